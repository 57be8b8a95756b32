"""Casts on a GPU agree with those of torchao and Transformer Engine, bit for bit where scales are powers of two."""

import pytest
import torch

from ds_fp8.casts import quantize
from tests.casts.peers import assert_same_as_torchao, inputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_casts_are_torchaos(format, granularity, scale):
    assert_same_as_torchao(format, granularity, scale, "cuda")


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("granularity", "dimensions"), [("1x128", 1), ("128x128", 2)])
def test_casts_are_transformer_engines(format, granularity, dimensions):
    """Its block quantizer's default scales are powers of two."""
    pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine_torch import DType

    x = inputs("cuda")
    dtype = DType.kFloat8E4M3 if format == "e4m3" else DType.kFloat8E5M2
    theirs = Float8BlockQuantizer(dtype, rowwise=True, columnwise=False, block_scaling_dim=dimensions)(x)
    ours = quantize(x, format, granularity, "pow2")
    assert torch.equal(ours.data.view(torch.uint8), theirs._rowwise_data)
    assert torch.equal(ours.dequantize(torch.float32), theirs.dequantize(dtype=torch.float32))
