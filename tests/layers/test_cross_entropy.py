"""Cross entropy without logits, alone, against the one with logits."""

import math

import pytest
import torch
import torch.nn.functional as F

from ds_fp8.casts import quantize
from ds_fp8.config.formats import CastSpec
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.plans import recipe_from_config
from ds_fp8.layers.head import cross_entropy
from ds_fp8.layers.head.cross_entropy import (
    IGNORED,
    LOGITS_BYTES,
    MAX_LOGITS_BYTES,
    chunk_tokens,
    label_errors,
    linear_cross_entropy,
    pop_label_errors,
    scaled,
    softmax_gradient,
)
from tests.layers.losses import TOLERANCE, limit_chunks
from tests.numerics import error


def linear_cross_entropy_reference(hidden, weight, targets):
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


# Tokens, hidden size, vocabulary.
SIZES = [(1, 3, 7), (5, 3, 61), (17, 8, 131), (64, 16, 1009), (2, 1, 1)]


def operands(tokens, hidden_size, vocabulary, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(tokens * vocabulary)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, generator=generator).to(device, dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[1::3] = IGNORED
    return hidden, weight, targets.to(device)


def loss_and_gradients(function, hidden, weight, targets, factor=1.0):
    loss = function(hidden, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss * factor, (hidden, weight))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_loss_and_gradients_are_those_of_all_logits(sizes, chunked, monkeypatch):
    dtype = torch.bfloat16 if sizes[0] % 2 else torch.float32
    if chunked:
        limit_chunks(monkeypatch, 3, sizes[2])
    given = operands(*sizes, dtype)
    ours = loss_and_gradients(linear_cross_entropy, *given, factor=0.37)
    theirs = loss_and_gradients(linear_cross_entropy_reference, *given, factor=0.37)
    for result, expected in zip(ours, theirs, strict=True):
        assert result.dtype is expected.dtype
        assert result.shape == expected.shape
        assert error(result, expected) < TOLERANCE[dtype]


def test_ignored_tokens_and_no_tokens():
    hidden, weight, targets = operands(5, 3, 7)
    for result in loss_and_gradients(linear_cross_entropy, hidden, weight, torch.full_like(targets, IGNORED)):
        assert (result == 0).all()
    for result in loss_and_gradients(linear_cross_entropy, *operands(0, 3, 7)):
        assert (result == 0).all()


def test_a_nan_is_seen_in_counted_tokens_alone():
    hidden, weight, targets = operands(5, 3, 7)
    with torch.no_grad():
        hidden[1] = math.nan  # an ignored one
    loss, dhidden, _ = loss_and_gradients(linear_cross_entropy, hidden, weight, targets)
    assert loss.isfinite()
    assert dhidden.isfinite().all()
    with torch.no_grad():
        hidden[0, 0] = math.nan
    assert all(result.isnan().any() for result in loss_and_gradients(linear_cross_entropy, hidden, weight, targets))


def test_the_gradient_of_the_loss_is_not_rounded_to_bf16():
    """1/3 in BF16 is off by 0.2%, for every element alike; the rounding of single elements averages out."""
    hidden, weight, targets = operands(64, 64, 1009, torch.bfloat16)
    whole = loss_and_gradients(linear_cross_entropy, hidden, weight, targets)[1:]
    third = loss_and_gradients(linear_cross_entropy, hidden, weight, targets, factor=1 / 3)[1:]
    for one, part in zip(whole, third, strict=True):
        assert part.dtype is torch.bfloat16
        assert (3 * part.double() * one.double()).sum() == pytest.approx(one.double().square().sum().item(), rel=2e-4)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_operand_gets_no_gradient_and_the_loss_is_the_same(frozen, in_fp8):
    recipe = recipe_from_config(FP8Config(linear={"backend": "reference"})) if in_fp8 else None
    given = operands(17, 128, 131, torch.bfloat16 if in_fp8 else torch.float32)
    expected = loss_and_gradients(lambda *each: linear_cross_entropy(*each, recipe), *given)
    given[frozen].requires_grad_(False)
    loss = linear_cross_entropy(*given, recipe)
    loss.backward()
    assert given[frozen].grad is None
    assert torch.equal(given[1 - frozen].grad, expected[2 - frozen])
    with torch.no_grad():
        assert linear_cross_entropy(*given, recipe) == loss == expected[0]


def test_backward_twice_and_no_second_derivative():
    hidden, weight, targets = operands(17, 8, 131)
    loss = linear_cross_entropy(hidden, weight, targets) / 3
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    (dhidden,) = torch.autograd.grad(loss * hidden.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dhidden.sum().backward()


def test_autocast_computes_in_its_dtype():
    given = operands(17, 8, 131)
    with torch.autocast("cpu", torch.bfloat16):
        ours = loss_and_gradients(linear_cross_entropy, *given)
        theirs = loss_and_gradients(linear_cross_entropy_reference, *given)
    for result, expected in zip(ours, theirs, strict=True):
        assert result.dtype is expected.dtype is torch.float32
        assert error(result, expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("preset", "tokens_of_chunk"), [("infir2", 256), ("hybrid_fast", None), ("rowwise", 256), ("tensorwise", None)]
)
def test_a_head_in_fp8_is_off_by_no_more_than_its_casts(preset, tokens_of_chunk, monkeypatch):
    if tokens_of_chunk:
        limit_chunks(monkeypatch, tokens_of_chunk, 1009)
    recipe = recipe_from_config(FP8Config.from_preset(preset, linear={"backend": "reference"}))
    given = operands(640, 64, 1009, torch.bfloat16)
    expected = loss_and_gradients(linear_cross_entropy_reference, *given)
    ours = loss_and_gradients(lambda *each: linear_cross_entropy(*each, recipe), *given)
    assert error(ours[0], expected[0]) < 2e-3
    for result, wanted in zip(ours[1:], expected[1:], strict=True):
        assert result.dtype is torch.bfloat16
        assert 1e-3 < error(result, wanted) < 0.1


@pytest.mark.parametrize(("vocabulary", "hidden"), [(152064, 3584), (50257, 768), (512, 256)])
@pytest.mark.parametrize("tokens", [1, 2048, 32768])
def test_chunks_on_a_gpu_are_few_and_do_not_raise_the_peak(tokens, vocabulary, hidden):
    chunk = chunk_tokens(tokens, vocabulary, hidden, on_gpu=True)
    logits, gradient = 2 * vocabulary * min(chunk, tokens), 2 * vocabulary * hidden
    if chunk >= tokens:
        assert logits + gradient <= max(3 * gradient, LOGITS_BYTES + gradient)
    else:
        assert logits <= max(gradient, LOGITS_BYTES)
        fewest = -(-2 * vocabulary * tokens // max(LOGITS_BYTES, min(MAX_LOGITS_BYTES, gradient)))
        assert -(-tokens // chunk) <= fewest + 1
        assert chunk % 128 == 0


@pytest.mark.parametrize(
    ("sizes", "dtype", "gradient"),
    [((1, 7), torch.float32, True), ((17, 131), torch.bfloat16, False), ((3, 5003), torch.bfloat16, True)],
    ids=str,
)
def test_the_kernel_computes_the_softmax_gradient(sizes, dtype, gradient):
    kernels = pytest.importorskip("ds_fp8.layers.head.softmax_gradient_triton", reason="Triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    logits, targets = 5 * torch.randn(sizes), torch.randint(0, sizes[1], sizes[:1])
    targets[1::3] = IGNORED
    padded = torch.full((sizes[0], sizes[1] + 3), math.nan, dtype=dtype, device=device)
    ours = padded[:, : sizes[1]].copy_(logits)
    theirs = ours.float().cpu().clone()
    expected = softmax_gradient(theirs, targets, gradient)
    losses = kernels.softmax_gradient(
        ours, targets.to(device), IGNORED, label_errors(ours.device), gradient, block=1024
    )
    assert error(losses, expected) < 1e-5
    assert error(ours, theirs) < TOLERANCE[dtype]
    assert padded[:, sizes[1] :].isnan().all()


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtypes", [(FP32, BF16), (BF16, BF16), (FP32, FP32)], ids=str)
def test_gradients_are_scaled_and_rounded_once(dtypes):
    """3 + 2^-7 is half-way between two BF16 numbers, and what the factor adds decides."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(97, 131, generator=torch.Generator().manual_seed(0)).to(device, dtypes[0])
    x[0, :2] = torch.tensor([math.inf, 1])
    factor = torch.tensor(3 + 2**-7 + 2**-18, device=device)
    ours, expected = scaled(x.t(), factor, dtypes[1]), (x.cpu().t().double() * factor.cpu().double()).float()
    assert ours.dtype is dtypes[1]
    assert ours[0, 0] == math.inf
    assert ours[1, 0] > 3 + 2**-7
    assert torch.equal(ours.cpu(), expected.to(dtypes[1]))


def test_the_kernel_shows_a_nan_and_hides_it_behind_an_ignored_target():
    kernels = pytest.importorskip("ds_fp8.layers.head.softmax_gradient_triton", reason="Triton is not installed")
    logits = torch.zeros(2, 5, device="cuda" if torch.cuda.is_available() else "cpu")
    logits[:, 3] = math.nan
    losses = kernels.softmax_gradient(
        logits, torch.tensor([0, IGNORED], device=logits.device), IGNORED, label_errors(logits.device), True
    )
    assert losses.isnan().tolist() == [True, False]
    assert logits[0].isnan().all()
    assert (logits[1] == 0).all()


@pytest.mark.parametrize("where", ["reference", "kernel", "cast"])
def test_targets_without_a_logit_are_counted_and_their_loss_is_nan(where):
    device = "cuda" if torch.cuda.is_available() and where != "reference" else "cpu"
    logits = torch.randn(128, 128, dtype=torch.bfloat16, device=device)
    targets = torch.arange(128, device=device)
    targets[[3, 5, 70]] = torch.tensor([700, -1, 128], device=device)
    targets[4] = IGNORED
    outside = torch.zeros(128, dtype=torch.bool).index_fill_(0, torch.tensor([3, 5, 70]), True)
    pop_label_errors()
    if where == "reference":
        losses = softmax_gradient(logits, targets, True)
    else:
        kernels = pytest.importorskip("ds_fp8.layers.head.softmax_gradient_triton", reason="Triton is not installed")
        options = targets, IGNORED, label_errors(logits.device)
        if where == "kernel":
            losses = kernels.softmax_gradient(logits, *options, True)
        else:
            losses, row = kernels.softmax_gradient_quantize(logits, *options, CastSpec(), True, None, 0)
            logits = row.dequantize()
    assert torch.equal(losses.isnan().cpu(), outside)
    assert torch.equal(logits.isnan().all(1).cpu(), outside)
    assert torch.equal(logits.isnan().any(1).cpu(), outside)
    said = pop_label_errors()
    assert said.startswith("3 labels are outside the vocabulary of 128 tokens, ")
    assert said.split(", ")[1] in ("700 for one", "-1 for one", "128 for one")
    assert pop_label_errors() is None


@pytest.mark.parametrize("wants_row", [True, False])
def test_the_kernel_casts_the_softmax_gradient(wants_row):
    kernels = pytest.importorskip("ds_fp8.layers.head.softmax_gradient_triton", reason="Triton is not installed")
    empty_result = pytest.importorskip("ds_fp8.casts.primitives_triton").empty_result
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bound = 1e-2 if torch.cuda.is_available() else 0.12  # Triton's interpreter rounds to FP8 coarsely
    torch.manual_seed(0)
    logits, targets = (3 * torch.randn(256, 384)).bfloat16().to(device), torch.randint(0, 384, (256,)).to(device)
    targets[::7] = IGNORED
    logits[14] = math.nan
    gradient = logits.float().cpu()
    expected = softmax_gradient(gradient, targets.cpu(), True)
    columns = empty_result(384, 512, "e4m3", "1x128", "pow2", torch.device(device))
    columns.data.view(torch.uint8).fill_(0)
    columns.scale.fill_(1)
    losses, row = kernels.softmax_gradient_quantize(
        logits, targets, IGNORED, label_errors(logits.device), CastSpec(), wants_row, columns, 256
    )
    assert error(losses, expected) < 1e-5
    assert error(columns.dequantize()[:, 256:], quantize(gradient.t()).dequantize()) < bound
    assert (columns.dequantize()[:, :256] == 0).all()
    assert (row is None) is not wants_row
    if wants_row:
        assert error(row.dequantize(), quantize(gradient).dequantize()) < bound


@pytest.mark.parametrize("preset", ["infir2", "hybrid_fast"])
def test_a_head_in_fp8_casts_by_tile_as_it_does_by_chunk(preset, monkeypatch):
    """Three chunks in two groups. Triton's interpreter rounds to FP8 coarsely."""
    pytest.importorskip("triton", reason="Triton is not installed")
    recipe = recipe_from_config(FP8Config.from_preset(preset, linear={"backend": "reference"}))
    monkeypatch.setattr(cross_entropy, "chunk_tokens", lambda *_: 128)
    given = operands(384, 64, 256, torch.bfloat16, "cuda" if torch.cuda.is_available() else "cpu")
    by_chunk = loss_and_gradients(lambda *each: linear_cross_entropy(*each, recipe), *given)
    monkeypatch.setattr(cross_entropy, "_quantizes_by_tile", lambda *_: True)
    by_tile = loss_and_gradients(lambda *each: linear_cross_entropy(*each, recipe), *given)
    assert error(by_tile[0], by_chunk[0]) < 1e-5
    for one, other in zip(by_tile[1:], by_chunk[1:], strict=True):
        assert error(one, other) < 0.12


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [*SIZES, (300, 128, 50257)], ids=str)
@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_gpu_agrees_with_all_logits(sizes, wants, dtype, chunked, monkeypatch):
    if chunked:
        monkeypatch.setattr(cross_entropy, "chunk_tokens", lambda *_: 128)
    given = operands(*sizes, dtype, "cuda")
    expected = loss_and_gradients(linear_cross_entropy_reference, *given, factor=0.37)
    for operand, wanted in zip(given[:2], wants, strict=True):
        operand.requires_grad_(wanted)
    loss = linear_cross_entropy(*given)
    (loss * 0.37).backward()
    assert error(loss.detach(), expected[0]) < TOLERANCE[dtype]
    for operand, wanted, theirs in zip(given[:2], wants, expected[1:], strict=True):
        if wanted:
            assert error(operand.grad, theirs) < TOLERANCE[dtype]
        else:
            assert operand.grad is None


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["infir2", "hybrid_fast"])
@pytest.mark.parametrize("tokens", [640, 600], ids=["whole tiles", "ragged"])
def test_a_head_in_fp8_on_a_gpu_is_the_emulated_one(tokens, preset, monkeypatch):
    monkeypatch.setattr(cross_entropy, "chunk_tokens", lambda *_: 256)
    results = []
    for device, backend in (("cuda", "auto"), ("cpu", "reference")):
        recipe = recipe_from_config(FP8Config.from_preset(preset, linear={"backend": backend}))
        given = operands(tokens, 128, 1024, torch.bfloat16, device)
        results.append(loss_and_gradients(lambda *each, r=recipe: linear_cross_entropy(*each, r), *given))
    for one, other in zip(*results, strict=True):
        assert error(one.cpu(), other) < 0.02
