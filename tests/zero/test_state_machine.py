"""Steps, overflows, writes, reads, loads and offloads in any order: after each an engine is what FP32 tensors say."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.optim.numbers import COAT, FISHMAN, FP8LM_O2
from tests.zero.life import Life
from tests.zero.test_parameter_gather import OVERRIDES

CODED = {"master": "fp8_plus16"}
FP32_SCALES = {"linear": {"weight": {"scale": "fp32"}}}


def freeze_most(model):
    """A layer, and half of the other."""
    model.layers[0].requires_grad_(False)
    model.layers[1].up.requires_grad_(False)


def tie_and_recompute(model):
    """Recompute every layer as older code of Hugging Face does, and tie the head."""
    model.lm_head.weight = model.embedding.weight
    for layer in model.layers:
        compute = layer.forward
        layer.forward = lambda x, compute=compute: torch.utils.checkpoint.checkpoint(compute, x, use_reentrant=True)


BUCKETS = {"sub_group_size": 50000, "reduce_bucket_size": 50000}
TWO = {"gradient_accumulation_steps": 2}
SETUPS: dict[str, tuple[int, dict[str, Any]]] = {
    "infir2, born sharded": (2, {"born_sharded": True}),
    "one rank, two micro-batches": (1, {"config": TWO}),
    "rowwise, gradients with one scale, round robin": (
        3,
        {"fp8": {"preset": "rowwise", "grad_reduce": {"scale": "tensor"}}, "zero": {"round_robin_gradients": True}},
    ),
    "tensorwise, BF16 gradients, many buckets, two micro-batches": (
        2,
        {"fp8": {"preset": "tensorwise", "grad_reduce": {"format": "bf16"}}, "zero": BUCKETS, "config": TWO},
    ),
    "emulated, clipped": (3, {"fp8": {"linear": {"overrides": OVERRIDES}}, "config": {"gradient_clipping": 0.05}}),
    "compressed moments, tied, recomputed": (
        3,
        {
            "fp8": {"optimizer": COAT},
            "zero": {"overlap_comm": False},
            "prepare": tie_and_recompute,
            "compact": True,
            "reentrant": True,
        },
    ),
    "precise, clipped": (2, {"fp8": {"preset": "precise"}, "config": {"gradient_clipping": 1.0}}),
    "frozen, moments with one scale": (2, {"prepare": freeze_most, "fp8": {"optimizer": FISHMAN}}),
    "frozen and whole, moments of 8 and 16 bits": (
        3,
        {"prepare": freeze_most, "fp8": {"param_gather": {"frozen": "whole"}, "optimizer": FP8LM_O2}},
    ),
    "coded masters": (2, {"fp8": {"optimizer": CODED, **FP32_SCALES}, "config": TWO}),
    "coded masters, compressed moments": (3, {"fp8": {"optimizer": CODED | COAT}, "zero": {"sub_group_size": 50000}}),
    "coded masters, one rank": (1, {"fp8": {"optimizer": CODED | COAT, "preset": "precise"}}),
}


ACTIONS = [
    *("step", "write_bf16", "overflow", "look", "offload_weights", "write_masters", "step_with_evaluation_between"),
    *(
        "write_local_masters",
        "step_with_written_gradients",
        "offload_gradients",
        "step_without_a_layer",
        "write_moment",
    ),
    *("overflow", "step_with_zero_grad_between", "write_bf16", "write_masters_within_a_gather", "offload_everything"),
    *("step_of_two_losses", "freeze", "write_bf16", "resume_in_place", "step_with_evaluation_behind_forward"),
    *("write_masters", "step_of_coalesced_reductions", "write_bf16", "resume_in_a_new_engine", "write_local_masters"),
]


def live(setup: str, actions: list[str], folder: str, seed: int, sizes: tuple[int, int] = (132, 300)) -> None:
    """sizes: DeepSpeed sets whole masters and gradients only where they divide by the ranks; these do by 1, 2 and 3."""
    life = Life(SETUPS[setup][1], folder, seed, sizes)
    life.step()
    life.check()
    for number, action in enumerate(actions):
        try:
            getattr(life, action)()
            life.check()
        except BaseException as error:
            error.add_note(f"at {action} behind {actions[:number]}")
            raise
    life.end()


@pytest.mark.parametrize("setup", SETUPS)
def test_in_any_order_an_engine_is_what_its_fp32_tensors_say(ranks, tmp_path, setup):
    seed = list(SETUPS).index(setup)
    ranks(SETUPS[setup][0], live, setup, random.Random(seed).sample(ACTIONS, 16), str(tmp_path), seed)


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
def test_in_many_orders(ranks, tmp_path_factory, setup):
    @settings(max_examples=20, phases=[Phase.explicit, Phase.generate])
    @given(st.permutations(ACTIONS), st.integers(0, 2**16))
    def run(actions, seed):
        ranks(SETUPS[setup][0], live, setup, actions, str(tmp_path_factory.mktemp("life")), seed)

    run()
