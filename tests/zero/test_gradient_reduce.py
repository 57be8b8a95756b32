"""The mean of gradients over ranks: its error, its two levels, overflow, and scales that all ranks agree on."""

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
from tests.ranks import case, on_ranks

# Relative error of one cast, as a share of the gradient's norm.
TOLERANCE = {"e4m3": 0.04, "e5m2": 0.08}
EMULATED = {"int8": 0.02, "e3m4": 0.025, "log8": 0.04, "e2m1": 0.2}
SHAPES = [(131, 301), (64, 64), (61,), (3, 5), (4097, 1), (1, 5000), (128, 256)]
OPTIONS = {"nearest": {}, "tensor": {"scale": "tensor"}}


def reducer(nodes=None, **options):
    """A function from full gradients and their names to this rank's slices of their means."""
    plan = step_plan(parse_fp8({"fp8": {"grad_reduce": options}})).reduction
    reduction = ReduceScatter(WireMeter(), None, plan, nodes)

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


def reduced(every, ranks_per_node):
    """By options this rank's slices; those of DeepSpeed in place of the last."""
    of_rank = [rank // (ranks_per_node or 1) for rank in range(dist.get_world_size())]
    nodes = find_nodes(Hosts(tuple(of_rank))) if ranks_per_node else None
    gradients = [gradient(shape, dist.get_rank()) for shape in SHAPES]
    names = [str(shape) for shape in SHAPES]
    ours = [reducer(nodes, **options)([g.clone() for g in gradients], names) for options in every]
    return [*ours, stock([g.clone() for g in gradients], None)]


@pytest.mark.parametrize(("world", "formats"), [(2, [*TOLERANCE, *EMULATED]), (3, TOLERANCE), (4, TOLERANCE)])
def test_mean_of_every_slice(ranks, world, formats):
    every = [{"format": format, **OPTIONS[option]} for format in formats for option in OPTIONS]
    *found, theirs = zip(*ranks(world, reduced, every, None), strict=True)
    for options, slices in zip(every, found, strict=True):
        emulated, bound = options["format"] in EMULATED, (TOLERANCE | EMULATED)[options["format"]]
        for index, shape in enumerate(SHAPES):
            with case((options, shape)):
                exact = torch.stack([gradient(shape, rank).double() for rank in range(world)]).mean(0).flatten()
                ours = torch.cat([parts[index].double() for parts in slices])
                assert ours.shape == exact.shape
                error = (ours - exact).norm() / exact.norm()
                if len(shape) == 1 or exact.numel() < SMALLEST:
                    assert torch.equal(ours, torch.cat([parts[index].double() for parts in theirs]))
                else:
                    # One scale for the tensor leaves less of a narrow format.
                    wide = 2 if emulated and "scale" in options else 1
                    assert 0.1 * bound * emulated < error < bound * wide
                    assert error > 0
                    assert all(parts[index].dtype is torch.float32 for parts in slices)


def test_two_levels_agree_with_the_exact_mean(ranks):
    """4 ranks as 2 nodes of 2: cast twice, so about twice the error of one level."""
    for slices in list(zip(*ranks(4, reduced, list(OPTIONS.values()), 2), strict=True))[:-1]:
        for index, shape in enumerate(SHAPES):
            exact = torch.stack([gradient(shape, rank).double() for rank in range(4)]).mean(0).flatten()
            ours = torch.cat([parts[index].double() for parts in slices])
            assert (ours - exact).norm() / exact.norm() < 2 * TOLERANCE["e4m3"]


@on_ranks(4)
def test_nodes():
    for host_of_rank, expected in [
        ((0, 0, 1, 1), (2, 2, 2, 2)),
        ((0, 0, 0, 0), None),
        ((0, 0, 0, 1), None),
        ((0, 1, 0, 1), None),
        ((0, 1, 2, 3), None),
        (None, None),
    ]:
        hosts = find_hosts() if host_of_rank is None else Hosts(host_of_rank)
        nodes, found = find_nodes(hosts), None
        assert (nodes is None) == (why_flat(hosts) is not None)
        if nodes is not None:
            sizes = dist.get_world_size(nodes.inside), dist.get_world_size(nodes.between)
            found = (nodes.count, nodes.ranks_per_node, *sizes)
        assert found == expected, host_of_rank


@on_ranks(2)
def test_one_ranks_overflow_is_seen_by_the_owner_of_the_slice():
    position = 7 * 301 + 11
    for options in OPTIONS.values():
        for value in (math.nan, math.inf, -math.inf):
            with case((value, options)):
                bad, reduce = gradient((131, 301), dist.get_rank()), reducer(**options)
                if dist.get_rank() == 1:
                    bad[7, 11] = value
                ours = reduce([bad], ["weight"])[0]
                wrong = ours.isnan().nonzero().flatten().tolist()
                assert not ours.isinf().any()
                if dist.get_rank() == 0:
                    assert position in wrong
                if "scale" in options:  # one scale for the tensor: all of it is lost
                    assert len(wrong) == len(ours)
                else:
                    assert len(wrong) <= 128 * (dist.get_rank() == 0)
                assert reduce([gradient((131, 301), dist.get_rank())], ["weight"])[0].isfinite().all()


def agreed_scales(outlier):
    scale, rank = AutomaticScale("e4m3"), dist.get_rank()
    small = torch.full((200, 100), 1.0)
    small[0, 0] = outlier if rank == 1 else 1.0
    zero, counts, seen = torch.zeros(64, 64), torch.zeros(2, dtype=torch.int32), []
    for _ in range(4):
        scales = scale.scales([small, zero], ["small", "zeros"])
        counts[0] = ((small / scales[0]).abs() > 448).sum() if outlier == 100 and rank == 1 else 0
        counts[0] += 1000 * (outlier == 200 and rank == 1)
        scale.saturated(counts, [small.numel(), zero.numel()], ["small", "zeros"])
        seen.append(scales.tolist())
    return seen, scale.mu("small"), scale.mu("zeros")


@on_ranks(2)
def test_all_ranks_agree_on_the_scale_of_the_largest():
    seen, mu, mu_of_zeros = agreed_scales(100)
    # 448 / 100 = 4.48: the power of two below it, times mu, which grows while nothing saturates
    assert [first for first, _ in seen] == pytest.approx([1 / (4 * GROWTH**n) for n in (1, 2, 3, 4)])
    assert [second for _, second in seen] == [1.0] * 4
    assert mu == pytest.approx(GROWTH**4)
    assert mu_of_zeros == 1.0
    both = [None, None]
    dist.all_gather_object(both, agreed_scales(200))  # one rank saturates
    assert both[0] == both[1]
    assert both[0][1] == pytest.approx(GROWTH / 8)  # the first reduction knows of no saturation, the other three do


def test_a_scale_of_a_cast_that_is_not_made_is_refused():
    with pytest.raises(UserError) as caught:
        GradientReduceConfig(format="bf16", scale="tensor")
    assert caught.value.key == "fp8.grad_reduce.scale"
