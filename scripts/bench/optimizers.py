"""AdamW steps with compressed moments against the FP32 ones of others: time, memory and error.

    python scripts/bench/optimizers.py                        1e9 parameters, every way to keep moments, every peer
    python scripts/bench/optimizers.py --sweep                shapes of the kernel's programs, for e4m3_expanded
    python scripts/bench/optimizers.py --moments moments.pt   quantisation errors on moments of a real run
    python scripts/bench/optimizers.py --quick                seconds on a CPU

One step() over a single flat FP32 parameter with an FP32 gradient, as ZeRO-3 makes it.
    "state B"      bytes of optimizer state a parameter, by what the first step allocates
    "transient B"  further bytes a parameter at the peak of a step
    "TB/s"         what the step must at least move (gradient read; parameter and state read and written) by its time
    "vs torch"     its time in units of torch's fused AdamW in the same run

Errors are of one encoding and decoding, mean |x - x'| / |x| over elements that are not zero: of both moments, and of
the update exp_avg / (sqrt(exp_avg_sq) + eps) made of them. A file of moments maps names to
{"exp_avg": tensor, "exp_avg_sq": tensor}; experiments/optimizer_parity.py --save-moments writes one.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import argument_parser, begin, device, measure, print_table, write_json

from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.optimizer_state import StatePrecision
from ds_fp8.config.presets import preset_values
from ds_fp8.optim import AdamW
from ds_fp8.optim.codecs import CODECS, decode, encode, moment_bytes

HYPERPARAMETERS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
KEPT: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"exp_avg": "bf16", "exp_avg_sq": "bf16"},
    "e4m3": {"exp_avg": "e4m3", "exp_avg_sq": "e4m3"},
    "e4m3, nearest": {"exp_avg": "e4m3", "exp_avg_sq": "e4m3", "stochastic_rounding": False},
    "coat: e4m3_expanded": preset_values("coat")["optimizer"],
    "e4m3_expanded, nearest": {**preset_values("coat")["optimizer"], "stochastic_rounding": False},
    "e4m3_expanded, all stochastic": {**preset_values("coat")["optimizer"], "stochastic_rounding": True},
    "fp8lm_o2: e4m3, fp16 by tensor": preset_values("fp8lm_o2")["optimizer"],
    "fishman: e4m3, e5m2 by tensor": preset_values("fishman")["optimizer"],
}
ERRORS = [
    ("bf16", "1x128", "fp32"),
    ("fp16", "1x128", "fp32"),
    ("e4m3", "1x128", "fp32"),
    ("e4m3", "1x128", "pow2"),
    ("e4m3", "tensor", "fp32"),
    ("e5m2", "1x128", "fp32"),
    ("e5m2", "tensor", "fp32"),
    ("e4m3_expanded", "1x128", "fp32"),
]
"""(codec, granularity, scale type) of the table of errors."""
PROGRAMS = [(4, 1), (8, 1), (4, 4), (8, 8), (8, 4), (16, 4), (16, 8), (8, 2), (32, 8)]
"""(groups of 128, warps) of a program of the kernel, for --sweep."""

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def peers() -> dict[str, Make]:
    """Return other packages' optimizers by name; the packages are imported when an optimizer is made."""

    def torch_fused(parameters):
        return torch.optim.AdamW(parameters, **HYPERPARAMETERS, fused=device().type == "cuda")

    def transformer_engine(**dtypes):
        def make(parameters):
            from transformer_engine.pytorch.optimizers import FusedAdam

            return FusedAdam(parameters, **HYPERPARAMETERS, **dtypes)

        return make

    def torchao(name):
        def make(parameters):
            import torchao.optim

            return getattr(torchao.optim, name)(parameters, **HYPERPARAMETERS)

        return make

    def bitsandbytes(parameters):
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, **HYPERPARAMETERS)

    result: dict[str, Make] = {"torch AdamW, fused": torch_fused}
    if device().type == "cuda":
        byte = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
        result |= {
            "Transformer Engine FusedAdam": transformer_engine(),
            "Transformer Engine FusedAdam, FP8 moments": transformer_engine(**byte),
            "torchao AdamWFp8": torchao("AdamWFp8"),
            "torchao AdamW8bit": torchao("AdamW8bit"),
            "bitsandbytes AdamW8bit": bitsandbytes,
        }
    return result


def ours(kept: dict[str, Any], check_finite: bool = False) -> Make:
    def make(parameters: list[torch.nn.Parameter]) -> AdamW:
        optimizer = AdamW(parameters, **HYPERPARAMETERS, **kept, check_finite=check_finite)
        for p in parameters:
            optimizer.set_segments(p, (p.numel(),))  # a matrix, flattened
        return optimizer

    return make


def measure_steps(make: Make, numel: int, milliseconds: float) -> dict[str, float]:
    """Return time and memory of a step of the optimizer that `make` makes."""
    on_gpu = device().type == "cuda"
    allocated = torch.cuda.memory_allocated if on_gpu else lambda: 0
    generator = torch.Generator(device()).manual_seed(0)
    p = torch.nn.Parameter(torch.empty(numel, device=device()).normal_(0, 0.02, generator=generator))
    p.grad = torch.empty(numel, device=device()).normal_(0, 1e-3, generator=generator)
    before = allocated()
    optimizer = make([p])
    optimizer.step()
    gc.collect()
    row: dict[str, float] = {}
    if on_gpu:
        torch.cuda.synchronize()
        state = allocated() - before
        torch.cuda.reset_peak_memory_stats()
        held = allocated()
        optimizer.step()
        row["transient_bytes"] = (torch.cuda.max_memory_allocated() - held) / numel
    elif isinstance(optimizer, AdamW):
        state = optimizer.state_bytes()
    else:
        state = sum(value.nbytes for value in optimizer.state[p].values() if value.dim())
    row["state_bytes"] = state / numel
    row["milliseconds"] = measure(optimizer.step, milliseconds=milliseconds, warmup_milliseconds=milliseconds / 6)
    row["terabytes_per_second"] = numel * (12 + 2 * row["state_bytes"]) / row["milliseconds"] / 1e9
    return row


def measure_all(optimizers: dict[str, Make], numel: int, milliseconds: float) -> list[dict[str, Any]]:
    """Return a row for every optimizer that can be imported; print the others with the reason."""
    rows = []
    for name, make in optimizers.items():
        try:
            rows.append({"optimizer": name, **measure_steps(make, numel, milliseconds)})
        except ImportError as error:
            print(f"not measured: {name} ({error})", flush=True)
        except Exception as error:  # a peer that is installed and fails must not take the other rows with it
            if name in KEPT or name.startswith("fp32"):
                raise
            print(f"not measured: {name} ({type(error).__name__}: {str(error).splitlines()[0][:120]})", flush=True)
        gc.collect()
        if device().type == "cuda":
            torch.cuda.empty_cache()
    return rows


def print_steps(rows: list[dict[str, Any]], numel: int) -> None:
    torch_time = rows[0]["milliseconds"]
    print_table(
        f"one step over {numel:.3g} parameters, median times",
        ("optimizer", "ms", "vs torch", "state B", "transient B", "TB/s"),
        [
            (
                row["optimizer"], row["milliseconds"], row["milliseconds"] / torch_time, row["state_bytes"],
                row.get("transient_bytes"), row["terabytes_per_second"],
            )
            for row in rows
        ],
    )  # fmt: skip


def sweep(numel: int, milliseconds: float) -> list[dict[str, Any]]:
    """Return the times of e4m3_expanded by the shape of the kernel's programs, torch's fused AdamW first."""
    from ds_fp8.optim import adamw_step_triton as kernels

    chosen = kernels.ROWS, kernels.WARPS
    rows = measure_all(peers() | {}, numel, milliseconds)[:1]
    try:
        for groups, warps in PROGRAMS:
            kernels.ROWS, kernels.WARPS = groups, warps
            make = {f"{groups} groups, {warps} warps": ours(KEPT["coat: e4m3_expanded"])}
            rows += measure_all(make, numel, milliseconds)
    finally:
        kernels.ROWS, kernels.WARPS = chosen
    return rows


def load_moments(file: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (exp_avg, exp_avg_sq) of every tensor in `file`, flat FP32."""
    try:
        content = torch.load(file, map_location=device(), weights_only=True).values()
        return [(entry["exp_avg"].flatten().float(), entry["exp_avg_sq"].flatten().float()) for entry in content]
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is no file of moments: {error}",
            key="--moments",
            remedy="make one with experiments/optimizer_parity.py --save-moments FILE",
        ) from None


def synthetic_moments() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return moments after 60 steps of random gradients whose size differs by row and element, if no run gives any."""
    generator = torch.Generator(device()).manual_seed(0)
    shape = 64, 1000
    size = torch.randn(shape[0], 1, generator=generator, device=device()).exp() * 1e-4
    size = size * torch.randn(shape, generator=generator, device=device()).exp()
    exp_avg, exp_avg_sq = torch.zeros(shape, device=device()), torch.zeros(shape, device=device())
    for _ in range(60):
        grad = torch.randn(shape, generator=generator, device=device()) * size
        exp_avg.lerp_(grad, 0.1)
        exp_avg_sq.lerp_(grad.square(), 0.05)
    return [(exp_avg.flatten(), exp_avg_sq.flatten())]


def measure_errors(moments: list[tuple[torch.Tensor, torch.Tensor]], eps: float = 1e-8) -> list[dict[str, Any]]:
    """Return a row for every way to keep moments: mean relative errors over all tensors."""
    rows = []
    for name, granularity, scale in ERRORS:
        codec = CODECS[name]
        sums, count = torch.zeros(3, dtype=torch.float64), 0
        for exp_avg, exp_avg_sq in moments:
            kept = [
                decode(encode(x, codec, granularity, scale, never_zero=positive), codec, granularity)
                for x, positive in ((exp_avg, False), (exp_avg_sq, True))
            ]
            exact = exp_avg / (exp_avg_sq.sqrt() + eps)
            update = kept[0] / (kept[1].sqrt() + eps)
            there = (exp_avg != 0) & (exp_avg_sq != 0)
            for index, (x, y) in enumerate(((exp_avg, kept[0]), (exp_avg_sq, kept[1]), (exact, update))):
                sums[index] += ((y - x).abs() / x.abs())[there].double().sum().cpu()
            count += int(there.sum())
        state_bytes = moment_bytes(StatePrecision(exp_avg=name, exp_avg_sq=name, granularity=granularity))
        rows.append(
            {"codec": name, "granularity": granularity, "scale": scale, "state_bytes": state_bytes}
            | dict(zip(("exp_avg", "exp_avg_sq", "update"), (sums / count).tolist(), strict=True))
        )
    return rows


def print_errors(rows: list[dict[str, Any]], source: str) -> None:
    plain = next(row for row in rows if (row["codec"], row["granularity"], row["scale"]) == ("e4m3", "1x128", "fp32"))
    print_table(
        f"mean relative errors of {source}; gain: plain e4m3's error of the update by this one",
        ("codec", "granularity", "scale", "state B", "exp_avg", "exp_avg_sq", "update", "gain"),
        [
            (
                row["codec"], row["granularity"], row["scale"], row["state_bytes"], row["exp_avg"], row["exp_avg_sq"],
                row["update"], plain["update"] / row["update"],
            )
            for row in rows
        ],
    )  # fmt: skip


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--numel", type=float, help="parameters (default 1e9, --quick: 1e5)")
    parser.add_argument("--sweep", action="store_true", help="time shapes of the kernel's programs instead")
    parser.add_argument("--moments", type=Path, metavar="FILE", help="measure errors on these moments instead")
    options = parser.parse_args(arguments)
    on_gpu = device().type == "cuda"
    if not on_gpu and (options.sweep or not (options.quick or options.numel or options.moments)):
        raise UserError(
            "this machine has no GPU, and a step over 1e9 parameters on a CPU takes minutes",
            key="--sweep" if options.sweep else "--numel",
            remedy="--quick, or --numel 1e6" + (", without --sweep" if options.sweep else ""),
        )
    options.numel = int(options.numel or (1e5 if options.quick else 1e9))
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts = begin()
    sections: dict[str, Any] = {"banner": facts}
    milliseconds = 20.0 if options.quick else 600.0
    if options.moments is None:
        if options.sweep:
            rows = sweep(options.numel, milliseconds)
        else:
            own = {name: ours(kept) for name, kept in KEPT.items()}
            own["fp32, looking for Inf and NaN"] = ours({}, check_finite=True)
            rows = measure_all(peers() | own, options.numel, milliseconds)
        print_steps(rows, options.numel)
        sections |= {"numel": options.numel, "steps": rows}
    if options.moments is not None or options.quick:
        source = str(options.moments or "synthetic moments")
        errors = measure_errors(load_moments(options.moments) if options.moments else synthetic_moments())
        print_errors(errors, source)
        sections["errors"] = errors
    if options.json:
        write_json(options.json, **sections)
    return 0


if __name__ == "__main__":
    main_entry(main)
