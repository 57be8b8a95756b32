"""Cross entropy without logits, alone, against the one with logits."""

import math

import pytest
import torch

from ds_fp8.modules.cross_entropy import IGNORED, linear_cross_entropy, linear_cross_entropy_reference
from tests.modules.losses import TOLERANCE, limit_chunks, relative_error

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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_loss_and_gradients_are_those_of_all_logits(sizes, chunked, dtype, monkeypatch):
    if chunked:
        limit_chunks(monkeypatch, 3, sizes[2])
    given = operands(*sizes, dtype)
    ours = loss_and_gradients(linear_cross_entropy, *given, factor=0.37)
    theirs = loss_and_gradients(linear_cross_entropy_reference, *given, factor=0.37)
    for result, expected in zip(ours, theirs, strict=True):
        assert result.dtype is expected.dtype
        assert result.shape == expected.shape
        assert relative_error(result, expected) < TOLERANCE[dtype]


def test_ignored_tokens_and_no_tokens():
    hidden, weight, targets = operands(5, 3, 7)
    for result in loss_and_gradients(linear_cross_entropy, hidden, weight, torch.full_like(targets, IGNORED)):
        assert (result == 0).all()
    for result in loss_and_gradients(linear_cross_entropy, *operands(0, 3, 7)):
        assert (result == 0).all()


def test_an_ignored_token_does_not_spread_its_nan():
    hidden, weight, targets = operands(5, 3, 7)
    with torch.no_grad():
        hidden[1] = math.nan
    loss, dhidden, _ = loss_and_gradients(linear_cross_entropy, hidden, weight, targets)
    assert loss.isfinite()
    assert dhidden.isfinite().all()


def test_a_nan_in_a_counted_token_is_seen():
    hidden, weight, targets = operands(5, 3, 7)
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


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_operand_gets_no_gradient(frozen):
    given = operands(17, 8, 131)
    expected = loss_and_gradients(linear_cross_entropy_reference, *given)[2 - frozen]
    given[frozen].requires_grad_(False)
    linear_cross_entropy(*given).backward()
    assert given[frozen].grad is None
    assert relative_error(given[1 - frozen].grad, expected) < TOLERANCE[torch.float32]


def test_without_gradients_the_loss_is_the_same():
    given = operands(17, 8, 131)
    with torch.no_grad():
        loss = linear_cross_entropy(*given)
    assert not loss.requires_grad
    assert loss == linear_cross_entropy(*given)


def test_backward_twice_and_no_second_derivative():
    hidden, weight, targets = operands(17, 8, 131)
    loss = linear_cross_entropy(hidden, weight, targets) / 3
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    (dhidden,) = torch.autograd.grad(loss * hidden.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dhidden.sum().backward()


def test_tokens_must_match():
    hidden, weight, targets = operands(5, 3, 7)
    with pytest.raises(ValueError, match="5"):
        linear_cross_entropy(hidden, weight, targets[:3])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [*SIZES, (300, 128, 50257)], ids=str)
@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True)], ids=str)
def test_liger_agrees_with_all_logits(sizes, wants, dtype):
    pytest.importorskip("liger_kernel")
    given = operands(*sizes, dtype, "cuda")
    expected = loss_and_gradients(linear_cross_entropy_reference, *given, factor=0.37)
    for operand, wanted in zip(given[:2], wants, strict=True):
        operand.requires_grad_(wanted)
    loss = linear_cross_entropy(*given)
    (loss * 0.37).backward()
    assert relative_error(loss.detach(), expected[0]) < TOLERANCE[dtype]
    for operand, wanted, theirs in zip(given[:2], wants, expected[1:], strict=True):
        if wanted:
            assert relative_error(operand.grad, theirs) < TOLERANCE[dtype]
        else:
            assert operand.grad is None
