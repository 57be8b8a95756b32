"""Do casts cost a training run more than chance does, and does Smooth-SwiGLU hold where a channel stands out?

    python scripts/experiments/cast_parity.py --variants bf16,tensorwise,infir2 --json parity.json       a GPU
    python scripts/experiments/cast_parity.py --quick --steps 300 --shared-steps 100 --seeds 0,1,2  three seeds on a CPU
    python scripts/experiments/cast_parity.py --quick --outlier 15 --variants bf16,tensorwise,fishman   Smooth-SwiGLU

Answer (2026-11-22, CPU): behind a channel of 2^20 one scale a tensor ends 3.3% above BF16, Smooth-SwiGLU 0.02%; chance
parts two runs by 0.002%.

A Llama in BF16 with FP32 masters reads bytes of Python sources (byte_training.py). Runs of one seed share their
first --shared-steps steps in BF16 and see the same batches: they differ by the casts of their linears alone. A variant
is "bf16", "perturbed" (BF16, and one weight that differs in its last bit: how far chance alone parts two runs), a
preset, a format (of all operands, weights in blocks of 128x128, the rest in groups of 1x128), or one of BLOCK_FORMATS.
nvfp4-paper is the preset nvfp4 with the last of --quick's two MLPs in BF16; the others leave an ingredient out, of it
or of quartet: scales of least error, the mask of clipped elements, stochastic rounding, the casts of casts, rotations.

--outlier E plants in every MLP what long training makes (Fishman et al., arXiv 2409.12517): the gate and up rows of one
channel are the same and lie along the mean of their inputs, so that its product is the square of its input: 2^E times
the typical channel's. Its column of down_proj is as much smaller, so that it takes part in the output like the others.
The planted weights are held where they are.

    "final loss"   mean training loss of the last tenth of the steps
    "vs bf16"      its relative difference from BF16 with the same seed
    "validation"   loss on text that no run trains on
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from byte_training import (
    PERTURBED,
    Scale,
    Trunk,
    add_arguments,
    add_shared_steps,
    batch,
    begin_training,
    build_model,
    deterministic,
    figures,
    perturb,
    refuse_full_on_cpu,
    train_bytes,
)
from common import argument_parser, print_table, words, write_json
from transformers import LlamaForCausalLM

from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.formats import FORMATS
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.presets import EMULATED_PRESETS, PRESETS
from ds_fp8.config.schema import nearest
from ds_fp8.layers.convert import convert
from ds_fp8.optim import AdamW

FULL = Scale(768, 3072, 12, 12, 1024, 16, 1000, 96_000_000)
QUICK = Scale(128, 384, 2, 2, 64, 8, 20, 500_000)
BF16 = "bf16"
GATHER_IN_BF16 = {"param_gather": {"format": "bf16"}}
_MXFP4 = {"format": "e2m1", "granularity": "1x32"}
_NVFP4 = EMULATED_PRESETS["nvfp4"]["linear"]
_QUARTET = EMULATED_PRESETS["quartet"]["linear"]
_PAPER = {**_NVFP4, "overrides": {"model.layers.1.mlp.*": "bf16"}}
BLOCK_FORMATS: dict[str, dict[str, Any]] = {
    "mxfp4": dict.fromkeys(("input", "weight", "grad_output"), _MXFP4),
    "nvfp4-nearest": {**_NVFP4, "grad_output": _NVFP4["input"]},
    "nvfp4-paper": _PAPER,
    "nvfp4-paper-unrotated": {**_PAPER, "rotation": {}},
    "nvfp4-paper-1x16-weights": {**_PAPER, "weight": _NVFP4["input"]},
    "nvfp4-paper-nearest": {**_PAPER, "grad_output": _NVFP4["input"]},
    "quartet-pow2": {**_QUARTET, "input": _MXFP4, "weight": _MXFP4},
    "quartet-unmasked": {**_QUARTET, "recast": {"of": "fprop", "clipped": "pass"}},
    "quartet-nearest": {**_QUARTET, "grad_output": _MXFP4, "recast": {"of": "fprop", "rounding": "nearest"}},
    "quartet-high-precision": {**_QUARTET, "recast": {}},
    "quartet-unrotated": {**_QUARTET, "rotation": {}},
}
"""Sections "linear" of what is no preset."""
CHANNEL = 3
"""Of every MLP, where an outlier is planted."""


@torch.no_grad()
def plant_outliers(model: LlamaForCausalLM, rows: torch.Tensor, exponent: int) -> None:
    """Make one channel of every MLP's product 2^exponent times as large as the typical one."""
    inputs, products = {}, {}
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda mlp, args: inputs.update({mlp: args[0].flatten(0, 1).float()}))
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda down, args: products.update({down: args[0].flatten(0, 1).float()})
        )
    for number, layer in enumerate(model.model.layers):
        model(input_ids=rows)  # the layers before have theirs already
        mlp, x = layer.mlp, inputs[layer.mlp]
        typical = products[mlp.down_proj].abs().amax(0).median()
        direction = x.mean(0) / x.mean(0).norm()
        largest = (x @ direction).amax()
        row = direction * math.sqrt(2.0**exponent * typical) / largest
        column = torch.randn(len(row), generator=torch.Generator().manual_seed(number)).to(row)
        mlp.gate_proj.weight[CHANNEL] = mlp.up_proj.weight[CHANNEL] = row.to(mlp.up_proj.weight)
        mlp.down_proj.weight[:, CHANNEL] = (column * mlp.down_proj.weight.std() * 2.0**-exponent).to(row.dtype)
    for layer in model.model.layers:
        layer.mlp._forward_pre_hooks.clear()
        layer.mlp.down_proj._forward_pre_hooks.clear()


def hold_outliers(model: LlamaForCausalLM, optimizer: AdamW) -> None:
    """Give the planted weights no gradients and no momentum, and all weights new masters, without those of others."""

    def without(place: Any):
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            gradient[place] = 0
            return gradient

        return hook

    for layer in model.model.layers:
        column = (slice(None), CHANNEL)
        for part, place in (
            (layer.mlp.gate_proj, CHANNEL),
            (layer.mlp.up_proj, CHANNEL),
            (layer.mlp.down_proj, column),
        ):
            part.weight.register_hook(without(place))
            if part.weight in optimizer.state:
                optimizer.state[part.weight]["exp_avg"][place] = 0
    for parameter in model.parameters():
        optimizer.state[parameter].pop("master", None)


def fp8_section(variant: str) -> dict[str, Any] | None:
    """Return the "fp8" section of a variant, None for BF16."""
    if variant in (BF16, PERTURBED):
        return None
    if variant in FORMATS:
        cast = {"format": variant}
        linear = {"input": cast, "weight": cast, "grad_output": cast}
    else:
        linear = BLOCK_FORMATS.get(variant)
    return {**GATHER_IN_BF16, **({"preset": {"linear": variant}} if linear is None else {"linear": linear})}


def train(
    variant: str, scale: Scale, text: torch.Tensor, seed: int, options: argparse.Namespace, trunk: Trunk | None
) -> tuple[list[float], AdamW, LlamaForCausalLM, float]:
    """Train the steps after `trunk`, or make it: (losses of all steps, the optimizer, the model, seconds a step)."""
    model = build_model(scale, seed)
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    first, last = 0, options.shared_steps
    if trunk is not None:
        first, last = len(trunk.losses), scale.steps
        model.load_state_dict(trunk.weights)
        optimizer.load_state_dict(trunk.state)
        if options.outlier:
            plant_outliers(model, batch(text, scale, seed), options.outlier)
            hold_outliers(model, optimizer)
    if variant == PERTURBED:
        perturb(model, optimizer)
    section = fp8_section(variant)
    if section is not None:
        convert(model, FP8Config(**section, monitor={"every": 0}))
    curve, seconds = train_bytes(model, optimizer, scale, text, seed, options.lr, range(first, last))
    return ([] if trunk is None else trunk.losses) + curve, optimizer, model, seconds


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    known = [BF16, PERTURBED, *PRESETS, *EMULATED_PRESETS, *FORMATS, *BLOCK_FORMATS]
    parser.add_argument("--variants", type=words, default=[BF16, PERTURBED, "infir2", "rowwise", "tensorwise"])
    add_arguments(parser, FULL, QUICK, 6e-4)
    add_shared_steps(parser)
    parser.add_argument("--outlier", type=int, default=0, metavar="E", help="plant channels of 2^E")
    options = parser.parse_args(arguments)
    check_variants(options.variants, known)
    refuse_full_on_cpu(options)
    return options


def check_variants(variants: list[str], known: list[str]) -> None:
    """Raise a UserError for a variant that is not known, and where the first is not BF16."""
    for name in variants:
        if name not in known:
            raise UserError(f'unknown variant "{name}"', key="--variants", remedy=nearest(name, known))
    if variants[0] != BF16:
        raise UserError("nothing to compare with", key="--variants", remedy=f"{BF16} first")


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts, scale, text = begin_training(options, FULL, QUICK)
    rows: list[dict[str, Any]] = []
    with deterministic():
        for seed in options.seeds:
            losses, optimizer, model, _ = train(BF16, scale, text, seed, options, None)
            trunk = Trunk(losses, model.state_dict(), optimizer.state_dict())
            reference: dict[str, Any] = {}
            for name in options.variants:
                row = figures(seed, *train(name, scale, text, seed, options, trunk), scale, text)
                reference = reference or row
                for key in ("final", "validation"):
                    row[f"{key}_vs_bf16"] = row[f"{key}_loss"] / reference[f"{key}_loss"] - 1
                rows.append({"variant": name, **row})
                print(f"{name:>20} seed {seed}: {row['final_loss']:.4f} {row['final_vs_bf16']:+.3%}", flush=True)
    print_table(
        f"{scale.steps} steps of {scale.rows * scale.length} bytes, {options.shared_steps} shared",
        ("casts", "seeds", "final loss", "vs bf16 %", "validation", "vs bf16 %"),
        [means(name, [row for row in rows if row["variant"] == name]) for name in options.variants],
    )
    if options.json:
        write_json(options.json, machine=facts, rows=rows)
    return 0


def means(name: str, rows: list[dict[str, Any]]) -> tuple[object, ...]:
    """Return the line of a variant: means over its seeds."""
    keys = ("final_loss", "final_vs_bf16", "validation_loss", "validation_vs_bf16")
    final, difference, validation, other = (sum(row[key] for row in rows) / len(rows) for key in keys)
    return name, len(rows), f"{final:.4f}", f"{100 * difference:+.3f}", f"{validation:.4f}", f"{100 * other:+.3f}"


if __name__ == "__main__":
    main_entry(main)
