"""The casts of other libraries, on the same input."""

import pytest
import torch

from ds_fp8.casts import quantize

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def inputs(device: str) -> torch.Tensor:
    """Return [256, 512] in BF16 whose rows are of very different sizes, one of them 0."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 256)[:, None]
    x[3] = 0
    return x.bfloat16().to(device)


def assert_same_as_torchao(format: str, granularity: str, scale: str, device: str) -> None:
    """Cast with both libraries, and compare codes and dequantised values bit for bit where scales are powers of two."""
    pytest.importorskip("torchao")
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    x = inputs(device)
    row = granularity == "row"
    theirs = hp_tensor_to_float8_dynamic(
        x,
        FORMATS[format],
        LinearMMConfig(),
        scaling_granularity=ScalingGranularity.AXISWISE if row else ScalingGranularity.TENSORWISE,
        axiswise_dim=-1 if row else None,
        round_scales_to_power_of_2=scale == "pow2",
    )
    ours = quantize(x, format, granularity, scale)
    filled = x.abs().amax(-1) > 0  # theirs gives empty rows the scale of a smallest amax, which changes nothing
    codes, their_codes = (each[filled].float() for each in (ours.data, theirs._data))
    if scale == "pow2":
        their_scales = (1 / theirs._scale).reshape(ours.scale.shape)
        assert torch.equal(ours.scale[filled] if row else ours.scale, their_scales[filled] if row else their_scales)
        assert torch.equal(codes, their_codes)
    else:  # they multiply by a rounded reciprocal: ties fall otherwise, to the neighbour
        assert (codes != their_codes).float().mean() < 0.01
        assert ((codes - their_codes).abs() <= 0.25 * their_codes.abs()).all()
    assert not ours.data[~filled].float().any()
    assert not theirs._data[~filled].float().any()
