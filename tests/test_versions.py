"""The two sets of pinned versions agree with the pinned torch, with pyproject.toml, and with the pages."""

import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ds_fp8.layers.transformers_versions import KNOWN

ROOT = Path(__file__).parents[1]

# Requires-Dist of the wheels that pip takes on Linux: torch-2.11.0-cp312-cp312-manylinux_2_28_x86_64.whl.metadata on
# PyPI (read 2026-11-25), and torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl of download.pytorch.org.
COMMON = ("filelock", "typing-extensions>=4.10.0", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5")
TORCH = {
    "gpu": (
        "2.11.0",
        (*COMMON, "setuptools<82", "triton==3.6.0", "nvidia-nccl-cu13==2.28.9", "cuda-bindings<14,>=13.0.3"),
    ),
    "cpu": ("2.13.0", (*COMMON, "setuptools>=77.0.3")),
}

IDS = ("constraints-gpu", "constraints-cpu")  # the word alone would mark tests for a GPU


def pins(kind: str) -> dict[str, str]:
    lines = [
        line for name in ("", f"-{kind}") for line in (ROOT / f"scripts/constraints{name}.txt").read_text().split("\n")
    ]
    found = [Requirement(line.partition("#")[0]) for line in lines if line.partition("#")[0].strip()]
    names = [requirement.name.lower().replace("_", "-") for requirement in found]
    assert len(set(names)) == len(names), "pinned twice"
    return {name: str(requirement.specifier).removeprefix("==") for name, requirement in zip(names, found, strict=True)}


@pytest.mark.parametrize("kind", TORCH, ids=IDS)
def test_the_pins_are_what_the_pinned_torch_requires(kind):
    version, requires = TORCH[kind]
    pinned = pins(kind)
    assert pinned["torch"] == version
    for requirement in map(Requirement, requires):
        pin = pinned.get(requirement.name)
        assert pin is None or requirement.specifier.contains(pin), (
            f"torch {version} requires {requirement}, pinned {pin}"
        )
    assert kind == "cpu" or {"triton", "setuptools"} <= pinned.keys(), "exact or bounded by torch, so pinned"


@pytest.mark.skipif(importlib.metadata.version("torch").partition("+")[0] != TORCH["cpu"][0], reason="another torch")
@pytest.mark.skipif("+cpu" not in importlib.metadata.version("torch"), reason="no CPU build")
def test_the_kept_lines_are_those_of_the_installed_wheel():
    requires = [line for line in importlib.metadata.requires("torch") if "extra ==" not in line]
    assert sorted(requires) == sorted(TORCH["cpu"][1])


@pytest.mark.parametrize("kind", TORCH, ids=IDS)
def test_every_bound_of_the_project_admits_the_pins(kind):
    pinned = pins(kind)
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    requires = [Requirement(line) for line in lines]
    checked = {r.name for r in requires if r.name in pinned and r.specifier.contains(pinned[r.name])}
    assert checked == {r.name for r in requires if r.name in pinned}
    assert {"torch", "transformers", "deepspeed", "triton", "accelerate", "trl", "peft"} <= checked
    (transformers,) = (r.specifier for r in requires if r.name == "transformers")
    assert transformers == SpecifierSet(KNOWN)


def test_the_pages_name_the_versions_of_the_gpu_set():
    pinned = pins("gpu")
    install = (ROOT / "README.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    for name in ("torch", "triton", "transformer-engine", "deepspeed", "transformers"):
        label = name.replace("-", " ").title() if "-" in name else name
        assert re.search(rf"{label}[^0-9\n]*{re.escape(pinned[name])}", install, re.IGNORECASE), name


@pytest.mark.parametrize(("gpu", "kind"), [("GPU 0: NVIDIA H100", "gpu"), ("", "cpu")], ids=IDS)
def test_the_environment_asks_pip_for_the_set_of_the_machine(tmp_path, gpu, kind):
    """With commands that write down what they were asked for in place of pip and nvidia-smi."""
    asked, programs = tmp_path / "asked", tmp_path / "bin"
    programs.mkdir()
    python = (
        '#!/bin/sh\ncase "$*" in\n*"import torch"*) exit 1;;\n*venv*) mkdir -p .venv/bin; cp "$0" .venv/bin/python;'
    )
    python += f' touch .venv/bin/activate;;\n*pip*) echo "$*" >> {asked};;\nesac\n'
    for name, text in (("python", python), ("nvidia-smi", f'#!/bin/sh\necho "{gpu}"\n')):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)  # which is locked while scripts/test.sh runs
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": "python"}
    subprocess.run(["bash", "-ec", ". scripts/environment.sh test"], cwd=tmp_path, env=environment, check=True)
    lines = asked.read_text().splitlines()
    (torch,) = (line for line in lines if "torch==" in line)
    assert torch.endswith(f"torch=={pins(kind)['torch']}{'' if kind == 'gpu' else '+cpu'}")
    for line in (x for x in lines if "deepspeed" in x or " -e " in x or "setuptools" in x):
        assert f"-c scripts/constraints-{kind}.txt" in line
