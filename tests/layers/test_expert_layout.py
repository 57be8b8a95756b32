"""Rows of routed tokens: every pair has one, in the order of the tokens, and tiles belong to one expert."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_fp8.config.formats import BLOCK
from ds_fp8.layers.experts.layout import ExpertLayout, expert_layout, expert_layout_reference, worst_case_rows

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


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("tokens", "choices", "experts"), [(1, 1, 1), (7, 2, 64), (300, 8, 8), (64, 4, 16), (1000, 3, 5), (129, 1, 1)]
)
def test_every_pair_has_a_row(tokens, choices, experts, dtype):
    torch.manual_seed(0)
    index = torch.rand(tokens, experts).topk(choices if choices <= experts else experts).indices.to(dtype)
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


def test_without_tokens_nothing_belongs_to_an_expert():
    layout = expert_layout(torch.empty(0, 2, dtype=torch.int64), 4)
    assert_is_layout(layout, torch.empty(0, 2, dtype=torch.int64), 4)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=20))
def test_the_worst_case_is_never_exceeded(counts):
    needed = sum(-(-count // BLOCK) * BLOCK for count in counts)
    assert worst_case_rows(sum(counts), len(counts)) >= needed
    assert worst_case_rows(sum(counts), len(counts)) <= sum(counts) + (BLOCK - 1) * len(counts) + BLOCK


def test_the_worst_case_can_happen():
    counts = [1] * 7 + [129]
    assert worst_case_rows(sum(counts), len(counts)) == sum(-(-count // BLOCK) * BLOCK for count in counts)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("tokens", "choices", "experts"), [(1, 1, 1), (7, 2, 64), (300, 8, 8), (700, 4, 200), (1000, 3, 5), (4096, 2, 16)]
)
def test_kernels_lay_out_as_the_reference(tokens, choices, experts, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "CELLS", 2048)
    torch.manual_seed(0)
    for ours in (experts, experts - 1):  # without the last one's choices, which are those of other ranks then
        if not ours:
            continue
        index = torch.rand(tokens, experts).topk(choices).indices.to(dtype)
        found = ExpertLayout(*kernels.lay_out(index.to(DEVICE), ours, worst_case_rows(index.numel(), ours)))
        for name, one, other in zip(ExpertLayout._fields, found, expert_layout_reference(index, ours), strict=True):
            assert one.dtype is other.dtype, name
            assert torch.equal(one.cpu(), other), name


def test_kernels_read_any_strides():
    index = torch.randint(0, 5, (3, 40)).t()
    found = kernels.lay_out(index.to(DEVICE), 5, worst_case_rows(120, 5))
    for one, other in zip(found, expert_layout_reference(index, 5), strict=True):
        assert torch.equal(one.cpu(), other)
