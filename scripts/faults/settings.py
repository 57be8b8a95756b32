"""Train with random combinations of valid settings, in FP8 and in BF16: equal losses, or a refusal in words.

    python scripts/faults/settings.py --combinations 40 --seed 1

Each combination has a ZeRO stage, offload, sizes of sub-groups and buckets, overlap, accumulation, a preset and more,
and trains a small Llama for a few steps on two CPU ranks. A combination is refused where `ds_fp8.initialize` raises a
UserError. Where DeepSpeed itself fails at the combination in BF16, that is said, and the combination does not count.
Exits with 1 where the losses are more than GAP apart, or FP8 fails in any other way.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["DS_ACCELERATOR"] = "cpu"

from tests.ranks import RankPools

RANKS, STEPS = 2, 4
GAP = 0.02
"""Relative difference of the last loss to that in BF16."""
CHOICES: dict[str, list[Any]] = {
    "stage": [1, 2, 3, 3, 3],
    "offload_optimizer": [None, None, {"device": "cpu"}, {"device": "cpu", "pin_memory": False}],
    "offload_param": [None, None, None, {"device": "cpu"}],
    "sub_group_size": [10**9, 5000, 1000],
    "overlap_comm": [True, False],
    "reduce_bucket_size": [5 * 10**8, 4000, 1],
    "contiguous_gradients": [True, False],
    "reduce_scatter": [True, True, False],
    "round_robin_gradients": [False, True],
    "stage3_param_persistence_threshold": [0, 100, 10**5],
    "stage3_prefetch_bucket_size": [0, 5 * 10**7],
    "zero_hpz_partition_size": [1, 1, 1, 2],
    "gradient_accumulation_steps": [1, 2, 3],
    "gradient_clipping": [0.0, 1.0, 0.01],
    "grad_accum_dtype": [None, "fp32", "bf16"],
    "preset": ["infir2", "coat", "fp8lm_o2", "rowwise", "fishman"],
    "grad_reduce": [None, {"format": "bf16"}, {"format": "e5m2"}],
    "param_gather": [None, {"format": "bf16"}],
    "checkpointing": [False, True],
    "optimizer": ["AdamW", "AdamW", "Adam", "SGD"],
}
ONLY_STAGE_3 = ("offload_param", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size",
                "zero_hpz_partition_size", "sub_group_size")  # fmt: skip


def drawn(rng: random.Random) -> dict[str, Any]:
    """Return a combination: a value of every choice; below stage 3 what FP8 has there, but for some."""
    chosen = {key: rng.choice(values) for key, values in CHOICES.items()}
    if chosen["stage"] != 3 and rng.random() < 0.9:
        chosen |= {"grad_reduce": {"format": "bf16"}, "param_gather": {"format": "bf16"}}
    return chosen


def configuration(chosen: dict[str, Any], fp8: bool) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a combination."""
    ours = ("gradient_accumulation_steps", "gradient_clipping", "grad_accum_dtype", "preset", "grad_reduce",
            "param_gather", "checkpointing", "optimizer")  # fmt: skip
    zero = {key: value for key, value in chosen.items() if key not in ours and value is not None}
    if chosen["stage"] != 3:
        zero = {key: value for key, value in zero.items() if key not in ONLY_STAGE_3}
    params = {"lr": 1e-3, "torch_adam": True} if "Adam" in chosen["optimizer"] else {"lr": 1e-2}
    raw = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": chosen["gradient_accumulation_steps"],
        "gradient_clipping": chosen["gradient_clipping"],
        "bf16": {"enabled": True},
        "optimizer": {"type": chosen["optimizer"], "params": params},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**6,
    }
    if chosen["grad_accum_dtype"]:
        raw["data_types"] = {"grad_accum_dtype": chosen["grad_accum_dtype"]}
    if fp8:
        asked = {key: chosen[key] for key in ("grad_reduce", "param_gather") if chosen[key]}
        raw["fp8"] = {"preset": chosen["preset"], **asked}
    return raw


def train(raw: dict[str, Any], checkpointing: bool) -> tuple[str, Any]:
    """Train on this rank. Returns ("trained", the last loss), ("refused", why), or ("failed", the error)."""
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import ds_fp8

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 136, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=64, **sizes)).bfloat16()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = None
    try:
        engine = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=raw)[0]
        draw = torch.Generator().manual_seed(1 + deepspeed.comm.get_rank())
        rows = torch.randint(0, 128, (STEPS, 6, 32), generator=draw) // 8 * 8
        for step in range(STEPS):
            loss = torch.zeros(())
            for part in range(raw["gradient_accumulation_steps"]):
                batch = rows[step, 2 * part : 2 * part + 2]
                micro = engine(input_ids=batch, labels=batch, use_cache=False).loss
                engine.backward(micro)
                engine.step()
                loss += micro.detach().float() / raw["gradient_accumulation_steps"]
        deepspeed.comm.all_reduce(loss)
        return "trained", loss.item() / deepspeed.comm.get_world_size()
    except ds_fp8.UserError as error:
        return "refused", f"{error.problem} [{error.key}]"
    except Exception as error:
        return "failed", f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        if engine is not None:
            engine.destroy()
        del engine, model
        gc.collect()


def attempt(pools: RankPools, raw: dict[str, Any], checkpointing: bool) -> tuple[str, Any]:
    """Train on all ranks and return the first one's outcome, or what became of the ranks."""
    try:
        outcomes = pools(RANKS, train, raw, checkpointing)
    except AssertionError as error:
        return "failed", str(error)[-500:]
    return next((outcome for outcome in outcomes if outcome[0] == "failed"), outcomes[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--combinations", type=int, default=40, help="that train in FP8 and BF16 (default 40)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, pools, counts, largest = random.Random(arguments.seed), RankPools(), Counter(), 0.0
    number = 0
    while counts["equal"] + counts["DIFFERS"] + counts["FAILS"] < arguments.combinations:
        number += 1
        chosen = drawn(rng)
        kind, loss = attempt(pools, configuration(chosen, fp8=True), chosen["checkpointing"])
        twin, expected = ("", None) if kind == "refused" else attempt(
            pools, configuration(chosen, fp8=False), chosen["checkpointing"]
        )  # fmt: skip
        outcome = kind
        if twin not in ("", "trained"):
            outcome = "deepspeed fails"
        elif kind == "trained":
            gap = abs(loss / expected - 1)
            largest = max(largest, gap)
            outcome = "equal" if gap <= GAP else "DIFFERS"
        elif kind == "failed":
            outcome = "FAILS"
        counts[outcome] += 1
        detail = f"{loss:.4f} and {expected:.4f}" if kind == twin == "trained" else f"{loss}; {twin} {expected}"
        print(f"{number}: {outcome}: {detail}: {json.dumps(chosen)}", flush=True)
    pools.close()
    print(f"{dict(counts)}, largest gap {largest:.3%}")
    return int(bool({"DIFFERS", "FAILS"} & set(counts)))


if __name__ == "__main__":
    sys.exit(main())
