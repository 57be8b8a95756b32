"""Rows of routed tokens: every pair has one, in the order of the tokens, and tiles belong to one expert."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_fp8.casts import quantize_both
from ds_fp8.config.formats import BLOCK
from ds_fp8.layers.experts.layout import (
    ExpertLayout,
    expert_layout,
    permute,
    permute_quantize,
    unpermute,
    worst_case_rows,
)
from tests.casts.test_kernels import assert_same

kernels = pytest.importorskip("ds_fp8.layers.experts.layout_triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_is_layout(layout, top_k_index, experts):
    """Compare a layout with the definition, pair by pair."""
    chosen = top_k_index.flatten().tolist()
    source, place = layout.source.tolist(), layout.place.flatten().tolist()
    assert layout.place.shape == top_k_index.shape
    assert len(source) % BLOCK == 0
    assert len(layout.of_tile) == len(source) // BLOCK
    expected_tiles, start = [], 0
    for expert in range(experts):
        pairs = [pair for pair, of in enumerate(chosen) if of == expert]
        assert layout.counts[expert] == len(pairs)
        assert layout.starts[expert] == start
        assert source[start : start + len(pairs)] == pairs
        assert [place[pair] for pair in pairs] == list(range(start, start + len(pairs)))
        tiles = -(-len(pairs) // BLOCK)
        assert source[start + len(pairs) : start + tiles * BLOCK] == [-1] * (tiles * BLOCK - len(pairs))
        expected_tiles += [expert] * tiles
        start += tiles * BLOCK
    unused = len(layout.of_tile) - len(expected_tiles)
    assert layout.of_tile.tolist() == expected_tiles + [-1] * unused
    assert source[start:] == [-1] * (len(source) - start)
    assert all(place[pair] == -1 for pair, of in enumerate(chosen) if not 0 <= of < experts)


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(0, 2, 4), (7, 2, 64), (300, 8, 8), (129, 1, 1)])
def test_every_pair_has_a_row(tokens, choices, experts):
    torch.manual_seed(0)
    index = torch.rand(tokens, experts).topk(choices).indices
    assert_is_layout(expert_layout(index, experts), index, experts)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8))
def test_any_counts(counts):
    index = torch.tensor([expert for expert, count in enumerate(counts) for _ in range(count)], dtype=torch.int64)
    index = index[torch.randperm(len(index))][:, None]
    assert_is_layout(expert_layout(index, len(counts)), index, len(counts))


def test_choices_of_other_ranks_get_no_row():
    index = torch.tensor([[0, 4], [3, 3], [4, 5], [1, 0]])
    layout = expert_layout(index, 4)
    assert_is_layout(layout, index, 4)
    assert layout.place[2].tolist() == [-1, -1]


@given(st.lists(st.integers(0, 400), min_size=1, max_size=20))
def test_the_worst_case_is_never_exceeded(counts):
    needed = sum(-(-count // BLOCK) * BLOCK for count in counts)
    assert worst_case_rows(sum(counts), len(counts)) >= needed
    assert worst_case_rows(sum(counts), len(counts)) <= sum(counts) + (BLOCK - 1) * len(counts) + BLOCK


@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "ours", "dtype"),
    [
        (1, 1, 1, 1, torch.int64),
        (7, 2, 64, 63, torch.int32),  # the last expert is another rank's
        (700, 4, 200, 200, torch.int64),
        (4096, 2, 16, 15, torch.int32),
    ],
)
def test_kernels_lay_out_as_the_reference(tokens, choices, experts, ours, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "CELLS", 2048)
    torch.manual_seed(0)
    index = torch.rand(tokens, experts).topk(choices).indices.to(dtype).t().contiguous().t()
    found = ExpertLayout(*kernels.lay_out(index.to(DEVICE), ours, worst_case_rows(index.numel(), ours)))
    for name, one, other in zip(ExpertLayout._fields, found, expert_layout(index, ours), strict=True):
        assert one.dtype is other.dtype, name
        assert torch.equal(one.cpu(), other), name


EXPERTS = 5


def permute_tiles(x, layout, *casts):
    return kernels.permute_tiles(x.to(DEVICE), layout.source.to(DEVICE), layout.choices, "e4m3", *casts)


def routing(tokens, choices, others=False):
    """Indices of experts; with `others`, some of them are those of other ranks."""
    torch.manual_seed(0)
    index = torch.rand(tokens, EXPERTS).topk(choices).indices
    return torch.where(torch.rand(tokens, choices) < 0.2, EXPERTS, index) if others else index


@pytest.mark.parametrize(
    ("tokens", "choices", "rowwise", "columnwise", "scale", "dtype"),
    [
        (1, 1, "1x128", "1x128", "fp32", torch.float32),
        (50, 2, "1x128", None, "pow2", torch.bfloat16),
        (50, 2, None, "128x128", "fp32", torch.bfloat16),
        (130, 3, "1x128", "128x128", "pow2", torch.float32),
    ],
)
def test_kernel_of_casts(tokens, choices, rowwise, columnwise, scale, dtype):
    layout = expert_layout(routing(tokens, choices, True), EXPERTS)
    x = torch.randn(tokens, 256).to(dtype)
    expected = permute_quantize(x, layout, "e4m3", rowwise, columnwise, scale)
    found = permute_tiles(x, layout, rowwise, columnwise, scale)
    for result, wanted in zip(found, expected, strict=True):
        assert_same(result, wanted)
    through = quantize_both(permute(x, layout), "e4m3", rowwise, columnwise, scale)
    for result, wanted in zip(permute_quantize(x, layout, "e4m3", rowwise, columnwise, scale), through, strict=True):
        assert (result is None) == (wanted is None)
        assert result is None or torch.equal(result.dequantize(), wanted.dequantize())


def test_kernel_of_casts_of_other_strides():
    tokens = 70
    layout = expert_layout(routing(tokens, 2), EXPERTS)
    wide = torch.randn(tokens, 600).bfloat16()
    for x in (wide[:, 40:296], torch.randn(256, tokens).bfloat16().t(), wide[:1, :256].expand(tokens, -1)):
        expected = permute_quantize(x, layout, "e4m3", "1x128", "1x128", "pow2")
        found = permute_tiles(x, layout, "1x128", "1x128", "pow2")
        for result, wanted in zip(found, expected, strict=True):
            assert_same(result, wanted)


@pytest.mark.parametrize(("tokens", "choices", "features"), [(1, 1, 1152), (50, 2, 384), (130, 3, 128)])
def test_kernel_of_sums(tokens, choices, features):
    layout = expert_layout(routing(tokens, choices, True), EXPERTS)
    rows = torch.randn(len(layout.source), features)
    assert torch.equal(kernels.sum_rows(rows.to(DEVICE), layout.place.to(DEVICE)).cpu(), unpermute(rows, layout))
