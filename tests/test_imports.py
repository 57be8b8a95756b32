"""Imports point one way, and only the listed files name what DeepSpeed does not document.

The packages and their order stand in pyproject.toml (tool.importlinter); `lint-imports` shows the same by hand.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOM = "ds_fp8/zero/deepspeed/"  # The folder whose files may import any module of DeepSpeed
# What every other file may import: the documented API, the models of the configuration, and command-line tools
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
# Beyond that: what runs inside of Ulysses' exchange, and optimizers and schedulers of a configuration or of ZeRO
CONFIGURATION = {
    "ds_fp8/layers/attention/sequence_parallel.py": {"deepspeed.runtime.sequence_parallel.ulysses_sp"},
    "ds_fp8/engine/initialize.py": {"deepspeed.runtime.zero.utils"},
    "ds_fp8/engine/preflight.py": {
        *("deepspeed.ops", "deepspeed.ops.adagrad", "deepspeed.ops.adam", "deepspeed.ops.lamb", "deepspeed.ops.lion"),
        *("deepspeed.runtime", "deepspeed.runtime.lr_schedules", "deepspeed.runtime.zero.utils"),
    },
}


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
