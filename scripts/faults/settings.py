"""Train with random combinations of valid settings, in FP8 and in BF16: equal losses, or a refusal in words.

    python scripts/faults/settings.py --combinations 10 --seed 1                  ten of every ZeRO stage
    python scripts/faults/settings.py --combinations 50 --jobs 24 --minutes 9     as many at once, no new ones after 9
    python scripts/faults/settings.py --seed 1 --only 3:17                        one again, with its traceback

Each combination has a ZeRO stage, offload, sizes of sub-groups and buckets, overlap, accumulation, a preset with some
changes, a model (dense, windows, tied, experts, LoRA), batches (lengths, padding, rows that ranks share), optimizer,
scheduler, a checkpoint on the way, graphs (lists of operations in their place) and more, and trains for a few steps on
one to three CPU ranks. It is refused where `ds_fp8.initialize` raises a UserError. Where DeepSpeed itself fails at the
combination in BF16, that is said, and the combination does not count. Exits with 1 where a loss is more than GAP apart,
where ranks hold other weights than each other, or where FP8 fails in any other way.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib.util
import json
import logging
import math
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ |= {"DS_ACCELERATOR": "cpu", "DS_FP8_TIMEOUT": "0"}

from tests.ranks import RankPools

STEPS, STEPS_OF_GRAPHS = 4, 8
GAP = 0.01  # Relative difference of the loss of a step to that in BF16
STAGES = (0, 1, 2, 3)
MODELS = [
    *("llama", "llama", "llama", "tied", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "olmo2", "granite"),
    *("qwen3_moe", "mixtral", "frozen", *(["lora"] * 2 if importlib.util.find_spec("peft") else ["llama"] * 2)),
]
# Without Adafactor: its means meet the padding of flat shards, whose numbers are arbitrary in DeepSpeed.
RATES = {"AdamW": 1e-3, "Adam": 1e-3, "SGD": 1e-2, "Adagrad": 1e-3, "RMSprop": 1e-4, "Adamax": 1e-3, "NAdam": 1e-3}
RATES |= {"Muon": 1e-3, "LBFGS": 1e-3}
ZERO: dict[str, list[Any]] = {
    "offload_optimizer": [None, None, {"device": "cpu"}, {"device": "cpu", "pin_memory": False}],
    "overlap_comm": [True, False],
    "reduce_bucket_size": [5 * 10**7, 4000, 1],
    "allgather_bucket_size": [5 * 10**7, 4000],
    "allgather_partitions": [True, True, False],
    "contiguous_gradients": [True, False],
    "reduce_scatter": [True, True, True, False],
    "round_robin_gradients": [False, True],
    "load_from_fp32_weights": [True, True, False],
    "ignore_unused_parameters": [True, False],
}
# Keys of "zero_optimization" in stage 3 alone
ZERO_3: dict[str, list[Any]] = {
    "offload_param": [None, None, None, None, {"device": "cpu"}],
    "sub_group_size": [10**9, 5000, 1000],
    "stage3_param_persistence_threshold": [0, 100, 10**5],
    "stage3_model_persistence_threshold": [None, None, 10**4],
    "stage3_prefetch_bucket_size": [0, 5 * 10**7],
    "stage3_max_live_parameters": [None, 10**9, 1],
    "stage3_max_reuse_distance": [None, 10**9, 0],
    "zero_hpz_partition_size": [1] * 9 + [2],
    "memory_efficient_linear": [True, False],
}
CHOICES: dict[str, list[Any]] = {
    "ranks": [2, 2, 2, 2, 1, 3],
    "model": MODELS,
    "hidden": [128, 128, 192, 256],
    "length": [32, 32, 64, 33, 17, 47],
    "rows": [1, 2, 3],
    "padded": [None, None, None, "right", "left"],
    "shared_rows": [1, 1, 1, 1, 2],
    "attn_implementation": ["sdpa", "sdpa", "eager"],
    "gradient_accumulation_steps": [1, 1, 2, 3],
    "gradient_clipping": [0.0, 1.0, 0.01],
    "grad_accum_dtype": [None, None, "fp32", "bf16"],
    "communication_data_type": [None, None, None, "fp32", "bf16"],
    "optimizer": ["AdamW"] * 10 + [*RATES],
    "given": [False, False, False, True],
    "scheduler": [None, None, "WarmupLR", "WarmupDecayLR", "OneCycle"],
    "checkpointing": [False, False, "layers", "reentrant"],
    "checkpoint": [False, False, True],
    "evaluate": [False, False, True],
    "graphs": [False, False, True],
    "preset": ["infir2", "hybrid_fast", "precise", "coat", "fp8lm_o1", "fp8lm_o2", "fp8lm_o3", "rowwise", "tensorwise",
               "compact", None],
    "moments": [None, None, None, "coat", "compact", "fp8lm_o2"],
}  # fmt: skip
# Keys of "fp8", of which a combination has a few
FP8: dict[str, list[Any]] = {
    "attention.format": ["e4m3"],
    "activations.save": ["bf16"],
    "activations.recompute": ["mlp"],
    "activations.keep_attention": [True],
    "activations.mlp_tile_tokens": [128],
    "fuse": ["off"],
    "loss.mode": ["off", "fused"],
    "loss.head": ["fp8"],
    "param_gather.format": ["bf16", "e5m2"],
    "param_gather.frozen": ["whole"],
    "grad_reduce.format": ["bf16", "e5m2"],
    "grad_reduce.scale": ["tensor"],
    "linear.outlier_channels": [0, 32, 64],
    "linear.skip": [["lm_head", "*.o_proj"]],
    "linear.overrides": [{"*.layers.0.*": "bf16"}, {"*.down_proj": {"input": {"granularity": "tensor"}}}],
    "linear.backend": ["reference"],
    "linear.expert_products": ["bf16", "fp8"],
    "linear.weight.scale": ["fp32"],
    "linear.wgrad.input": ["128x128"],
    "linear.grad_output.format": ["e5m2"],
    "monitor.every": [0, 1, 2],
    "monitor.fallback": [True],
    "optimizer.exp_avg": ["bf16", "fp16", "e5m2"],
    "optimizer.exp_avg_sq": ["bf16", "e4m3_expanded"],
    "optimizer.scale": ["pow2"],
    "optimizer.master": ["fp8_plus16"],
    "optimizer.implementation": ["ds_fp8"],
    "report": ["full"],
}
WIRE = {"grad_reduce.format": "bf16", "param_gather.format": "bf16"}


def drawn(stage: int, number: int, seed: int) -> dict[str, Any]:
    """Return a combination: a value of every choice; below stage 3 what FP8 has there, but for some."""
    rng = random.Random(f"{seed} {stage} {number}")
    chosen = {key: rng.choice(values) for key, values in CHOICES.items()}
    keys = {**ZERO, **(ZERO_3 if stage == 3 else {})} if stage else {}
    zero = {key: rng.choice(values) for key, values in keys.items()}
    fp8 = {key: rng.choice(FP8[key]) for key in rng.sample(list(FP8), rng.choice([0, 1, 2, 4, 6]))}
    if stage != 3 and rng.random() < 0.95:
        fp8 |= WIRE
    if rng.random() < 0.9:
        make_fit(chosen, zero, fp8, stage)
    if chosen["shared_rows"] > 1:
        chosen |= {"ranks": 2, "length": 32, "padded": None}
    if chosen["optimizer"] == "Adagrad" and zero.get("offload_optimizer"):
        chosen["given"] = True  # DeepSpeed's own would be compiled
    if chosen["optimizer"] == "Muon":
        chosen["given"] = False
        if stage == 3 and rng.random() < 0.8:
            zero["reduce_scatter"], fp8["grad_reduce.format"] = False, "bf16"
    return {**chosen, "stage": stage, "zero": zero, "fp8": fp8}


def make_fit(chosen: dict[str, Any], zero: dict[str, Any], fp8: dict[str, Any], stage: int) -> None:
    """Change what is refused in this company: else hardly any combination would train."""
    compact = "compact" in (chosen["preset"], chosen["moments"]) or "optimizer.master" in fp8
    if compact and stage == 3:
        zero |= {"offload_optimizer": None, "offload_param": None}
        for key in ("param_gather.format", "linear.weight.scale", "linear.outlier_channels"):
            fp8.pop(key, None)
        if chosen["preset"] not in ("infir2", "hybrid_fast", "precise", "compact"):
            chosen["preset"] = "hybrid_fast"
    elif compact:
        chosen |= {"preset": "infir2", "moments": None}
        fp8.pop("optimizer.master", None)
    if chosen["graphs"] and stage == 3:
        zero |= {"offload_optimizer": None, "offload_param": None, "overlap_comm": True}
        chosen |= {"optimizer": "AdamW", "checkpointing": chosen["checkpointing"] and "layers"}
        for key in ("grad_reduce.scale", "linear.backend"):
            fp8.pop(key, None)
    if zero.get("offload_param"):
        fp8["param_gather.format"] = "bf16"
    if zero.get("reduce_scatter") is False and stage == 3:
        fp8["grad_reduce.format"] = "bf16"
    if fp8.get("param_gather.format") == "e5m2":
        fp8["linear.weight.format"] = "e5m2"
    if fp8.get("param_gather.format") == "bf16":
        fp8.pop("param_gather.frozen", None)
    if fp8.get("grad_reduce.format") == "bf16":
        fp8.pop("grad_reduce.scale", None)
    if "activations.keep_attention" in fp8:
        chosen["checkpointing"] = chosen["checkpointing"] or "layers"
    if chosen["preset"] not in ("infir2", "hybrid_fast", "precise", "compact"):
        for key in ("activations.mlp_tile_tokens", "linear.outlier_channels", "linear.wgrad.input"):
            fp8.pop(key, None)
    if chosen["optimizer"] not in ("AdamW", "Adam"):
        chosen |= {"preset": "infir2", "moments": None}
        for key in [key for key in fp8 if key.startswith("optimizer.")]:
            del fp8[key]
    if chosen["grad_accum_dtype"] == "bf16" and stage == 3:
        chosen["gradient_accumulation_steps"] = 1
    if chosen["grad_accum_dtype"] == "fp32" and stage < 2:
        chosen["grad_accum_dtype"] = None
    if chosen["shared_rows"] > 1 or "attention.format" in fp8:
        chosen["attn_implementation"] = "sdpa"
    if chosen["model"] in ("mistral", "gemma3_text"):  # windows
        fp8.pop("attention.format", None)


def nested(dotted: dict[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for key, value in dotted.items():
        *sections, last = key.split(".")
        inner = whole
        for name in sections:
            inner = inner.setdefault(name, {})
        inner[last] = copy.deepcopy(value)
    return whole


def configuration(chosen: dict[str, Any], fp8: bool) -> dict[str, Any]:
    zero = {key: value for key, value in chosen["zero"].items() if value is not None}
    raw = {
        "train_micro_batch_size_per_gpu": chosen["rows"],
        "gradient_accumulation_steps": chosen["gradient_accumulation_steps"],
        "gradient_clipping": chosen["gradient_clipping"],
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": chosen["stage"], **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**6,
    }
    if not chosen["given"]:
        in_torch = {"torch_adam": True} if chosen["optimizer"] in ("AdamW", "Adam", "Muon") else {}
        raw["optimizer"] = {"type": chosen["optimizer"], "params": {"lr": RATES[chosen["optimizer"]], **in_torch}}
    if chosen["scheduler"]:
        rate = RATES[chosen["optimizer"]]
        raw["scheduler"] = {
            "type": chosen["scheduler"],
            "params": {
                "WarmupLR": {"warmup_max_lr": rate, "warmup_num_steps": 3},
                "WarmupDecayLR": {"total_num_steps": 10, "warmup_num_steps": 2, "warmup_max_lr": rate},
                "OneCycle": {"cycle_min_lr": rate / 10, "cycle_max_lr": rate, "cycle_first_step_size": 3},
            }[chosen["scheduler"]],
        }
    if chosen["grad_accum_dtype"]:
        raw["data_types"] = {"grad_accum_dtype": chosen["grad_accum_dtype"]}
    if chosen["communication_data_type"]:
        raw["communication_data_type"] = chosen["communication_data_type"]
    if chosen["shared_rows"] > 1:
        raw["sequence_parallel_size"] = chosen["shared_rows"]
    if fp8:
        preset, moments = chosen["preset"], chosen["moments"]
        raw["fp8"] = nested(chosen["fp8"])
        if preset:
            raw["fp8"]["preset"] = {"linear": preset, "optimizer": moments} if moments else preset
    return raw


def build(chosen: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    kind, hidden = chosen["model"], chosen["hidden"]
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 128, "max_position_embeddings": 64, "num_key_value_heads": 2, "pad_token_id": 0}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "head_dim": hidden // 4, "tie_word_embeddings": kind == "tied"}
    sizes |= {
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "mistral": {"sliding_window": 16},
        "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": hidden // 4},
    }.get(kind, {})
    of_llama = kind in ("lora", "tied", "frozen")
    config = AutoConfig.for_model("llama" if of_llama else kind, **sizes)
    attention = {"attn_implementation": chosen["attn_implementation"]}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **attention)
    if kind == "frozen":
        model.get_input_embeddings().requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
    if kind == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    if chosen["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": chosen["checkpointing"] == "reentrant"})
        if kind in ("lora", "frozen"):
            model.enable_input_require_grads()
    return model


def rows_of(step: int, micro: int, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's batch of a micro-step: rows of its own, or its part of rows of all."""
    import deepspeed
    import torch

    rank, shared, length = deepspeed.comm.get_rank(), chosen["shared_rows"], chosen["length"]
    draw = torch.Generator().manual_seed(100 * step + micro + (0 if shared > 1 else 10**4 * (1 + rank)))
    rows = torch.randint(0, 120, (chosen["rows"], length), generator=draw) // 8 * 8 + 5
    if shared > 1:
        mine = slice(rank * (length // shared), (rank + 1) * (length // shared))
        positions = torch.arange(length)[None].expand_as(rows)
        targets = torch.nn.functional.pad(rows[:, 1:], (0, 1), value=-100)
        batch = {"input_ids": rows, "labels": targets, "shift_labels": targets, "position_ids": positions}
        return {name: x[:, mine].contiguous() for name, x in batch.items()}
    batch = {"input_ids": rows, "labels": rows.clone()}
    if chosen["padded"]:
        lengths = torch.randint(length // 2, length + 1, (chosen["rows"], 1), generator=draw)
        places = torch.arange(length)[None]
        real = places < lengths if chosen["padded"] == "right" else places >= length - lengths
        batch["attention_mask"] = real.long()
        batch["input_ids"] = rows.where(real, 0)
        batch["labels"] = rows.where(real, -100)
    return batch


def start(raw: dict[str, Any], chosen: dict[str, Any]) -> Any:
    import torch

    import ds_fp8

    model = build(chosen)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    more = {}
    if chosen["given"]:
        more["optimizer"] = getattr(torch.optim, chosen["optimizer"])(trained, lr=RATES[chosen["optimizer"]])
    engine = ds_fp8.initialize(model=model, model_parameters=trained, config=raw, **more)[0]
    if chosen["graphs"] and engine.fp8.step is not None and would_capture(engine):
        from tests.engine.graphs_in_python import Graphs

        engine.fp8.health.say = lambda line: None
        engine.fp8.graphs = Graphs(engine, auto=True)
    return engine


def would_capture(engine: Any) -> bool:
    """Return whether the engine's micro-steps would be graphs on a GPU."""
    from ds_fp8.graphs.conditions import why_no_graphs

    class OnGPU:
        device = SimpleNamespace(type="cuda")

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

    return why_no_graphs(OnGPU(), engine.fp8.plans.step, engine.fp8.why_no_step) is None


def train(raw: dict[str, Any], chosen: dict[str, Any], folder: str) -> tuple[str, Any]:
    """Train on this rank. Returns ("trained", the losses), ("refused", why), or ("failed", the error)."""
    import deepspeed
    import torch
    import torch._dynamo

    import ds_fp8

    logging.getLogger("ds_fp8").setLevel(logging.ERROR)
    torch._dynamo.config.disable = True  # DeepSpeed compiles Muon's iterations, for minutes
    engine, losses = None, []

    def loss_of(step: int, micro: int) -> Any:
        return engine(**rows_of(step, micro, chosen), use_cache=False).loss

    try:
        engine = start(raw, chosen)
        for step in range(STEPS_OF_GRAPHS if chosen["graphs"] and chosen["stage"] == 3 else STEPS):
            loss = torch.zeros(())
            for micro in range(raw["gradient_accumulation_steps"]):
                part = loss_of(step, micro)
                engine.backward(part)
                engine.step()
                loss += part.detach().float() / raw["gradient_accumulation_steps"]
            losses.append(loss)
            if chosen["evaluate"]:
                engine.eval()
                with torch.no_grad():
                    losses.append(loss_of(10**3 + step, 0).float())
                engine.train()
            if chosen["checkpoint"] and step == 1:
                engine.save_checkpoint(folder)
                engine.destroy()
                engine = start(raw, chosen)
                if engine.load_checkpoint(folder)[0] is None:
                    raise RuntimeError("nothing was loaded")
        losses = torch.stack(losses)
        deepspeed.comm.all_reduce(losses)
        with contextlib.suppress(ValueError):  # no parameters that lie whole on a rank
            whole = torch.cat([p.detach().double().flatten() for p in engine.module.parameters() if p.numel() > 0])
            largest = torch.stack([whole.sum(), -whole.sum()])
            deepspeed.comm.all_reduce(largest, op=deepspeed.comm.ReduceOp.MAX)
            if chosen["stage"] < 3 and largest.sum() != 0:
                return "failed", f"ranks hold other weights: sums differ by {largest.sum():.3g}"
        return "trained", (losses / deepspeed.comm.get_world_size()).tolist()
    except ds_fp8.UserError as error:
        return "refused", f"{error.problem} [{error.key}]"
    except Exception as error:
        where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        whole = traceback.format_exc() if chosen.get("only") else ""
        return "failed", f"{type(error).__name__}: {str(error)[:300]} ({' '.join(where[-4:])}) {whole}"
    finally:
        if engine is not None:
            engine.destroy()
        engine = None  # for the collector
        gc.collect()


class Trainers:
    """The ranks of a thread; those of one world size at a time, and made one after another."""

    _making = threading.Lock()

    def __init__(self) -> None:
        self._pools, self._last = RankPools(), (0, 0)

    def attempt(self, raw: dict[str, Any], chosen: dict[str, Any]) -> tuple[str, Any]:
        """Train on all ranks and return the first one's outcome, or what became of the ranks."""
        asked = chosen["ranks"], chosen["shared_rows"]
        if asked != self._last or chosen["shared_rows"] > 1:  # a process shares rows of one model only
            self._pools.close()
            self._last = asked
        with self._making:
            self._pools(chosen["ranks"], os.getpid)
        try:
            with tempfile.TemporaryDirectory() as folder:
                outcomes = self._pools(chosen["ranks"], train, raw, chosen, folder)
        except Exception as error:  # of the ranks, which have ended, or of none: the next combination has new ones
            return "failed", f"{type(error).__name__}: {str(error)[-500:]}"
        return next((outcome for outcome in outcomes if outcome[0] == "failed"), outcomes[0])

    def judge(self, chosen: dict[str, Any]) -> tuple[str, str, float]:
        """Return what became of a combination, in a word and in words, and the largest gap of a loss."""
        kind, losses = self.attempt(configuration(chosen, fp8=True), chosen)
        if kind == "refused":
            return kind, losses, 0.0
        twin, expected = self.attempt(configuration(chosen, fp8=False), chosen)
        if twin != "trained":
            return "deepspeed fails", f"{kind} {losses}; {twin} {expected}", 0.0
        if kind == "failed":
            return "FAILS", str(losses), 0.0
        if not all(map(math.isfinite, expected)):
            return "deepspeed fails", f"{losses}; {expected}", 0.0
        gaps = [abs(mine / its - 1) for mine, its in zip(losses, expected, strict=True)]
        gap = max(gaps) if all(map(math.isfinite, gaps)) else math.inf
        both = f"{gap:.3%}, last {losses[-1]:.4f} and {expected[-1]:.4f}"
        return "equal" if gap <= GAP else "DIFFERS", both if gap <= GAP else f"{both}: {losses} {expected}", gap

    def close(self) -> None:
        self._pools.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--combinations", type=int, default=10, help="of each stage, refused ones too (default 10)")
    parser.add_argument("--stage", type=int, nargs="+", choices=STAGES, default=STAGES, help="ZeRO stages (all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="combinations at a time (default 1)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after so many")
    parser.add_argument("--only", metavar="STAGE:NUMBER", help="this one of the seed's alone, with its traceback")
    arguments = parser.parse_args()
    if arguments.only:
        stage, number = map(int, arguments.only.split(":"))
        one = drawn(stage, number, arguments.seed) | {"only": True}
        print(json.dumps(configuration(one, fp8=True), indent=1), json.dumps(one), sep="\n")
        trainers = Trainers()
        kind, words, _ = trainers.judge(one)
        trainers.close()
        print(f"{arguments.only}: {kind}: {words}")
        return int(kind in ("DIFFERS", "FAILS"))
    return int(not all_of(arguments))


def all_of(arguments: argparse.Namespace) -> bool:
    """Train with all combinations, say what became of each and of all; return whether none was wrong."""
    began, counts, bad, largest = time.monotonic(), {stage: Counter() for stage in arguments.stage}, [], 0.0
    mine, made = threading.local(), []

    def judged(stage: int, number: int) -> tuple[str, str, float]:
        if time.monotonic() - began > 60 * arguments.minutes:
            return "not begun", "", 0.0
        if not hasattr(mine, "trainers"):
            mine.trainers = Trainers()
            made.append(mine.trainers)
        try:
            return mine.trainers.judge(drawn(stage, number, arguments.seed))
        except Exception:
            return "FAILS", traceback.format_exc(), 0.0

    with ThreadPoolExecutor(arguments.jobs) as threads:
        begun = {
            threads.submit(judged, stage, number): (stage, number)
            for number in range(arguments.combinations)
            for stage in arguments.stage
        }
        for done in as_completed(begun):
            (stage, number), (kind, words, gap) = begun[done], done.result()
            counts[stage][kind] += 1
            largest = max(largest, gap)
            line = f"{stage}:{number}: {kind}: {words}"
            if kind != "not begun":
                print(line, flush=True)
            if kind in ("DIFFERS", "FAILS"):
                bad.append(line)
    for trainers in made:
        trainers.close()
    print(*(f"\n{line}" for line in bad))
    for stage, found in counts.items():
        print(f"stage {stage}: {', '.join(f'{count} {kind}' for kind, count in sorted(found.items()))}")
    total, minutes = sum(counts.values(), Counter()), (time.monotonic() - began) / 60
    print(f"seed {arguments.seed}: {dict(total)}, largest gap {largest:.3%}, {minutes:.1f} minutes")
    return not bad


if __name__ == "__main__":
    sys.exit(main())
