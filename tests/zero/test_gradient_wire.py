"""Messages of the gradient reduction: their layout, their casts, and the kernels against the reference."""

import math

import pytest
import torch

from ds_fp8.casts import quantize
from ds_fp8.zero.reduce import Message, Slices, pack_reference, sum_rows_reference

# Relative error of one cast per group of 128, as a share of the gradient's norm.
TOLERANCE = {"e4m3": 0.04, "e5m2": 0.08}
# Of the kernels: without a GPU they run in Triton's interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [
    # rows, places, and the elements of each gradient
    (1, 1, [4096]),
    (2, 1, [5000, 131]),
    (3, 1, [4097, 128 * 384]),
    (2, 2, [5000, 8192]),
]


def kernels():
    return pytest.importorskip("ds_fp8.zero.reduce_triton", reason="Triton is not installed")


def laid_out(rows, places, numels):
    slices, width = [], 0
    for numel in numels:
        slices.append(Slices(math.ceil(numel / (rows * places)), width))
        width += slices[-1].padded
    return Message(rows, places, math.ceil(width / 512) * 512), slices


def gradients_of(numels, dtype=torch.bfloat16, exact=False):
    """Random gradients; `exact`: numbers that E4M3 holds in units of any scale that a group of them can have."""
    generator = torch.Generator().manual_seed(0)
    if not exact:
        return [torch.randn(numel, generator=generator).to(dtype) for numel in numels]
    signs = [torch.randint(0, 2, (numel,), generator=generator) * 2 - 1 for numel in numels]
    eighths = [torch.randint(8, 16, (numel,), generator=generator) / 8 for numel in numels]
    return [(sign * eighth).to(dtype) for sign, eighth in zip(signs, eighths, strict=True)]


def packed(pack, gradients, shape, slices, format="e4m3", **options):
    message = torch.zeros(shape.rows, shape.row_bytes, dtype=torch.uint8, device=gradients[0].device)
    for gradient, place in zip(gradients, slices, strict=True):
        pack(gradient, message, shape, place, format, **options)
    return message


def slices_in(message, shape, slices, numel, format):
    """What a message says of the gradient at `slices`, by way of one receiver a row."""
    rows = [sum_rows_reference(message[row : row + 1], shape_of_one(shape), format) for row in range(shape.rows)]
    parts = [
        rows[rank % shape.rows].view(shape.places, shape.width)[rank // shape.rows, slices.column :][: slices.length]
        for rank in range(shape.rows * shape.places)
    ]
    return torch.cat(parts)[:numel]


def shape_of_one(shape):
    return Message(1, shape.places, shape.width)


@pytest.mark.parametrize(("rows", "places", "numels"), SHAPES)
@pytest.mark.parametrize("format", TOLERANCE)
def test_every_rank_finds_its_slice(rows, places, numels, format):
    shape, slices = laid_out(rows, places, numels)
    gradients = gradients_of(numels)
    message = packed(pack_reference, gradients, shape, slices, format)
    assert message.shape[1] == shape.places * shape.width * 33 // 32
    for gradient, place in zip(gradients, slices, strict=True):
        found = slices_in(message, shape, place, gradient.numel(), format)
        assert found.shape == gradient.shape
        error = (found - gradient.float()).norm() / gradient.float().norm()
        assert 0 < error < TOLERANCE[format]


def test_one_scale_saturates_and_counts():
    shape, slices = laid_out(2, 1, [5000])
    gradient = torch.ones(5000)
    gradient[:7], gradient[7] = 1000.0, -1000.0
    clipped = torch.zeros((), dtype=torch.int32)
    message = packed(pack_reference, [gradient], shape, slices, scale=torch.tensor(0.5), clipped=clipped)
    found = slices_in(message, shape, slices[0], 5000, "e4m3")
    assert clipped == 8
    assert (found[:7] == 224).all()
    assert found[7] == -224
    assert (found[8:] == 1).all()


@pytest.mark.parametrize("format", ["int8", "e3m4", "log8", "e2m1", "int4"])
@pytest.mark.parametrize(("rows", "places", "numels"), SHAPES)
def test_emulated_messages_say_what_the_cast_of_each_slice_says(rows, places, numels, format):
    shape, slices = laid_out(rows, places, numels)
    gradients = gradients_of(numels)
    message = packed(pack_reference, gradients, shape, slices, format)
    for gradient, place in zip(gradients, slices, strict=True):
        found = slices_in(message, shape, place, len(gradient), format)
        parts = gradient.float().split(place.length)
        expected = torch.cat([quantize(part, format, "1x128").dequantize() for part in parts])
        assert torch.equal(found, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_overflow_is_sent(value):
    shape, slices = laid_out(2, 1, [5000])
    (gradient,) = gradients_of([5000], torch.float32)
    gradient[300] = value
    message = packed(pack_reference, [gradient], shape, slices)
    found = slices_in(message, shape, slices[0], 5000, "e4m3")
    assert found[256:384].isnan().all()
    assert found.isnan().sum() == 128


@pytest.mark.parametrize(("rows", "places", "numels"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_send_the_same_bytes(rows, places, numels, dtype):
    """On numbers that FP8 holds: Triton's interpreter does not round its casts to the nearest."""
    shape, slices = laid_out(rows, places, numels)
    gradients = [gradient.to(DEVICE) for gradient in gradients_of(numels, dtype, exact=True)]
    plain, ours = (packed(pack, gradients, shape, slices) for pack in (pack_reference, kernels().pack))
    assert torch.equal(plain, ours)


def test_the_kernels_saturate_alike():
    shape, slices = laid_out(2, 1, [5000])
    (gradient,) = gradients_of([5000], torch.float32, exact=True)
    gradient[:50] *= 4096
    gradient = gradient.to(DEVICE)
    counts = [torch.zeros((), dtype=torch.int32, device=DEVICE) for _ in range(2)]
    plain, ours = (
        packed(pack, [gradient], shape, slices, scale=torch.tensor(0.25, device=DEVICE), clipped=count)
        for pack, count in zip((pack_reference, kernels().pack), counts, strict=True)
    )
    assert torch.equal(plain, ours)
    assert counts == [50, 50]


@pytest.mark.parametrize(("rows", "places", "numels"), SHAPES)
@pytest.mark.parametrize("divisor", [1, 3])
@pytest.mark.parametrize("format", TOLERANCE)
def test_the_kernels_sum_alike(rows, places, numels, divisor, format):
    shape, slices = laid_out(rows, places, numels)
    message = packed(pack_reference, gradients_of(numels, exact=True), shape, slices, format)
    # On the CPU: on a GPU torch divides by a number as it multiplies by its reciprocal.
    plain = sum_rows_reference(message, shape, format, divisor)
    found = kernels().sum_rows(message.to(DEVICE), shape, format, divisor)
    assert torch.equal(plain, found.cpu())
    assert plain.count_nonzero() > 0
