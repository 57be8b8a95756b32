"""MXFP8 operands made of codes with scales of 128: bit for bit the same numbers, in both directions and any size."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ds_fp8.casts import QuantizedTensor, quantize
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import CastSpec
from ds_fp8.config.fp8 import FP8Config, parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.gemm import scaled_matmul, select_backend, unavailable
from ds_fp8.layers.attention.hadamard import signs
from ds_fp8.research import mxfp8
from tests.layers.hugging_face import causal_lm, tokens
from tests.layers.linears import fp8_linear, results_of
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


# ---------------------------------------------------------------- operands of backward cast again, as in Quartet


E2M1 = torch.tensor([0, 1, 2, 4, 0.5, 1.5, 3, 6], dtype=torch.float64)
TOKENS, INPUTS, OUTPUTS = 40, 96, 64
DRAWS = 100


def section(**recast):
    return {"preset": "quartet", "linear": {"recast": recast}, "monitor": {"every": 0}}


def nearest(groups, scale):
    distance = ((groups / scale).abs()[..., None] - E2M1).abs()
    return groups.sign() * E2M1[distance.argmin(-1)] * scale


def mxfp4(x, least_error):
    """(x [M, K] in MXFP4 along K to nearest, where that clips)."""
    padding = -x.shape[1] % 32
    groups = torch.nn.functional.pad(x, (0, padding)).unflatten(1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1, (amax / 6).log2().ceil().exp2())
    if least_error:
        errors = [(nearest(groups, one) - groups).square().sum(-1, keepdim=True) for one in (scale, scale / 2)]
        scale = torch.where(errors[1] < errors[0], scale / 2, scale)
    parts = nearest(groups, scale), groups.abs() > 6 * scale
    return tuple(part.flatten(1)[:, : x.shape[1]] for part in parts)


def hadamard(size, random):
    """Block diagonal [size, size] of matrices of 32 by 32, element (i, j) of -1 to the bits that i and j share."""
    shared = np.bitwise_and.outer(np.arange(32), np.arange(32))
    block = torch.tensor([[(-1.0) ** int(n).bit_count() for n in row] for row in shared], dtype=torch.float64)
    if random:
        block = signs(32, 0, torch.device("cpu")).double()[:, None] * block
    return torch.block_diag(*[block / math.sqrt(32)] * (size // 32))


def operands():
    torch.manual_seed(3)
    x, dy = torch.randn(TOKENS, INPUTS), torch.randn(TOKENS, OUTPUTS)
    return x * torch.randn(TOKENS, 1).exp(), dy * torch.randn(TOKENS, 1).exp()


def forward_operands(linear, x, random=True):
    """Fprop's operands in FP64, what of them is clipped, and its rotation."""
    f = hadamard(INPUTS, random)
    return *mxfp4(x.double() @ f, True), *mxfp4(linear.weight.detach().double() @ f, True), f


@pytest.mark.parametrize("save", ["fp8", "bf16"])
@pytest.mark.parametrize("clipped", ["zero", "pass"])
def test_products_are_those_of_the_algorithm(clipped, save):
    """All of it rounded to nearest, so that every number can be foretold."""
    linear = fp8_linear(
        INPUTS, OUTPUTS, torch.float32, preset="quartet", monitor={"every": 0}, activations={"save": save},
        linear={"recast": {"rounding": "nearest", "clipped": clipped}, "grad_output": {"rounding": "nearest"}},
    )  # fmt: skip
    x, dy = operands()
    x_cast, x_clipped, w_cast, w_clipped, f = forward_operands(linear, x)
    if clipped == "pass":
        x_clipped, w_clipped = torch.zeros_like(x_clipped), torch.zeros_like(w_clipped)
    else:
        assert 0 < x_clipped.double().mean() < 0.1
        assert 0 < w_clipped.double().mean() < 0.1
    along_n, along_t = hadamard(OUTPUTS, True), hadamard(64, True)  # 40 tokens are padded to 64
    padded_dy, padded_x = (torch.cat([part, part.new_zeros(24, part.shape[1])]) for part in (dy.double(), x_cast))
    dx = mxfp4(dy.double() @ along_n, False)[0] @ mxfp4(w_cast.t() @ along_n, False)[0].t()
    dw = mxfp4(padded_dy.t() @ along_t, False)[0] @ mxfp4(padded_x.t() @ along_t, False)[0].t()
    expected = [x_cast @ w_cast.t(), (dx * ~x_clipped) @ f.t(), (dw * ~w_clipped) @ f.t()]
    for found, wanted in zip(results_of(linear, x, dy), expected, strict=True):
        # A sum that lands on the middle between two numbers may go either way: of the other rounding it is 3%.
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_gradients_are_right_on_average():
    """Of the function that forward computed: draws of backward differ, and their mean is what they leave out."""
    linear = fp8_linear(INPUTS, OUTPUTS, torch.float32, **section(of="fprop"))
    x, dy = operands()
    x_cast, x_clipped, w_cast, w_clipped, f = forward_operands(linear, x)
    exact = [((dy.double() @ w_cast) * ~x_clipped) @ f.t(), ((dy.double().t() @ x_cast) * ~w_clipped) @ f.t()]
    draws = [results_of(linear, x, dy)[1:] for _ in range(DRAWS)]
    for expected, found in zip(exact, zip(*draws, strict=True), strict=True):
        found = torch.stack(found).double()
        spread = found.std(0) / math.sqrt(len(draws))
        off = ((found.mean(0) - expected) / spread).square().mean().sqrt()
        assert 0.9 < off < 1.1  # standard errors
    high = fp8_linear(INPUTS, OUTPUTS, torch.float32, **section(of="high_precision"))
    of_another = torch.stack([results_of(high, x, dy)[2] for _ in range(DRAWS)]).double()
    off = ((of_another.mean(0) - exact[1]) / (of_another.std(0) / math.sqrt(DRAWS))).square().mean().sqrt()
    assert off > 2


def test_an_input_that_needs_no_gradient_keeps_no_mask():
    linear = fp8_linear(INPUTS, OUTPUTS, torch.float32, **section(of="fprop"))
    x, dy = operands()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t.dtype, t.shape)) or t, lambda t: t):
        y = linear(x)
        assert torch.bool not in [dtype for dtype, _ in kept]
        linear(x.requires_grad_())
    assert (torch.bool, x.shape) in kept
    y.backward(dy)
    assert linear.weight.grad.isfinite().all()


def test_nothing_is_fused_or_smoothed_where_operands_are_cast_again():
    quartet = section(of="fprop")
    quartet["linear"]["rotation"] = {"fprop": None, "dgrad": None, "wgrad": None}
    conversion = convert(causal_lm("llama"), parse_fp8({"fp8": quartet}))
    assert not conversion.fusion.layers
    assert "recast or smooth_swiglu are computed one by one" in next(iter(conversion.fusion.left.values()))
    assert "recast: fprop's for the others, pow2 stochastic" in str(FP8Config.from_preset("quartet").linear)
    quartet["linear"]["smooth_swiglu"] = True
    with pytest.raises(UserError, match="recast both change"):
        convert(causal_lm("llama"), parse_fp8({"fp8": quartet}))
