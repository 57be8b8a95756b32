"""Variants that step.py measures: this library's variants by their names, and the peers, whose scripts lie in a folder.

A variant of this library is "bf16" (plain DeepSpeed) or PRESET[+OPTIMIZER][/CHOICE...]: the preset, the optimizer
section of another, and any of bf16-wire (gather and reduce in BF16), fp8-experts (products of a mixture), fp8-head,
64-outliers (outlier channels), fp8-attention, graph, graph-auto, and the name of a GEMM backend.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from ds_fp8.config.errors import UserError
from ds_fp8.config.presets import PRESETS
from ds_fp8.config.schema import nearest
from ds_fp8.gemm import BACKENDS

CHOICES: dict[str, dict[str, Any]] = {
    "bf16-wire": {"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}},
    "fp8-experts": {"linear": {"expert_products": "fp8"}},
    "fp8-head": {"loss": {"head": "fp8"}},
    "64-outliers": {"linear": {"outlier_channels": 64}},
    "graph": {"graph": "on"},
    "graph-auto": {"graph": "auto"},
    "fp8-attention": {"attention": {"format": "e4m3"}},
    **{backend: {"linear": {"backend": backend}} for backend in BACKENDS},
}

PEERS = {
    "deepspeed": "zero3_baseline.py",
    "torchao": "fsdp2_torchao.py",
    "fsdp2": "fsdp2_torchao.py",
    "te-fsdp2": "fsdp_te.py",
    "te-megatron": "fsdp_te.py",
}
"""Name -> script: DeepSpeed ZeRO-3 BF16 with Liger and leaf layers; FSDP2 with torchao tensor-wise and in BF16, both
compiled; torch FSDP2 and Megatron-FSDP with te.TransformerLayer, FP8 blocks."""

WARMUP = {"deepspeed": 3, "torchao": 5, "fsdp2": 5, "te-fsdp2": 3, "te-megatron": 3}
"""Steps that a peer's script leaves out of its median; those that compile do so in the first ones."""


def fp8_section(variant: str, monitor: int = 0) -> dict[str, Any]:
    """Return the "fp8" section of a variant, measured every `monitor` steps. Raise UserError for an unknown name."""
    if variant == "bf16":
        return {"enabled": False}
    base, *choices = variant.split("/")
    preset, _, optimizer = base.partition("+")
    for name in filter(None, (preset, optimizer)):
        if name not in PRESETS:
            raise UserError(
                f'unknown variant "{variant}"', key="--variants", remedy=nearest(name, ["bf16", *PEERS, *PRESETS])
            )
    section: dict[str, Any] = {"preset": preset, "monitor": {"every": monitor}, "graph": "off"}
    if optimizer:
        section["optimizer"] = PRESETS[optimizer].get("optimizer", {})
    for choice in choices:
        if choice not in CHOICES:
            raise UserError(f'unknown variant "{variant}"', key="--variants", remedy=nearest(choice, CHOICES))
        for key, value in CHOICES[choice].items():  # several choices may set keys of one subsection
            section[key] = {**section.get(key, {}), **value} if isinstance(value, dict) else value
    return section


def peer_command(name: str, options: argparse.Namespace, result: Path) -> list[str]:
    """Return the arguments that run a peer with the shape of `options`; fsdp_te.py writes the file `result`.

    Raise UserError for a shape that its script cannot be told.
    """
    script = Path(options.peers) / PEERS[name]
    if not script.is_file():
        raise UserError(f"there is no {script}", key="--peers", remedy="name the folder that holds the peers' scripts")
    steps = str(WARMUP[name] + options.steps - options.warmup)
    if PEERS[name] == "fsdp_te.py":
        cannot = options.recompute and "recompute"
        shape = {"size": options.size, "sequences": options.sequences, "length": options.length}
        shape |= {"layers": options.layers, "vocabulary": options.vocabulary, "warmup": WARMUP[name]}
        shape |= {"steps": options.steps - options.warmup, "arch": "te", "json": result}
        shape |= {"engine": "fsdp2" if name == "te-fsdp2" else "mfsdp"}
    else:
        cannot = options.vocabulary != 152064 and "another vocabulary"
        shape = {"mbs": options.sequences, "seq": options.length, "layers": options.layers, "steps": steps}
        if name == "deepspeed":
            shape |= {"size": options.size, "liger": 1, "leaf": 1, "ckpt": int(options.recompute)}
        else:
            cannot = cannot or (options.recompute and "recompute")
            shape |= {"mode": "tensorwise" if name == "torchao" else "bf16"}
            if options.size != "7b":
                shape["size"] = options.size
    cannot = cannot or (options.accumulation > 1 and "accumulation")
    if cannot:
        raise UserError(f"the script of {name} knows no {cannot}", key="--variants", remedy=f"leave out {name}")
    return [str(script), *(word for key, value in shape.items() for word in (f"--{key}", str(value)))]


def peer_row(name: str, output: str, result: Path) -> dict[str, Any]:
    """Return a row as step.py writes them from what a peer's script printed or wrote. Raise ValueError for neither."""
    if PEERS[name] == "fsdp_te.py":
        found = json.loads(result.read_text())
        milliseconds, tokens = found["step_ms"], found["tokens_per_second_per_gpu"]
        peak, losses = found["peak_allocated_gib"], found["losses"]
    else:
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise ValueError("it printed no result")
        found = json.loads(lines[-1].removeprefix("RESULT "))
        milliseconds, tokens = found["step_ms"], found["tok_s_gpu"]
        peak, losses = found["peak_gib"], [found["loss"]]
    return {
        "variant": name,
        "gpus": found["gpus"],
        "step_seconds": milliseconds / 1e3,
        "tokens_per_second_per_gpu": tokens,
        "peak_bytes": peak * 2**30,
        "reserved_bytes": None,
        "sent_bytes": None,
        "losses": losses,
        "profile": None,
    }


def run_ranks(command: list[str], ranks: int, seconds: float | None) -> tuple[int, str]:
    """Return (exit status, standard output) of `command` on so many ranks, ended with all of them after `seconds`."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *command]
    process = subprocess.Popen(launch, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with _killed_at_the_end(process):
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return 124, f"it ran longer than {seconds:g} s"
    return process.returncode, output


@contextlib.contextmanager
def _killed_at_the_end(process: subprocess.Popen) -> Iterator[None]:
    """End all that `process` started: a rank that waits for a collective outlives its launcher."""
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(process.pid)
            for one in (launcher, *launcher.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        process.wait()


def failure(variant: str, status: int, output: str) -> str:
    """Return what to print of a run that failed: its last lines."""
    last = "\n".join(output.splitlines()[-15:])
    return f"{last}\nnot measured: {variant} (exit status {status})"
