"""Masters as codes and corrections on GPUs: the kernel beside its reference, and what holds on CPU ranks."""

import functools

import pytest
import torch

from tests.zero import test_masters
from tests.zero.test_master_step import *  # noqa: F403

pytestmark = pytest.mark.gpu
GPUS = range(1, min(torch.cuda.device_count(), 2) + 1)


@pytest.mark.parametrize("sizes", [test_masters.SIZES, (256, 512)], ids=["in two passes", "in one"])
@pytest.mark.parametrize("world", GPUS)
def test_a_run_is_that_of_fp32_masters(gpu_ranks, world, sizes):
    fp32, coded = (gpu_ranks(world, test_masters.train, master, "fp32", sizes) for master in ("fp32", "fp8_plus16"))
    test_masters.assert_like_fp32(fp32, coded)


@pytest.mark.parametrize("world", GPUS)
@pytest.mark.parametrize("sizes", [test_masters.SIZES, (256, 512)], ids=["in two passes", "in one"])
def test_a_resumed_run_is_the_run_that_went_on(gpu_ranks, tmp_path, world, sizes):
    for saved, loaded, went_on, resumed in gpu_ranks(world, test_masters.resume, str(tmp_path), "fp32", True, 2, sizes):
        test_masters.assert_same(saved, loaded)
        assert went_on[0] == resumed[0]
        test_masters.assert_same(went_on[1], resumed[1])


@pytest.mark.parametrize("written", [False, True])
def test_a_skipped_step_changes_nothing(gpu_ranks, written):
    for before, after, numbers, later in gpu_ranks(max(GPUS), test_masters.skipped, True, written, (256, 512)):
        test_masters.assert_same(before, after)
        test_masters.assert_same(numbers, later)


def test_users_write_masters_and_numbers(gpu_ranks):
    for sizes in (test_masters.SIZES, (256, 512)):
        test_masters.assert_alike(functools.partial(gpu_ranks, max(GPUS), test_masters.writes), sizes)
