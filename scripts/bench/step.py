"""Whole training steps under ZeRO-3: FP8 presets against BF16, and against FP8 compute with BF16 collectives.

    deepspeed --num_gpus 2 scripts/bench/step.py --size 7b --layers 8 --json step.json
    deepspeed --num_gpus 2 scripts/bench/step.py --size 1.5b --steps 200 --json curves.json    loss curves, same seed
    deepspeed --num_gpus 2 scripts/bench/step.py --size 7b --layers 8 --profile                host waits in a step
    NCCL_P2P_DISABLE=1 deepspeed --num_gpus 2 scripts/bench/step.py ...                        a slower link
    python scripts/bench/step.py --quick                                                       seconds on a CPU

A variant is "bf16" (plain DeepSpeed), a preset, or "PRESET/bf16-wire": the preset's compute, gathering and reducing in
BF16. Weak scaling is the default (--tokens per GPU); --global-tokens fixes the tokens of a step for strong scaling.

The model is Qwen2-like with random weights of seed 0. Tokens are synthetic (a noisy counter, quickly learnt) or the
bytes of --text FILE. Every variant sees the same tokens in the same order.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from common import banner, device, print_banner, print_table, words, write_json
from deepspeed import comm as dist
from zero_ranks import (
    causal_lm_config,
    is_first,
    join_ranks,
    leave_ranks,
    link,
    slowest,
    synchronize,
    zero3_config,
)

import ds_fp8
from ds_fp8.config import PRESETS
from ds_fp8.errors import UserError, main_entry
from ds_fp8.schema import nearest

BF16_WIRE = "bf16-wire"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
"""Events of a profile in which the host waits for the GPU; the last is .item() and what reads a tensor like it."""
WARMUP = 3


def fp8_section(variant: str) -> dict[str, Any]:
    """The "fp8" section of a variant. Raises UserError for a name that is none."""
    if variant == "bf16":
        return {"enabled": False}
    preset, _, wire = variant.partition("/")
    if preset not in PRESETS or wire not in ("", BF16_WIRE):
        known = ["bf16", *PRESETS, *(f"{name}/{BF16_WIRE}" for name in PRESETS)]
        raise UserError(f'unknown variant "{variant}"', key="--variants", remedy=nearest(variant, known))
    section: dict[str, Any] = {"preset": preset, "monitor": {"every": 0}}
    return section | {part: {"format": "bf16"} for part in ("param_gather", "grad_reduce") if wire}


def engine_of(variant: str, options: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM

    config = causal_lm_config(options.size, options.layers, options.vocabulary, options.length)
    torch.manual_seed(0)
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if options.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ds_config = zero3_config(options.sequences, options.accumulation, fp8_section(variant))
    return ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=ds_config)[0]


class Batches:
    """Token sequences [sequences, length] by step and rank, the same for every variant."""

    def __init__(self, options: argparse.Namespace):
        self._shape = options.sequences, options.length
        self._vocabulary = options.vocabulary
        self._text = None
        if options.text:
            self._text = torch.frombuffer(bytearray(Path(options.text).read_bytes()), dtype=torch.uint8)

    def __call__(self, micro_step: int) -> torch.Tensor:
        sequences, length = self._shape
        generator = torch.Generator().manual_seed(micro_step * dist.get_world_size() + dist.get_rank())
        if self._text is not None:
            starts = torch.randint(0, len(self._text) - length, (sequences,), generator=generator)
            tokens = torch.stack([self._text[start : start + length] for start in starts.tolist()]).long()
        else:
            start = torch.randint(0, self._vocabulary, (sequences, 1), generator=generator)
            stride = torch.randint(1, 4, (sequences, 1), generator=generator)
            noise = torch.rand(sequences, length, generator=generator) < 0.05
            tokens = (start + stride * torch.arange(length)) % min(self._vocabulary, 257)
            tokens[noise] = torch.randint(0, 257, (int(noise.sum()),), generator=generator) % self._vocabulary
        return tokens.to(device())


def train_step(engine: Any, batches: Batches, step: int, accumulation: int) -> torch.Tensor:
    """One optimizer step; the mean loss of its micro-batches, on the device."""
    losses = []
    for micro in range(accumulation):
        tokens = batches(step * accumulation + micro)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
    return torch.stack(losses).mean()


def measure_variant(variant: str, options: argparse.Namespace, batches: Batches) -> dict[str, Any]:
    engine = engine_of(variant, options)
    on_gpu = device().type == "cuda"
    losses, durations = [], []
    for step in range(options.steps):
        if step == WARMUP and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        engine.fp8.wire.take()
        dist.barrier()
        synchronize()
        begin = time.perf_counter()
        losses.append(train_step(engine, batches, step, options.accumulation))
        synchronize()
        durations.append(time.perf_counter() - begin)
    sent = engine.fp8.wire.take()
    seconds = slowest(sorted(durations[WARMUP:])[len(durations[WARMUP:]) // 2])
    curve = torch.stack(losses)
    dist.all_reduce(curve)
    row = {
        "variant": variant,
        "gpus": dist.get_world_size(),
        "step_seconds": seconds,
        "tokens_per_second_per_gpu": options.sequences * options.length * options.accumulation / seconds,
        "peak_bytes": slowest(float(torch.cuda.max_memory_allocated())) if on_gpu else None,
        "sent_bytes": sent,
        "losses": (curve / dist.get_world_size()).tolist(),
        "host_waits": count_waits(engine, batches, options) if options.profile else None,
    }
    engine.destroy()
    del engine
    if on_gpu:
        torch.cuda.empty_cache()
    return row


def count_waits(engine: Any, batches: Batches, options: argparse.Namespace) -> dict[str, int]:
    """How often the host waits for the GPU in one step of rank 0, by kind. Collective."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device().type == "cuda")
    with profile(activities=activities) as profiler:
        train_step(engine, batches, options.steps, options.accumulation)
        synchronize()
    counts = Counter(event.name for event in profiler.events())
    if is_first() and options.trace:
        profiler.export_chrome_trace(options.trace)
    return {name: counts[name] for name in WAITS}


def print_rows(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    base = rows[0]["tokens_per_second_per_gpu"]
    print_table(
        f"{options.size}, {options.layers} layers, {options.sequences} x {options.length} tokens "
        f"x {options.accumulation} a GPU and step, {rows[0]['gpus']} ranks, link: {link()}",
        ("variant", "ms", "tokens/s a GPU", "speed-up", "peak GB", "gather MB", "grad MB", "first loss", "last loss"),
        [
            (
                row["variant"],
                row["step_seconds"] * 1e3,
                row["tokens_per_second_per_gpu"],
                row["tokens_per_second_per_gpu"] / base,
                row["peak_bytes"] and row["peak_bytes"] / 1e9,
                row["sent_bytes"]["all_gather_bytes"] / 1e6,
                row["sent_bytes"]["grad_bytes"] / 1e6,
                f"{row['losses'][0]:.4f}",
                f"{row['losses'][-1]:.4f}",
            )
            for row in rows
        ],
    )
    if options.profile:
        print_table(
            f"how often the host waits in one step ({options.layers} layers)",
            ("variant", *WAITS, "cuda*, a layer"),
            [
                (
                    row["variant"],
                    *row["host_waits"].values(),
                    sum(count for name, count in row["host_waits"].items() if name.startswith("cuda")) / options.layers,
                )
                for row in rows
            ],
        )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    parser.add_argument("--size", help="7b or 1.5b (default 7b, --quick: tiny)")
    parser.add_argument("--layers", type=int, help="decoder layers (default 8, --quick: 2)")
    parser.add_argument("--vocabulary", type=int, help="default 152064, --quick: 512")
    parser.add_argument("--variants", type=words, metavar="NAME,...", help=f"default bf16,infir2,infir2/{BF16_WIRE}")
    parser.add_argument("--sequences", type=int, help="of a micro-batch and GPU (default 2, --quick: 2)")
    parser.add_argument("--length", type=int, help="tokens of a sequence (default 4096, --quick: 64)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--global-tokens", type=int, help="tokens of a step over all GPUs, in place of --accumulation")
    parser.add_argument("--steps", type=int, help=f"of which {WARMUP} warm up (default 20, --quick: 6)")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing of whole layers")
    parser.add_argument("--text", metavar="FILE", help="train on the bytes of this file")
    parser.add_argument("--profile", action="store_true", help="count the host's waits in one more step")
    parser.add_argument("--trace", metavar="FILE", help="with --profile: write rank 0's last trace there")
    parser.add_argument("--quick", action="store_true", help="a small model, for any machine")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    options = parser.parse_args(arguments)
    quick = {"size": "tiny", "layers": 2, "vocabulary": 512, "sequences": 2, "length": 64, "steps": 6}
    full = {"size": "7b", "layers": 8, "vocabulary": 152064, "sequences": 2, "length": 4096, "steps": 20}
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.variants = options.variants or ["bf16", "infir2", f"infir2/{BF16_WIRE}"]
    for variant in options.variants:
        fp8_section(variant)
    if options.steps <= WARMUP:
        raise UserError(f"{options.steps} steps are not enough", key="--steps", remedy=f"more than {WARMUP}")
    if options.text and not Path(options.text).is_file():
        raise UserError(f"there is no file {options.text}", key="--text", remedy="name a file to train on")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    join_ranks()
    if options.global_tokens:
        micro_batch = options.sequences * options.length * dist.get_world_size()
        if options.global_tokens % micro_batch:
            raise UserError(
                f"{options.global_tokens} tokens are no multiple of the {micro_batch} of a micro-batch on all GPUs",
                key="--global-tokens",
                remedy=f"a multiple of {micro_batch}",
            )
        options.accumulation = options.global_tokens // micro_batch
    facts = banner()
    if is_first():
        print_banner(facts)
    batches = Batches(options)
    rows = [measure_variant(variant, options, batches) for variant in options.variants]
    if is_first():
        print_rows(rows, options)
        if options.json:
            settings = {key: getattr(options, key) for key in ("size", "layers", "vocabulary", "sequences", "length")}
            settings |= {"accumulation": options.accumulation, "recompute": options.recompute}
            write_json(options.json, banner=facts, link=link(), settings=settings, rows=rows)
    leave_ranks()
    return 0


if __name__ == "__main__":
    main_entry(main)
