"""The supported DeepSpeed versions, and what is said of others."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest
from packaging.specifiers import SpecifierSet

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.compatibility import check_deepspeed
from ds_fp8.zero import deepspeed_versions


def test_every_name_exists_in_the_installed_version():
    installed = deepspeed_versions.supported_range(deepspeed.__version__)
    assert installed is not None
    assert deepspeed_versions.missing_names(installed) == []


@pytest.mark.parametrize("ranges", deepspeed_versions.NAMES)
def test_every_range_lists_what_seams_uses(ranges):
    """A name of DeepSpeed that the seams take from a module or a parameter is in the table of every supported range."""
    seams = Path(deepspeed_versions.__file__).parent / "seams"
    source = "".join(file.read_text() for file in sorted(seams.glob("*.py")))
    listed = {name for table in (deepspeed_versions.NAMES, deepspeed_versions.ATTRIBUTES)
              for names in table[ranges].values() for name in names}  # fmt: skip
    used = set(re.findall(r"\b(?:parameter|p)\.(ds_\w+|_z3\w+)", source))
    used |= set(re.findall(r"\b(?:partition_parameters|stage3)\.(\w+)", source))
    used |= set(re.findall(r"\bstatus\.([A-Z_]+)", source))
    used |= set(re.findall(r"\boptimizer\.(get_param_id|grad_position|fp32_partitioned_groups_flat)\b", source))
    assert {"ds_tensor", "ZeroParamStatus", "INFLIGHT", "grad_position"} <= used
    assert used <= listed


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
    check_deepspeed({}, FP8Config(enabled=False))
    with pytest.raises(UserError, match=r"0\.20\.1"):
        check_deepspeed({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, FP8Config())


@pytest.mark.parametrize("version", ["0.19.8", "0.19.9", "0.19.8+d3a7"])
def test_a_supported_version_is_let_through(version):
    deepspeed_versions.check(version)


def test_a_missing_name_is_named_with_the_version():
    script = (
        "import deepspeed, deepspeed.runtime.zero.stage3 as s\n"
        "del s.DeepSpeedZeroOptimizer_Stage3._restore_from_bit16_weights\n"
        "import ds_fp8, ds_fp8.engine.compatibility as c\n"
        "c.check_deepspeed({}, ds_fp8.FP8Config(enabled=False))\n"
        "try:\n    c.check_deepspeed({}, ds_fp8.FP8Config())\n"
        "except ds_fp8.UserError as error:\n    print(error)\n"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "DeepSpeedZeroOptimizer_Stage3._restore_from_bit16_weights" in printed
    assert deepspeed.__version__ in printed
    assert "0.19.8" in printed
