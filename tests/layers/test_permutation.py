"""Permutation of tokens to experts' rows with its casts, and back: kernels against the references, both against torch.

On a GPU the kernels run compiled, elsewhere in Triton's interpreter, which rounds to FP8 in its own way: there only
scales are compared bit for bit, and codes for their place.
"""

import pytest
import torch

from ds_fp8.casts import quantize_both
from ds_fp8.layers.experts.layout import (
    expert_layout,
    pair_values,
    permute,
    permute_cast,
    permute_cast_reference,
    row_factors,
    unpermute,
    unpermute_reference,
)
from tests.casts.test_kernels import assert_same

kernels = pytest.importorskip("ds_fp8.layers.experts.layout_triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS = 5
ROUTINGS = [(1, 1), (50, 2), (130, 3), (300, 1)]
"""Tokens and choices."""


def permute_tiles(x, layout, *casts):
    return kernels.permute_tiles(x.to(DEVICE), layout.source.to(DEVICE), layout.choices, "e4m3", *casts)


def routing(tokens, choices, others=False):
    """Indices of experts; with `others`, some of them are those of other ranks."""
    torch.manual_seed(0)
    index = torch.rand(tokens, EXPERTS).topk(choices).indices
    return torch.where(torch.rand(tokens, choices) < 0.2, EXPERTS, index) if others else index


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(("tokens", "choices"), ROUTINGS)
def test_rows_are_those_of_the_tokens(tokens, choices, others):
    index = routing(tokens, choices, others)
    layout, x = expert_layout(index, EXPERTS), torch.randn(tokens, 128)
    rows = permute(x, layout)
    for row, pair in enumerate(layout.source.tolist()):
        assert torch.equal(rows[row], x[pair // choices] if pair >= 0 else torch.zeros(128))
    expected = torch.stack([x[token] * sum(expert < EXPERTS for expert in row) for token, row in enumerate(index)])
    torch.testing.assert_close(unpermute(rows, layout), expected)


@pytest.mark.parametrize(("tokens", "choices"), ROUTINGS)
def test_each_is_the_others_gradient(tokens, choices):
    layout = expert_layout(routing(tokens, choices, True), EXPERTS)
    x, rows = torch.randn(tokens, 128).double(), torch.randn(len(layout.source), 128).double()
    inner = (permute(x, layout) * rows).sum()
    torch.testing.assert_close(inner.float(), (x * unpermute(rows, layout)).sum().float())


@pytest.mark.parametrize(("tokens", "choices"), ROUTINGS)
def test_values_of_pairs_and_rows(tokens, choices):
    layout = expert_layout(routing(tokens, choices, True), EXPERTS)
    weights = torch.rand(tokens, choices).bfloat16()
    factors = row_factors(weights, layout)
    assert factors.dtype is torch.float32
    assert not factors[layout.source < 0].any()
    assert torch.equal(pair_values(factors, layout), weights.float().masked_fill(layout.place < 0, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize(
    ("rowwise", "columnwise"), [("1x128", None), ("1x128", "1x128"), (None, "128x128"), ("1x128", "128x128")]
)
@pytest.mark.parametrize(("tokens", "choices"), ROUTINGS[:3])
def test_kernel_of_casts(tokens, choices, rowwise, columnwise, scale, dtype):
    layout = expert_layout(routing(tokens, choices, True), EXPERTS)
    x = torch.randn(tokens, 256).to(dtype)
    expected = permute_cast_reference(x, layout, "e4m3", rowwise, columnwise, scale)
    found = kernels.permute_tiles(
        x.to(DEVICE), layout.source.to(DEVICE), layout.choices, "e4m3", rowwise, columnwise, scale
    )
    for result, wanted in zip(found, expected, strict=True):
        assert_same(result, wanted)
    through = quantize_both(permute(x, layout), "e4m3", rowwise, columnwise, scale)
    for result, wanted in zip(permute_cast(x, layout, "e4m3", rowwise, columnwise, scale), through, strict=True):
        assert (result is None) == (wanted is None)
        assert result is None or torch.equal(result.dequantize(), wanted.dequantize())


@pytest.mark.parametrize("tokens", [1, 70])
def test_kernel_of_casts_of_other_strides(tokens):
    layout = expert_layout(routing(tokens, 2), EXPERTS)
    wide = torch.randn(tokens, 600).bfloat16()
    for x in (wide[:, 40:296], torch.randn(256, tokens).bfloat16().t(), wide[:1, :256].expand(tokens, -1)):
        expected = permute_cast_reference(x, layout, "e4m3", "1x128", "1x128", "pow2")
        found = kernels.permute_tiles(
            x.to(DEVICE), layout.source.to(DEVICE), layout.choices, "e4m3", "1x128", "1x128", "pow2"
        )
        for result, wanted in zip(found, expected, strict=True):
            assert_same(result, wanted)


@pytest.mark.parametrize("features", [128, 384, 1152])
@pytest.mark.parametrize(("tokens", "choices"), ROUTINGS[:3])
def test_kernel_of_sums(tokens, choices, features):
    layout = expert_layout(routing(tokens, choices, True), EXPERTS)
    rows = torch.randn(len(layout.source), features)
    assert torch.equal(
        kernels.sum_rows(rows.to(DEVICE), layout.place.to(DEVICE)).cpu(), unpermute_reference(rows, layout)
    )


def test_features_that_are_no_whole_groups_are_refused():
    with pytest.raises(ValueError, match="multiple of 128"):
        permute_cast(torch.randn(4, 100), expert_layout(routing(4, 1), EXPERTS))
