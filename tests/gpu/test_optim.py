"""The optimizer on a GPU: that it waits for nothing, allocates nothing, and agrees with the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ds_fp8.optim import AdamW
from tests.optim.numbers import gradients
from tests.optim.test_adamw import PRECISIONS, moments

pytestmark = pytest.mark.gpu

HYPERPARAMETERS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
GROUPED = [name for name, kept in PRECISIONS.items() if kept.get("granularity") != "tensor"]
WEIGHTS = {"rtol": 1e-4, "atol": 1e-6}  # Of FP32 weights after a few steps on a GPU and on a CPU


def parameter(numel: int, device: str = "cuda") -> nn.Parameter:
    return nn.Parameter((gradients(numel, seed=1) * 100).to(device))


def matrix_adamw(parameters: list[nn.Parameter], **words) -> AdamW:
    """AdamW of flattened matrices: masters of vectors are FP32 in any case."""
    optimizer = AdamW(parameters, **words)
    for p in parameters:
        optimizer.set_segments(p, (p.numel(),))
    return optimizer


def take(optimizer: AdamW, p: nn.Parameter, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        p.grad = gradients(p.numel(), seed=10 + step).to(p.device)
        optimizer.step()


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_a_gpu_trains_as_a_cpu_does(precision):
    kept = {**PRECISIONS[precision], "stochastic_rounding": False}
    states = []
    for device in ("cpu", "cuda"):
        p = parameter(100_003, device)
        optimizer = matrix_adamw([p], **HYPERPARAMETERS, **kept)
        take(optimizer, p, 3)
        states.append((p.detach().cpu(), optimizer))
    torch.testing.assert_close(states[1][0], states[0][0], rtol=5e-3, atol=5e-5)
    for left, right in zip(moments(states[1][1]), moments(states[0][1]), strict=True):
        # Codes differ where a number lies between two: few, and by a step.
        assert ((left - right).norm() / right.norm()).item() < 0.01


def test_fp32_moments_are_torchs_fused_adamw():
    left, right = parameter(100_003), parameter(100_003)
    take(AdamW([left], **HYPERPARAMETERS), left, 5)
    take(torch.optim.AdamW([right], **HYPERPARAMETERS, fused=True), right, 5)
    torch.testing.assert_close(left, right, **WEIGHTS)


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_a_step_waits_for_nothing_and_takes_no_memory(precision):
    p = parameter(1 << 24)
    optimizer = matrix_adamw([p], **HYPERPARAMETERS, **PRECISIONS[precision])
    take(optimizer, p, 2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert precision not in GROUPED or torch.cuda.max_memory_allocated() == held


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_a_checkpoint_resumes_exactly(precision):
    p = parameter(100_003)
    optimizer = matrix_adamw([p], **HYPERPARAMETERS, **PRECISIONS[precision])
    take(optimizer, p, 3)
    q = nn.Parameter(p.detach().clone())
    again = matrix_adamw([q], **PRECISIONS[precision])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for left, right in zip(moments(again), moments(optimizer), strict=True):
        assert torch.equal(left, right)
    for number, (one, x) in enumerate(((optimizer, p), (again, q))):
        take(one, x, 2, start=3)
        assert one.state[x]["step"] == 5, number
    assert torch.equal(p, q)
    assert again.state[q]["exp_avg"] is not optimizer.state[p]["exp_avg"]


@pytest.mark.alone
def test_more_elements_than_32_bits_count():
    numel = (1 << 31) + 128 * 1000 + 77
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free memory")
    p = nn.Parameter(torch.zeros(numel, device="cuda"))
    optimizer = AdamW([p], lr=1e-3, weight_decay=0.0, **PRECISIONS["coat"])
    p.grad = torch.zeros(numel, device="cuda")
    last = gradients(1000)
    p.grad[-1000:] = last.cuda()
    optimizer.step()
    assert torch.equal(p[-1000:].sign().cpu(), -last.sign())
    assert p[:-1000].count_nonzero() == 0
    kept = optimizer.state[p]["exp_avg"].narrow(0, numel - 1000, 1000).cpu()
    # The smallest of a group is 2.3 steps of the format: half a step is more than a fifth of it.
    torch.testing.assert_close(kept, 0.1 * last, rtol=0.5 / 2.3, atol=0)


def test_grad_scaler():
    p = parameter(10_000)
    optimizer = matrix_adamw([p], **HYPERPARAMETERS, **PRECISIONS["coat"])
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for value in (1.0, torch.inf, 1.0):
        loss = scaler.scale((p * value).sum())
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.state[p]["step"] == 2
    assert p.isfinite().all()
