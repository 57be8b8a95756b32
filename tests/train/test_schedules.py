"""Learning-rate schedules at their ends, at their corners, and in between."""

from itertools import pairwise

import pytest

from ds_fp8.train.stage import Schedule, learning_rate_factor


def factors(total: int, steps: int | None = None, **settings) -> list[float]:
    return [learning_rate_factor(step, total, Schedule(**settings)) for step in range(steps or total)]


@pytest.mark.parametrize("total", [1, 2, 7, 100, 1001])
@pytest.mark.parametrize("kind", ["wsd", "cosine", "constant"])
def test_stays_in_bounds_has_no_jumps_and_ends_at_the_minimum(kind, total):
    shares = factors(total, total + 6, type=kind)
    assert all(0 < factor <= 1 for factor in shares)
    if total >= 7:
        assert [shares[-1], shares[total - 1]] == pytest.approx([1.0 if kind == "constant" else 0.1] * 2)
    if total > 1000:
        assert max(abs(later - earlier) for earlier, later in pairwise(shares)) <= 1 / 50 + 1e-9


def test_warmup_is_linear_and_reaches_the_peak_on_its_last_step():
    assert factors(100, type="constant", warmup=4)[:6] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert factors(200, type="wsd", warmup=0.1, decay=0.25) == factors(200, type="wsd", warmup=20, decay=50)


def test_wsd_is_flat_between_warmup_and_decay_then_falls_over_the_decay_only():
    shares = factors(100, type="wsd", warmup=10, decay=20, min_ratio=0.2)
    assert shares[9:80] == [1.0] * 71
    assert all(later < earlier for earlier, later in pairwise(shares[79:]))
    assert shares[89] == pytest.approx(0.6, abs=0.01)  # half-way down


@pytest.mark.parametrize(("shape", "half_way"), [("cosine", 0.5), ("linear", 0.5), ("1-sqrt", 1 - 0.5**0.5)])
def test_a_decay_has_the_shape_asked_for_and_is_the_end_of_a_longer_run(shape, half_way):
    shares = factors(101, type="wsd", warmup=0, decay=100, decay_shape=shape, min_ratio=0.0)
    assert [shares[0], shares[50], shares[-1]] == pytest.approx([1.0, half_way, 0.0])
    assert factors(101, type="cosine", warmup=0, min_ratio=0.0)[50] == pytest.approx(0.5)
    for decay in (1, 7, 60):
        whole = factors(100, type="wsd", warmup=10, decay=decay, decay_shape=shape)
        assert factors(decay, type="wsd", warmup=0, decay=decay, decay_shape=shape) == pytest.approx(whole[-decay:])
