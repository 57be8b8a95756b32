"""MXFP8 operands made of codes with scales of 128: bit for bit the same numbers, in both directions and any size."""

import itertools
from dataclasses import replace

import pytest
import torch

from ds_fp8.casts import QuantizedTensor, quantize
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import CastSpec
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.plans import convert
from ds_fp8.gemm import scaled_matmul, select_backend, unavailable
from ds_fp8.research import mxfp8
from tests.layers.hugging_face import causal_lm, tokens
from tests.research.mxfp8_library import DTYPES

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has libraries and products of its own")
SIZES = [(1, 1), (7, 130), (96, 160), (128, 128), (257, 300)]


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Numbers whose magnitudes differ from group to group, by no more than FP64 sums exactly."""
    generator = torch.Generator().manual_seed(1000 * rows + columns + seed)
    spread = torch.exp2(torch.randint(-3, 4, (rows, -(-columns // 16)), generator=generator))
    return torch.randn(rows, columns, generator=generator) * spread.repeat_interleave(16, 1)[:, :columns]


def decoded(codes: torch.Tensor, scales: torch.Tensor, format: str) -> torch.Tensor:
    """The numbers of MXFP8 codes [R, K], element by element from its definition: code * 2^(byte - 127)."""
    numbers = codes.view(DTYPES[format]).double()
    result = torch.empty_like(numbers)
    for group in range(codes.shape[1] // 32):
        exponent = scales[: len(codes), group].double() - 127
        exponent[scales[: len(codes), group] == 255] = torch.nan
        columns = slice(32 * group, 32 * group + 32)
        result[:, columns] = numbers[:, columns] * torch.exp2(exponent)[:, None]
    return result


def lying_transposed(q: QuantizedTensor) -> QuantizedTensor:
    """The same operand with its codes in memory along the other dimension."""
    return replace(q, data=q.data.t().contiguous().t())


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("granularity", ["1x128", "128x128"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_an_operand_is_the_same_numbers(rows, columns, format, granularity, columnwise):
    q = quantize(random(rows, columns), format, granularity)
    q = lying_transposed(q) if columnwise else q
    found = mxfp8.operand(q, columnwise)
    codes, scales = (found.codes.t(), found.scales.t()) if columnwise else (found.codes, found.scales)
    assert found.codes.is_contiguous()
    assert found.scales.is_contiguous()
    assert all(length % 32 == 0 for length in codes.shape)
    assert scales.shape[0] == -(-rows // 128) * 128
    assert scales.shape[1] == -(-columns // 128) * 4
    numbers = decoded(codes.contiguous(), scales, format)
    assert torch.equal(numbers[:rows, :columns], q.dequantize().double())
    assert not numbers[rows:].any()
    assert not numbers[:, columns:].any()


def test_one_gathered_weight_serves_both_directions():
    """Rowwise as fprop reads it and columnwise as dgrad does: the same bytes, scales repeated along either side."""
    w = quantize(random(384, 256), granularity="128x128")
    rowwise, columnwise = mxfp8.operand(w, columnwise=False), mxfp8.operand(w.t(), columnwise=True)
    assert rowwise.codes.data_ptr() == columnwise.codes.data_ptr()
    assert rowwise.codes.shape == columnwise.codes.shape == (384, 256)
    assert rowwise.scales.shape == (384, 8)
    assert columnwise.scales.shape == (12, 256)
    assert torch.equal(rowwise.scales[::32, :].repeat_interleave(32, 1), columnwise.scales)


def test_every_scale_of_the_casts_has_its_byte():
    exponents = torch.arange(-126, 128)
    bytes_ = mxfp8.e8m0(torch.exp2(exponents.double()).float())
    assert torch.equal(bytes_.int(), exponents.int() + 127)
    assert torch.equal(bytes_.view(torch.float8_e8m0fnu).double(), torch.exp2(exponents.double()))
    nan = torch.tensor([torch.nan, -torch.nan])
    assert mxfp8.e8m0(nan).tolist() == [255, 255]


@pytest.mark.parametrize(("a_turned", "b_turned"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize(
    ("a_format", "b_format", "a_granularity", "b_granularity", "out_dtype"),
    [
        ("e4m3", "e4m3", "1x128", "128x128", torch.bfloat16),
        ("e5m2", "e4m3", "1x128", "1x128", torch.float32),
        ("e4m3", "e5m2", "128x128", "128x128", torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (7, 300, 200), (256, 384, 128)])
def test_products(library, m, k, n, a_granularity, b_granularity, a_format, b_format, a_turned, b_turned, out_dtype):
    a, b = quantize(random(m, k), a_format, a_granularity), quantize(random(n, k, 1), b_format, b_granularity)
    exact = a.dequantize().double() @ b.dequantize().double().t()
    a, b = lying_transposed(a) if a_turned else a, lying_transposed(b) if b_turned else b
    product = scaled_matmul(a, b, backend="mxfp8", out_dtype=out_dtype)
    assert product.dtype is out_dtype
    assert torch.equal(product, exact.to(out_dtype))
    if min(m, k, n) > 1:  # a single row lies both ways
        assert library == ["NN" if b_turned and not a_turned else "NT" if b_turned else "TN"]


def test_nan_reaches_the_rows_that_read_it(library):
    x = random(40, 200)
    x[1, 150] = torch.inf
    product = scaled_matmul(quantize(x), quantize(random(40, 200), granularity="128x128"), backend="mxfp8")
    assert product.isnan().all(1).nonzero().tolist() == [[1]]


@pytest.mark.parametrize("preset", ["infir2", "hybrid_fast"])
def test_a_model_multiplies_its_weights_where_they_lie(library, monkeypatch, preset):
    """Fused layers, linears and the head: the reference's loss and gradients; dgrad's weights are views."""
    monkeypatch.setattr(mxfp8, "unavailable", lambda: None)
    results = {}
    for backend in ("reference", "mxfp8"):
        model = causal_lm("qwen3")
        changes = {"linear": {"backend": backend}, "loss": {"head": "fp8"}}
        convert(model, FP8Config.from_preset(preset, **changes))
        library.clear()  # of the product at selection
        loss = model(input_ids=tokens(2, 64), labels=tokens(2, 64)).loss
        loss.backward()
        results[backend] = [loss.detach(), *(p.grad for p in model.parameters())]
    for found, expected in zip(results["mxfp8"], results["reference"], strict=True):
        assert (found - expected).float().norm() <= 2e-2 * expected.float().norm()
    assert set(library) == {"TN", "NN"}
    assert library.count("TN") == 2 * library.count("NN")  # fprop and wgrad; dgrad


@no_gpu
def test_fp32_scales_are_a_reason_before_the_first_product(library, monkeypatch):
    monkeypatch.setattr(mxfp8, "unavailable", lambda: None)
    powers, others = CastSpec(), CastSpec(scale="fp32")
    assert unavailable("mxfp8", [(powers, replace(powers, granularity="128x128"))]) is None
    assert '"scale": "pow2"' in unavailable("mxfp8", [(powers, powers), (others, powers)])
    with pytest.raises(UserError, match="powers of two") as error:
        select_backend("mxfp8", [(powers, others)])
    assert "reference" in error.value.remedy


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        (("e5m2", "1x128"), ("e5m2", "1x128"), "two E5M2"),
        (("e4m3", "tensor"), ("e4m3", "tensor"), "cublas"),
        (("e4m3", "1x128"), ("e4m3", "row"), "cublas"),
    ],
)
def test_other_operands_are_refused_with_the_reason(a, b, word):
    assert word in mxfp8.unsupported(*a, *b)


def test_a_comparison_says_whether_the_library_multiplies_as_it_should(library, monkeypatch):
    assert mxfp8.differs(torch.device("cpu")) is None
    assert library == ["TN", "NN", "NT"]
    real = mxfp8.e8m0
    monkeypatch.setattr(mxfp8, "e8m0", lambda scale: real(scale) + 1)
    assert "differs" in mxfp8.differs(torch.device("cpu"))
    monkeypatch.setattr(mxfp8, "e8m0", lambda scale: real(scale)[:, :0])
    assert "fails" in mxfp8.differs(torch.device("cpu"))


def in_order_of_cublas(scales: torch.Tensor) -> torch.Tensor:
    """Scales [R, K/32] in the order that cuBLAS documents: tiles of 128 by 4, in which r % 32 goes before r."""
    rows, columns = scales.shape
    return scales.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).flatten()


with_library = pytest.mark.skipif(mxfp8.missing() is not None, reason="Transformer Engine cannot be loaded")


@pytest.mark.gpu
@with_library
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("granularity", ["1x128", "128x128"])
@pytest.mark.parametrize(("rows", "columns"), [(7, 130), (96, 160), (256, 384), (300, 1000)])
def test_the_library_takes_the_scales_for_what_they_are(rows, columns, granularity, columnwise):
    """Its check of shapes, and its kernel that brings them into cuBLAS's order; needs no MXFP8 units."""
    import transformer_engine_torch as tex

    q = quantize(random(rows, columns).cuda(), "e4m3", granularity)
    found = mxfp8.operand(lying_transposed(q) if columnwise else q, columnwise)
    expected = (found.scales.t() if columnwise else found.scales).clone()
    codes = found.codes.t() if columnwise else found.codes
    expected[codes.shape[0] :], expected[:, codes.shape[1] // 32 :] = 0, 0  # nothing is read of the padding
    storage = mxfp8.storage(found)
    tex.swizzle_scales_for_gemm_(storage)
    swizzled = storage._columnwise_scale_inv if columnwise else storage._rowwise_scale_inv
    assert torch.equal(swizzled.flatten(), in_order_of_cublas(expected))


@pytest.mark.gpu
@with_library
@pytest.mark.skipif(unavailable("mxfp8") is None, reason="has MXFP8 units")
def test_without_mxfp8_units_it_is_cublas_that_refuses():
    """The call itself is right: only the library below it has no such product."""
    assert "cublas" in mxfp8.differs(torch.device("cuda")).lower()
