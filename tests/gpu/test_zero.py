"""ZeRO-3 on GPUs: kernels bit for bit, and streams that order master update, cast, gather and release."""

from unittest import mock

import pytest
import torch

from ds_fp8.casts import quantize
from ds_fp8.config.formats import CastSpec
from ds_fp8.layers.linear.weights import UNSHARDED
from ds_fp8.zero import collectives
from ds_fp8.zero.quantizer import make_shard_cast
from tests.zero import models, test_frozen_weights
from tests.zero import test_parameter_gather as test_one_rank
from tests.zero.shard_casts import SHAPES, cast_on_all_ranks
from tests.zero.test_options import CASES, LOSS_GAP, train_and_look
from tests.zero.test_training import QUIET, assert_same, losses_and_weights

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

PREFETCH = {"stage3_prefetch_bucket_size": 10**8, "stage3_max_reuse_distance": 10**8, "overlap_comm": True}
# Whole blocks, whose shards begin at multiples of 16 elements: the kernels then move 16 bytes at a time
ALIGNED = [(256, 256), (384, 512)]


def random_masters(shapes):
    generator = torch.Generator().manual_seed(1)
    masters = [torch.randn(shape, generator=generator) * 0.02 for shape in shapes]
    masters[0][0, :3] = torch.tensor([0.0, 1e-30, -3.0])
    return masters


@pytest.mark.parametrize("shapes", [SHAPES, ALIGNED], ids=["ragged", "aligned"])
@pytest.mark.parametrize("world", [1, 2, 3, 64])
@pytest.mark.parametrize("granularity", ["128x128", "row", "tensor"])
@pytest.mark.parametrize(("format", "scale"), [("e4m3", "pow2"), ("e4m3", "fp32"), ("e5m2", "pow2")])
@pytest.mark.parametrize("where", ["device", "host"])
def test_shards_of_all_ranks_are_the_cast_of_the_whole(shapes, world, granularity, format, scale, where):
    """Masters on the host are those of an offloaded optimizer."""
    spec = CastSpec(format=format, granularity=granularity, scale=scale)
    masters = random_masters(shapes)
    to = (lambda shard: shard.cpu()) if where == "host" else (lambda shard: shard)
    _, scales, codes = cast_on_all_ranks(make_shard_cast, masters, world, spec, "cuda", to)
    for master, factor, code in zip(masters, scales, codes, strict=True):
        whole = quantize(master, format, granularity, scale)
        assert torch.equal(factor, whole.scale)
        assert torch.equal(code, whole.data.view(torch.uint8))


@two_gpus
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("leaf", [False, True])
def test_prefetch_changes_nothing_bit_for_bit(gpu_ranks, overlap, leaf):
    off = models.config(QUIET, overlap_comm=overlap)
    on = models.config(QUIET, overlap_comm=overlap, stage3_prefetch_bucket_size=10**8, stage3_max_reuse_distance=10**8)
    for left, right in zip(
        gpu_ranks(2, losses_and_weights, off, False, leaf, False, 40),
        gpu_ranks(2, losses_and_weights, on, False, leaf, False, 40),
        strict=True,
    ):
        assert_same(left, right)


@two_gpus
def test_a_second_run_gives_the_same_bits(gpu_ranks):
    first, second = (gpu_ranks(2, losses_and_weights, models.config(QUIET), True, False, False, 40) for _ in range(2))
    for left, right in zip(first, second, strict=True):
        assert_same(left, right)


@two_gpus
@pytest.mark.parametrize("case", sorted(CASES.keys() - {"optimizer offload"}))  # needs DeepSpeed's compiled CPU Adam
def test_options(gpu_ranks, case):
    fp8, bf16 = (gpu_ranks(2, train_and_look, case, enabled) for enabled in (True, False))
    for (losses, _, _, left_behind, wrong), (twin, *_) in zip(fp8, bf16, strict=True):
        assert (left_behind, wrong) == (0, 0)
        assert losses == pytest.approx(twin, rel=LOSS_GAP)


def gather_without_a_wait():
    engine = models.build(models.config(QUIET))
    models.train(engine, 2)
    weights = [weight for layer in engine.module.layers for weight in (layer.up.weight, layer.down.weight)]
    models.gather(weights)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for weight in weights:
            weight.partition()
        models.gather(weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for weight in weights:
        weight.partition()
    return True


@two_gpus
def test_a_gather_and_a_release_do_not_make_the_host_wait(gpu_ranks):
    assert gpu_ranks(2, gather_without_a_wait) == [True, True]


def wait_on_another_stream():
    """As DeepSpeed waits for a prefetch that nobody used: on the stream of the products, not on that of the gathers."""
    engine = models.build(models.config(QUIET))
    models.train(engine, 2)
    weights = [weight for layer in engine.module.layers for weight in (layer.up.weight, layer.down.weight)]
    models.gather(weights)
    expected = [getattr(weight, UNSHARDED).dequantize() for weight in weights]
    for weight in weights:
        weight.partition()
    side, wrong = torch.cuda.Stream(), 0
    for _ in range(50):
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            handle = weights[0].all_gather_coalesced(weights)
        torch.cuda._sleep(1_000_000)  # the current stream is late
        handle.wait()
        with torch.cuda.stream(side):  # whatever was freed too early is written over
            rubbish = [torch.full((1 << size,), 255, dtype=torch.uint8, device="cuda") for size in range(14, 20)]
        seen = [getattr(weight, UNSHARDED).dequantize() for weight in weights]
        for weight in weights:
            weight.partition()
        del rubbish
        wrong += sum(not torch.equal(left, right) for left, right in zip(seen, expected, strict=True))
    return wrong


@two_gpus
def test_a_gather_may_be_waited_for_on_another_stream(gpu_ranks):
    assert gpu_ranks(2, wait_on_another_stream) == [0, 0]


def by_nccl(config):
    with mock.patch.object(collectives, "share", return_value="for comparison"):
        return losses_and_weights(config)


@two_gpus
def test_copy_engines_gather_the_same_bits(gpu_ranks):
    nccl, copied = (gpu_ranks(2, train, models.config(QUIET, **PREFETCH)) for train in (by_nccl, losses_and_weights))
    for left, right in zip(nccl, copied, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize("preset", ["infir2", "tensorwise", "rowwise"])
@pytest.mark.parametrize(
    ("sizes", "accumulate"), [(test_one_rank.ALIGNED, 1), (test_one_rank.ALIGNED, 2), (test_one_rank.RAGGED, 1)]
)
def test_one_rank_without_copies_has_the_bits_of_one_with(gpu_ranks, preset, sizes, accumulate):
    losses, masters = gpu_ranks(1, test_one_rank.trained_on_one_rank, preset, sizes, False, accumulate)[0]
    expected, expected_masters = gpu_ranks(1, test_one_rank.trained_on_one_rank, preset, sizes, True, accumulate)[0]
    assert losses == expected
    assert all(map(torch.equal, masters, expected_masters))


def test_one_rank_sends_and_copies_nothing(gpu_ranks):
    assert gpu_ranks(1, test_one_rank.sent_and_allocated)[0] == [True] * 4
    for left_out in (False, True):
        found = gpu_ranks(1, test_one_rank.gathered_over_a_step, left_out, "infir2")[0]
        assert found == (True, None if left_out else False)
    assert gpu_ranks(1, test_one_rank.fetched_over_a_step) == [True]


def test_frozen_weights_may_be_sharded_into_host_memory(gpu_ranks):
    whole, on_host = (gpu_ranks(1, test_frozen_weights.with_adapters, where) for where in (False, True))
    assert whole == on_host
    assert on_host[0][1] == [{"cpu"}, {"cuda"}]
