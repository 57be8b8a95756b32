"""Whole training steps under ZeRO-3: FP8 presets against BF16, against each other, and against their peers.

    python scripts/bench/step.py --gpus 2 --size 7b --layers 8 --json step.json
    python scripts/bench/step.py --gpus 2 --size 7b --layers 28 --sequences 1 --length 8192 --steps 8 --profile
        --variants bf16,infir2,hybrid_fast+coat
    python scripts/bench/step.py --gpus 2 --size 1.5b --steps 200 --lr 1e-4             losses of every step, same seed
    NCCL_P2P_DISABLE=1 python scripts/bench/step.py --gpus 2 ...                        a slower link
    python scripts/bench/step.py --gpus 1 --layers 28 --lora 16 --steps 12 --variants
        torch/liger,torch/liger/compile,hybrid_fast/graph-auto                          adapters beside their peers
    python scripts/bench/step.py --gpus 1 --size 8b --layers 32 --vocabulary 128256 --sequences 1 --length 8192
        --recompute --gradients bf16 --variants hybrid_fast+compact,torch/liger/flashoptim,bf16/liger/offload
    python scripts/bench/step.py --quick                                                seconds on a CPU

Each variant runs in processes of its own, for DeepSpeed keeps an engine's memory until its process ends. On several
hosts start them yourself, one variant at a time: deepspeed --hostfile HOSTS scripts/bench/step.py --variants infir2.

A variant is "bf16[/liger][/tuned][/tiled][/offload]" (plain DeepSpeed), "torch[/liger][/compile][/flashoptim]" (torch
alone) or PRESET[+OPTIMIZER][/CHOICE...] such as hybrid_fast+coat (the optimizer section of coat), infir2/bf16-wire
(gathering and reducing in BF16), infir2/graph-auto or infir2/fp8-attention (all names: step_variants.py). Weak scaling
is the default (--sequences x --length x --accumulation tokens a GPU); --global-tokens fixes the tokens of a step for
strong scaling. --shared P lets P GPUs share every row of --length tokens. --profile prints where the time of one more
step goes.

The time of a step is that from the end of the step before to its own end, on the GPU; medians are shown. The host runs
as far ahead as the code lets it, as in training. Where NVML counts joules (nvidia-ml-py), those of a step are the mean
power behind --warmup, of the GPUs of all ranks, times the median; these steps have to take 4 s, for the counter moves
ten times a second.

The model is Qwen2-like, or Qwen3-MoE-like for sizes of mixtures, with random weights of seed 0, made on the GPU; those
of 32b, 70b, and of qwen3-30b with adapters one by one (--one-by-one), each sharded before the next, frozen ones of FP8
variants into host memory.
Tokens are synthetic (a noisy counter, quickly learnt) or the bytes of --text FILE. Every variant of this library sees
the same tokens in the same order.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import banner, device, print_banner, print_table, words, write_json
from deepspeed import comm as dist
from step_profile import marked, print_profiles, profiled
from step_variants import (
    OFFLOAD,
    TUNED,
    PlainEngine,
    apply_liger,
    attention_kernels,
    failure,
    fp8_section,
    gather_layers_whole,
    plain_choices,
    run_ranks,
    tile_mlps,
)
from zero_ranks import (
    MIXTURES,
    Intervals,
    causal_lm_config,
    is_first,
    join_ranks,
    leave_ranks,
    link,
    sharded_model,
    slowest,
    synchronize,
    zero3_config,
)

import ds_fp8
from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.graphs.host_checkpoints import keep_on_host
from ds_fp8.monitor.energy import energy_counter
from ds_fp8.zero.collectives import allocated_bytes

COUNTED = 4  # Seconds of steps whose joules are counted, at least


def engine_of(variant: str, options: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM

    config = causal_lm_config(options.size, options.layers, options.vocabulary, options.length)
    choices = plain_choices(variant) or []
    ds_config = zero3_config(options.sequences, options.accumulation, fp8_section(variant, options.measure_every))
    ds_config["data_types"]["grad_accum_dtype"] = options.gradients
    ds_config["optimizer"]["params"]["lr"] = options.lr
    if "offload" in choices:  # by torch's AdamW: DeepSpeed's for the host would be compiled first
        ds_config["zero_optimization"] |= OFFLOAD
        ds_config["optimizer"]["params"]["fused"] = True
    if "tuned" in choices:
        ds_config["zero_optimization"] |= TUNED
    if options.shared > 1:
        ds_config["sequence_parallel_size"] = options.shared
    if options.prefetch is not None:
        ds_config["zero_optimization"]["stage3_prefetch_bucket_size"] = options.prefetch

    def adapted(model: Any) -> Any:
        if "liger" in choices:  # before adapters wrap experts, whose sizes Liger asks for
            apply_liger(model)
        if not options.lora:
            return model
        import peft

        shape = {"r": options.lora, "lora_dropout": options.lora_dropout, "target_modules": "all-linear"}
        if options.size in MIXTURES:  # "all-linear" doubles the rank of gate and up there, and adapts routers
            shape |= {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
            shape |= {"target_parameters": ["gate_up_proj", "down_proj"]}
        return peft.get_peft_model(model, peft.LoraConfig(**shape, task_type="CAUSAL_LM")).bfloat16()

    torch.manual_seed(0)
    in_torch = variant.startswith("torch")
    if options.one_by_one and not in_torch:
        model = sharded_model(config, ds_config, adapted, ds_config["fp8"].get("enabled", True))
    else:
        with torch.device(device()):
            model = adapted(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    if options.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if options.recompute == "offload":
        keep_on_host(model)
    if "tiled" in choices:
        tile_mlps(model)
    if "tuned" in choices and not options.lora:  # with adapters in them, backward finds empty tensors
        gather_layers_whole(model)
    if in_torch:
        return PlainEngine(model, choices, options.lr)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ds_fp8.initialize(model=model, model_parameters=trained, config=ds_config)[0]


class Batches:
    """Makes a model's inputs by step and rank: sequences [sequences, length], the same for every variant.

    Where ranks share rows each has its slice, whose labels end with it, and its places in the row.
    """

    def __init__(self, options: argparse.Namespace):
        self._shape = options.sequences, options.length
        self._shared = options.shared
        self._vocabulary = options.vocabulary
        self._text = None
        if options.text:
            self._text = torch.frombuffer(bytearray(Path(options.text).read_bytes()), dtype=torch.uint8)

    def __call__(self, micro_step: int) -> dict[str, torch.Tensor]:
        sequences, length = self._shape
        row, place = divmod(dist.get_rank(), self._shared)
        generator = torch.Generator().manual_seed(micro_step * dist.get_world_size() + row)
        if self._text is not None:
            starts = torch.randint(0, len(self._text) - length, (sequences,), generator=generator)
            tokens = torch.stack([self._text[start : start + length] for start in starts.tolist()]).long()
        else:
            start = torch.randint(0, self._vocabulary, (sequences, 1), generator=generator)
            stride = torch.randint(1, 4, (sequences, 1), generator=generator)
            noise = torch.rand(sequences, length, generator=generator) < 0.05
            tokens = (start + stride * torch.arange(length)) % min(self._vocabulary, 257)
            tokens[noise] = torch.randint(0, 257, (int(noise.sum()),), generator=generator) % self._vocabulary
        if self._shared == 1:
            tokens = tokens.to(device())
            return {"input_ids": tokens, "labels": tokens}
        places = torch.arange(length).expand(sequences, -1)
        tokens, places = (x.chunk(self._shared, 1)[place].contiguous().to(device()) for x in (tokens, places))
        return {"input_ids": tokens, "labels": tokens, "position_ids": places}


def preference_loss(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of DPO: the first half of the rows is chosen, the reference is the model without its adapters."""

    def log_probabilities() -> torch.Tensor:
        logits = engine(input_ids=tokens, use_cache=False).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return -losses.view(len(tokens), -1).float().sum(-1)

    ours = log_probabilities()
    with torch.no_grad(), engine.module.disable_adapter():
        theirs = log_probabilities()
    chosen, rejected = (ours - theirs).chunk(2)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def train_step(
    engine: Any, batches: list[dict[str, torch.Tensor]], step: int, accumulation: int, dpo: bool = False
) -> torch.Tensor:
    """Take one optimizer step and return the mean loss of its micro-batches, on the device."""
    losses = []
    for micro in range(accumulation):
        batch = batches[step * accumulation + micro]
        loss = preference_loss(engine, batch["input_ids"]) if dpo else engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
    return torch.stack(losses).mean()


def measure_variant(variant: str, options: argparse.Namespace, batches: Batches) -> dict[str, Any]:
    on_gpu = device().type == "cuda"
    began = time.perf_counter()
    engine = engine_of(variant, options)
    made = {
        "seconds": time.perf_counter() - began,
        "reserved_bytes": slowest(float(torch.cuda.max_memory_reserved() + allocated_bytes())) if on_gpu else None,
        "host_bytes": slowest(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0),
    }
    tokens = [batches(number) for number in range((options.steps + 1) * options.accumulation)]
    losses, intervals, counter = [], Intervals(), energy_counter(device())
    dist.barrier()
    intervals.mark()
    for step in range(options.steps):
        # Graphs take their memory while they are captured, before the steps that are timed.
        if on_gpu and step == (0 if engine.fp8.graphs else options.warmup):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if step == options.warmup:  # without waiting, which would leave the GPU idle
            begun, before = time.perf_counter(), counter() if counter else math.nan
        engine.fp8.wire.take()
        losses.append(train_step(engine, tokens, step, options.accumulation, options.dpo))
        intervals.mark()
    drawn, passed = (counter() if counter else math.nan) - before, time.perf_counter() - begun
    durations = intervals.seconds()[options.warmup :]
    sent = engine.fp8.wire.take()
    seconds = slowest(statistics.median(durations))
    joules = joules_of_step(drawn / passed, seconds) if slowest(passed) >= COUNTED else None
    curve = torch.stack(losses)
    dist.all_reduce(curve)
    tokens_of_step = options.sequences * options.length * options.accumulation / options.shared
    row = {
        "variant": variant,
        "made": made,
        "gpus": dist.get_world_size(),
        "step_seconds": seconds,
        "milliseconds_of_steps": [round(duration * 1e3, 1) for duration in durations],
        "tokens_per_second_per_gpu": tokens_of_step / seconds,
        "joules": joules,
        "millijoules_per_token": joules and joules / (tokens_of_step * dist.get_world_size()) * 1e3,
        "peak_bytes": slowest(float(torch.cuda.max_memory_allocated() + allocated_bytes())) if on_gpu else None,
        "reserved_bytes": slowest(float(torch.cuda.max_memory_reserved() + allocated_bytes())) if on_gpu else None,
        "graphs": (engine.fp8.graphs.off or engine.fp8.graphs.captured) if engine.fp8.graphs else None,
        "sent_bytes": sent,
        "losses": (curve / dist.get_world_size()).tolist(),
        "skipped_steps": engine.skipped_steps,
        "profile": None,
    }
    if options.profile:

        def one_more() -> None:
            train_step(engine, tokens, options.steps, options.accumulation, options.dpo)
            synchronize()

        with contextlib.nullcontext() if isinstance(engine, PlainEngine) else marked(engine):
            row["profile"] = profiled(one_more, options.trace if is_first() else None)
    return row


def joules_of_step(watts: float, seconds: float) -> float | None:
    """Return the joules of a step on all ranks, by the mean power of each; None unless all count. Collective."""
    total = torch.tensor(watts, dtype=torch.float64, device=device())
    dist.all_reduce(total)
    return total.item() * seconds if total.isfinite() else None


def print_rows(rows: list[dict[str, Any]], joined_by: str, options: argparse.Namespace) -> None:
    base = rows[0]["tokens_per_second_per_gpu"]
    holder = "GPU" if options.shared == 1 else f"{options.shared} GPUs"
    print_table(
        f"{options.size}, {options.layers} layers, {options.sequences} x {options.length} tokens "
        f"x {options.accumulation} a {holder} and step, {rows[0]['gpus']} ranks, link: {joined_by}",
        (
            *("variant", "ms", "tokens/s a GPU", f"/ {rows[0]['variant']}", "peak GiB", f"/ {rows[0]['variant']}"),
            *(
                "J a step",
                "mJ a token",
                "reserved",
                "graphs",
                "made: s",
                "made: reserved",
                "made: host GiB",
                "gather MB",
                "grad MB",
                "first loss",
                "last loss",
            ),
        ),
        [
            (
                row["variant"],
                row["step_seconds"] * 1e3,
                row["tokens_per_second_per_gpu"],
                row["tokens_per_second_per_gpu"] / base,
                row["peak_bytes"] and row["peak_bytes"] / 2**30,
                row["peak_bytes"] and row["peak_bytes"] / rows[0]["peak_bytes"],
                row["joules"],
                row["millijoules_per_token"],
                row["reserved_bytes"] and row["reserved_bytes"] / 2**30,
                "-" if row["graphs"] is None else str(row["graphs"]),  # how many, or why none are left
                row["made"]["seconds"],
                row["made"]["reserved_bytes"] and row["made"]["reserved_bytes"] / 2**30,
                row["made"]["host_bytes"] / 2**30,
                row["sent_bytes"] and row["sent_bytes"]["all_gather_bytes"] / 1e6,
                row["sent_bytes"] and row["sent_bytes"]["grad_bytes"] / 1e6,
                f"{row['losses'][0]:.4f}",
                f"{row['losses'][-1]:.4f}",
            )
            for row in rows
        ],
    )
    for row in rows:
        print(f"losses of {row['variant']} at --lr {options.lr:g}: {' '.join(f'{loss:.4f}' for loss in row['losses'])}")
    if options.profile:
        print_profiles({row["variant"]: row["profile"] for row in rows if row["profile"]}, options.layers)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    parser.add_argument("--gpus", type=int, help="ranks on this host (default: all GPUs, 1 without)")
    parser.add_argument("--size", help="70b, 32b, 14b, 8b, 7b, 1.5b, qwen3-30b, tiny-mixture (default 7b)")
    parser.add_argument("--layers", type=int, help="decoder layers (default 8, --quick: 2)")
    parser.add_argument("--vocabulary", type=int, help="default 152064, --quick: 512")
    parser.add_argument("--variants", type=words, metavar="NAME,...", help="default bf16,infir2,infir2/bf16-wire")
    parser.add_argument("--limit", type=float, metavar="S", help="seconds after which a variant is given up")
    parser.add_argument("--sequences", type=int, help="of a micro-batch and GPU (default 2, --quick: 2)")
    parser.add_argument("--length", type=int, help="tokens of a sequence (default 4096, --quick: 64)")
    parser.add_argument("--shared", type=int, default=1, metavar="P", help="GPUs that share every sequence (default 1)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--global-tokens", type=int, help="tokens of a step over all GPUs, in place of --accumulation")
    parser.add_argument("--steps", type=int, help="with those that warm up (default 20, --quick: 6)")
    parser.add_argument("--warmup", type=int, default=3, help="steps that are not timed (default 3)")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate, without warm-up (default 3e-4)")
    parser.add_argument("--measure-every", type=int, default=0, help="fp8.monitor.every (default 0: never)")
    parser.add_argument("--prefetch", type=int, help="stage3_prefetch_bucket_size, where not as it is by default")
    parser.add_argument("--gradients", choices=["fp32", "bf16"], default="fp32", help="accumulator (default fp32)")
    parser.add_argument(
        "--recompute",
        nargs="?",
        const="layers",
        choices=["layers", "offload"],
        help="gradient checkpointing of whole layers; offload: whose inputs wait on the host, with BF16, too",
    )
    parser.add_argument("--one-by-one", action="store_true", help="shard each weight before the next one is made")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="R", help="train PEFT's adapters of this rank alone, on experts, too"
    )
    parser.add_argument("--lora-dropout", type=float, default=0.0, metavar="P", help="of adapters (default 0)")
    parser.add_argument("--dpo", action="store_true", help="loss of DPO on pairs of sequences; needs --lora")
    parser.add_argument("--deterministic", action="store_true", help="attention that adds up in one order (MATH)")
    parser.add_argument("--text", metavar="FILE", help="train on the bytes of this file")
    parser.add_argument("--profile", action="store_true", help="of one more step: the host's waits, the GPU's time")
    parser.add_argument("--trace", metavar="FILE", help="with --profile: write rank 0's last trace there")
    parser.add_argument("--quick", action="store_true", help="a small model, for any machine")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    options = parser.parse_args(arguments)
    quick = {"size": "tiny", "layers": 2, "vocabulary": 512, "sequences": 2, "length": 64, "steps": 6}
    full = {"size": "7b", "layers": 8, "vocabulary": 152064, "sequences": 2, "length": 4096, "steps": 20}
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.one_by_one = options.one_by_one or options.size in ("32b", "70b")
    options.one_by_one |= options.size == "qwen3-30b" and bool(options.lora)
    options.variants = options.variants or ["bf16", "infir2", "infir2/bf16-wire"]
    if options.dpo and (not options.lora or options.sequences % 2):
        raise UserError("DPO needs adapters and pairs", key="--dpo", remedy="--lora 16 --sequences 2")
    if options.shared < 1 or options.length % options.shared or (options.dpo and options.shared > 1):
        remedy = "a divisor of --length, and no --dpo"
        raise UserError(f"{options.shared} GPUs cannot share these rows", key="--shared", remedy=remedy)
    if options.steps <= options.warmup:
        raise UserError(f"{options.steps} steps are not enough", key="--steps", remedy=f"more than {options.warmup}")
    for variant in options.variants:
        fp8_section(variant)
    if options.text and not Path(options.text).is_file():
        raise UserError(f"there is no file {options.text}", key="--text", remedy="name a file to train on")
    return options


def micro_batches(options: argparse.Namespace, ranks: int) -> int:
    if ranks % options.shared:
        remedy = f"a divisor of {ranks}"
        raise UserError(f"{ranks} GPUs are no groups of {options.shared}", key="--shared", remedy=remedy)
    if not options.global_tokens:
        return options.accumulation
    tokens = options.sequences * options.length * ranks // options.shared
    if options.global_tokens % tokens:
        raise UserError(
            f"{options.global_tokens} tokens are no multiple of the {tokens} of a micro-batch on all GPUs",
            key="--global-tokens",
            remedy=f"a multiple of {tokens}",
        )
    return options.global_tokens // tokens


def measure_here(options: argparse.Namespace) -> None:
    join_ranks()
    if len(options.variants) > 1:
        raise UserError(
            "several variants would be measured in the same processes, where DeepSpeed frees nothing",
            key="--variants",
            remedy="name one, or start this script without a launcher",
        )
    options.accumulation = micro_batches(options, dist.get_world_size())
    if options.deterministic:
        for kernel in ("cudnn", "flash", "mem_efficient"):
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
    with contextlib.nullcontext() if options.deterministic else attention_kernels(options.variants[0]):
        rows = [measure_variant(options.variants[0], options, Batches(options))]
    facts = banner()
    if is_first():
        report({"banner": facts, "link": link(), "settings": settings_of(options), "rows": rows}, options)
    leave_ranks()


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    names = ["size", "layers", "vocabulary", "sequences", "length", "shared", "accumulation"]
    names += ["gradients", "lr", "recompute", "one_by_one", "prefetch", "lora", "lora_dropout", "dpo", "deterministic"]
    return {**{name: getattr(options, name) for name in names}, "monitor": options.measure_every}


def report(found: dict[str, Any], options: argparse.Namespace) -> None:
    options.accumulation = found["settings"]["accumulation"]
    print_banner(found["banner"])
    print_rows(found["rows"], found["link"], options)
    if options.json:
        write_json(options.json, **found)


def measure_apart(arguments: list[str], options: argparse.Namespace) -> int:
    """Measure every variant in processes of its own; return the exit status of the first failure."""
    ranks = options.gpus or max(torch.cuda.device_count(), 1)
    micro_batches(options, ranks)  # or every variant would find the mistake by itself
    failed, found = 0, {}
    with tempfile.TemporaryDirectory() as folder:
        for number, variant in enumerate(options.variants):
            file = Path(folder) / f"{number}.json"
            print(f"{variant} ...", flush=True)
            command = [__file__, *arguments, "--variants", variant, "--json", str(file)]
            status, output = run_ranks(command, ranks, options.limit)
            try:
                one = json.loads(file.read_text()) if status == 0 else None
            except (OSError, ValueError) as error:
                one, output = None, f"{output}\n{error}"
            if one is None:
                print(failure(variant, status, output), file=sys.stderr, flush=True)
                failed = failed or status or 1
                continue
            found = {**one, **found, "rows": [*found.get("rows", []), *one["rows"]]}
            if options.json:  # after each, so that a run that is cut off leaves what it has
                write_json(options.json, **found)
    if found:
        report(found, options)
    return failed


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    if "RANK" in os.environ:
        measure_here(options)
        return 0
    return measure_apart(arguments, options)


if __name__ == "__main__":
    main_entry(main)
