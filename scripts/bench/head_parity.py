"""Training parity of a head in FP8: one model and one order of data, the head's products in BF16 and in FP8.

    python scripts/bench/head_parity.py --json parity.json                          minutes on a GPU
    python scripts/bench/head_parity.py --quick --steps 300 --seeds 0,1,2           three seeds on a CPU

A Llama whose layers stay in BF16 (FP32 masters under autocast) reads pairs of bytes of Python sources, a vocabulary of
65536 (--quick: their remainders by 4096). Runs of one seed start from the same weights and see the same batches: they
differ by the head alone, or, "perturbed", by the last bit of one BF16 weight: how far chance alone parts two runs.

    "final loss"   mean training loss of the last tenth of the steps
    "vs bf16"      its relative difference from the BF16 head with the same seed
    "validation"   loss on text that no run trains on
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from byte_training import (
    PERTURBED,
    VALIDATION_BATCHES,
    add_arguments,
    begin_training,
    final_loss,
    learning_rate,
    train_steps,
)
from common import argument_parser, device, preset_recipe, print_table, words, write_json
from transformers import LlamaConfig, LlamaForCausalLM

from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.schema import nearest
from ds_fp8.layers.loss import fuse_loss

VARIANTS = ("bf16", PERTURBED, "infir2", "hybrid_fast")


class Scale(NamedTuple):
    """Model and batch."""

    vocabulary: int
    hidden: int
    layers: int
    length: int
    rows: int
    steps: int
    text: int
    """Bytes of text."""


FULL = Scale(65536, 768, 12, 1024, 16, 800, 96_000_000)
QUICK = Scale(4096, 128, 2, 64, 8, 20, 4_000_000)


def batches(text: torch.Tensor, scale: Scale, seed: int, count: int) -> Iterator[torch.Tensor]:
    """Yield tokens [rows, length] from places that depend on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(0, len(text) - 2 * scale.length, (scale.rows, 1), generator=generator)
        pairs = text[starts + torch.arange(2 * scale.length)].long().unflatten(1, (-1, 2))
        yield ((pairs[..., 0] * 256 + pairs[..., 1]) % scale.vocabulary).to(device())


def build_model(scale: Scale, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=scale.vocabulary, hidden_size=scale.hidden, intermediate_size=4 * scale.hidden,
        num_hidden_layers=scale.layers, num_attention_heads=scale.hidden // 64, max_position_embeddings=scale.length,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device())


def train(variant: str, seed: int, scale: Scale, text: torch.Tensor, peak: float) -> dict[str, Any]:
    """Return the losses of one run and its validation loss."""
    model = build_model(scale, seed)
    recipe = None if variant in ("bf16", PERTURBED) else preset_recipe(variant)
    if not (fusion := fuse_loss(model, recipe)).fused:
        raise RuntimeError(fusion.description)
    if variant == PERTURBED:
        with torch.no_grad():
            one = model.model.layers[0].mlp.up_proj.weight.view(torch.int32)[0]
            one[0] ^= 1 << 16  # the last bit of BF16, in which it is multiplied
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    held = len(text) // 100
    rates = (learning_rate(step, scale.steps, peak) for step in range(scale.steps))
    curve, seconds = train_steps(
        model, optimizer, batches(text[:-held], scale, seed, scale.steps), rates, autocast=True
    )
    model.eval()
    with torch.no_grad(), torch.autocast(device().type, torch.bfloat16):
        validation = [
            model(input_ids=tokens, labels=tokens).loss
            for tokens in batches(text[-held:], scale, 1000, VALIDATION_BATCHES)
        ]
    return {
        "variant": variant,
        "seed": seed,
        "losses": curve,
        "final_loss": final_loss(curve),
        "validation": torch.stack(validation).mean().item(),
        "seconds": seconds * len(curve),
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to every row its relative difference from the BF16 head's of the same seed."""
    of_seed = {row["seed"]: row for row in rows if row["variant"] == "bf16"}
    for row in rows:
        base = of_seed.get(row["seed"])
        row["final_vs_bf16"] = base and row["final_loss"] / base["final_loss"] - 1
        row["validation_vs_bf16"] = base and row["validation"] / base["validation"] - 1


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--variants", type=words, metavar="NAME,...", help=f"of {', '.join(VARIANTS)} (default all)")
    add_arguments(parser, FULL, QUICK, 1e-3)
    options = parser.parse_args(arguments)
    options.variants = options.variants or list(VARIANTS)
    for name in options.variants:
        if name not in VARIANTS:
            raise UserError(f'unknown variant "{name}"', key="--variants", remedy=nearest(name, VARIANTS))
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts, scale, text = begin_training(options, FULL, QUICK)
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        for variant in options.variants:
            rows.append(train(variant, seed, scale, text, options.lr))
            print(f"{variant}, seed {seed}: {rows[-1]['final_loss']:.4f}, {rows[-1]['seconds']:.0f} s", flush=True)
            compare(rows)
            if options.json:
                write_json(options.json, banner=facts, scale=scale._asdict(), rows=rows)
    print_table(
        f"{scale.steps} steps of {scale.rows} x {scale.length} tokens, {scale.hidden} x {scale.vocabulary} head",
        ("head", "seed", "final loss", "vs bf16, %", "validation", "vs bf16, %"),
        [
            (row["variant"], row["seed"], f"{row['final_loss']:.4f}", 100 * (row["final_vs_bf16"] or 0.0),
             f"{row['validation']:.4f}", 100 * (row["validation_vs_bf16"] or 0.0))
            for row in rows
        ],
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    main_entry(main)
