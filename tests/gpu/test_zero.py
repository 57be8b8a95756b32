"""The ZeRO-3 seams over NCCL: streams must order the master update, the cast, the gather and the release."""

import pytest
import torch

from tests.zero import models
from tests.zero.test_parameter_gather import gathered_against_whole
from tests.zero.test_training import QUIET, assert_same, losses_and_weights, step_with_overflow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("preset", ["infir2", "tensorwise"])
def test_gathered_weight_is_the_cast_of_the_whole_master(gpu_ranks, preset):
    for result in gpu_ranks(2, gathered_against_whole, preset, 2):
        assert all(result.values()), result


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("leaf", [False, True])
def test_prefetch_changes_nothing_bit_for_bit(gpu_ranks, overlap, leaf):
    off = models.config(QUIET, overlap_comm=overlap)
    on = models.config(QUIET, overlap_comm=overlap, stage3_prefetch_bucket_size=10**8, stage3_max_reuse_distance=10**8)
    for left, right in zip(
        gpu_ranks(2, losses_and_weights, off, False, leaf, False, 40),
        gpu_ranks(2, losses_and_weights, on, False, leaf, False, 40),
        strict=True,
    ):
        assert_same(left, right)


def test_a_second_run_gives_the_same_bits(gpu_ranks):
    first, second = (gpu_ranks(2, losses_and_weights, models.config(QUIET), True, False, False, 40) for _ in range(2))
    for left, right in zip(first, second, strict=True):
        assert_same(left, right)


def test_training_follows_bf16(gpu_ranks):
    fp8 = gpu_ranks(2, losses_and_weights, models.config(QUIET), False, False, False, 20)[0][0]
    bf16 = gpu_ranks(2, losses_and_weights, models.config({"enabled": False}), False, False, False, 20)[0][0]
    assert fp8 != bf16
    assert fp8 == pytest.approx(bf16, rel=0.02)


def test_overflow_on_one_rank_skips_the_step_on_all(gpu_ranks):
    for unchanged, skipped, _ in gpu_ranks(2, step_with_overflow, float("nan")):
        assert unchanged
        assert skipped == 1
