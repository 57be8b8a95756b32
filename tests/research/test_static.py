"""Static scales: one power of two whatever the numbers are, and saturation."""

import pytest
import torch

from ds_fp8.casts import QuantizedTensor, quantize
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import FORMATS, CastSpec
from ds_fp8.config.fp8 import FP8Config, parse_fp8
from ds_fp8.engine.plans import recipe_from_config
from ds_fp8.layers.head.loss import fuse_loss
from ds_fp8.monitor.statistics import add_cast_statistics
from ds_fp8.research.formats import static_scale_type
from ds_fp8.zero.param import ReferenceShardCast
from tests.layers.hugging_face import causal_lm, tokens
from tests.numerics import error
from tests.zero.shard_casts import buffer_of, shards_of, weights_of

SMALL = [(131, 301), (1, 5), (70, 131)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STATIC = {"scale": "static", "granularity": "tensor"}


def numbers(shape, spread: float = 200.0) -> torch.Tensor:
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
    x, layout = numbers(shape), FORMATS[format]
    result = quantize(x, format, "tensor", static_scale_type(exponent))
    assert torch.equal(result.scale, torch.tensor(2.0**exponent))
    magnitudes = torch.arange(128, dtype=torch.uint8).view(layout.dtype).float()
    magnitudes = magnitudes[magnitudes.isfinite()]
    units = (x / 2.0**exponent).abs().clamp(max=layout.max)
    distance = (units[..., None] - magnitudes).abs().amin(-1)
    got = result.dequantize()
    finite = x.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert torch.equal(((x - got).abs() / 2.0**exponent)[finite & (units < layout.max)],
                       distance[finite & (units < layout.max)])  # fmt: skip
    assert torch.equal(got[finite].abs().amax() <= layout.max * 2.0**exponent, torch.tensor(True))


@pytest.mark.parametrize("world", [1, 3])
def test_shards_are_cast_like_the_whole(world):
    spec = CastSpec("e4m3", "tensor", "static 2^-1")
    masters = [torch.randint(-5, 12, shape).float().exp2() for shape in SMALL]
    masters[0][0, 0], masters[1][0, 0] = torch.inf, torch.nan
    parts = []
    for rank in range(world):
        weights = weights_of(rank, world, "tensor", DEVICE, SMALL)
        shards = shards_of([master.to(DEVICE) for master in masters], weights)
        scales = torch.full_like(buffer_of(weights), 0.5)
        ReferenceShardCast(weights, spec).cast(scales, shards.__getitem__)
        parts.append([weight.data[: weight.shard.valid] for weight in weights])
    for master, codes in zip(masters, zip(*parts, strict=True), strict=True):
        got = QuantizedTensor(torch.cat(codes).cpu().view(torch.float8_e4m3fn).view(master.shape),
                              torch.tensor(0.5), "tensor", spec.scale)  # fmt: skip
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


@pytest.mark.parametrize(
    "linear",
    [
        {"input": {"scale": "static"}},
        {"input": {"static_exponent": 3}},
        {"input": {**STATIC, "format": "int8"}},
        {"input": STATIC, "wgrad": {"input": "1x128"}},
    ],
)
def test_what_does_not_go_together_is_an_error(linear):
    with pytest.raises(UserError, match="static"):
        parse_fp8({"fp8": {"linear": linear}})
