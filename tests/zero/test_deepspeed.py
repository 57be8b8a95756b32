"""The supported DeepSpeed versions, what is said of others, and its methods that are replaced."""

import ast
import contextlib
import re
import warnings
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from packaging.specifiers import SpecifierSet

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.engine.preflight import check
from ds_fp8.zero.deepspeed import optimizer, versions
from tests.ranks import case, on_ranks
from tests.zero import models

ROOM = Path(versions.__file__).parent


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


@contextlib.contextmanager
def renamed(name):
    """Let a method of DeepSpeed's, or an attribute, have another name than this package knows."""
    if name in vars(DeepSpeedZeroOptimizer_Stage3):
        method = vars(DeepSpeedZeroOptimizer_Stage3)[name]
        delattr(DeepSpeedZeroOptimizer_Stage3, name)
        yield
        setattr(DeepSpeedZeroOptimizer_Stage3, name, method)
    else:
        with mock.patch.object(optimizer, "_GRADIENT_PARTITIONS", name):
            yield


def said_without(name, version):
    """What an engine of a version of DeepSpeed raises when it is made or steps, and whether Init is as before then."""
    partition, engine, error = Init._partition, None, None
    with renamed(name), mock.patch.object(deepspeed, "__version__", version):
        try:
            engine = models.engine({})
            models.train(engine, 1)
        except (UserError, AttributeError) as raised:
            error = raised
    if engine is not None:
        engine.destroy()
    return error, Init._partition is partition


@on_ranks(2)
def test_a_name_that_is_missing_is_named_with_the_version():
    """One of the replaced methods, or a private one of a newer version; of the tested one it is a fault here."""
    warnings.simplefilter("ignore")  # of a newer version
    for name, version in [
        ("partition_grads", versions.TESTED),
        ("_pre_step", "0.19.9"),
        ("_grad_partitions", "0.19.9"),
        ("_grad_partitions", versions.TESTED),
    ]:
        error, restored = said_without(name, version)
        with case((name, version)):
            assert restored
            if version == versions.TESTED and name.startswith("_"):
                assert type(error) is AttributeError
            else:
                assert type(error) is UserError
                assert re.search(rf"(?s)DeepSpeed {re.escape(version)} lacks .*{name}", str(error))
                assert f"pip install 'deepspeed=={versions.TESTED}'" in str(error)


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


@pytest.mark.parametrize("version", [versions.TESTED, f"{versions.TESTED}+d3a7"])
def test_the_tested_version_is_let_through(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check(version)


def test_of_a_supported_version_that_nobody_has_tested_is_warned():
    with pytest.warns(UserWarning, match=r"DeepSpeed 0\.19\.99 is newer than .*deepspeed=="):
        versions.check("0.19.99")
