"""The gated MLP in tiles of tokens on a GPU: sums in FP32 by the backend's own products, and the peak of a tile."""

import pytest
import torch

from ds_fp8.config.formats import CastSpec
from ds_fp8.gemm import BACKENDS, unavailable, why_not_in_fp32
from tests.layers import test_tiled_mlp as on_any_device

pytestmark = pytest.mark.gpu

OPERAND = CastSpec("e4m3", "1x128", "pow2")


@pytest.mark.parametrize("input_granularity", ["1x128", "128x128"])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in ("reference", "mxfp8")])
def test_backends_give_fp32(backend, input_granularity):
    other = CastSpec("e4m3", input_granularity, "pow2")
    reason = unavailable(backend, [(OPERAND, other)])
    if reason is not None:
        pytest.skip(reason)
    assert why_not_in_fp32(backend, OPERAND, other) is None


@pytest.mark.parametrize("length", [16384, 16000])
@pytest.mark.parametrize("preset", ["infir2", "hybrid_fast"])
def test_tiles_are_the_whole_within_rounding(preset, length):
    whole = on_any_device.results(None, preset, length)
    on_any_device.assert_alike(on_any_device.results(2048, preset, length), whole)


@pytest.mark.alone
def test_the_peak_is_that_of_a_tile(monkeypatch):
    monkeypatch.setattr(on_any_device, "H", 1024)
    monkeypatch.setattr(on_any_device, "F", features := 4096)
    length, most = 65536, []
    for tile in (None, 4096):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        on_any_device.results(tile, length=length)
        most.append(torch.cuda.max_memory_allocated())
    # gate_up kept in FP8, the product's gradient and three casts: 9 bytes a token and feature, of which 1/16 is left.
    sums = 2 * 12 * 1024 * features
    assert most[0] - most[1] > 0.8 * 9 * length * features - sums
