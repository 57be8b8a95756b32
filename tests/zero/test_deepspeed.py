"""The supported DeepSpeed versions, what is said of others, and its methods that are replaced."""

import ast
import inspect
import re
from pathlib import Path

import deepspeed
import deepspeed.runtime.zero.stage3 as stage3
import pytest
from packaging.specifiers import SpecifierSet

from ds_fp8.config import other_packages
from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.engine.preflight import check
from ds_fp8.zero.deepspeed import versions

ROOM = Path(versions.__file__).parent
INSIDE = ROOM.parents[1] / "layers" / "attention" / "sequence_parallel.py"
"""What runs inside of Ulysses' exchange."""


def test_every_name_that_is_used_exists_in_the_installed_version():
    assert SpecifierSet(versions.SUPPORTED).contains(deepspeed.__version__)
    assert versions.missing_names() == []
    assert "skip_all_but_last_attention_debug_mode" in versions.used_names([ast.parse(INSIDE.read_text())])["exchange"]
    assert versions.changed_functions() == []


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
        "NAME = 'new_name'\nsetattr(self._coordinator, NAME, 0)",
    ],
)
def test_a_name_that_is_read_of_any_holder_is_found(line):
    found = versions.used_names([ast.parse(line)])
    assert {name for names in found.values() for name in names} - {"optimizer"}


def test_private_names_are_read_in_one_folder_alone():
    """Attributes of engines and their optimizers that begin with an underscore."""
    root = ROOM.parents[1]
    found = [
        f"{file.relative_to(root)}: {ast.unparse(node)}"
        for file in sorted(root.rglob("*.py"))
        if file.parent != ROOM
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if ast.unparse(node.value).split(".")[-1] in ("engine", "_engine", "optimizer")
        and ast.unparse(node.value) != "self.optimizer"
    ]
    assert found == []


CACHES = (versions.missing_names, versions._defined_names, versions.changed_functions, other_packages._parsed)


@pytest.fixture
def change_stage3(tmp_path, monkeypatch):
    """`change_stage3(before, after)`: let DeepSpeed have other source of stage3.py."""

    def change(before, after):
        file = tmp_path / "stage3.py"
        file.write_text(inspect.getsource(stage3).replace(before, after))
        monkeypatch.setattr(stage3.__spec__, "origin", str(file))
        for cache in CACHES:
            cache.cache_clear()

    yield change
    monkeypatch.undo()
    for cache in CACHES:
        cache.cache_clear()


def test_a_changed_function_is_named(change_stage3):
    """Another line in one function: names check out, and a warning says which."""
    change_stage3("self._pre_step()", "self._pre_step(); self.late = 1")
    with pytest.warns(UserWarning, match=rf"DeepSpeed {deepspeed.__version__}.*: step\. .*deepspeed=="):
        versions.check(deepspeed.__version__)


def test_a_missing_name_is_named_with_the_version(change_stage3):
    change_stage3("clip_grad", "clip")
    check(Configuration({}))
    with pytest.raises(UserError, match=r"zero\.clip_grad") as caught:
        check(Configuration({"fp8": {}}))
    assert deepspeed.__version__ in str(caught.value)
    assert "0.19.8" in str(caught.value)


def test_the_project_asks_for_the_supported_versions():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (wanted,) = re.findall(r'"deepspeed([^"]+)"', project)
    assert SpecifierSet(versions.SUPPORTED) == SpecifierSet(wanted)


@pytest.mark.parametrize("version", ["0.16.2", "0.19.7", "0.20.0", "1.0"])
def test_an_unsupported_version_is_named(version):
    with pytest.raises(UserError) as caught:
        versions.check(version)
    assert version in str(caught.value)
    assert "0.19.8" in caught.value.remedy


def test_an_unsupported_version_can_be_tried(monkeypatch):
    with pytest.raises(UserError) as caught:
        versions.check("0.20.1")
    name, _, value = caught.value.remedy.split()[-1].partition("=")
    monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=r"DeepSpeed 0\.20\.1 is not supported"):
        versions.check("0.20.1")
    with pytest.raises(UserError):
        versions.check("0.20.2")


def test_with_fp8_off_any_version_serves(monkeypatch):
    monkeypatch.setattr(deepspeed, "__version__", "0.20.1")
    check(Configuration({}))
    with pytest.raises(UserError, match=r"0\.20\.1"):
        check(Configuration({"fp8": {}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}))


@pytest.mark.parametrize("version", ["0.19.8", "0.19.9", "0.19.8+d3a7"])
def test_a_supported_version_is_let_through(version):
    versions.check(version)
