import math

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced as stock

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import GradientReduceConfig, parse_fp8
from ds_fp8.engine.plans import step_plan
from ds_fp8.zero.automatic_scale import GROWTH, AutomaticScale
from ds_fp8.zero.collectives import WireMeter
from ds_fp8.zero.hosts import Hosts, find_hosts, find_nodes, why_flat
from ds_fp8.zero.reduce import SMALLEST, ReduceScatter

# Relative error of one cast, as a share of the gradient's norm.
TOLERANCE = {"e4m3": 0.04, "e5m2": 0.08}
EMULATED = {"int8": 0.02, "e3m4": 0.025, "log8": 0.04, "e2m1": 0.2}
SHAPES = [(131, 301), (64, 64), (61,), (3, 5), (4097, 1), (1, 5000), (128, 256)]
OPTIONS = {"nearest": {}, "tensor": {"scale": "tensor"}}


def reducer(nodes=None, **options):
    """A function from full gradients and their names to this rank's slices of their means."""
    reduction = ReduceScatter(
        WireMeter(), None, step_plan(parse_fp8({"fp8": {"grad_reduce": options}})).reduction, nodes
    )

    def reduce(gradients, names):
        parameters = []
        for value in gradients:
            parameters.append(torch.nn.Parameter(torch.empty_like(value)))
            parameters[-1].grad, parameters[-1].ds_process_group = value, None
        named = dict(zip(names, parameters, strict=True))
        return reduction(named, torch.bfloat16, False, lambda some: stock([p.grad for p in some], None))

    return reduce


def gradient(shape, rank):
    return torch.randn(shape, generator=torch.Generator().manual_seed(31 * rank + math.prod(shape))).bfloat16()


def exact_mean(shape, world):
    return torch.stack([gradient(shape, rank).double() for rank in range(world)]).mean(0).flatten()


def reduced(options, ranks_per_node=None):
    nodes = find_nodes(hosts_of(ranks_per_node)) if ranks_per_node else None
    gradients = [gradient(shape, dist.get_rank()) for shape in SHAPES]
    ours = reducer(nodes, **options)([g.clone() for g in gradients], [str(shape) for shape in SHAPES])
    theirs = stock([g.clone() for g in gradients], None)
    return ours, theirs


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("format", TOLERANCE)
@pytest.mark.parametrize("option", OPTIONS)
def test_mean_of_every_slice(ranks, world, format, option):
    results = ranks(world, reduced, {"format": format, **OPTIONS[option]})
    for index, shape in enumerate(SHAPES):
        exact = exact_mean(shape, world)
        ours = torch.cat([result[0][index].double() for result in results])
        assert ours.shape == exact.shape
        error = (ours - exact).norm() / exact.norm()
        if len(shape) == 1 or exact.numel() < SMALLEST:
            theirs = torch.cat([result[1][index].double() for result in results])
            assert torch.equal(ours, theirs)
        else:
            assert 0 < error < TOLERANCE[format]
            assert all(result[0][index].dtype is torch.float32 for result in results)


def reduced_in_each(formats, options):
    return {format: reduced({"format": format, **options})[0] for format in formats}


@pytest.mark.parametrize("option", OPTIONS)
def test_mean_of_every_slice_in_emulated_formats(ranks, option):
    results = ranks(2, reduced_in_each, list(EMULATED), OPTIONS[option])
    for format, bound in EMULATED.items():
        for index, shape in enumerate(SHAPES):
            exact = exact_mean(shape, 2)
            ours = torch.cat([result[format][index].double() for result in results])
            if len(shape) > 1 and exact.numel() >= SMALLEST:
                # One scale for the tensor leaves less of a narrow format.
                assert 0.1 * bound < (ours - exact).norm() / exact.norm() < bound * (2 if option == "tensor" else 1)


@pytest.mark.parametrize("option", OPTIONS)
def test_two_levels_agree_with_the_exact_mean(ranks, option):
    """4 ranks as 2 nodes of 2: cast twice, so about twice the error of one level."""
    results = ranks(4, reduced, OPTIONS[option], 2)
    for index, shape in enumerate(SHAPES):
        exact = exact_mean(shape, 4)
        ours = torch.cat([result[0][index].double() for result in results])
        assert (ours - exact).norm() / exact.norm() < 2 * TOLERANCE["e4m3"]


def hosts_of(ranks_per_host):
    return Hosts(tuple(rank // ranks_per_host for rank in range(dist.get_world_size())))


def node_layout(host_of_rank):
    hosts = find_hosts() if host_of_rank is None else Hosts(host_of_rank)
    nodes = find_nodes(hosts)
    assert (nodes is None) == (why_flat(hosts) is not None)
    if nodes is None:
        return None
    return (nodes.count, nodes.ranks_per_node, dist.get_world_size(nodes.inside), dist.get_world_size(nodes.between))


@pytest.mark.parametrize(
    ("host_of_rank", "expected"),
    [
        ((0, 0, 1, 1), (2, 2, 2, 2)),
        ((0, 0, 0, 0), None),
        ((0, 0, 0, 1), None),
        ((0, 1, 0, 1), None),
        ((0, 1, 2, 3), None),
        (None, None),
    ],
)
def test_nodes(ranks, host_of_rank, expected):
    assert ranks(4, node_layout, host_of_rank) == [expected] * 4


def one_bad_gradient(value, options):
    gradients = [gradient((131, 301), dist.get_rank())]
    if dist.get_rank() == 1:
        gradients[0][7, 11] = value
    reduce = reducer(**options)
    ours = reduce(gradients, ["weight"])[0]
    bad = ours.isnan().nonzero().flatten().tolist()
    afterwards = reduce([gradient((131, 301), dist.get_rank())], ["weight"])[0]
    return bad, ours.isinf().any().item(), afterwards.isfinite().all().item(), len(ours)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("option", OPTIONS)
def test_one_ranks_overflow_is_seen_by_the_owner_of_the_slice(ranks, value, option):
    position = 7 * 301 + 11
    (bad, infinite, well_again, length), (other, _, other_well, other_length) = ranks(
        2, one_bad_gradient, value, OPTIONS[option]
    )
    assert position in bad
    assert not infinite
    assert well_again
    assert other_well
    if "scale" in OPTIONS[option]:  # one scale for the tensor: all of it is lost
        assert (len(bad), len(other)) == (length, other_length)
    else:
        assert len(bad) <= 128
        assert other == []


def agreed_scales(outlier):
    scale = AutomaticScale("e4m3")
    rank = dist.get_rank()
    small = torch.full((200, 100), 1.0)
    small[0, 0] = outlier if rank == 1 else 1.0
    zero, counts = torch.zeros(64, 64), torch.zeros(2, dtype=torch.int32)
    seen = []
    for _ in range(4):
        scales = scale.scales([small, zero], ["small", "zeros"])
        counts[0] = ((small / scales[0]).abs() > 448).sum() if outlier == 100 and rank == 1 else 0
        counts[0] += 1000 * (outlier == 200 and rank == 1)
        scale.saturated(counts, [small.numel(), zero.numel()], ["small", "zeros"])
        seen.append(scales.tolist())
    return seen, scale.mu("small"), scale.mu("zeros")


def test_all_ranks_agree_on_the_scale_of_the_largest(ranks):
    (seen, mu, mu_of_zeros), other = ranks(2, agreed_scales, 100)
    assert (seen, mu, mu_of_zeros) == other
    # 448 / 100 = 4.48: the power of two below it, times mu, which grows while nothing saturates
    assert [first for first, _ in seen] == pytest.approx([1 / (4 * GROWTH**n) for n in (1, 2, 3, 4)])
    assert [second for _, second in seen] == [1.0] * 4
    assert mu == pytest.approx(GROWTH**4)
    assert mu_of_zeros == 1.0


def test_mu_halves_when_one_rank_saturates(ranks):
    (seen, mu, _), other = ranks(2, agreed_scales, 200)
    assert seen == other[0]
    assert mu == pytest.approx(GROWTH / 8)  # the first reduction knows of no saturation, the other three do


def test_a_scale_of_a_cast_that_is_not_made_is_refused():
    with pytest.raises(UserError) as caught:
        GradientReduceConfig(format="bf16", scale="tensor")
    assert caught.value.key == "fp8.grad_reduce.scale"
