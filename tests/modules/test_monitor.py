"""Statistics of casts: what is counted, and on which steps."""

import pytest
import torch

from ds_fp8.modules.monitor import CastMonitor
from ds_fp8.quantize import QuantizedTensor, cast, quantize
from tests.modules.linears import fp8_linear


def observed(monitor: CastMonitor, x: torch.Tensor, **words: str) -> None:
    monitor.observe("input", x, quantize(x, **words))


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128"])
def test_small_numbers_beside_a_large_one_count_as_underflow(granularity):
    x = torch.zeros(1, 130)
    x[0, :128] = torch.tensor([448.0, 2.0**-11, -(2.0**-12), 2.0**-9]).repeat_interleave(32)
    monitor = CastMonitor(every=1)
    observed(monitor, x, granularity=granularity)
    monitor.end_step()
    assert monitor.last == pytest.approx({"saturated": 0, "underflow": 64 / 130})


def test_numbers_beyond_the_scale_count_as_saturated():
    x, scale = torch.tensor([[447.0, 448.0, 500.0, -1e9, 0.0]]), torch.tensor(1.0)
    monitor = CastMonitor(every=1)
    monitor.observe("weight", x, QuantizedTensor(cast(x, scale, "e4m3", "tensor"), scale, "tensor"))
    monitor.end_step()
    assert monitor.last == pytest.approx({"saturated": 2 / 5, "underflow": 0})


def test_shares_are_over_all_elements_of_all_classes():
    monitor = CastMonitor(every=1)
    monitor.observe("input", x := torch.tensor([[1.0, 1e-30]]), quantize(x))
    monitor.observe("input", x := torch.tensor([[1.0, 1.0]]), quantize(x))
    monitor.observe("grad_output", x := torch.tensor([[1.0, 1.0, 1e-30, 1e-30]]), quantize(x))
    monitor.end_step()
    assert monitor.last["underflow"] == pytest.approx(3 / 8)


@pytest.mark.parametrize(
    ("every", "measured"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4]), (4, [0, 4]), (100, [0]), (0, [])]
)
def test_one_step_of_every_is_measured(every, measured):
    """Step n flushes n + 1 of 10 elements, so that `last` tells which step it is of."""
    monitor, seen = CastMonitor(every), []
    for step in range(6):
        assert monitor.active == (step in measured)
        x = torch.ones(1, 10)
        x[0, 1 : step + 2] = 1e-30
        observed(monitor, x)
        monitor.end_step()
        if monitor.last is not None and (share := round(monitor.last["underflow"] * 10) - 1) not in seen:
            seen.append(share)
    assert seen == measured


def test_a_step_is_counted_on_its_own():
    monitor = CastMonitor(every=1)
    observed(monitor, torch.tensor([[1.0, 1e-30]]))
    monitor.end_step()
    observed(monitor, torch.tensor([[1.0, 1.0]]))
    monitor.end_step()
    assert monitor.last["underflow"] == 0


def test_nothing_to_report_before_the_first_step_and_without_casts():
    monitor = CastMonitor(every=1)
    assert monitor.last is None
    monitor.end_step()
    assert monitor.last is None


def test_empty_tensors_count_nothing():
    monitor = CastMonitor(every=1)
    observed(monitor, torch.empty(0, 40))
    monitor.end_step()
    assert monitor.last == {"saturated": 0, "underflow": 0}


def test_a_linear_reports_its_casts():
    linear = fp8_linear(4, 4, monitor={"every": 1})
    x = torch.tensor([[1.0, 1e-30, 1e-30, 1e-30]], dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.fill_(1)
    y = linear(x)
    y.sum().backward()
    linear.recipe.monitor.end_step()
    assert linear.recipe.monitor.last["saturated"] == 0
    # 3 of the 4 numbers of the input; none of the 16 of the weight.
    assert linear.recipe.monitor.last["underflow"] == pytest.approx(3 / (4 + 16))
