"""What a step of AdamW allocates on a CPU, against what estimates count for it."""

import pytest
import torch

from ds_fp8.config.presets import preset_values
from ds_fp8.memory.optimizer_step import EMULATED
from ds_fp8.optim import AdamW
from tests.memory.workloads import most_allocated

NUMEL = 1 << 20
CAUTION = 1.3
"""How much more than it takes may be counted."""
KEPT = {
    **{name: preset_values(name)["optimizer"] for name in ("coat", "fishman", "fp8lm_o2", "fp8lm_o3")},
    "e4m3": {"exp_avg": "e4m3", "exp_avg_sq": "e4m3"},
    "bf16": {"exp_avg": "bf16", "exp_avg_sq": "bf16"},
}


@pytest.mark.parametrize("at_random", [True, False], ids=["auto", "nearest"])
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_an_emulated_step_takes_what_is_counted(kept, at_random):
    p = torch.nn.Parameter(torch.randn(NUMEL))
    p.grad = 1e-3 * torch.randn(NUMEL)
    optimizer = AdamW([p], **kept, stochastic_rounding="auto" if at_random else False, check_finite=False)
    optimizer.set_segments(p, (NUMEL,))
    optimizer.step()
    counted = NUMEL * EMULATED[optimizer.precision.granularity][bool(optimizer.precision.stochastic_parts)]
    taken = most_allocated(optimizer.step)
    assert taken <= 1.01 * counted
    assert counted <= CAUTION * taken
