"""Masters on GPUs: an engine's life."""

import random

import pytest
import torch

from tests.zero.test_state_machine import ACTIONS, SETUPS, live

pytestmark = pytest.mark.gpu
GPUS = range(1, min(torch.cuda.device_count(), 2) + 1)
SIZES = [(132, 300), (256, 512)]  # updated and quantized in two passes, in one


@pytest.mark.parametrize("setup", SETUPS)
def test_in_any_order_an_engine_is_what_its_fp32_tensors_say(gpu_ranks, tmp_path, setup):
    seed, world = list(SETUPS).index(setup), min(SETUPS[setup][0], max(GPUS))
    sizes = SIZES[seed % 2]  # a life takes 20 s
    gpu_ranks(world, live, setup, random.Random(seed).sample(ACTIONS, len(ACTIONS)), str(tmp_path), seed, sizes)
