"""Block Hadamard transforms: against a matrix product in FP64, undone exactly as far as FP32 goes, and part by part."""

import pytest
import torch

from ds_fp8.casts import quantize, quantize_both, quantize_columnwise, rotate, unrotate
from ds_fp8.casts.hadamard import padded, rotation_matrix
from ds_fp8.config.formats import ROTATION_BLOCKS, Rotation, static_scale_type

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


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("block", ROTATION_BLOCKS)
@pytest.mark.parametrize("shape", [(1, 128), (70, 256), (129, 384)])
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


def test_it_cancels_in_a_product_along_either_axis():
    a, b = torch.randn(40, 256), torch.randn(50, 256)
    rotation = Rotation(64, 3)
    torch.testing.assert_close(rotate(a, rotation) @ rotate(b, rotation).t(), a @ b.t(), rtol=0, atol=1e-4)
    a, b = torch.randn(77, 40), torch.randn(77, 50)
    rotation = Rotation(32, None, 0)
    torch.testing.assert_close(rotate(a, rotation).t() @ rotate(b, rotation), a.t() @ b, rtol=0, atol=1e-4)


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


@pytest.mark.parametrize("axis", [0, 1])
def test_empty(axis):
    assert rotate(torch.empty(0, 128), Rotation(axis=axis)).shape == (0, 128)


def test_columns_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="130 columns are not a multiple of the rotation block 128"):
        rotate(torch.zeros(2, 130), Rotation())


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("format", "granularity", "scale"), [("e4m3", "1x128", "pow2"), ("int8", "row", "fp32")])
def test_casts_rotate_behind_the_factors(format, granularity, scale, rounding):
    x, row, column = torch.randn(70, 256), torch.rand(70), torch.rand(256)
    words = format, granularity, scale
    turned = x * row[:, None] * column
    along, across = Rotation(128, 2), Rotation(16, 5, 0)

    def seeded(function, *args, **kwargs):
        torch.manual_seed(0)
        return function(*args, rounding=rounding, **kwargs)

    def assert_equal(result, expected):
        assert torch.equal(result.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(result.scale, expected.scale)

    factors = {"row_factor": row, "column_factor": column}
    assert_equal(
        seeded(quantize, x, *words, rotation=along, **factors), seeded(quantize, rotate(turned, along), *words)
    )
    expected = seeded(quantize, rotate(turned, across).t().contiguous(), *words)
    assert_equal(seeded(quantize_columnwise, x, *words, rotation=across, **factors), expected)
    both = quantize_both(x, format, granularity, granularity, scale, row_rotation=across, column_rotation=along)
    assert both[0].shape == (80, 256)
    assert both[1].shape == (256, 70)
    assert_equal(both[0], quantize(rotate(x, across), *words))
    assert_equal(both[1], quantize_columnwise(rotate(x, along), *words))


kernels = pytest.importorskip("ds_fp8.casts.rotation_triton", reason="Triton is not installed")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the compiled kernels")
PAIRS = [
    ("1x128", "1x128"), ("128x128", "128x128"), ("row", "row"), ("tensor", "tensor"), ("tensor", None), (None, "row"),
]  # fmt: skip


def whole_numbers(*shape, dtype=torch.float32):
    """Sums of such are exact in FP32, in whatever order."""
    return torch.randint(-64, 65, shape, generator=torch.Generator().manual_seed(2)).to(dtype)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("block", "seed"), [(16, 3), (32, None), (64, 1), (128, 0)])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_kernel_rotates_to_the_same_bits_and_back(axis, block, seed, dtype):
    rotation = Rotation(block, seed, axis)
    x = whole_numbers(131, 256, dtype=dtype)
    rotated = kernels.rotate_tiles(x, rotation, torch.float32)
    assert torch.equal(rotated, rotate(x, rotation))
    back = kernels.rotate_tiles(rotated, rotation, torch.float32, inverse=True)
    torch.testing.assert_close(back[:131], x.float(), rtol=1e-5, atol=1e-4)
    numbers = torch.randn(131, 256)
    torch.testing.assert_close(
        kernels.rotate_tiles(numbers, rotation, torch.float32), rotate(numbers, rotation), rtol=0, atol=4e-6
    )


@interpreted
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize(("rowwise", "columnwise"), PAIRS)
@pytest.mark.parametrize("shape", [(1, 128), (130, 256), (128, 128)])
def test_the_kernel_rotates_and_casts_in_one_pass(shape, rowwise, columnwise, scale, factors):
    """Scales bit for bit; the interpreter rounds to FP8 in its own way, so of the codes most."""
    x = whole_numbers(*shape)
    row, column = (2.0 ** torch.randint(-2, 3, (size,)) for size in shape) if factors else (None, None)
    for rotations in (
        (Rotation(32, 1, 1), Rotation(16, None, 0)),
        (Rotation(128, None, 0), None),
        (None, Rotation(64, 2)),
    ):
        words = rowwise, columnwise
        expected = quantize_both(x, "e4m3", *words, scale, row, column, "nearest", *rotations)
        results = kernels.quantize_rotated(x, "e4m3", scale, *words, *rotations, row, column)
        for result, wanted in zip(results, expected, strict=True):
            assert (result is None) == (wanted is None)
            if wanted is not None:
                assert result.shape == wanted.shape
                assert torch.equal(result.scale, wanted.scale)
                assert (result.data.view(torch.uint8) == wanted.data.view(torch.uint8)).float().mean() > 0.8


@interpreted
@pytest.mark.parametrize("rotation", [Rotation(16, 1, 0), Rotation(64)])
def test_the_kernel_with_a_static_scale(rotation):
    """Numbers whose rotation E4M3 holds exactly."""
    numbers = torch.randint(-8, 9, (48, 128), generator=torch.Generator().manual_seed(2)).float()
    x, words = unrotate(numbers, rotation, 48), ("e4m3", static_scale_type())
    row, column = kernels.quantize_rotated(x, *words, "tensor", "tensor", rotation, rotation)
    assert torch.equal(row.dequantize(), numbers)
    assert torch.equal(column.dequantize(), numbers.t())


def test_the_kernel_of_nothing_and_of_columns_that_are_no_whole_blocks():
    row, column = kernels.quantize_rotated(torch.empty(0, 128), "e4m3", "pow2", "row", "1x128", None, Rotation(axis=0))
    assert row.shape == (0, 128)
    assert column.shape == (128, 0)
    with pytest.raises(ValueError, match="130 columns"):
        kernels.quantize_rotated(torch.zeros(2, 130), "e4m3", "pow2", "row", None, Rotation(), None)
