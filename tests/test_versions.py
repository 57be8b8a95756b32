"""Shell scripts, and the sets of pinned versions that they install."""

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


# ---------------------------------------------------------------- scripts/test.sh and scripts/quickstart.sh


TOOLS = ("bash", "cat", "cksum", "cp", "cut", "dirname", "flock", "grep", "head", "mkdir", "sed", "sh", "touch")
PYTHON = """#!/bin/sh
case "$*" in
  *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; touch .venv/bin/activate;;
  *pytest*) echo "pytest of $PATH";;
  *train.py*) echo "train $*";;
esac
"""


@pytest.fixture
def script(tmp_path):
    """`script(NAME, option, ...)`: run it in a folder with a space, with programs that only say that they were called.

    PATH has the tools of a bare machine; `programs` are added to them.
    """
    folder, found = tmp_path / "a folder", tmp_path / "bin"
    found.mkdir()
    (folder / "examples").mkdir(parents=True)
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=lambda *_: ["bench", "faults"])
    shutil.copy(ROOT / "pyproject.toml", folder)
    for tool in TOOLS:
        (found / tool).symlink_to(shutil.which(tool))

    def run(name: str, *options: str, root: bool = False, programs: tuple[str, ...] = (), path: str = ""):
        own = {"python": PYTHON, "python3": PYTHON, "id": f"#!/bin/sh\necho {0 if root else 1000}\n"}
        for program, text in {**dict.fromkeys(("ruff", "ds-fp8", *programs), "#!/bin/sh\n"), **own}.items():
            (found / program).unlink(missing_ok=True)
            (found / program).write_text(text)
            (found / program).chmod(0o755)
        command = [found / "bash", folder / "scripts" / name, *options]
        return subprocess.run(command, env={"PATH": f"{found}{path}"}, cwd=tmp_path, capture_output=True, text=True)

    run.folder = folder
    return run


def test_skipped_tests_are_said_where_their_programs_or_rights_are_missing(script):
    bare = script("test.sh")
    assert bare.returncode == 0, bare.stderr
    assert "no browser: tests that open reports are skipped" in bare.stdout
    assert "not root: tests of jobs on several hosts are skipped" in bare.stdout
    assert "pytest of" in bare.stdout
    hosts = "pdsh", "sshd", "ip", "tc"
    whole = script("test.sh", root=True, programs=("chromium", *hosts)).stdout
    assert "are skipped" not in whole
    assert "several hosts are skipped" in script("test.sh", programs=("chromium", *hosts)).stdout


def test_what_is_not_in_reach_is_no_part_of_path(script, tmp_path):
    """DeepSpeed looks for numactl along PATH, and ends at a folder that may not be entered."""
    told = script("test.sh", path=f":{tmp_path / 'absent'}:/usr/games").stdout
    assert "absent" not in told
    assert f"pytest of {tmp_path / 'bin'}" in told


@pytest.mark.parametrize("options", [["--stesp", "2"], ["--steps"], ["--steps", "0"], ["--steps", "two"], ["2"]])
def test_wrong_options_of_the_quickstart_are_refused_before_anything_is_installed(script, options):
    refused = script("quickstart.sh", *options)
    assert refused.returncode == 2
    assert "error: " in refused.stderr
    assert "usage: " in refused.stderr
    assert not (script.folder / ".venv").exists()


def test_the_tests_packages_are_those_of_the_quickstart_too(script):
    assert "Installing" in script("test.sh").stdout
    assert "Installing" not in script("quickstart.sh").stdout


def test_the_quickstart_in_few_steps(script):
    assert "--steps N" in script("quickstart.sh", "--help").stdout
    lines = script("quickstart.sh", "--steps", "2").stdout.splitlines()
    trained = [line for line in lines if line.startswith("train ")]
    assert len(trained) == 6
    assert all("--set train.steps=2" in line for line in trained)
    (script.folder / "runs/quickstart/fp8").mkdir()  # which the stages would have made
    assert script("quickstart.sh", "--steps", "2").returncode == 0
    for other in (["--steps", "3"], []):
        refused = script("quickstart.sh", *other)
        assert refused.returncode == 2
        assert "other lengths" in refused.stderr
    shutil.rmtree(script.folder / "runs")
    assert "train.steps" not in script("quickstart.sh").stdout
