"""The cast of the shards of all ranks is the cast of the whole tensor, by either implementation."""

import pytest
import torch

from ds_fp8.casts import QuantizedTensor, quantize, scale_from_amax
from ds_fp8.config.formats import CastSpec
from ds_fp8.zero.param import ReferenceShardCast
from ds_fp8.zero.quantizer import make_shard_cast
from tests.zero.shard_casts import DEVICE, SHAPES, buffer_of, cast_on_all_ranks, exact_masters, shards_of, weights_of

GRANULARITIES = ["128x128", "row", "tensor"]


def reference(weights, codes, spec):
    return ReferenceShardCast(weights, spec)


def implementations():
    kernels = pytest.importorskip("ds_fp8.zero.cast_triton", reason="Triton is not installed")
    return [reference, kernels.TritonShardCast]


def random_masters():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) * 0.02 for shape in SHAPES]


def assert_whole(masters, scales, codes, spec):
    for master, scale, code in zip(masters, scales, codes, strict=True):
        whole = quantize(master, spec.format, spec.granularity, spec.scale)
        assert torch.equal(scale, whole.scale)
        assert torch.equal(code, whole.data.view(torch.uint8))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_the_reference_casts_the_whole(world, granularity, scale):
    spec = CastSpec(granularity=granularity, scale=scale)
    masters = random_masters()
    assert_whole(masters, *cast_on_all_ranks(reference, masters, world, spec)[1:], spec)


@pytest.mark.parametrize("make", [0, 1], ids=["reference", "kernel"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_codes_leave_room_for_outlier_blocks(world, make):
    spec, masters = CastSpec(granularity="128x128"), exact_masters()
    assert_whole(masters, *cast_on_all_ranks(implementations()[make], masters, world, spec, channels=65)[1:], spec)


@pytest.mark.parametrize(
    ("world", "granularity", "scale"),
    [
        (1, "128x128", "pow2"),
        (1, "row", "pow2"),
        (3, "128x128", "fp32"),
        (3, "row", "pow2"),
        (5, "128x128", "pow2"),
    ],
)
def test_the_kernels_cast_the_whole(world, granularity, scale):
    """Numbers that FP8 holds exactly: Triton's interpreter rounds others in its own way."""
    spec = CastSpec(granularity=granularity, scale=scale)
    masters = exact_masters()
    if granularity == "row":  # every row has the largest number of the format in it
        masters = [torch.cat([m.sign() * m.abs().log2().floor().clamp(-5, 5).exp2(), torch.full((len(m), 1), 448.0)], 1)
                   for m in masters]  # fmt: skip
    _, kernel = implementations()
    assert_whole(masters, *cast_on_all_ranks(kernel, masters, world, spec)[1:], spec)


def test_ranks_without_a_part_of_any_weight():
    spec, masters = CastSpec(granularity="128x128"), [torch.tensor([[448.0, -8.0, 0.5, 0.0, 1.0]])]
    for make in implementations():
        assert_whole(masters, *cast_on_all_ranks(make, masters, 8, spec)[1:], spec)


@pytest.mark.parametrize(
    ("granularity", "dtype"),
    [*((each, torch.bfloat16) for each in GRANULARITIES), ("128x128", torch.float32), ("128x128", torch.float16)],
)
def test_both_find_the_same_amax_in_any_source(granularity, dtype):
    """BF16 shards are those of frozen weights; what the kernels cannot read is copied first, weight by weight."""
    spec = CastSpec(granularity=granularity)
    masters = exact_masters()
    plain, kernel = (
        cast_on_all_ranks(make, masters, 2, spec, to=lambda shard: shard.to(dtype)) for make in implementations()
    )
    assert torch.equal(plain[0], kernel[0])
    assert (plain[0] > 0).any()
    if granularity == "128x128" or DEVICE == "cuda":  # exact also in the interpreter
        assert all(map(torch.equal, plain[2], kernel[2]))


@pytest.mark.parametrize(
    ("granularity", "value"), [*((each, torch.nan) for each in GRANULARITIES), ("128x128", -torch.inf)]
)
def test_overflow_makes_its_group_nan(granularity, value):
    spec = CastSpec(granularity=granularity)
    masters = exact_masters()
    masters[0][130, 299] = value
    for make in implementations():
        amax, scales, codes = cast_on_all_ranks(make, masters, 2, spec)
        assert not amax.isnan().any()
        assert amax.isinf().sum() == 1
        weights = [
            QuantizedTensor(code.view(torch.float8_e4m3fn), scale, granularity).dequantize()
            for code, scale in zip(codes, scales, strict=True)
        ]
        group = {"128x128": weights[0][128:, 256:], "row": weights[0][130:], "tensor": weights[0]}[granularity]
        assert group.isnan().all()
        assert weights[0].isnan().sum() == group.numel()
        assert not any(weight.isnan().any() for weight in weights[1:])


def test_a_cpu_gets_the_reference():
    codes = torch.zeros(1, dtype=torch.uint8)
    assert isinstance(make_shard_cast([], codes, CastSpec(granularity="128x128")), ReferenceShardCast)


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_masters_of_whole_blocks_are_read_once(scale):
    """Their scales need no other rank: the codes are there behind the launch that finds the amax."""
    spec, masters = CastSpec(granularity="128x128", scale=scale), exact_masters()
    _, kernel = implementations()
    weights = weights_of(0, 1, "128x128", DEVICE)
    shards = shards_of(masters, weights)
    cast = kernel(weights, weights[0].data._base, spec)
    amax = buffer_of(weights)
    cast.write_amax(amax, shards.__getitem__)
    scales = scale_from_amax(amax, spec.format, spec.scale)
    codes = [weight.data[: weight.shard.valid].view(weight.shard.shape).cpu() for weight in weights]
    assert_whole(masters, [weight.scales_in(scales).cpu() for weight in weights], codes, spec)

    def unread(weight):
        raise AssertionError("a master is read again")

    cast.cast(scales, unread)
