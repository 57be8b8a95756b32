"""The public names: the same objects however often, in whatever order and beside whatever else they are imported."""

import ast
import inspect
import pickle
import pkgutil
import subprocess
import sys
from copy import deepcopy
from importlib import import_module, resources

import pytest
import torch

import ds_fp8

NAMES = ds_fp8.__all__


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_the_same_object_every_time(name):
    first, second = getattr(ds_fp8, name), getattr(ds_fp8, name)
    assert first is second is getattr(import_module(ds_fp8._HOMES[name]), name)
    assert callable(first)
    assert inspect.isclass(first) or inspect.isfunction(first)


def test_no_name_is_that_of_a_module():
    """`import ds_fp8.x` binds the module to ds_fp8.x, whatever that was before."""
    assert not {module.name for module in pkgutil.iter_modules(ds_fp8.__path__)} & set(NAMES)


PROGRAM = """
import sys
extras = "datasets sentencepiece wandb tensorboard xxhash trl peft".split()
sys.modules.update(dict.fromkeys(extras))  # as after `pip install ds-fp8` without extras
import ds_fp8
assert {*ds_fp8.__all__, "__version__"} <= set(dir(ds_fp8))
from ds_fp8 import FP8Config, QuantizedTensor, UserError, quantize
import torch, ds_fp8.casts
assert (ds_fp8.quantize(torch.ones(2, 128)).data == quantize(torch.ones(2, 128)).data).all()
assert isinstance(ds_fp8.quantize(torch.ones(2, 128)), QuantizedTensor)
assert not {"deepspeed", "transformers"} & set(sys.modules)
ds_fp8.initialize, ds_fp8.convert, ds_fp8.install()
from ds_fp8.config.presets import PRESETS
from ds_fp8.engine.plans import recipe_from_config
for name in PRESETS:
    recipe_from_config(FP8Config.from_preset(name))
for name in extras:
    del sys.modules[name]
import ds_fp8.memory.estimate, ds_fp8.export, ds_fp8.train.model, ds_fp8.commands.evaluate
assert not [name for name in sys.modules if name.startswith("ds_fp8.research")]
"""


def test_a_fresh_interpreter_sees_all_names_and_imports_no_more_than_it_needs():
    """No DeepSpeed for casts, nothing of the extras for engines; research for sections that name it alone."""
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        ds_fp8.quantise  # noqa: B018


def test_type_checkers_see_what_python_sees():
    assert resources.files(ds_fp8).joinpath("py.typed").is_file()
    tree = ast.parse(inspect.getsource(ds_fp8))
    block = next(node for node in tree.body if isinstance(node, ast.If) and node.test.id == "TYPE_CHECKING")
    seen = {alias.name: statement.module for statement in block.body for alias in statement.names}
    assert seen == ds_fp8._HOMES
    assert sorted(seen) == sorted(NAMES)


def test_public_values_are_pickled():
    for granularity in ("1x128", "128x128"):
        tensor = ds_fp8.quantize(torch.randn(3, 200), granularity=granularity)
        for value in (tensor, tensor.t()) if granularity == "128x128" else (tensor,):
            for copy in (pickle.loads(pickle.dumps(value)), deepcopy(value)):
                assert (copy.data.dtype, copy.granularity) == (torch.float8_e4m3fn, granularity)
                assert torch.equal(copy.dequantize(), value.dequantize())
    for config in (ds_fp8.FP8Config(), ds_fp8.FP8Config.from_preset("rowwise", optimizer="coat")):
        assert pickle.loads(pickle.dumps(config)) == config
    error = pickle.loads(pickle.dumps(ds_fp8.UserError("bad", key="a.b", file="f.json", remedy="mend")))
    assert str(error) == str(ds_fp8.UserError("bad", key="a.b", file="f.json", remedy="mend"))
    for name in NAMES:
        assert pickle.loads(pickle.dumps(getattr(ds_fp8, name))) is getattr(ds_fp8, name)


def test_an_optimizer_is_pickled_with_its_state():
    weight = torch.nn.Parameter(torch.ones(256))
    optimizer = ds_fp8.AdamW([weight], lr=1e-2, exp_avg="e4m3", exp_avg_sq="e4m3_expanded")
    weight.grad = torch.ones(256)
    optimizer.step()
    copy = pickle.loads(pickle.dumps(optimizer))
    [theirs] = copy.param_groups[0]["params"]
    for _ in range(2):
        weight.grad, theirs.grad = torch.ones(256), torch.ones(256)
        optimizer.step()
        copy.step()
    assert torch.equal(weight, theirs)
