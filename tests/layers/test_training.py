"""Training in FP8 ends where training in BF16 ends."""

import copy

import pytest
import torch
from torch import nn

from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.config.presets import PRESETS
from ds_fp8.engine.plans import convert

STEPS = 100


def final_loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """First and last loss of a BF16 model trained with AdamW on FP32 master weights."""
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=3e-3)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(x).float(), target)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, parameters)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.float()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    return losses[0], losses[-1]


@pytest.fixture(scope="module")
def regression():
    """(an untrained model, inputs, targets, the loss at which the model ends in BF16)."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(40, 200), nn.SiLU(), nn.Linear(200, 7))
    model = nn.Sequential(nn.Linear(40, 200), nn.SiLU(), nn.Linear(200, 7)).bfloat16()
    x = torch.randn(2048, 40)  # more targets than the model can learn by heart
    with torch.no_grad():
        target = teacher(x) * 4
    target = target + 0.3 * torch.randn_like(target)  # what is left to every model, so that losses compare as ratios
    first, bf16 = final_loss(copy.deepcopy(model), x.bfloat16(), target)
    assert bf16 < first / 3
    return model, x.bfloat16(), target, bf16


@pytest.mark.parametrize("preset", PRESETS)
def test_a_regression_reaches_the_loss_of_bf16(preset, regression):
    model, x, target, bf16 = regression
    model = copy.deepcopy(model)
    convert(model, parse_fp8({"fp8": {"preset": preset}}))
    assert final_loss(model, x, target)[1] == pytest.approx(bf16, rel=0.03)
