"""Imports point one way, and only the listed files name what DeepSpeed does not document.

The packages and their order stand in pyproject.toml (tool.importlinter); `lint-imports` shows the same by hand.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOM = "ds_fp8/zero/deepspeed/"
"""The folder whose files may import any module of DeepSpeed."""
PUBLIC = {
    "deepspeed",
    "deepspeed.accelerator",
    "deepspeed.checkpointing",
    "deepspeed.checkpoint.ds_to_universal",
    "deepspeed.comm",
    "deepspeed.constants",
    "deepspeed.git_version_info",
    "deepspeed.moe.layer",
    "deepspeed.pipe",
    "deepspeed.runtime.config",
    "deepspeed.runtime.config_utils",
    "deepspeed.runtime.zero.config",
    "deepspeed.utils",
    "deepspeed.utils.logging",
    "deepspeed.utils.zero_to_fp32",
    "deepspeed.zero",
}
"""What every other file may import: the documented API, the models of the configuration, and command-line tools."""
CONFIGURATION = {
    "ds_fp8/layers/attention/sequence_parallel.py": {"deepspeed.runtime.sequence_parallel.ulysses_sp"},
    "ds_fp8/engine/initialize.py": {"deepspeed.runtime.zero.utils"},
    "ds_fp8/engine/preflight.py": {
        *("deepspeed.ops", "deepspeed.ops.adagrad", "deepspeed.ops.adam", "deepspeed.ops.lion"),
        *("deepspeed.runtime", "deepspeed.runtime.lr_schedules", "deepspeed.runtime.zero.utils"),
    },
}
"""Beyond that: what runs inside of Ulysses' exchange, and optimizers and schedulers of a configuration or of ZeRO."""
PLANTED = (
    ("casts/planted.py", "import ds_fp8.zero.collectives\n", "ds_fp8.casts is not allowed to import ds_fp8.zero"),
    ("gemm/planted.py", "def f():\n    import ds_fp8.optim\n", "ds_fp8.gemm is not allowed to import ds_fp8.optim"),
    ("casts/primitives.py", "from ds_fp8.casts import outliers\n", "No cycles are allowed in ds_fp8.casts"),
)
"""File, what is planted in it (an upward arrow, one in a function, a circle), and what is said of it."""


def lint_imports(folder: Path) -> subprocess.CompletedProcess:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_packages_import_downwards_and_files_in_no_circle():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_planted_imports_are_found(tmp_path):
    shutil.copytree(ROOT / "ds_fp8", tmp_path / "ds_fp8", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, text, _ in PLANTED:
        with (tmp_path / "ds_fp8" / file).open("a") as out:
            out.write(text)
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert [message for *_, message in PLANTED if message not in result.stdout] == []
    (tmp_path / "ds_fp8/attic").mkdir()
    (tmp_path / "ds_fp8/attic/__init__.py").touch()
    assert "attic" in lint_imports(tmp_path).stdout  # a package without a place


def undocumented(source: str, allowed: set[str]) -> list[str]:
    """Return what a file imports from DeepSpeed, or reaches through its name, beyond the `allowed` modules."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            private = [f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_")]
            found += private if node.module in allowed else [node.module]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name not in allowed]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            found += [module] if (module := ast.unparse(node.value)) not in allowed else []
    return [name for name in found if name and name.split(".")[0] == "deepspeed"]


def test_only_one_folder_imports_what_deepspeed_does_not_document():
    found = {}
    for file in sorted((ROOT / "ds_fp8").rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        if not name.startswith(ROOM) and (
            names := undocumented(file.read_text(), PUBLIC | CONFIGURATION.get(name, set()))
        ):
            found[name] = names
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "from deepspeed.runtime.zero import stage3",
        "import deepspeed.runtime.zero.stage3",
        "from deepspeed.comm import _private",
        "import deepspeed\ndeepspeed.runtime.zero.stage3.f()",
    ],
)
def test_an_undocumented_name_is_found(line):
    assert undocumented(line, PUBLIC)


def test_every_listed_file_exists():
    assert all((ROOT / name).exists() for name in CONFIGURATION)
