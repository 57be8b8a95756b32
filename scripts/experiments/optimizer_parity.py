"""Does compressed optimizer state cost a training run more than chance does?

    python scripts/experiments/optimizer_parity.py --json parity.json --plot parity.png --save-moments moments.pt
    python scripts/experiments/optimizer_parity.py --quick                                seconds on a CPU
    python scripts/experiments/optimizer_parity.py --quick --steps 300 --seeds 0,1,2      three seeds on a CPU

Answer (2026-11-22, H200, four seeds, a shared start of 400 of 1500 steps): coat and fp8lm_o2 end 0.06% above FP32
state in the mean, fp8lm_o3 0.09%, fishman 0.00%: all within what chance does.

A Llama of 113 million parameters in BF16 reads bytes of Python sources: those of the standard library and of the
packages in this environment, in the order of their names. Masters are FP32 except where the preset says otherwise. Runs
of one seed start from the same weights and see the same batches, so they differ by the optimizer's state alone.

    "final loss"   mean training loss of the last tenth of the steps
    "vs first"     its relative difference from the first preset with the same seed; parity with FP32 is within 0.25%
    "validation"   loss on the last hundredth of the text, which no run trains on
    "perturbed"    FP32 state, and one weight that differs in its last bit: how far chance alone parts two runs
    "dithered"     FP32 state, and master weights that start within one FP16 spacing of the others: how far rounding to
                   FP16 may part two runs by chance, without anything being lost

A run from random weights is chaotic: what parts two of them in the first steps shifts the time at which both learn.
--shared-steps N trains the first N steps once a seed, with FP32 state, and lets every preset go on from there.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from byte_training import (
    PERTURBED,
    Scale,
    Trunk,
    build_model,
    deterministic,
    figures,
    perturb,
    read_sources,
    train_bytes,
)
from common import argument_parser, begin, device, positive, print_table, whole_numbers, words, write_json
from transformers import LlamaForCausalLM

from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.presets import preset_values
from ds_fp8.optim import AdamW

EXPANDED = {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"}
KEPT: dict[str, dict[str, Any]] = {
    **{
        name: preset_values(name).get("optimizer", {}) for name in ("infir2", "coat", "fishman", "fp8lm_o2", "fp8lm_o3")
    },
    "perturbed": {},
    "dithered": {},
    "bf16": {"exp_avg": "bf16", "exp_avg_sq": "bf16"},
    "e4m3": {"exp_avg": "e4m3", "exp_avg_sq": "e4m3"},
    "e4m3_nearest": {"exp_avg": "e4m3", "exp_avg_sq": "e4m3", "stochastic_rounding": False},
    "coat_nearest": {**EXPANDED, "stochastic_rounding": False},
    "coat_exp_avg": {"exp_avg": "e4m3_expanded"},
    "coat_exp_avg_sq_nearest": {"exp_avg_sq": "e4m3_expanded", "stochastic_rounding": False},
    "coat_stochastic": {**EXPANDED, "stochastic_rounding": True},
    "fp8lm_o3_nearest": {**preset_values("fp8lm_o3")["optimizer"], "stochastic_rounding": False},
    "fishman_nearest": {**preset_values("fishman")["optimizer"], "stochastic_rounding": False},
}
"""Presets of the fp8 section by what they say of the optimizer, and more."""
DITHERED = "dithered"
MOMENTS_SAVED = 20_000_000
"""Elements of moments to save at least: whole tensors from the first layers on."""


FULL = Scale(768, 3072, 12, 12, 1024, 16, 1000, 96_000_000)
QUICK = Scale(64, 256, 2, 2, 64, 8, 20, 500_000)


def chosen_scale(options: argparse.Namespace) -> Scale:
    """Return the scale that --quick and --steps ask for."""
    scale = QUICK if options.quick else FULL
    return scale._replace(steps=options.steps or scale.steps)


def dither(optimizer: AdamW) -> None:
    """Move the FP32 masters of matrices, those to come too, by up to one FP16 spacing; BF16 weights stay the same."""
    generator = torch.Generator(device()).manual_seed(0)
    for p in optimizer.param_groups[0]["params"]:
        if p.dim() > 1:
            master = optimizer.state[p].get("master", p.detach().float())
            _, exponent = torch.frexp(master)  # master = m * 2**exponent, m in [0.5, 1), and FP16 has 11 bits of m
            noise = 2 * torch.rand(p.shape, generator=generator, device=p.device) - 1
            optimizer.state[p]["master"] = master + torch.ldexp(noise, exponent - 11)


def train(
    name: str,
    scale: Scale,
    text: torch.Tensor,
    seed: int,
    options: argparse.Namespace,
    trunk: Trunk | None = None,
    last: int | None = None,
) -> tuple[list[float], AdamW, LlamaForCausalLM, float]:
    """Train from `trunk` to step `last`; return (the losses of all steps, the optimizer, the model, seconds a step)."""
    model = build_model(scale, seed)
    forward = torch.compile(model) if options.compile else model
    optimizer = AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, options.beta2), eps=1e-8, weight_decay=0.1, **KEPT[name]
    )
    first, last = 0, scale.steps if last is None else last
    if trunk is not None:
        first = len(trunk.losses)
        model.load_state_dict(trunk.weights)
        optimizer.load_state_dict(trunk.state)
    if name == PERTURBED:
        perturb(model, optimizer)
    if name == DITHERED:
        dither(optimizer)
    curve, seconds = train_bytes(model, optimizer, scale, text, seed, options.lr, range(first, last), forward)
    return ([] if trunk is None else trunk.losses) + curve, optimizer, model, seconds


def grow_trunk(scale: Scale, text: torch.Tensor, seed: int, options: argparse.Namespace) -> Trunk | None:
    """Train the first --shared-steps steps with FP32 state; return None where there are none to share."""
    if not options.shared_steps:
        return None
    losses, optimizer, model, _ = train("infir2", scale, text, seed, options, last=options.shared_steps)
    return Trunk(losses, model.state_dict(), optimizer.state_dict())


def save_moments(file: str, optimizer: AdamW, model: torch.nn.Module) -> None:
    """Write FP32 moments of the first tensors for optimizers.py --moments."""
    saved, count = {}, 0
    for name, p in model.named_parameters():
        if count < MOMENTS_SAVED:
            saved[name] = {key: optimizer.state[p][key].float().cpu() for key in ("exp_avg", "exp_avg_sq")}
            count += p.numel()
    torch.save(saved, file)


def print_rows(rows: list[dict[str, Any]], parameters: int, scale: Scale) -> None:
    print_table(
        f"{parameters / 1e6:.0f} million parameters, {scale.steps} steps of {scale.rows * scale.length} bytes",
        ("state", "seed", "final loss", "vs first %", "validation", "vs first %", "state B", "ms a step"),
        [
            (
                row["state"], row["seed"], f"{row['final_loss']:.4f}", f"{100 * row['difference']:+.3f}",
                f"{row['validation_loss']:.4f}", f"{100 * row['validation_difference']:+.3f}",
                row["state_bytes"], row["milliseconds_a_step"],
            )
            for row in rows
        ],
    )  # fmt: skip


def plot(file: str, rows: list[dict[str, Any]]) -> None:
    """Plot training losses of the first seed and their distance from the reference, means of fiftieths of the run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seed = rows[0]["seed"]
    curves = {row["state"]: torch.tensor(row["losses"]) for row in rows if row["seed"] == seed}
    reference = rows[0]["state"]
    window = max(1, len(curves[reference]) // 50)
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 8), height_ratios=(3, 2))
    steps = torch.arange(window, len(curves[reference]) + 1, window)
    smooth = {name: curve[: len(steps) * window].view(-1, window).mean(1) for name, curve in curves.items()}
    for name, curve in smooth.items():
        above.plot(steps, curve, label=name, linewidth=1)
        below.plot(steps, 100 * (curve / smooth[reference] - 1), label=name, linewidth=1)
    above.set_ylabel("training loss")
    above.legend()
    below.axhspan(-0.25, 0.25, color="0.9")
    below.set_ylabel(f"difference from {reference} (%)")
    below.set_ylim(-2, 2)
    below.set_xlabel("step")
    figure.savefig(file, dpi=120, bbox_inches="tight")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--presets", type=words, default=list(KEPT), metavar="NAME,...", help=f"of {','.join(KEPT)}")
    parser.add_argument("--seeds", type=whole_numbers, default=[0], metavar="N,...")
    parser.add_argument("--steps", type=positive, help=f"default {FULL.steps}, --quick: {QUICK.steps}")
    parser.add_argument("--lr", type=float, default=6e-4, help="peak learning rate (default 6e-4)")
    parser.add_argument("--shared-steps", type=int, default=0, metavar="N", help="train N of them once a seed")
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--compile", action="store_true", help="compile the model, to wait less for Python")
    parser.add_argument("--plot", metavar="FILE", help="draw the curves of the first seed there")
    parser.add_argument("--save-moments", metavar="FILE", help="write moments of the first run there")
    options = parser.parse_args(arguments)
    for name in options.presets:
        if name not in KEPT:
            raise UserError(f'unknown preset "{name}"', key="--presets", remedy=f"some of {', '.join(KEPT)}")
    if not 0 <= options.shared_steps < chosen_scale(options).steps:
        raise UserError("no step is left to part after", key="--shared-steps", remedy="fewer than --steps")
    if options.save_moments and {"exp_avg", "exp_avg_sq"} & KEPT[options.presets[0]].keys():
        raise UserError("the first run has no FP32 moments to save", key="--presets", remedy="infir2 first")
    if device().type != "cuda" and not options.quick:
        raise UserError("113 million parameters take hours without a GPU", remedy="--quick")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts, scale = begin(), chosen_scale(options)
    text = read_sources(scale.text)
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        with deterministic():
            trunk = grow_trunk(scale, text, seed, options)
        for name in options.presets:
            with deterministic():
                curve, optimizer, model, seconds = train(name, scale, text, seed, options, trunk)
                row = figures(seed, curve, optimizer, model, seconds, scale, text)
            parameters = sum(p.numel() for p in model.parameters())
            if name == options.presets[0]:
                reference = row
                if options.save_moments and seed == options.seeds[0]:
                    save_moments(options.save_moments, optimizer, model)
            row |= {
                "state": name,
                "difference": row["final_loss"] / reference["final_loss"] - 1,
                "validation_difference": row["validation_loss"] / reference["validation_loss"] - 1,
            }
            rows.append(row)
            print(
                f"{name}, seed {seed}: final loss {row['final_loss']:.4f} ({100 * row['difference']:+.3f}%)", flush=True
            )
            del optimizer, model
            if options.json:  # after every run: nothing is lost when the time runs out
                about = {"lr": options.lr, "beta2": options.beta2, "parameters": parameters, **scale._asdict()}
                about["shared_steps"] = options.shared_steps
                write_json(options.json, banner=facts, run=about, rows=rows)
    print_rows(rows, parameters, scale)
    if options.plot:
        plot(options.plot, rows)
    return 0


if __name__ == "__main__":
    main_entry(main)
