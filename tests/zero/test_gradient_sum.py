"""Rows of a message summed into the gradient shards: the reference by hand, and the kernel against it."""

import pytest
import torch

from ds_fp8.zero.reduce import LIMIT, SPAN, Target, add_rows_reference, pack_reference, span_count, sum_rows_reference
from tests.zero.test_gradient_wire import gradients_of, laid_out, packed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUMELS = {"ragged": [5000, 131 * 301, 70], "aligned": [8192, 2 * SPAN * 3]}


def message_of(numels, rows=3, format="e4m3"):
    """(message, its shape, the targets of rank 0, elements of its shards) of gradients that E4M3 holds exactly."""
    shape, slices = laid_out(rows, 1, numels)
    message = packed(pack_reference, gradients_of(numels, exact=True), shape, slices, format)
    targets, start, span = [], 0, 0
    for place in slices:
        targets.append(Target(place.column, start, place.length, span))
        start += place.length
        span += span_count(place.length)
    return message, shape, targets, start


@pytest.mark.parametrize("numels", NUMELS.values(), ids=NUMELS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_and_their_squares(numels, accumulate):
    message, shape, targets, total = message_of(numels)
    gradient = torch.arange(total) % 7.0
    before, squares = gradient.clone(), torch.full((sum(span_count(t.numel) for t in targets),), torch.nan).double()
    add_rows_reference(message, shape, "e4m3", 3, targets, gradient, squares, accumulate)
    rows = sum_rows_reference(message, shape, "e4m3", 3)
    for target in targets:
        mine = slice(target.start, target.start + target.numel)
        expected = rows[target.column : target.column + target.numel] + accumulate * before[mine]
        assert torch.equal(gradient[mine], expected)
    assert squares.sum().item() == pytest.approx(gradient.double().square().sum().item(), rel=1e-12)


def test_a_sum_of_squares_beyond_fp32_is_finite_and_inf_is_not():
    message, shape, targets, total = message_of([8192])
    gradient, squares = torch.full((total,), 1e30), torch.zeros(span_count(total), dtype=torch.float64)
    add_rows_reference(message, shape, "e4m3", 1, targets, gradient, squares, True)
    assert squares.isfinite().all()
    gradient[5] = torch.inf
    add_rows_reference(message, shape, "e4m3", 1, targets, gradient, squares, True)
    assert not squares.sum().isfinite()


@pytest.mark.parametrize("numels", NUMELS.values(), ids=NUMELS)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("rows", "dtype"), [(2, torch.float32), (3, torch.float32), (3, torch.bfloat16)])
def test_the_kernel_gives_the_bits_of_the_reference(numels, accumulate, rows, dtype):
    kernel = pytest.importorskip("ds_fp8.zero.reduce_triton", reason="Triton is not installed")
    message, shape, targets, total = message_of(numels, rows)
    results = []
    for add_rows, device in ((add_rows_reference, "cpu"), (kernel.add_rows, DEVICE)):
        gradient = (torch.arange(total, device=device) % 7.0).to(dtype)
        squares = torch.zeros(sum(span_count(t.numel) for t in targets), dtype=torch.float64, device=device)
        add_rows(message.to(device), shape, "e4m3", rows, targets, gradient, squares, accumulate)
        results.append((gradient.cpu(), squares.cpu()))
    (expected, expected_squares), (found, found_squares) = results
    if dtype is torch.bfloat16 and DEVICE == "cpu":  # the interpreter truncates to BF16
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(found, expected)
        torch.testing.assert_close(found_squares, expected_squares, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rows", [7, 8, 9, 16, 17, 256])
def test_many_ranks_are_summed_in_their_order(rows):
    """In a loop, with the bits of the sum that is written out: rounding makes another order visible."""
    kernel = pytest.importorskip("ds_fp8.zero.reduce_triton", reason="Triton is not installed")
    shape, slices = laid_out(rows, 1, [300, 5000 * rows])
    gradients = [torch.randn(numel, generator=torch.Generator().manual_seed(numel)) for numel in (300, 5000 * rows)]
    message = packed(pack_reference, gradients, shape, slices, "e4m3")
    targets = [Target(slices[1].column, 0, slices[1].length, 0)]
    results = []
    for add_rows, device in ((add_rows_reference, "cpu"), (kernel.add_rows, DEVICE)):
        gradient = torch.zeros(slices[1].length, device=device)
        squares = torch.zeros(span_count(slices[1].length), dtype=torch.float64, device=device)
        add_rows(message.to(device), shape, "e4m3", rows, targets, gradient, squares, False)
        results.append(gradient.cpu())
    assert torch.equal(*results)


def test_tables_of_buckets_that_vary_are_forgotten(monkeypatch):
    kernel = pytest.importorskip("ds_fp8.zero.reduce_triton", reason="Triton is not installed")
    message, shape, targets, total = message_of([5000, 6000, 7000])
    message, gradient = message.to(DEVICE), torch.zeros(total, device=DEVICE)
    squares = torch.zeros(sum(span_count(t.numel) for t in targets), device=DEVICE).double()
    monkeypatch.setattr(kernel, "_caches", type(kernel._caches)())
    for number in range(1, LIMIT + 5):
        kernel._caches.setdefault(squares, kernel._Cache()).tables((targets[0]._replace(numel=number),), message.device)
    cache = kernel._caches[squares]
    assert len(cache._recent) == LIMIT
    kept = cache.tables((targets[0]._replace(numel=LIMIT + 4),), message.device)
    assert cache.tables((targets[0]._replace(numel=LIMIT + 4),), message.device) is kept
    kernel.add_rows(message, shape, "e4m3", 3, targets, gradient, squares, False)
    assert len(kernel._caches) == 1
    # They end with the gradients.
    del squares
    assert len(kernel._caches) == 0


def test_tables_that_a_graph_writes_are_of_that_graph_alone(monkeypatch):
    kernel = pytest.importorskip("ds_fp8.zero.reduce_triton", reason="Triton is not installed")
    capturing = False
    monkeypatch.setattr(kernel, "_tables", lambda targets, device: object())
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: capturing)
    cache, targets, device = kernel._Cache(), (Target(0, 0, 256, 0),), torch.device("cuda")
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


def test_a_rank_without_any_part_launches_nothing():
    kernel = pytest.importorskip("ds_fp8.zero.reduce_triton", reason="Triton is not installed")
    message, shape, _, _ = message_of([5000])
    empty = torch.zeros(0)
    kernel.add_rows(message, shape, "e4m3", 3, [], empty, empty.double(), False)
