"""Scales of research: fitted, of least squared error, and static, beside enumerations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_fp8.casts import QuantizedTensor, quantize, scale_from_amax
from ds_fp8.config.formats import FORMATS, CastSpec
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.plans import recipe_from_config
from ds_fp8.layers.head.loss import fuse_loss
from ds_fp8.monitor.statistics import add_cast_statistics
from ds_fp8.research.formats import ResearchSpec, clipped, fitted_scales, static_scale_type
from ds_fp8.zero.param import ReferenceShardCast
from tests.layers.hugging_face import causal_lm, tokens
from tests.numerics import error
from tests.zero.shard_casts import buffer_of, shards_of, weights_of

SIZES = [(1, 1), (7, 130), (130, 257), (128, 256), (256, 128)]
FORMAT_NAMES = ["e4m3", "e5m2"]
NEARLY_EQUAL = 1e-4  # Relative: sums in another order take another of two scales that leave errors as close as this


def with_outliers(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return numbers of which one column in 16 is 30 times the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x[:, ::16] *= 30
    return x.bfloat16()


def errors(x: torch.Tensor, cast: QuantizedTensor) -> torch.Tensor:
    """Return the squared error of every group, FP64 [M, ceil(K / 128)]."""
    lost = (x.double() - cast.dequantize().double()).square()
    return torch.nn.functional.pad(lost, (0, -lost.shape[1] % 128)).unflatten(1, (-1, 128)).sum(-1)


def error_with(x: torch.Tensor, format: str, sevenths: int) -> torch.Tensor:
    """Return the squared error of every group with its largest number on `sevenths` of the format's largest code."""
    padded = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    scale = padded.abs().amax(-1, keepdim=True) / (FORMATS[format].max * sevenths / 7)
    rounded = (padded / scale).float().to(FORMATS[format].dtype).double() * scale
    return (padded - rounded).square().sum(-1)


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_no_other_code_for_the_largest_number_leaves_a_smaller_error(rows, columns, format):
    x = with_outliers(rows, columns)
    cast = quantize(x, format, scale="fitted")
    best = torch.stack([error_with(x, format, sevenths) for sevenths in (7, 6, 5, 4)]).amin(0)
    torch.testing.assert_close(errors(x, cast), best, rtol=NEARLY_EQUAL, atol=1e-12)
    if columns >= 128:
        assert errors(x, cast).sum() < 0.95 * errors(x, quantize(x, format, scale="fp32")).sum()


def test_zeros_and_what_is_not_finite():
    x = torch.zeros(4, 128)
    x[1, 3], x[2, 5], x[3, 7] = torch.inf, torch.nan, 2.0**-130
    scale = fitted_scales(x, "e4m3").flatten()
    assert scale[0] == 1
    assert scale[1:3].isnan().all()
    assert scale[3] >= 2.0**-126
    assert fitted_scales(x[:0], "e4m3").shape == (0, 1)


@pytest.mark.parametrize("granularity", ["128x128", "row", "tensor"])
def test_other_granularities_have_fp32_scales(granularity):
    x = with_outliers(130, 256)
    fitted, plain = (quantize(x, granularity=granularity, scale=scale) for scale in ("fitted", "fp32"))
    assert torch.equal(fitted.data.view(torch.uint8), plain.data.view(torch.uint8))
    assert torch.equal(fitted.scale, plain.scale)


# -------------------- scales of least squared error


E2M1 = np.array([0, 1, 2, 4, 0.5, 1.5, 3, 6])  # Even codes first: of two as near argmin takes the first
POWERS = 2.0 ** np.arange(-40, 20)


def rounded(group, scale):
    """The group as numbers of E2M1 times `scale`, nearest."""
    distance = np.abs(np.abs(group / scale)[:, None] - E2M1)
    return np.sign(group) * E2M1[distance.argmin(1)] * scale


def groups(x, rows, columns):
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            yield (top // rows, left // columns), (slice(top, top + rows), slice(left, left + columns))


def numbers(kind):
    """[24, 70], groups of which differ in size by 2^12."""
    rng = np.random.default_rng(1)
    x = {
        "normal": rng.standard_normal((24, 70)),
        "heavy tails": rng.standard_t(2, (24, 70)),
        "few sizes": rng.choice([0.25, 0.75, 1.25, 2.5, 3.1, 5.0, 6.5], (24, 70)) * rng.choice([-1, 1], (24, 70)),
        "the worst for p / 2": np.where(np.arange(70) % 32 == 0, 3.01, 0.125) * np.ones((24, 1)),
    }[kind]
    return torch.from_numpy(x * 2.0 ** rng.integers(-8, 5, (24, 1))).float()


@pytest.mark.parametrize("granularity", ["1x32", "1x16"])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "few sizes", "the worst for p / 2"])
def test_no_power_of_two_leaves_less(kind, granularity):
    x = numbers(kind)
    cast = quantize(x, "e2m1", granularity, "mse")
    rows, columns = (int(side) for side in granularity.split("x"))
    halved = 0
    for index, where in groups(x, rows, columns):
        group = x[where].double().flatten().numpy()
        errors = [((group - rounded(group, power)) ** 2).sum() for power in POWERS]
        scale = cast.scale[index].item()
        assert scale in POWERS
        found = ((group - rounded(group, scale)) ** 2).sum()
        assert found <= min(errors) * (1 + 1e-5)
        np.testing.assert_array_equal(cast.dequantize()[where].flatten().numpy(), rounded(group, scale))
        beyond = np.abs(group) > 6 * scale
        np.testing.assert_array_equal(clipped(x, cast)[where].flatten().numpy(), beyond)
        halved += beyond.any()
    assert halved or kind == "the worst for p / 2"
    assert clipped(x, quantize(x, "e2m1", granularity, "pow2")).sum() == 0


@pytest.mark.parametrize(("granularity", "sides"), [("tensor", (24, 70)), ("row", (1, 70)), ("16x16", (16, 16))])
@pytest.mark.parametrize("format", ["e2m1", "int8", "e4m3"])
def test_the_better_of_two_scales_by_any_group(format, granularity, sides):
    x = numbers("normal")
    cast = quantize(x, format, granularity, "mse")
    by_amax = quantize(x, format, granularity, "pow2").dequantize()
    scales = cast.scale.expand(1, 1) if granularity == "tensor" else cast.scale
    for index, where in groups(x, *sides):
        whole = scale_from_amax(x[where].abs().amax(), format, "pow2").item()
        assert scales[index].item() in (whole, whole / 2)
        error = ((cast.dequantize() - x)[where] ** 2).sum()
        assert error <= ((by_amax - x)[where] ** 2).sum() * (1 + 1e-5)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_is_seen_and_zeros_stay(bad):
    x = torch.zeros(2, 64)
    x[0, 3], x[1, 40] = bad, 1e-42
    cast = quantize(x, "e2m1", "1x32", "mse")
    assert cast.dequantize()[0, :32].isnan().all()
    assert torch.equal(cast.scale[0, 1:], torch.ones(1))
    assert cast.scale[1, 1] == 2.0**-126
    assert quantize(x[:0], "e2m1", "1x32", "mse").shape == (0, 64)


def test_an_amax_alone_makes_no_such_scale():
    with pytest.raises(ValueError, match="does not follow"):
        scale_from_amax(torch.ones(1), "e2m1", "mse")
    assert "mse" in ResearchSpec("e2m1", "32x32", "mse").why_not_gathered


# -------------------- static scales


SMALL = [(131, 301), (1, 5), (70, 131)]


def of_all_sizes(shape, spread: float = 200.0) -> torch.Tensor:
    """Return random numbers of all sizes, some too large for E4M3, with an Inf and a NaN where there is room."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).pow(8) * spread * 10
    if x.numel() > 3:
        x.view(-1)[1], x.view(-1)[2] = torch.inf, torch.nan
    return x


@pytest.mark.parametrize("scale", ["static 3", "statics", "static 2^"])
def test_other_words_are_errors(scale):
    with pytest.raises(ValueError, match="is not one of"):
        quantize(torch.ones(3), "e4m3", "tensor", scale)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("exponent", [0, -3, 4])
@pytest.mark.parametrize("shape", [(1, 1), (3,), (7, 130), (2, 3, 5)])
def test_every_code_is_the_nearest_and_saturates(format, exponent, shape):
    """Beside an enumeration of all numbers of the format."""
    x, layout = of_all_sizes(shape), FORMATS[format]
    result = quantize(x, format, "tensor", static_scale_type(exponent))
    assert torch.equal(result.scale, torch.tensor(2.0**exponent))
    magnitudes = torch.arange(128, dtype=torch.uint8).view(layout.dtype).float()
    magnitudes = magnitudes[magnitudes.isfinite()]
    units = (x / 2.0**exponent).abs().clamp(max=layout.max)
    distance = (units[..., None] - magnitudes).abs().amin(-1)
    got = result.dequantize()
    finite = x.isfinite()
    assert torch.equal(got.isfinite(), finite)
    inside = finite & (units < layout.max)
    assert torch.equal(((x - got).abs() / 2.0**exponent)[inside], distance[inside])
    assert got[finite].abs().amax() <= layout.max * 2.0**exponent


@pytest.mark.parametrize("world", [1, 3])
def test_shards_are_cast_like_the_whole(world):
    spec = CastSpec("e4m3", "tensor", "static 2^-1")
    masters = [torch.randint(-5, 12, shape).float().exp2() for shape in SMALL]
    masters[0][0, 0], masters[1][0, 0] = torch.inf, torch.nan
    parts = []
    for rank in range(world):
        weights = weights_of(rank, world, "tensor", "cpu", SMALL)
        shards = shards_of(masters, weights)
        scales = torch.full_like(buffer_of(weights), 0.5)
        ReferenceShardCast(weights, spec).cast(scales, shards.__getitem__)
        parts.append([weight.data[: weight.shard.valid] for weight in weights])
    for master, codes in zip(masters, zip(*parts, strict=True), strict=True):
        codes = torch.cat(codes).cpu().view(torch.float8_e4m3fn).view(master.shape)
        got = QuantizedTensor(codes, torch.tensor(0.5), "tensor", spec.scale)
        expected = quantize(master, "e4m3", "tensor", spec.scale).dequantize()
        assert torch.equal(got.dequantize().nan_to_num(-1), expected.nan_to_num(-1))


def test_the_monitor_counts_what_saturates():
    x = torch.full((4, 8), 3.0)
    x[0, :3] = 1000.0
    sums, peaks = torch.zeros(5, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    add_cast_statistics(x, quantize(x, "e4m3", "tensor", "static"), sums, peaks)
    assert sums[1] == 3
    assert sums[2] == 0


def test_a_head_in_fp8_clips_no_gradient_of_the_summed_loss():
    """Which is as large as 1, and divided by the tokens only afterwards."""
    gradients = {}
    for name in ("bf16", "fp8"):
        model = causal_lm("qwen2")
        section = {"loss": {"head": "fp8"}, "monitor": {"every": 0}}
        config = FP8Config.from_preset("munit", **section) if name == "fp8" else None
        assert fuse_loss(model, config and recipe_from_config(config)).fused
        ids = tokens(2, 64)
        model(ids, labels=ids).loss.backward()
        gradients[name] = [model.lm_head.weight.grad.float(), model.model.norm.weight.grad.float()]
    for found, exact in zip(gradients["fp8"], gradients["bf16"], strict=True):
        # Clipped they were 80% too small.
        assert error(found, exact) < 0.1
        assert found.norm().item() == pytest.approx(exact.norm().item(), rel=0.02)
