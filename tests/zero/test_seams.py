"""The supported DeepSpeed versions, and what is said of others."""

import ast
import contextlib
import copyreg
import functools
import inspect
import re
import subprocess
import sys
from collections import deque
from pathlib import Path

import deepspeed
import pytest
import torch
from packaging.specifiers import SpecifierSet

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.engine.preflight import check
from ds_fp8.zero import deepspeed_functions, deepspeed_versions, grouped, lifecycle, streams
from ds_fp8.zero.seams import installation
from tests.zero import models


def test_every_name_exists_in_the_installed_version():
    installed = deepspeed_versions.supported_range(deepspeed.__version__)
    assert installed is not None
    assert deepspeed_versions.missing_names(installed) == []


RECEIVERS = {
    *(
        "zero",
        "self._zero",
        "optimizer",
        "engine.optimizer",
        "engine.optimizer.parameter_offload",
        "self._zero.optimizer",
    ),
    *("engine", "self._engine", "bucket", "self._coordinator", "stock", "self._stock"),
    *("partition_parameters", "parameter_offload", "stage3", "status"),
}
"""Expressions in the seams that are objects of DeepSpeed, whatever the name that is read of them."""
TORCH = [
    torch,
    torch.cuda,
    torch.cuda.Stream,
    torch.distributed,
    type(torch.distributed.group),  # whose property WORLD is
    torch.nn,
    torch.nn.Module(),
    torch.nn.Parameter(),
]
PYTHON = [
    dict,
    list,
    set,
    str,
    deque,
    Path,
    contextlib,
    contextlib.ExitStack,
    copyreg,
    functools,
    inspect.Signature,
    inspect.BoundArguments,
]
OTHERS = (
    {name for owner in (*TORCH, *PYTHON) for name in dir(owner)}
    | {"cuda_stream", "value", "WORLD"}
    | {"__wrapped__", "Optimizer"}
)
DOCUMENTED_NAMES = {"DeepSpeedEngine", "device_name", "module"}
"""Of `deepspeed`, its accelerator and its engine."""
BY_NAME = {"getattr", "hasattr", "setattr", "replace", "self._replace", "call_around", "wrap_closure", "_around_method"}
"""Functions that take the name of an attribute as text."""


def seams() -> list[ast.Module]:
    return [ast.parse(file.read_text()) for file in (Path(deepspeed_versions.__file__).parent / "seams").glob("*.py")]


def own_names(trees) -> set[str]:
    """What the seams define, and the parts of this package that they call."""
    own = {name for module in (deepspeed_versions, grouped, streams) for name in vars(module)}
    for node in (node for tree in [*trees, ast.parse(Path(lifecycle.__file__).read_text())] for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            own.add(node.attr)
    return own


def names_of_deepspeed(trees) -> set[str]:
    """The attributes that are read of DeepSpeed's objects, and those that nobody else's objects have."""
    own, found = own_names(trees), set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute):
            if ast.unparse(node.value) in RECEIVERS or node.attr not in own | OTHERS:
                found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            found |= {text for text in texts if isinstance(text, str) and text not in own | OTHERS}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("_COUNTERS", "_MOMENT_WRITES"):
            found |= set(ast.literal_eval(node.value))
    return found


@pytest.mark.parametrize("ranges", deepspeed_versions.NAMES)
def test_every_range_lists_what_seams_uses(ranges):
    """Whatever the seams read that is not torch's, Python's or this package's is in the table of every range."""
    listed = {name for table in (deepspeed_versions.NAMES, deepspeed_versions.ATTRIBUTES)
              for names in table[ranges].values() for name in names}  # fmt: skip
    used = names_of_deepspeed(seams())
    assert {"ds_tensor", "INFLIGHT", "loss_scale", "clear_params", "zenflow", "ds_grads_remaining", "dtype"} <= used
    assert used - DOCUMENTED_NAMES - {"state", "expand_moments"} - listed == set()  # the last two are AdamW's


@pytest.mark.parametrize(
    "line",
    [
        "zero.new_name",
        "self._zero.dtype_of_something",
        "engine.new_name()",
        "bucket.reset()",
        "whatever.ds_new",
        "getattr(module, '_new')",
        "replace(engine, engine.optimizer, 'new_name', f)",
    ],
)
def test_a_name_that_is_read_of_any_receiver_is_found(line):
    assert names_of_deepspeed([ast.parse(line)]) - names_of_deepspeed([]) - {"optimizer"}


def test_private_names_are_read_in_the_seams_alone():
    """Attributes of engines and their optimizers that begin with an underscore."""
    root = Path(deepspeed_versions.__file__).parents[1]
    found = [
        f"{file.relative_to(root)}: {ast.unparse(node)}"
        for file in sorted(root.rglob("*.py"))
        if file.parent.name != "seams"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if ast.unparse(node.value).split(".")[-1] in ("engine", "_engine", "optimizer")
        and ast.unparse(node.value) != "self.optimizer"
    ]
    assert found == []


def test_functions_are_those_that_were_looked_at():
    assert deepspeed_functions.changed_functions() == {}


def test_a_changed_function_is_named_with_what_it_is_for(tmp_path):
    """An installed DeepSpeed with another line in one function: names check out, and a warning says which."""
    script = (
        "import inspect, sys\n"
        "import deepspeed, deepspeed.runtime.zero.stage3 as stage3\n"
        "source = inspect.getsource(stage3).replace('self._pre_step()', 'self._pre_step(); self.late = 1')\n"
        "changed = sys.argv[1]\n"
        "open(changed, 'w').write(source)\n"
        "stage3.__spec__.origin = changed\n"
        "from ds_fp8.zero import deepspeed_versions\n"
        "for _ in range(2):\n    deepspeed_versions.check(deepspeed.__version__)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "stage3.py"], capture_output=True, text=True, check=True
    )
    (line,) = [line for line in run.stderr.splitlines() if "UserWarning: DeepSpeed" in line]
    assert f"DeepSpeed {deepspeed.__version__}" in line
    assert ": step (replaced by this package's step" in line
    assert "_post_step" not in line
    assert "deepspeed==" in line


DOCUMENTED = {"deepspeed", "deepspeed.accelerator", "deepspeed.comm"}
"""What DeepSpeed's users import too."""


def imported():
    """(module, name) of every `from deepspeed.... import ...` of the package, wherever it stands."""
    for file in sorted(Path(deepspeed_versions.__file__).parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "deepspeed":
                yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("ranges", deepspeed_versions.NAMES)
def test_every_range_lists_what_is_imported(ranges):
    found = {(module, name) for module, name in imported() if module not in DOCUMENTED}
    assert ("deepspeed.utils.tensor_fragment", "fragment_address") in found
    listed = {(module, name) for module, names in deepspeed_versions.NAMES[ranges].items() for name in names}
    assert found - listed == set()


def test_the_project_asks_for_the_supported_versions():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (wanted,) = re.findall(r'"deepspeed([^"]+)"', project)
    assert [SpecifierSet(ranges) for ranges in deepspeed_versions.NAMES] == [SpecifierSet(wanted)]


@pytest.mark.parametrize("version", ["0.16.2", "0.19.7", "0.20.0", "1.0"])
def test_an_unsupported_version_is_named(version):
    with pytest.raises(UserError) as caught:
        deepspeed_versions.check(version)
    assert version in str(caught.value)
    assert "0.19.8" in caught.value.remedy


def test_an_unsupported_version_can_be_tried(monkeypatch):
    with pytest.raises(UserError) as caught:
        deepspeed_versions.check("0.20.1")
    name, _, value = caught.value.remedy.split()[-1].partition("=")
    monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=r"DeepSpeed 0\.20\.1 is not supported"):
        deepspeed_versions.check("0.20.1")
    with pytest.raises(UserError):
        deepspeed_versions.check("0.20.2")


def test_with_fp8_off_any_version_serves(monkeypatch):
    monkeypatch.setattr(deepspeed, "__version__", "0.20.1")
    check(Configuration({}))
    with pytest.raises(UserError, match=r"0\.20\.1"):
        check(Configuration({"fp8": {}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}))


@pytest.mark.parametrize("version", ["0.19.8", "0.19.9", "0.19.8+d3a7"])
def test_a_supported_version_is_let_through(version):
    deepspeed_versions.check(version)


def test_a_missing_name_is_named_with_the_version():
    script = (
        "import deepspeed, deepspeed.runtime.zero.stage3 as s\n"
        "del s.DeepSpeedZeroOptimizer_Stage3._restore_from_bit16_weights\n"
        "import ds_fp8, ds_fp8.engine.preflight as c\n"
        "from ds_fp8.config.deepspeed_json import Configuration\n"
        "c.check(Configuration({}))\n"
        "try:\n    c.check(Configuration({'fp8': {}}))\n"
        "except ds_fp8.UserError as error:\n    print(error)\n"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "DeepSpeedZeroOptimizer_Stage3._restore_from_bit16_weights" in printed
    assert deepspeed.__version__ in printed
    assert "0.19.8" in printed


def replacements(_):
    """How often each attribute of each object is replaced while an engine is made, and its parameters."""
    counts, replace = {}, installation.replace

    def counted(engine, owner, name, value):
        counts[id(owner), name] = counts.get((id(owner), name), 0) + 1
        replace(engine, owner, name, value)

    ours = [module for name, module in list(sys.modules.items()) if name.startswith("ds_fp8.zero")]
    patched = [module for module in ours if vars(module).get("replace") is replace]
    for module in patched:
        module.replace = counted
    try:
        engine = models.build(models.config({"monitor": {"every": 1}}))
    finally:
        for module in patched:
            module.replace = replace
    names = [name for _, name in counts]
    often = {name: names.count(name) for name in ("step", "all_gather_coalesced")}
    return max(counts.values()), often, len(list(engine.module.parameters()))


def test_every_method_is_replaced_once(ranks):
    for most, counts, parameters in ranks(2, replacements, None):
        assert most == 1
        assert counts == {"step": 1, "all_gather_coalesced": parameters}
