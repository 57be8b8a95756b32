"""Rotated casts on a GPU: the kernels against the reference on a CPU, and a linear's gradients."""

import pytest
import torch

from ds_fp8.layers.attention.hadamard import ROTATION_BLOCKS, Rotation, rotate, unrotate
from tests.layers.linears import fp8_linear

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", ROTATION_BLOCKS)
@pytest.mark.parametrize("axis", [0, 1])
def test_rotations_are_those_of_the_reference(axis, block, dtype):
    rotation, x = Rotation(block, 1, axis), torch.randn(300, 384).to(dtype)
    rotated = rotate(x.cuda(), rotation)
    torch.testing.assert_close(rotated.cpu(), rotate(x, rotation), rtol=0, atol=1e-5)
    exact = torch.randint(-64, 65, (300, 384)).to(dtype)  # sums are exact in whatever order
    assert torch.equal(rotate(exact.cuda(), rotation).cpu(), rotate(exact, rotation))
    back = unrotate(rotated, rotation, 300)
    torch.testing.assert_close(back.cpu(), x.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("preset", ["infir2", "tensorwise", "rowwise", "halo", "nvfp4", "quartet"])
def test_a_linear_computes_as_on_a_cpu(preset):
    rotation = (
        {} if preset in ("halo", "nvfp4", "quartet") else {"fprop": "in_features", "dgrad": "tokens", "wgrad": "tokens"}
    )
    linear = fp8_linear(
        384, 256, preset=preset, linear={"backend": "reference", "rotation": rotation}, monitor={"every": 0}
    )
    x, dy = torch.randn(300, 384).bfloat16(), torch.randn(300, 256).bfloat16()
    results = []
    for where in ("cpu", "cuda"):
        linear = linear.to(where)
        leaf = x.to(where).requires_grad_()
        y = linear(leaf)
        results.append(
            [part.cpu().float() for part in (y, *torch.autograd.grad(y, [leaf, linear.weight], dy.to(where)))]
        )
    # Stochastic rounding draws other numbers there; two draws on a CPU part by 0.19 and 0.32.
    bound = {"nvfp4": 0.3, "quartet": 0.45}.get(preset, 0.02)
    for host, device in zip(*results, strict=True):
        assert (device - host).norm() < bound * host.norm()
