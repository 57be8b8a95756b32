"""What do the head and its cross entropy take, in BF16 and FP8 here, in Liger, cut-cross-entropy, all logits at once?

    python scripts/experiments/head.py                          7B: 8192 tokens, hidden 3584, vocabulary 152064
    python scripts/experiments/head.py --tokens 2048 --hidden 1536 --vocabulary 151936
    python scripts/experiments/head.py --chunks 512,1024,4096   chunks of so many tokens, too
    python scripts/experiments/head.py --quick                  seconds on a CPU

Answer (2026-11-22, H200, 7B): 44 ms in BF16, 33 in FP8, 82 in Liger, 151 in cut-cross-entropy, which takes 1.1 GiB
where the others take 3.1 to 5.5.

A row is one forward and backward: milliseconds, the peak memory beyond operands and results, and the relative errors of
loss and gradients against the same numbers multiplied in FP32. On a GPU the softmax gradient alone is measured, too.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import bench_path  # noqa: F401  (for `common` and its neighbours)
import torch
from common import (
    argument_parser,
    begin,
    device,
    first_line,
    integers,
    measure,
    normal,
    positive,
    preset_recipe,
    print_table,
    words,
    write_json,
)

from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.schema import nearest
from ds_fp8.layers.head import cross_entropy
from ds_fp8.layers.head.cross_entropy import chunk_tokens, linear_cross_entropy, linear_cross_entropy_reference
from ds_fp8.layers.head.softmax_gradient import IGNORED, softmax_gradient

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

REFERENCE_TOKENS = 512
"""The errors are those of so many tokens: all logits in FP32 must fit."""


def in_chunks_of(tokens: int, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return linear_cross_entropy in chunks of `tokens` tokens."""
    before = cross_entropy.chunk_tokens
    cross_entropy.chunk_tokens = lambda *_: tokens
    try:
        return linear_cross_entropy(hidden, weight, targets)
    finally:
        cross_entropy.chunk_tokens = before


def liger(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return Liger's fused linear cross entropy, the weight's gradient summed in FP32."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    arguments = (hidden, weight, targets, None, None, IGNORED, 0.0, 0.0, "sum", None, False, torch.float32)
    return LigerFusedLinearCrossEntropyFunction.apply(*arguments)[0]


def cut(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return Apple's cut cross entropy, which skips what is negligible of the softmax."""
    from cut_cross_entropy import linear_cross_entropy as compute

    return compute(hidden, weight, targets, reduction="sum", ignore_index=IGNORED)


def contestants(chunks: list[int]) -> dict[str, Loss]:
    """Return what can be measured here, by name."""
    found: dict[str, Loss] = {"bf16": linear_cross_entropy}
    found |= {f"bf16, chunks of {count}": functools.partial(in_chunks_of, count) for count in chunks}
    for preset in ("infir2", "hybrid_fast"):
        recipe = preset_recipe(preset)
        found[f"fp8 {preset} ({recipe.backend})"] = functools.partial(linear_cross_entropy, recipe=recipe)
    if device().type == "cuda":
        packages = {"liger": (liger, "liger_kernel"), "cut-cross-entropy": (cut, "cut_cross_entropy")}
        found |= {name: loss for name, (loss, module) in packages.items() if importlib.util.find_spec(module)}
    return found | {"all logits": linear_cross_entropy_reference}


def step(loss: Loss, operands: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return loss and gradients, for a loss gradient of 1 / tokens."""
    hidden, weight, targets = operands
    result = loss(hidden, weight, targets)
    return [result.detach(), *torch.autograd.grad(result / len(targets), (hidden, weight))]


def errors(loss: Loss, operands: tuple[torch.Tensor, ...]) -> list[float]:
    """Return the relative errors of loss, dhidden and dweight on the first tokens."""
    hidden, weight, targets = operands
    few = (hidden.detach()[:REFERENCE_TOKENS].requires_grad_(), weight, targets[:REFERENCE_TOKENS])
    exact = tuple(operand.detach().float().requires_grad_() for operand in few[:2])
    pairs = zip(step(loss, few), step(linear_cross_entropy_reference, (*exact, few[2])), strict=True)
    return [((one.float() - other).norm() / other.norm()).item() for one, other in pairs]


def measure_row(name: str, loss: Loss, operands: tuple[torch.Tensor, ...], milliseconds: float) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "peak_gib": None}
    step(loss, operands)
    if device().type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = step(loss, operands)
        row["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        del results
    row["milliseconds"] = measure(lambda: step(loss, operands), milliseconds=milliseconds)
    row["errors"] = errors(loss, operands)
    return row


def measure_kernel(tokens: int, vocabulary: int) -> list[tuple[Any, ...]]:
    """Return (tokens of a tile, warps, milliseconds, TB/s of two reads and a write) of the softmax gradient."""
    from ds_fp8.layers.head.softmax_gradient_triton import softmax_gradient as kernel

    logits, targets = normal(tokens, vocabulary), torch.randint(0, vocabulary, (tokens,), device=device())
    rows = []
    for block, warps in ((4096, 8), (8192, 8), (8192, 16), (16384, 16), (16384, 32), (32768, 32)):
        duration = measure(lambda b=block, w=warps: kernel(logits, targets, IGNORED, True, None, b, w))
        rows.append((block, warps, duration, 3 * logits.nbytes / duration / 1e9))
    rows.append(("as used", None, measure(lambda: softmax_gradient(logits, targets, True)), None))
    return rows


def parse_arguments(arguments: list[str] | None) -> Any:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=positive, help="T (default 8192)")
    parser.add_argument("--hidden", type=positive, help="H (default 3584)")
    parser.add_argument("--vocabulary", type=positive, help="V (default 152064)")
    parser.add_argument("--chunks", type=integers, default=[], metavar="C,...", help="of tokens, to compare")
    parser.add_argument("--only", type=words, metavar="NAME,...", help="beginnings of the rows' names")
    options = parser.parse_args(arguments)
    quick = {"tokens": 256, "hidden": 128, "vocabulary": 1024}
    full = {"tokens": 8192, "hidden": 3584, "vocabulary": 152064}
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts = begin()
    tokens, vocabulary, width = options.tokens, options.vocabulary, options.hidden
    hidden = normal(tokens, width).requires_grad_()
    weight = normal(vocabulary, width, std=0.02, seed=1).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(0)).to(device())
    known = contestants(options.chunks)
    for name in options.only or ():
        if not any(other.startswith(name) for other in known):
            raise UserError(f'no row is called "{name}"', key="--only", remedy=nearest(name, known))
    rows = []
    for name, loss in known.items():
        if options.only and not name.startswith(tuple(options.only)):
            continue
        try:
            rows.append(measure_row(name, loss, (hidden, weight, targets), 60.0 if options.quick else 400.0))
        except Exception as error:  # another library fails in its own way
            if name.startswith(("bf16", "fp8")):
                raise
            print(f"not measured: {name} ({first_line(error)})", flush=True)
    chunk = chunk_tokens(tokens, vocabulary, width, device().type == "cuda")
    print_table(
        f"{tokens} tokens, hidden {width}, vocabulary {vocabulary}: head and loss, forward and backward; chunk {chunk}",
        ("", "ms", "GiB beyond operands", "loss", "dhidden", "dweight"),
        [(row["name"], row["milliseconds"], row["peak_gib"], *row["errors"]) for row in rows],
    )
    kernel = []
    if device().type == "cuda":
        kernel = measure_kernel(min(chunk, tokens), vocabulary)
        print_table(f"softmax gradient of {min(chunk, tokens)} tokens", ("block", "warps", "ms", "TB/s"), kernel)
    if options.json:
        write_json(options.json, banner=facts, rows=rows, kernel=kernel)
    return 0


if __name__ == "__main__":
    main_entry(main)
