"""The kernel against plain torch. Off a GPU it runs in Triton's interpreter, whose casts round coarsely."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_fp8.optim import adamw_step_triton as kernels
from ds_fp8.optim.adamw import AdamStep, adamw_step_reference
from ds_fp8.optim.masters import SplitMasters
from ds_fp8.optim.moments import CODECS
from tests.optim.numbers import dequantized, gradients, moment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [  # of the interpreter: log2(0), 0 / 0, and a NaN as an integer
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in (cast|divide):RuntimeWarning"),
]
STEP = AdamStep(3, 1e-3, 0.9, 0.95, 1e-8, 0.1)
FP32 = {"rtol": 1e-4, "atol": 1e-7}  # Of the master weights: fused multiply-adds and approximate roots
SPACINGS = 1.05  # Codes may differ by one step of the format, where a number lies close to the middle of two
# Share of the codes that may differ: the interpreter's casts lose the carry from the mantissa into the exponent, which
# one number in sixteen has in E4M3 and one in eight in E5M2
DIFFERENT = 0.01 if DEVICE == "cuda" else 0.15

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
    step(master, grad.to(device, dtype), m, v, replace(STEP, seed=seed, **more), low)
    return master.cpu(), m, v, low.cpu()


def assert_same_moment(left, right, codec):
    """Equal up to the choice between neighbouring codes."""
    kind = CODECS[codec]
    left, right = dequantized(left), dequantized(right)
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
        assert torch.equal(dequantized(left), dequantized(right))
    assert not torch.equal(after(take)[0], before[0])


@pytest.mark.parametrize("kept", [KEPT[1], KEPT[3], KEPT[5], KEPT[8]])
def test_stochastic_rounding_is_decided_by_the_seed(kept):
    numel = 1024 + 77
    first, again, other = (one_step(kernels.adamw_step, kept, numel, seed=seed) for seed in (5, 5, 6))
    expected = one_step(adamw_step_reference, kept, numel, device="cpu")
    for index in (1, 2):
        assert torch.equal(dequantized(first[index]), dequantized(again[index]))
        assert not torch.equal(dequantized(first[index]), dequantized(other[index]))
        assert is_a_neighbour(dequantized(first[index]), dequantized(expected[index]), CODECS[kept[index - 1]]).all()
    assert torch.equal(first[0], other[0])  # the update uses the moments before they are rounded


@pytest.mark.parametrize("part", ["exp_avg", "exp_avg_sq"])
def test_one_moment_alone_may_be_rounded_stochastically(part):
    kept, numel = KEPT[5], 1024 + 77
    nearest = one_step(kernels.adamw_step, kept, numel)
    mixed = one_step(kernels.adamw_step, kept, numel, seed=5, stochastic=[part])
    for index, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
        assert torch.equal(dequantized(mixed[index]), dequantized(nearest[index])) == (name != part)


@pytest.mark.parametrize("kept", [KEPT[1], KEPT[3], KEPT[5]])
def test_stochastic_rounding_is_right_on_average(kept):
    numel, draws = 512, 8
    exact = one_step(adamw_step_reference, KEPT[0], numel, device="cpu")
    for index in (1, 2):
        expected = dequantized(exact[index])
        at = expected.abs() > expected.abs().view(-1, 128).amax(1).repeat_interleave(128) * 1e-3
        mean = (
            sum(dequantized(one_step(kernels.adamw_step, kept, numel, seed=seed)[index]) for seed in range(draws))
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
    kernels.adamw_step(gradients(numel, 1).to(DEVICE), grad.to(DEVICE), m, v, replace(STEP, seed=5))
    for state in (m, v):
        assert dequantized(state)[[5, 1030]].isnan().all()


# Bits of middles between BF16 numbers, Inf, NaN and a subnormal number; nothing changes them where lr is 0
TIES = torch.tensor(
    [0x3F808000, 0x3F818000, -0x407F8000, -0x407E8000, 0x00008000, 0x7F7F8000, 0x7F800000, 0x7FC00000, 5]
)


@pytest.mark.parametrize(("numel", "lr"), [(128 * 32, 0.0), (1000, 1e-3), (5003, 0.0), (5003, 1e-3)])
@pytest.mark.parametrize("kept", [KEPT[0], KEPT[5], KEPT[7]], ids=lambda kept: "-".join(kept[:3]))
@pytest.mark.parametrize(("update", "device"), [(kernels.adamw_step, DEVICE), (adamw_step_reference, "cpu")])
def test_masters_of_bf16_and_corrections_are_fp32_ones(update, device, kept, numel, lr):
    """Two steps, the first with masters in the middle of BF16 numbers, one of which is skipped."""
    step = AdamStep(3, lr, 0.9, 0.95, 1e-8, 0.1)
    master, grad = gradients(numel, 1) * 100, gradients(numel, 2)
    master[: 9 * 40].view(torch.int32)[:] = TIES.int().repeat(40)
    found = []
    pieces = [slice(0, numel - 100), slice(numel - 100, numel)] if kept[2] == "tensor" else [slice(0, numel)]
    for of_bf16 in (False, True):
        layout = {"granularity": kept[2], "scale": kept[3], "segments": (numel - 100, 100), "device": device}
        m, v = moment(gradients(numel, 3), kept[0], **layout), moment(grad**2, kept[1], never_zero=True, **layout)
        masters = master.to(device, copy=True)
        if of_bf16:
            masters = SplitMasters.of(masters.bfloat16())
            for elements in pieces:
                masters.write(elements, master[elements].to(device))
        low = None if of_bf16 else torch.zeros(numel, dtype=torch.bfloat16, device=device)
        for skip in (0, 1, 0):
            skip = torch.full((1,), skip, dtype=torch.int32, device=device)
            update(masters, grad.to(device), m, v, replace(step, skip=skip), low)
        low = masters.bf16 if of_bf16 else low
        if of_bf16:
            masters = torch.cat([masters.read(elements) for elements in pieces])
        found.append([x.cpu() for x in (masters, dequantized(m), dequantized(v), masters.bfloat16())])
        if of_bf16:
            assert torch.equal(low.cpu().nan_to_num(1.5), found[-1][-1].nan_to_num(1.5))
    for fp32, split in zip(*found, strict=True):
        assert torch.equal(fp32.isnan(), split.isnan())
        assert torch.equal(fp32[~fp32.isnan()], split[~fp32.isnan()])
    if lr == 0:
        assert torch.equal(found[1][0].view(torch.int32)[:7], master.view(torch.int32)[:7])
