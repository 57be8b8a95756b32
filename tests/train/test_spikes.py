"""Spikes stand out; noise, a falling loss and what is not finite do not."""

import math
import random

import pytest

from ds_fp8.train.metrics import LEAST_HISTORY, SpikeDetector


def noisy(count: int, level: float = 3.0, spread: float = 0.05, slope: float = 0.0) -> list[float]:
    rng = random.Random(0)
    return [level - slope * index + rng.gauss(0, spread) for index in range(count)]


def test_a_loss_far_above_the_last_ones_is_a_spike():
    detector = SpikeDetector(100, 10.0, noisy(60))
    assert detector.observe(3.1) is None
    score = detector.observe(5.0)
    assert score == pytest.approx(2.0 / 0.05, rel=0.5)


@pytest.mark.parametrize("slope", [0.0, 0.01, -0.0005])
def test_noise_and_trends_are_no_spikes(slope):
    detector = SpikeDetector(100, 10.0)
    assert [detector.observe(loss) for loss in noisy(500, level=8.0, slope=slope)] == [None] * 500


def test_a_loss_far_below_is_no_spike():
    assert SpikeDetector(100, 10.0, noisy(60)).observe(0.1) is None


def test_one_spike_does_not_hide_the_next():
    detector = SpikeDetector(100, 10.0, noisy(60))
    scores = [detector.observe(9.0) for _ in range(5)]
    assert all(score > 50 for score in scores)


def test_too_few_losses_say_nothing():
    detector = SpikeDetector(100, 10.0, noisy(LEAST_HISTORY - 1))
    assert detector.observe(50.0) is None
    assert detector.observe(50.0) is not None


def test_equal_losses_do_not_make_a_ripple_a_spike():
    detector = SpikeDetector(100, 10.0, [2.0] * 50)
    assert detector.observe(2.01) is None
    assert detector.observe(2.1) is not None


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_not_finite_is_left_to_the_skipped_step(loss):
    detector = SpikeDetector(100, 10.0, noisy(60))
    assert detector.observe(loss) is None
    assert loss not in detector.losses()


def test_it_goes_on_from_the_losses_it_remembers():
    first = SpikeDetector(30, 10.0)
    losses = noisy(80)
    for loss in losses[:50]:
        first.observe(loss)
    second = SpikeDetector(30, 10.0, first.losses())
    assert [first.observe(loss) for loss in [*losses[50:], 4.5]] == [
        second.observe(loss) for loss in [*losses[50:], 4.5]
    ]
