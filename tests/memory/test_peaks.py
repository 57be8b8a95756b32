"""Estimates compared with peaks that were measured on GPUs."""

import pytest

from ds_fp8.memory import estimate_workload
from tests.memory.peaks import STEPS, levels

ERROR = 0.038


@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_what_was_measured(name):
    step = STEPS[name]
    assert estimate_workload(step.workload()).peak_bytes / 2**30 == pytest.approx(step.peak, rel=step.error)


def test_levels_of_fp8_take_what_was_measured():
    for name, (peak, w) in levels().items():
        assert estimate_workload(w).peak_bytes / 2**30 == pytest.approx(peak, rel=ERROR), name
