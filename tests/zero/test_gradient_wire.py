"""Messages of the gradient reduction: their layout, casts and sums by hand, and the kernels against the reference."""

import math

import pytest
import torch

import ds_fp8.research  # noqa: F401  the emulated formats
from ds_fp8.casts import quantize
from ds_fp8.zero.reduce import (
    LIMIT,
    SPAN,
    Message,
    Slices,
    Target,
    add_rows_reference,
    pack_reference,
    span_count,
    sum_rows_reference,
)

kernels = pytest.importorskip("ds_fp8.zero.reduce_triton", reason="Triton is not installed")
# Relative error of one cast per group of 128, as a share of the gradient's norm
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
shapes = pytest.mark.parametrize(("rows", "places", "numels"), SHAPES)


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
    of_one = Message(1, shape.places, shape.width)
    rows = [sum_rows_reference(message[row : row + 1], of_one, format) for row in range(shape.rows)]
    parts = [
        rows[rank % shape.rows].view(shape.places, shape.width)[rank // shape.rows, slices.column :][: slices.length]
        for rank in range(shape.rows * shape.places)
    ]
    return torch.cat(parts)[:numel]


@shapes
@pytest.mark.parametrize("format", ["e4m3", "e5m2", "int8", "e3m4", "log8", "e2m1", "int4"])
def test_every_rank_finds_the_cast_of_its_slice(rows, places, numels, format):
    shape, slices = laid_out(rows, places, numels)
    gradients = gradients_of(numels)
    message = packed(pack_reference, gradients, shape, slices, format)
    if format in TOLERANCE:
        assert message.shape[1] == shape.places * shape.width * 33 // 32
    for gradient, place in zip(gradients, slices, strict=True):
        found = slices_in(message, shape, place, len(gradient), format)
        parts = gradient.float().split(place.length)
        assert torch.equal(found, torch.cat([quantize(part, format, "1x128").dequantize() for part in parts]))
        error = (found - gradient.float()).norm() / gradient.float().norm()
        assert 0 < error < TOLERANCE.get(format, 1)


def test_one_scale_saturates_and_counts():
    shape, slices = laid_out(2, 1, [5000])
    gradient, clipped = torch.ones(5000), torch.zeros((), dtype=torch.int32)
    gradient[:7], gradient[7] = 1000.0, -1000.0
    message = packed(pack_reference, [gradient], shape, slices, scale=torch.tensor(0.5), clipped=clipped)
    found = slices_in(message, shape, slices[0], 5000, "e4m3")
    assert clipped == 8
    assert (found[:7] == 224).all()
    assert found[7] == -224
    assert (found[8:] == 1).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_overflow_is_sent(value):
    shape, slices = laid_out(2, 1, [5000])
    (gradient,) = gradients_of([5000], torch.float32)
    gradient[300] = value
    found = slices_in(packed(pack_reference, [gradient], shape, slices), shape, slices[0], 5000, "e4m3")
    assert found[256:384].isnan().all()
    assert found.isnan().sum() == 128


@shapes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_send_the_same_bytes_and_sum_alike(rows, places, numels, dtype):
    """Off a GPU on numbers that FP8 holds: Triton's interpreter does not round its casts to the nearest."""
    shape, slices = laid_out(rows, places, numels)
    gradients = gradients_of(numels, dtype, exact=DEVICE == "cpu")
    for format in TOLERANCE:
        plain = packed(pack_reference, gradients, shape, slices, format).to(DEVICE)
        ours = packed(kernels.pack, [gradient.to(DEVICE) for gradient in gradients], shape, slices, format)
        assert torch.equal(plain, ours) or (format, DEVICE) == ("e5m2", "cpu")
        for divisor in (1, 3):
            # On the CPU: on a GPU torch divides by a number as it multiplies by its reciprocal.
            expected = sum_rows_reference(plain.cpu(), shape, format, divisor)
            found = kernels.sum_rows(plain, shape, format, divisor)
            assert torch.equal(expected, found.cpu())
            assert expected.count_nonzero() > 0


def test_the_kernels_saturate_alike():
    shape, slices = laid_out(2, 1, [5000])
    (gradient,) = gradients_of([5000], torch.float32, exact=True)
    gradient[:50] *= 4096
    counts = [torch.zeros((), dtype=torch.int32, device=DEVICE) for _ in range(2)]
    plain, ours = (
        packed(pack, [gradient.to(DEVICE)], shape, slices, scale=torch.tensor(0.25, device=DEVICE), clipped=count)
        for pack, count in zip((pack_reference, kernels.pack), counts, strict=True)
    )
    assert torch.equal(plain, ours)
    assert counts == [50, 50]


# ---------------------------------------------------------------- rows of a message summed into the gradient shards


NUMELS = {"ragged": [5000, 131 * 301, 70], "aligned": [8192, 2 * SPAN * 3]}


def message_of(numels, rows=3):
    """(message, its shape, the targets of rank 0, elements of its shards) of gradients that E4M3 holds exactly."""
    shape, slices = laid_out(rows, 1, numels)
    message = packed(pack_reference, gradients_of(numels, exact=True), shape, slices)
    targets, start, span = [], 0, 0
    for place in slices:
        targets.append(Target(place.column, start, place.length, span))
        start += place.length
        span += span_count(place.length)
    return message, shape, targets, start


def squares_of(targets):
    return torch.full((sum(span_count(target.numel) for target in targets),), torch.nan).double()


@pytest.mark.parametrize("numels", NUMELS.values(), ids=NUMELS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_and_their_squares(numels, accumulate):
    for rows, dtype in ((3, torch.float32), (2, torch.float32), (3, torch.bfloat16)):
        message, shape, targets, total = message_of(numels, rows)
        before, found = torch.arange(total) % 7.0, []
        for add_rows, device in ((add_rows_reference, "cpu"), (kernels.add_rows, DEVICE)):
            gradient, squares = before.to(device, dtype, copy=True), squares_of(targets).to(device)
            add_rows(message.to(device), shape, "e4m3", rows, targets, gradient, squares, accumulate)
            found.append((gradient.cpu(), squares.cpu()))
        (expected, squares), (by_kernel, squares_by_kernel) = found
        if dtype is torch.float32:
            sums = sum_rows_reference(message, shape, "e4m3", rows)
            for target in targets:
                mine = slice(target.start, target.start + target.numel)
                by_hand = sums[target.column : target.column + target.numel] + accumulate * before[mine]
                assert torch.equal(expected[mine], by_hand)
            assert squares.sum().item() == pytest.approx(expected.double().square().sum().item(), rel=1e-12)
        if dtype is torch.bfloat16 and DEVICE == "cpu":  # the interpreter truncates to BF16
            torch.testing.assert_close(by_kernel, expected, rtol=2**-7, atol=0)
        else:
            assert torch.equal(by_kernel, expected)
            torch.testing.assert_close(squares_by_kernel, squares, rtol=1e-12, atol=0)


def test_a_sum_of_squares_beyond_fp32_is_finite_and_inf_is_not():
    message, shape, targets, total = message_of([8192])
    gradient, squares = torch.full((total,), 1e30), squares_of(targets)
    add_rows_reference(message, shape, "e4m3", 1, targets, gradient, squares, True)
    assert squares.isfinite().all()
    gradient[5] = torch.inf
    add_rows_reference(message, shape, "e4m3", 1, targets, gradient, squares, True)
    assert not squares.sum().isfinite()


@pytest.mark.parametrize("rows", [7, 8, 9, 16, 17, 256])
def test_many_ranks_are_summed_in_their_order(rows):
    """In a loop, with the bits of the sum that is written out: rounding makes another order visible."""
    shape, slices = laid_out(rows, 1, [300, 5000 * rows])
    gradients = [torch.randn(numel, generator=torch.Generator().manual_seed(numel)) for numel in (300, 5000 * rows)]
    message, targets = (
        packed(pack_reference, gradients, shape, slices),
        [Target(slices[1].column, 0, slices[1].length, 0)],
    )
    results = []
    for add_rows, device in ((add_rows_reference, "cpu"), (kernels.add_rows, DEVICE)):
        gradient = torch.zeros(slices[1].length, device=device)
        add_rows(message.to(device), shape, "e4m3", rows, targets, gradient, squares_of(targets).to(device), False)
        results.append(gradient.cpu())
    assert torch.equal(*results)


def test_tables_of_buckets_that_vary_are_forgotten(monkeypatch):
    message, shape, targets, total = message_of([5000, 6000, 7000])
    message, gradient, squares = message.to(DEVICE), torch.zeros(total, device=DEVICE), squares_of(targets).to(DEVICE)
    monkeypatch.setattr(kernels, "_caches", type(kernels._caches)())
    for number in range(1, LIMIT + 5):
        kernels._caches.setdefault(squares, kernels._Cache()).tables(
            (targets[0]._replace(numel=number),), message.device
        )
    cache = kernels._caches[squares]
    assert len(cache._recent) == LIMIT
    kept = cache.tables((targets[0]._replace(numel=LIMIT + 4),), message.device)
    assert cache.tables((targets[0]._replace(numel=LIMIT + 4),), message.device) is kept
    kernels.add_rows(message, shape, "e4m3", 3, targets, gradient, squares, False)
    assert len(kernels._caches) == 1
    # They end with the gradients.
    del squares
    assert len(kernels._caches) == 0
    empty = torch.zeros(0)
    kernels.add_rows(message, shape, "e4m3", 3, [], empty, empty.double(), False)  # a rank without any part


def test_tables_that_a_graph_writes_are_of_that_graph_alone(monkeypatch):
    capturing = False
    monkeypatch.setattr(kernels, "_tables", lambda targets, device: object())
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: capturing)
    cache, targets, device = kernels._Cache(), (Target(0, 0, 256, 0),), torch.device("cuda")
    capturing = True
    of_a_dry_run = cache.tables(targets, device)
    assert cache.tables(targets, device) is not of_a_dry_run  # a dry run is never replayed: its copies are not done
    capturing = False
    outside = cache.tables(targets, device)
    capturing = True
    assert cache.tables(targets, device) is outside
    for number in range(LIMIT + 1):
        capturing = False
        cache.tables((Target(0, 0, number + 1, 0),), device)
    capturing = True
    assert cache.tables(targets, device) is outside  # the graph of before reads it still
