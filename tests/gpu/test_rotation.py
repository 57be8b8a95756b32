"""Rotated casts on a GPU: the kernels against the reference on a CPU, and a linear's gradients."""

import itertools

import pytest
import torch

from ds_fp8.casts import quantize_both, rotate, unrotate
from ds_fp8.casts.rotation import rotate_reference
from ds_fp8.config.formats import ROTATION_BLOCKS, Rotation
from tests.layers.linears import fp8_linear

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", ROTATION_BLOCKS)
@pytest.mark.parametrize("axis", [0, 1])
def test_rotations_are_those_of_the_reference(axis, block, dtype):
    rotation, x = Rotation(block, 1, axis), torch.randn(300, 384).to(dtype)
    rotated = rotate(x.cuda(), rotation)
    torch.testing.assert_close(rotated.cpu(), rotate_reference(x, rotation), rtol=0, atol=1e-5)
    exact = torch.randint(-64, 65, (300, 384)).to(dtype)  # sums are exact in whatever order
    assert torch.equal(rotate(exact.cuda(), rotation).cpu(), rotate_reference(exact, rotation))
    back = unrotate(rotated, rotation, 300)
    torch.testing.assert_close(back.cpu(), x.float(), rtol=0, atol=1e-5)


# A rotation of FP32 tiles compiles for 20 s: once a granularity, for the casts behind it are the same code.
CASTS = [*itertools.product(DTYPES[:2], ["e4m3", "e5m2"], ["pow2", "fp32"]), (torch.float32, "e4m3", "fp32")]


@pytest.mark.parametrize(("dtype", "format", "scale"), CASTS)
@pytest.mark.parametrize("granularity", ["1x128", "128x128", "row", "tensor"])
@pytest.mark.parametrize("shape", [(1, 128), (300, 384), (256, 256)])
def test_casts_are_bit_equal_where_sums_are_exact(shape, granularity, scale, format, dtype):
    x = torch.randint(-64, 65, shape).to(dtype)
    rotations = Rotation(128, None, 1), Rotation(16, 5, 0)
    words = format, granularity, granularity, scale, None, None, "nearest", *rotations
    for result, expected in zip(quantize_both(x.cuda(), *words), quantize_both(x, *words), strict=True):
        assert torch.equal(result.scale.cpu(), expected.scale)
        assert torch.equal(result.data.cpu().view(torch.uint8), expected.data.view(torch.uint8))


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
