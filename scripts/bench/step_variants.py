"""Variants that step.py measures, by their names, and the processes that measure one.

A variant is "bf16[/liger][/tuned][/tiled][/offload]" (plain DeepSpeed; layers gathered whole, but for adapters, more
ahead, and cuDNN's attention; its tiled MLP; masters and moments on the host),
"torch[/liger][/compile][/flashoptim[/release]]" (torch alone in BF16, on one GPU; with FlashOptim's 24-bit masters and
8-bit moments, and gradients released, which leaves no clipping) or PRESET[+OPTIMIZER][/CHOICE...]: the preset, the
optimizer section of another, and any of bf16-wire (gather and reduce in BF16), bf16-layers (linear layers in BF16; with
bf16-wire all is BF16, by this package's step and graphs), fp8-experts (products of a mixture), fp8-head, 64-outliers
(outlier channels), fp8-attention, keep-attention (through recomputation), tiled (MLPs in tiles of tokens), whole-base
(frozen weights whole on every GPU), graph, graph-auto, and the name of a GEMM backend.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ds_fp8.config.errors import UserError
from ds_fp8.config.presets import PRESETS
from ds_fp8.config.schema import nearest
from ds_fp8.gemm import BACKENDS

TILE_TOKENS = 8192
CHOICES: dict[str, dict[str, Any]] = {
    "bf16-wire": {"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}},
    "bf16-layers": {"linear": {"overrides": {"*": "bf16"}}},
    "fp8-experts": {"linear": {"expert_products": "fp8"}},
    "fp8-head": {"loss": {"head": "fp8"}},
    "64-outliers": {"linear": {"outlier_channels": 64}},
    "whole-base": {"param_gather": {"frozen": "whole"}},
    "graph": {"graph": "on"},
    "graph-auto": {"graph": "auto"},
    "fp8-attention": {"attention": {"format": "e4m3"}},
    "keep-attention": {"activations": {"keep_attention": True}},
    "tiled": {"activations": {"mlp_tile_tokens": TILE_TOKENS}},
    **{backend: {"linear": {"backend": backend}} for backend in BACKENDS},
}


def fp8_section(variant: str, monitor: int = 0) -> dict[str, Any]:
    """Return the "fp8" section of a variant, measured every `monitor` steps. Raise UserError for an unknown name."""
    if plain_choices(variant) is not None:
        return {"enabled": False}
    base, *choices = variant.split("/")
    preset, _, optimizer = base.partition("+")
    for name in filter(None, (preset, optimizer)):
        if name not in PRESETS:
            raise UserError(f'unknown variant "{variant}"', key="--variants", remedy=nearest(name, ["bf16", *PRESETS]))
    section: dict[str, Any] = {"preset": preset, "monitor": {"every": monitor}, "graph": "off"}
    if optimizer:
        section["optimizer"] = PRESETS[optimizer].get("optimizer", {})
    for choice in choices:
        if choice not in CHOICES:
            raise UserError(f'unknown variant "{variant}"', key="--variants", remedy=nearest(choice, CHOICES))
        for key, value in CHOICES[choice].items():  # several choices may set keys of one subsection
            section[key] = {**section.get(key, {}), **value} if isinstance(value, dict) else value
    return section


PLAIN = {"bf16": ("liger", "tuned", "tiled", "offload"), "torch": ("liger", "compile", "flashoptim", "release")}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
TUNED = {
    "stage3_prefetch_bucket_size": 5e8,
    "stage3_max_live_parameters": 2e9,
    "stage3_max_reuse_distance": 2e9,
}


def plain_choices(variant: str) -> list[str] | None:
    """Return what a variant in DeepSpeed's or torch's BF16 has besides; None for any other variant."""
    base, *choices = variant.split("/")
    if base not in PLAIN:
        return None
    for choice in choices:
        if choice not in PLAIN[base]:
            raise UserError(f'unknown variant "{variant}"', key="--variants", remedy=nearest(choice, PLAIN[base]))
    return choices


def apply_liger(model: torch.nn.Module) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


def gather_layers_whole(model: torch.nn.Module) -> None:
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(model, [type(model.get_decoder().layers[0])])


def tile_mlps(model: torch.nn.Module) -> None:
    """Compute MLPs by DeepSpeed's TiledMLP, in tiles of as many tokens as this package's."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    for layer in model.get_decoder().layers:
        forward, weights = layer.mlp.forward, list(layer.mlp.parameters())

        def tiled(x: torch.Tensor, forward: Any = forward, weights: Any = weights) -> torch.Tensor:
            tiles = -(-x.shape[-2] // TILE_TOKENS)  # the same on all ranks, which share rows of one length
            return TiledMLP.apply(lambda _, tile: forward(tile), None, x, tiles, weights)

        layer.mlp.forward = tiled


def attention_kernels(variant: str) -> contextlib.AbstractContextManager:
    """Let torch take cuDNN's attention first in a tuned variant: its own first is slower on Hopper."""
    if "tuned" not in (plain_choices(variant) or ()):
        return contextlib.nullcontext()
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels, set_priority=True)


class PlainEngine:
    """A model in torch alone, with as much of an engine's interface as step.py uses."""

    fp8 = SimpleNamespace(graphs=None, wire=SimpleNamespace(take=lambda: None))
    skipped_steps = 0

    def __init__(self, model: torch.nn.Module, choices: list[str], lr: float):
        if int(os.environ["WORLD_SIZE"]) > 1:
            raise UserError("plain torch is measured on one GPU", key="--gpus", remedy="--gpus 1")
        self.module = model
        if "compile" in choices:
            model.compile()
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._releases = "release" in choices
        if "flashoptim" in choices:
            from flashoptim import FlashAdamW, enable_gradient_release

            self._optimizer = FlashAdamW(self._trained, lr=lr, betas=(0.9, 0.95), master_weight_bits=24)
            if self._releases:
                enable_gradient_release(model, self._optimizer)
        else:
            self._optimizer = torch.optim.AdamW(self._trained, lr=lr, betas=(0.9, 0.95), fused=True)

    def __call__(self, **batch: Any) -> Any:
        return self.module(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        if self._releases:  # parameters were updated in backward
            return
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


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
    last = "\n".join(output.splitlines()[-15:])
    return f"{last}\nnot measured: {variant} (exit status {status})"
