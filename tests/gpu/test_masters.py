"""Masters as codes and corrections on GPUs: the kernel beside its reference, and what holds on CPU ranks."""

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
