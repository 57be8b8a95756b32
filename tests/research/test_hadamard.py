"""Block Hadamard transforms: against a matrix product in FP64, undone exactly as far as FP32 goes, and part by part."""

from dataclasses import replace

import pytest
import torch

from ds_fp8.layers.attention.hadamard import (
    ROTATION_BLOCKS,
    Rotation,
    kernel_arguments,
    padded,
    rotate,
    rotation_matrix,
    unrotate,
)
from ds_fp8.research.formats import ResearchSpec, cast_matrix

CPU = torch.device("cpu")
SEEDS = [None, 0, 7]


def by_matrix(x, rotation):
    """Multiply every block by R, in FP64 and with a matrix made of the definition: (-1)^popcount(i & j)."""
    n = rotation.block
    signs = rotation_matrix(rotation, CPU, torch.float64)[:, 0]
    i = torch.arange(n)
    bits = torch.tensor([[int(a & b).bit_count() for b in i] for a in i])
    matrix = signs[:, None] * (1 - 2 * (bits % 2)).double() / n**0.5
    x = x.double() if rotation.axis == 1 else x.double().t()
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % n))
    result = torch.cat([block @ matrix for block in x.split(n, 1)], 1)
    return result if rotation.axis == 1 else result.t()


@pytest.mark.parametrize(("block", "seed"), [(16, 0), (32, None), (64, 7), (128, None)])
@pytest.mark.parametrize("shape", [(1, 128), (129, 384)])
@pytest.mark.parametrize("axis", [0, 1])
def test_it_is_the_product_with_the_matrix_and_can_be_undone(axis, shape, block, seed):
    rotation = Rotation(block, seed, axis)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    rotated = rotate(x, rotation)
    assert rotated.shape == (padded(shape[0], rotation), shape[1])
    torch.testing.assert_close(rotated.double(), by_matrix(x, rotation), rtol=0, atol=2e-6)
    torch.testing.assert_close(unrotate(rotated, rotation, shape[0]), x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("block", ROTATION_BLOCKS)
def test_signs_depend_on_the_seed_alone(block):
    plain, first, second = (rotation_matrix(Rotation(block, seed), CPU, torch.float32) for seed in SEEDS)
    assert (plain[:, 0] == 1).all()
    assert (first[:, 0] < 0).any()
    assert (first[:, 0] > 0).any()
    assert not torch.equal(first, second)
    assert torch.equal(first @ first.t(), block * torch.eye(block))


def test_a_part_is_rotated_to_the_same_bits():
    x = torch.randn(6, 384)
    rotation = Rotation(128, 1)
    assert torch.equal(rotate(x.view(-1, 128), rotation).view(6, 384), rotate(x, rotation))
    assert torch.equal(rotate(x[2:3, 128:256], rotation), rotate(x, rotation)[2:3, 128:256])


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_overflow_spoils_its_block(value):
    x = torch.randn(4, 256)
    x[2, 70] = value
    spoilt = ~rotate(x, Rotation(64)).isfinite()
    assert spoilt[2, 64:128].all()
    assert spoilt.sum() == 64


def test_columns_that_are_no_whole_blocks_are_refused():
    assert rotate(torch.empty(0, 128), Rotation(axis=0)).shape == (0, 128)
    with pytest.raises(ValueError, match="130 columns are not a multiple of the rotation block 128"):
        rotate(torch.zeros(2, 130), Rotation())


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("format", "granularity", "scale"), [("e4m3", "1x128", "pow2"), ("int8", "row", "fp32")])
def test_casts_rotate_behind_the_factors(format, granularity, scale, rounding):
    x, factors = torch.randn(70, 256), (torch.rand(70), torch.rand(256))
    turned = x * factors[0][:, None] * factors[1]
    spec = ResearchSpec(format, granularity, scale, rounding)
    for rotation, columnwise in ((Rotation(128, 2), False), (Rotation(16, 5, 0), True), (Rotation(16, 5, 0), False)):
        torch.manual_seed(0)
        found = cast_matrix(x, replace(spec, rotation=rotation), *factors, columnwise=columnwise)
        numbers = rotate(turned, rotation)
        torch.manual_seed(0)
        expected = cast_matrix(numbers.t().contiguous() if columnwise else numbers, spec)
        assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(found.scale, expected.scale)


kernels = pytest.importorskip("ds_fp8.layers.attention.hadamard_triton", reason="Triton is not installed")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the compiled kernels")


def whole_numbers(*shape, dtype=torch.float32):
    """Sums of such are exact in FP32, in whatever order."""
    return torch.randint(-64, 65, shape, generator=torch.Generator().manual_seed(2)).to(dtype)


@interpreted
@pytest.mark.parametrize(
    ("block", "seed", "dtype"),
    [(16, 3, torch.float32), (32, None, torch.float16), (64, 1, torch.bfloat16), (128, 0, torch.bfloat16)],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_the_kernel_rotates_to_the_same_bits_and_back(axis, block, seed, dtype):
    rotation = Rotation(block, seed, axis)
    x = whole_numbers(131, 256, dtype=dtype)
    rotated = kernels.rotate_tiles(x, *kernel_arguments(rotation, x), torch.float32)
    assert torch.equal(rotated, rotate(x, rotation))
    back = kernels.rotate_tiles(rotated, *kernel_arguments(rotation, rotated), torch.float32, inverse=True)
    torch.testing.assert_close(back[:131], x.float(), rtol=1e-5, atol=1e-4)
    numbers = torch.randn(131, 256)
    found = kernels.rotate_tiles(numbers, *kernel_arguments(rotation, numbers), torch.float32)
    torch.testing.assert_close(found, rotate(numbers, rotation), rtol=0, atol=4e-6)
