"""The supported DeepSpeed versions, what is said of others, and its methods that are replaced."""

import ast
import contextlib
import copyreg
import functools
import os
import pickle
import re
import subprocess
import sys
from collections import deque
from pathlib import Path

import deepspeed
import numpy
import pytest
import torch
from packaging.specifiers import SpecifierSet

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.engine.preflight import check
from ds_fp8.zero import collectives, lifecycle, streams
from ds_fp8.zero.deepspeed import versions

ROOM = Path(versions.__file__).parent
INSIDE = ROOM.parents[1] / "layers" / "attention" / "sequence_parallel.py"
"""What runs inside of Ulysses' exchange."""
TORCH = (torch, torch.cuda, torch.cuda.Stream, torch.distributed, torch.nn, torch.nn.Module(), torch.nn.Parameter())
TORCH += (torch.optim, torch.serialization)
PYTHON = (dict, list, set, str, deque, re, ast, os, pickle, copyreg, Path, contextlib, contextlib.ExitStack, functools)
PYTHON += (numpy,)
OTHERS = {name for owner in (*TORCH, *PYTHON) for name in dir(owner)} | {
    "WORLD",
    "group",
    "cuda_stream",
    "value",
    "__wrapped__",
}


def trees():
    return [ast.parse(file.read_text()) for file in ROOM.glob("*.py") if file.name != "versions.py"]


def own_names():
    """What the folder defines, and the parts of this package that it calls."""
    own = {name for module in (collectives, streams) for name in vars(module)}
    for node in (n for tree in [*trees(), ast.parse(Path(lifecycle.__file__).read_text())] for n in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            own.add(node.attr)
    return own


def test_every_name_that_is_used_exists_in_the_installed_version():
    assert SpecifierSet(versions.SUPPORTED).contains(deepspeed.__version__)
    assert versions.missing_names() == []
    assert "skip_all_but_last_attention_debug_mode" in versions.used_names([ast.parse(INSIDE.read_text())])["exchange"]
    assert versions.changed_functions() == []


def test_every_name_that_is_read_is_collected():
    """Whatever the files read that is not torch's, Python's or this package's is asked for."""
    used = versions.used_names(trees())
    assert {"ds_tensor", "partition"} <= used["parameter"]
    assert {"loss_scale", "zenflow", "dtype", "averaged_gradients"} <= used["zero"]
    assert {"clear_params"} <= used["bucket"]
    assert {"attn_head_count", "batch_size"} <= used["exchange"]
    names = {node.attr for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    asked = {name for found in used.values() for name in found}
    documented = {"device_name", "is_synchronized_device", "DeepSpeedEngine", "ops", "all_gather_coalesced"}
    adamw = {"expand_moments", "state", "param_groups"}
    assert names - asked - OTHERS - own_names() - documented - adamw == set()


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


def with_changed_stage3(tmp_path, before, after, script):
    """Run a script beside a DeepSpeed with other source of stage3.py."""
    given = (
        "import inspect, sys\n"
        "import deepspeed, deepspeed.runtime.zero.stage3 as stage3\n"
        f"source = inspect.getsource(stage3).replace({before!r}, {after!r})\n"
        "open(sys.argv[1], 'w').write(source)\n"
        "stage3.__spec__.origin = sys.argv[1]\n"
    )
    command = [sys.executable, "-W", "default", "-c", given + script, tmp_path / "stage3.py"]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_a_changed_function_is_named(tmp_path):
    """Another line in one function: names check out, and a warning says which."""
    script = (
        "from ds_fp8.zero.deepspeed import versions\nfor _ in range(2):\n    versions.check(deepspeed.__version__)\n"
    )
    run = with_changed_stage3(tmp_path, "self._pre_step()", "self._pre_step(); self.late = 1", script)
    (line,) = [line for line in run.stderr.splitlines() if "UserWarning: DeepSpeed" in line]
    assert f"DeepSpeed {deepspeed.__version__}" in line
    assert ": step. " in line
    assert "deepspeed==" in line


def test_a_missing_name_is_named_with_the_version(tmp_path):
    script = (
        "import ds_fp8, ds_fp8.engine.preflight as c\n"
        "from ds_fp8.config.deepspeed_json import Configuration\n"
        "c.check(Configuration({}))\n"
        "try:\n    c.check(Configuration({'fp8': {}}))\n"
        "except ds_fp8.UserError as error:\n    print(error)\n"
    )
    printed = with_changed_stage3(tmp_path, "clip_grad", "clip", script).stdout
    assert "zero.clip_grad" in printed
    assert deepspeed.__version__ in printed
    assert "0.19.8" in printed


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
