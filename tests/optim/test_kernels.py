"""The kernel against plain torch. Off a GPU it runs in Triton's interpreter, whose casts round coarsely."""

from __future__ import annotations

import itertools

import pytest
import torch

from ds_fp8.casts.stochastic import uniform
from ds_fp8.optim import adamw_step_triton as kernels
from ds_fp8.optim.adamw_step import adamw_step_reference
from ds_fp8.optim.codecs import CODECS
from ds_fp8.optim.moment import Layout, Moment
from ds_fp8.optim.step_numbers import AdamStep
from tests.optim.numbers import gradients, moment, numbers_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [  # of the interpreter: log2(0), 0 / 0, and a NaN as an integer
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in (cast|divide):RuntimeWarning"),
]
STEP = AdamStep(3, 1e-3, 0.9, 0.95, 1e-8, 0.1)
FP32 = {"rtol": 1e-4, "atol": 1e-7}
"""Of the master weights: fused multiply-adds and approximate roots."""
SPACINGS = 1.05
"""Codes may differ by one step of the format, where a number lies close to the middle of two."""
DIFFERENT = 0.01 if DEVICE == "cuda" else 0.15
"""Share of the codes that may differ: the interpreter's casts lose the carry from the mantissa into the exponent, which
one number in sixteen has in E4M3 and one in eight in E5M2."""

KEPT = [
    ("fp32", "fp32", "1x128", "fp32"),
    ("bf16", "bf16", "1x128", "fp32"),
    ("fp32", "e4m3", "1x128", "fp32"),
    ("e4m3", "e5m2", "1x128", "pow2"),
    ("fp16", "fp16", "1x128", "fp32"),
    ("e4m3_expanded", "e4m3_expanded", "1x128", "fp32"),
    ("e4m3_expanded", "bf16", "1x128", "fp32"),
    ("e4m3", "fp16", "tensor", "pow2"),
    ("e4m3", "e5m2", "tensor", "fp32"),
]


def one_step(step, kept, numel, *, device=DEVICE, seed=None, segments=(), dtype=torch.float32, **more):
    """(master, exp_avg, exp_avg_sq, 16-bit copy) after a step from moments that are not zero."""
    exp_avg, exp_avg_sq, granularity, scale = kept
    master, grad = gradients(numel, 1) * 100, gradients(numel, 2)
    grad[: numel // 3] = 0
    first, second = gradients(numel, 3) * 0.1, gradients(numel, 4) ** 2
    first[: numel // 4], second[: numel // 4] = 0, 0
    layout = {"granularity": granularity, "scale": scale, "segments": segments, "device": device}
    m, v = moment(first, exp_avg, **layout), moment(second, exp_avg_sq, never_zero=True, **layout)
    master = master.to(device)
    low = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    step(master, grad.to(device, dtype), m, v, STEP, low=low, seed=seed, **more)
    return master.cpu(), m, v, low.cpu()


def assert_same_moment(left, right, codec):
    """Equal up to the choice between neighbouring codes."""
    kind = CODECS[codec]
    left, right = numbers_of(left), numbers_of(right)
    if codec == "fp32":
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5 * right.abs().max().item())
        return
    near = is_a_neighbour(left, right, kind)
    assert near.all() if DEVICE == "cuda" else (~near).float().mean() <= DIFFERENT + 1 / len(near)
    if codec != "bf16":  # the interpreter truncates to BF16
        different = (left - right).abs() > 1e-4 * right.abs()
        assert different.float().mean() <= DIFFERENT + 1 / len(near)


def is_a_neighbour(left, right, kind):
    """Where two numbers are at most a step of the format apart; an expanded code's step is wider at the lower end."""
    step = 2.0**-kind.mantissa_bits * (4 if kind.expanded else 1)
    tiny = right.abs().max() * kind.smallest / (kind.max or 1)
    return (left - right).abs() <= (right.abs() * step + tiny) * SPACINGS


@pytest.mark.parametrize("numel", [1, 127, 1024, 2 * 1024 + 77])
@pytest.mark.parametrize("kept", KEPT)
def test_the_kernel_does_what_torch_does(kept, numel):
    segments = (numel // 3, 0, numel - numel // 3) if numel > 1 else ()
    master, m, v, low = one_step(kernels.adamw_step, kept, numel, segments=segments)
    expected, m_expected, v_expected, _ = one_step(adamw_step_reference, kept, numel, device="cpu", segments=segments)
    torch.testing.assert_close(master, expected, **FP32)
    assert_same_moment(m, m_expected, kept[0])
    assert_same_moment(v, v_expected, kept[1])
    torch.testing.assert_close(low.float(), master, rtol=2.0**-7, atol=0)


def test_gradients_may_be_bf16():
    master, *_ = one_step(kernels.adamw_step, KEPT[5], 1000, dtype=torch.bfloat16)
    expected, *_ = one_step(adamw_step_reference, KEPT[5], 1000, device="cpu", dtype=torch.bfloat16)
    torch.testing.assert_close(master, expected, **FP32)


@pytest.mark.parametrize("kept", KEPT)
def test_nothing_changes_where_the_step_is_to_be_skipped(kept):
    numel = 1024 + 77
    skip, take = (torch.tensor(value, dtype=torch.int32, device=DEVICE) for value in (1, 0))

    def after(flag):
        return one_step(kernels.adamw_step, kept, numel, skip=flag)

    def untouched(*arguments, **keywords):
        return None

    skipped, before = after(skip), one_step(untouched, kept, numel)
    for left, right in zip(skipped, before, strict=True):
        assert torch.equal(numbers_of(left), numbers_of(right))
    assert not torch.equal(after(take)[0], before[0])


@pytest.mark.parametrize("kept", [KEPT[1], KEPT[3], KEPT[5], KEPT[8]])
def test_stochastic_rounding_is_decided_by_the_seed(kept):
    numel = 1024 + 77
    first, again, other = (one_step(kernels.adamw_step, kept, numel, seed=seed) for seed in (5, 5, 6))
    expected = one_step(adamw_step_reference, kept, numel, device="cpu")
    for index in (1, 2):
        assert torch.equal(numbers_of(first[index]), numbers_of(again[index]))
        assert not torch.equal(numbers_of(first[index]), numbers_of(other[index]))
        assert is_a_neighbour(numbers_of(first[index]), numbers_of(expected[index]), CODECS[kept[index - 1]]).all()
    assert torch.equal(first[0], other[0])  # the update uses the moments before they are rounded


@pytest.mark.parametrize("part", ["exp_avg", "exp_avg_sq"])
def test_one_moment_alone_may_be_rounded_stochastically(part):
    kept, numel = KEPT[5], 1024 + 77
    nearest = one_step(kernels.adamw_step, kept, numel)
    mixed = one_step(kernels.adamw_step, kept, numel, seed=5, stochastic=[part])
    for index, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
        assert torch.equal(numbers_of(mixed[index]), numbers_of(nearest[index])) == (name != part)


@pytest.mark.parametrize("kept", [KEPT[1], KEPT[3], KEPT[5]])
def test_stochastic_rounding_is_right_on_average(kept):
    numel, draws = 512, 8
    exact = one_step(adamw_step_reference, KEPT[0], numel, device="cpu")
    for index in (1, 2):
        expected = numbers_of(exact[index])
        at = expected.abs() > expected.abs().view(-1, 128).amax(1).repeat_interleave(128) * 1e-3
        mean = (
            sum(numbers_of(one_step(kernels.adamw_step, kept, numel, seed=seed)[index]) for seed in range(draws))
            / draws
        )
        # From moments that the codec had rounded: what it had is another half spacing of noise, the same in all draws.
        relative = ((mean - expected) / expected)[at]
        assert relative.mean().abs() < 0.02


@pytest.mark.parametrize("kept", [KEPT[1], KEPT[3], KEPT[5], KEPT[7]])
def test_nan_stays_nan_when_rounded_stochastically(kept):
    """Every bit of a NaN may be set, as a GPU's own have it: noise must not carry it over into a number."""
    numel = 1024 + 77
    grad = gradients(numel, 2)
    grad.view(torch.int32)[[5, 1030]] = 0x7FFFFFFF
    m, v = (
        moment(gradients(numel, 3) ** 2, codec, kept[2], kept[3], never_zero=True, device=DEVICE) for codec in kept[:2]
    )
    kernels.adamw_step(gradients(numel, 1).to(DEVICE), grad.to(DEVICE), m, v, STEP, seed=5)
    for state in (m, v):
        assert numbers_of(state)[[5, 1030]].isnan().all()


def masters(numel):
    """Numbers as weights are, with zeros, a tensor of nothing else, and some that FP16 holds as subnormals only."""
    numbers = gradients(numel, 1) * 100
    numbers[: numel // 8] = 0
    numbers[-50:] *= 1e-8
    return numbers


def rounded(step, device, numbers, layout, *, seed=None, exact=()):
    """`numbers` after a step of length zero, which does nothing to them but round them to FP16."""
    master = numbers.to(device, copy=True)
    grad, m, v = torch.zeros(3, len(numbers), device=device).unbind()
    rest = AdamStep(1, 0.0, 0.9, 0.95, 1e-8, 0.0)
    step(master, grad, m, v, rest, fp16_masters=layout, exact=exact, seed=seed, stochastic=("master",))
    return master.cpu()


BOTH = (("cpu", adamw_step_reference), (DEVICE, kernels.adamw_step))


@pytest.mark.parametrize("segments", [(), (128, 1, 4000, 972), (600, 0, 4501)])
def test_masters_in_fp16_are_those_of_plain_torch(segments):
    numbers, layout = masters(5101), Layout(5101, "tensor", "pow2", segments)
    expected, found = (rounded(step, device, numbers, layout) for device, step in BOTH)
    assert torch.equal(found, expected)
    assert not torch.equal(found, numbers)
    apart = Moment(CODECS["fp16"], layout, torch.device("cpu"), never_zero=False)
    apart.encode(numbers)
    assert torch.equal(found, apart.decode())


@pytest.mark.parametrize("numel", [100, 2048, 5101])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kept", [KEPT[0], KEPT[1], KEPT[5], KEPT[7], KEPT[8]])
def test_a_step_of_masters_in_fp16(kept, apart, numel):
    """Beside moments with one scale a tensor, of every 128 elements, or without."""
    grouped = kept[2] != "tensor" and CODECS[kept[0]].max
    segments = () if grouped else (numel // 3, 0, numel - numel // 3)
    layout = Layout(numel, "tensor", "pow2", segments)

    def step(function):
        def with_masters(master, *arguments, **keywords):
            if not apart:
                return function(master, *arguments, fp16_masters=layout, **keywords)
            held = moment(master.cpu(), "fp16", "tensor", "pow2", segments=segments, device=master.device)
            function(held, *arguments, **keywords)
            master.copy_(held.decode())

        return with_masters

    def after(device, function):
        return one_step(step(function), kept, numel, device=device, segments=segments)

    (expected, *moments_expected, low_expected), (found, *moments, low) = (after(*one) for one in BOTH)
    assert is_a_neighbour(found, expected, CODECS["fp16"]).all()
    assert (found != expected).float().mean() < 0.02
    assert torch.equal(found, rounded(BOTH[0][1], "cpu", found, layout))  # they are FP16 numbers
    torch.testing.assert_close(low.float(), low_expected.float(), rtol=2.0**-7, atol=0)
    for left, right, codec in zip(moments, moments_expected, kept[:2], strict=True):
        assert_same_moment(left, right, codec)


@pytest.mark.parametrize("apart", [False, True])
def test_masters_and_moments_by_tensor_are_rounded_with_random_numbers_of_their_own(apart):
    """As fp8lm_o3 does, under ZeRO (FP32 shards, in which vectors stay as they are) and of BF16 parameters."""
    numel, segments, exact = 5101, (300, 0, 2500, 2301), () if apart else (0, 3)
    in_place = {} if apart else {"fp16_masters": Layout(numel, "tensor", "pow2", segments), "exact": exact}
    numbers, grad = masters(numel), gradients(numel, 2)
    first, second = gradients(numel, 3) * 0.1, gradients(numel, 4) ** 2

    def states(device):
        layout = {"granularity": "tensor", "scale": "pow2", "segments": segments, "device": device}
        master = moment(numbers, "fp16", **layout) if apart else numbers.to(device, copy=True)
        return master, moment(first, "e4m3", **layout), moment(second, "fp16", never_zero=True, **layout)

    def after(seed):
        master, m, v = states(DEVICE)
        parts = ("exp_avg", "exp_avg_sq", "master")
        kernels.adamw_step(master, grad.to(DEVICE), m, v, STEP, **in_place, seed=seed, stochastic=parts)
        return numbers_of(master), numbers_of(m)

    found, m_found = after(5)
    assert torch.equal(found, after(5)[0])
    assert not torch.equal(found, after(6)[0])
    unrounded, m, v = (numbers_of(state) for state in states("cpu"))
    adamw_step_reference(unrounded, grad, m, v, STEP)  # in FP32, from what the codes stand for
    for index, (start, stop) in enumerate(itertools.pairwise((0, 300, 300, 2800, numel))):
        part, expected = found[start:stop], unrounded[start:stop]
        if index in exact:
            torch.testing.assert_close(part, expected, **FP32)
            assert not torch.equal(
                part, rounded(adamw_step_reference, "cpu", part, Layout(len(part), "tensor", "pow2"))
            )
        elif len(part):
            assert is_a_neighbour(part, expected, CODECS["fp16"]).all()
            nearest = rounded(adamw_step_reference, "cpu", expected, Layout(len(part), "tensor", "pow2"))
            assert 0.1 < (part != nearest).float().mean() < 0.5
    both = slice(300, 2800)
    off = (found - unrounded)[both] / unrounded[both].abs(), (m_found - m)[both] / m[both].abs()
    at = torch.isfinite(off[0]) & torch.isfinite(off[1]) & (off[0].abs() < 1e-3) & (off[1].abs() < 0.2)
    assert at.float().mean() > 0.5
    assert torch.corrcoef(torch.stack([x[at].sign() for x in off]))[0, 1].abs() < 0.1


def test_tensors_flattened_together_draw_random_numbers_of_their_own():
    numbers = masters(1000).repeat(2)
    halves = rounded(kernels.adamw_step, DEVICE, numbers, Layout(2000, "tensor", "pow2", (1000, 1000)), seed=5)
    assert not torch.equal(halves[:1000], halves[1000:])


def test_what_lies_beyond_the_end_is_no_master():
    """Without eps an element of zeros there would be 0 / 0."""
    found = []
    for device, step in BOTH:
        master, grad, m, v = (torch.ones(100, device=device) for _ in range(4))
        rest = AdamStep(1, 1e-3, 0.9, 0.95, 0.0, 0.1)
        step(master, grad, m, v, rest, fp16_masters=Layout(100, "tensor", "pow2"))
        found.append(master.cpu())
    assert found[1].isfinite().all()
    assert is_a_neighbour(found[1], found[0], CODECS["fp16"]).all()


def test_masters_rounded_stochastically_are_neighbours_and_right_on_average():
    numel, draws = 4096, 64
    layout = Layout(numel, "tensor", "pow2")
    exact, mean = masters(numel), torch.zeros(numel)
    nearest = rounded(adamw_step_reference, "cpu", exact, layout)
    spacing = (exact.abs() * 2.0**-10).clamp_min(2.0**-24 * exact.abs().max() / 32768)
    for seed in range(draws):
        numbers = rounded(kernels.adamw_step, DEVICE, exact, layout, seed=seed)
        mean += numbers / draws
        assert ((numbers - exact).abs() <= spacing).all()
    off = (mean - exact) / spacing
    assert off.abs().max() < 0.5
    assert off.mean().abs() < 0.01 < (nearest - exact).abs().div(spacing).mean()


@pytest.mark.parametrize("numel", [768, 5101])
def test_masters_rounded_stochastically_are_those_of_the_draws(numel):
    layout, seed = Layout(numel, "tensor", "pow2"), 0x5EED5EED
    numbers = masters(numel)
    nearest = moment(numbers, "fp16", "tensor", "pow2")
    magnitude = numbers.abs() / nearest.scale
    spacing = (torch.exp2(torch.frexp(magnitude)[1] - 1.0) * 2.0**-10).clamp_min(2.0**-24)
    below = (magnitude / spacing).floor()
    up = magnitude / spacing - below + uniform(torch.arange(numel), seed ^ kernels.OF_MASTERS.value) >= 1
    expected = torch.copysign((below + up) * spacing * nearest.scale, numbers)
    assert torch.equal(rounded(kernels.adamw_step, DEVICE, numbers, layout, seed=seed), expected)


@pytest.mark.parametrize("seed", [None, 5])
def test_some_masters_stay_as_they_are(seed):
    layout, numbers = Layout(1000, "tensor", "pow2", (300, 500, 200)), masters(1000)
    for device, step in BOTH:
        changed = rounded(step, device, numbers, layout, seed=seed, exact=(0, 2)) != numbers
        assert changed[300:800].any()
        assert not changed[:300].any()
        assert not changed[800:].any()


@pytest.mark.parametrize("apart", [False, True])
def test_masters_do_not_change_where_the_step_is_to_be_skipped(apart):
    numbers, skip = masters(1000), torch.ones(1, dtype=torch.int32, device=DEVICE)
    master = moment(numbers, "fp16", "tensor", "pow2", device=DEVICE) if apart else numbers.to(DEVICE, copy=True)
    before = numbers_of(master)
    m, v = (moment(gradients(1000, 3) ** 2, codec, "tensor", "pow2", device=DEVICE) for codec in ("e4m3", "fp16"))
    layout = None if apart else Layout(1000, "tensor", "pow2")
    kernels.adamw_step(master, gradients(1000, 2).to(DEVICE), m, v, STEP, fp16_masters=layout, skip=skip)
    assert torch.equal(numbers_of(master), before)


def test_masters_that_are_not_finite_become_nan():
    for bad in (float("nan"), float("inf")):
        numbers = masters(300)
        numbers[7] = bad
        assert rounded(kernels.adamw_step, DEVICE, numbers, Layout(300, "tensor", "pow2"), seed=3).isnan().all()
