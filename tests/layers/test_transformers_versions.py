"""The names and functions of transformers that this package depends on, and what is said of others."""

import ast
import functools
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

from ds_fp8.config.errors import UserError
from ds_fp8.config.other_packages import changed, missing, not_set
from ds_fp8.layers import transformers_versions as versions

PACKAGE = Path(versions.__file__).parents[1]
PRIVATE = {"_attn_implementation", "_gradient_checkpointing_func", "_init_weights"}


@functools.cache
def trees():
    return [ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))]


def test_the_installed_version_has_every_name_and_known_functions():
    assert missing(versions.NAMES) + not_set(versions.ATTRIBUTES) == []
    assert changed(versions.FUNCTIONS) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_of_changes.__wrapped__(transformers.__version__)


def test_every_import_from_within_transformers_is_listed():
    """Beside what `import transformers` gives."""
    nodes = [node for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = {(node.module, alias.name) for node in nodes for alias in node.names if node.module}
    inner = {(module, name) for module, name in found if module.startswith("transformers.")}
    assert ("transformers.masking_utils", "sdpa_mask") in inner
    assert inner - {(module, name) for module, names in versions.NAMES.items() for name in names} == set()


def test_every_name_that_a_graph_replaces_is_listed():
    (function,) = (
        node
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "masks_as_outside"
    )
    keys = [key.value for node in ast.walk(function) if isinstance(node, ast.Dict) for key in node.keys]
    assert keys == ["is_tracing", "find_packed_sequence_indices"]
    assert set(keys) <= set(versions.NAMES["transformers.masking_utils"])


def test_private_attributes_are_listed():
    """Of models, their modules and configurations; what else begins with an underscore is torch's or Python's."""
    read = {node.attr for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read |= {node.value for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    listed = {name for table in (versions.NAMES, versions.ATTRIBUTES) for names in table.values() for name in names}
    of_transformers = {*dir(transformers.PreTrainedModel), *dir(transformers.PretrainedConfig)}
    of_others = {*dir(object), *dir(torch.nn.Module())}
    private = {x for x in of_transformers - of_others if x.startswith("_") and not x.startswith("__")} | PRIVATE
    assert listed >= PRIVATE
    assert read & private - listed == set()


def test_a_version_that_the_tests_do_not_pass_with_is_refused_unless_asked_for(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.24.0")  # models may have put another object into sys.modules
    with pytest.raises(UserError, match=r"transformers 5\.24\.0 is not supported") as raised:
        versions.check_names.__wrapped__()
    assert f"pip install 'transformers{versions.KNOWN}'" in str(raised.value)
    monkeypatch.setenv(versions.TRY, "5.24.0")
    versions.check_names.__wrapped__()


def test_a_changed_function_is_named_with_what_it_is_for(monkeypatch):
    path, known = next((path, known) for path, known in versions.FUNCTIONS.items() if path.endswith("ForCausalLMLoss"))
    monkeypatch.setitem(versions.FUNCTIONS, path, known._replace(digests=("another",)))
    with pytest.warns(UserWarning, match=r"looked at: .*ForCausalLMLoss \(imitated by the fused loss\)\."):
        versions.warn_of_changes.__wrapped__(transformers.__version__)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("del masks.is_tracing", "masking_utils.is_tracing"),
        ("masks.and_masks = lambda *masks: lambda *places: masks", "mask_functions (set by and_masks)"),
    ],
)
def test_a_missing_name_is_named_before_anything_is_imported(change, named):
    script = f"import transformers.masking_utils as masks\n{change}\nimport ds_fp8\nds_fp8.convert"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode != 0
    assert f"transformers {transformers.__version__} lacks" in run.stderr
    assert named in run.stderr
    assert f"pip install 'transformers{versions.KNOWN}'" in run.stderr
