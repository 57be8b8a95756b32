"""Joules by the counter of a GPU itself."""

import common
import pytest
import torch

from ds_fp8.monitor.energy import energy_counter

pytestmark = pytest.mark.gpu


def test_a_gpu_at_work_draws_what_gpus_draw():
    if energy_counter(torch.device("cuda", torch.cuda.current_device())) is None:
        pytest.skip("needs nvidia-ml-py and a GPU with a counter")
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    found = common.sustained(lambda: x @ x, seconds=1)
    assert 50 < found.watts < 1500
    assert 2 * 4096**3 / found.milliseconds / 1e9 < 5000  # TFLOP/s: a call was a product
