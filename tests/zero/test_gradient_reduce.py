import math

import pytest
import torch
from deepspeed import comm as dist

from ds_fp8.zero.gradient_reduce import SMALLEST, find_nodes, make_reduce_scatter, pack, unpack
from ds_fp8.zero.seams import _stock_reduce_scatter as stock

# Relative error of one cast per group of 128, as a share of the gradient's norm.
TOLERANCE = {"e4m3": 0.04, "e5m2": 0.08}
SHAPES = [(131, 301), (64, 64), (61,), (3, 5), (4097, 1), (1, 5000), (128, 256)]


def gradient(shape, rank):
    return torch.randn(shape, generator=torch.Generator().manual_seed(31 * rank + math.prod(shape))).bfloat16()


def reduced(format, ranks_per_node):
    nodes = find_nodes("auto", ranks_per_node) if ranks_per_node else None
    gradients = [gradient(shape, dist.get_rank()) for shape in SHAPES]
    ours = make_reduce_scatter(stock, format, nodes)([g.clone() for g in gradients], None)
    theirs = stock([g.clone() for g in gradients], None)
    return ours, theirs


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("format", TOLERANCE)
def test_mean_of_every_slice(ranks, world, format):
    results = ranks(world, reduced, format, None)
    for index, shape in enumerate(SHAPES):
        exact = torch.stack([gradient(shape, r).double() for r in range(world)]).mean(0).flatten()
        ours = torch.cat([result[0][index].double() for result in results])
        assert ours.shape == exact.shape
        error = (ours - exact).norm() / exact.norm()
        if len(shape) == 1 or exact.numel() < SMALLEST:
            theirs = torch.cat([result[1][index].double() for result in results])
            assert torch.equal(ours, theirs)
        else:
            assert 0 < error < TOLERANCE[format]
            assert all(result[0][index].dtype is torch.float32 for result in results)


def test_two_levels_agree_with_the_exact_mean(ranks):
    """4 ranks as 2 nodes of 2: cast twice, so about twice the error of one level."""
    results = ranks(4, reduced, "e4m3", 2)
    for index, shape in enumerate(SHAPES):
        exact = torch.stack([gradient(shape, r).double() for r in range(4)]).mean(0).flatten()
        ours = torch.cat([result[0][index].double() for result in results])
        assert (ours - exact).norm() / exact.norm() < 2 * TOLERANCE["e4m3"]


def node_layout(hierarchy, ranks_per_node):
    nodes = find_nodes(hierarchy, ranks_per_node)
    if nodes is None:
        return None
    return (nodes.count, nodes.ranks_per_node, dist.get_world_size(nodes.inside), dist.get_world_size(nodes.between))


@pytest.mark.parametrize(
    ("hierarchy", "ranks_per_node", "expected"),
    [
        ("auto", 2, (2, 2, 2, 2)),
        ("auto", 4, None),
        ("auto", 3, None),
        ("auto", 1, None),
        ("flat", 2, None),
        ("auto", None, None),
    ],
)
def test_nodes(ranks, hierarchy, ranks_per_node, expected):
    assert ranks(4, node_layout, hierarchy, ranks_per_node) == [expected] * 4


def one_bad_gradient(value):
    gradients = [gradient((131, 301), dist.get_rank())]
    if dist.get_rank() == 1:
        gradients[0][7, 11] = value
    ours = make_reduce_scatter(stock, "e4m3")(gradients, None)[0]
    bad = ours.isnan().nonzero().flatten().tolist()
    return bad, ours.isinf().any().item()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_ranks_overflow_is_seen_by_the_owner_of_the_slice(ranks, value):
    position = 7 * 301 + 11
    (bad, infinite), (other, _) = ranks(2, one_bad_gradient, value)
    assert position in bad
    assert len(bad) <= 128
    assert not infinite
    assert other == []


@pytest.mark.parametrize("format", TOLERANCE)
@pytest.mark.parametrize("world", [1, 3])
def test_packed_bytes(format, world):
    x = torch.randn(world, 384)
    buffer = pack(x, format)
    assert buffer.dtype is torch.uint8
    assert buffer.shape == (world, 384 + 12)
    assert (unpack(buffer, 384, format) - x).norm() / x.norm() < TOLERANCE[format]
