"""Rotated weights under ZeRO-3: each rank rotates its own shard, and what is gathered is the cast of the whole."""

import contextlib
import io

import pytest
import torch

from ds_fp8.config.errors import UserError
from ds_fp8.layers.attention.hadamard import Rotation
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.weights import UNSHARDED
from ds_fp8.research.formats import ResearchSpec, cast_matrix
from ds_fp8.zero.param import ReferenceShardCast
from tests.zero import models
from tests.zero.shard_casts import cast_on_all_ranks, weights_of

SIZES = (128, 160)
ROTATION = {"fprop": "in_features", "dgrad": "tokens", "wgrad": "tokens", "block": 32, "random": True}


SECTIONS = {"infir2": ({}, ROTATION), "halo": ({"preset": "halo"}, {"block": 32})}


def trained(fp8):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine = models.build(models.config(fp8), sizes=SIZES)
    losses = models.train(engine, 4)
    same = []
    for module in engine.module.modules():
        if isinstance(module, FP8Linear) and engine.fp8.weights.in_fp8(module.weight):
            spec = module.recipe.weight
            master = models.full_master(module.weight)
            expected = cast_matrix(master, spec)
            module.weight.all_gather_coalesced([module.weight]).wait()
            gathered = getattr(module.weight, UNSHARDED)
            same.append(torch.equal(gathered.dequantize(), expected.dequantize()))
            module.weight.partition()
    text = " ".join(printed.getvalue().replace("│", " ").split())
    return losses, engine.fp8.report["remarks"]["rotation"], text, same


@pytest.mark.parametrize(("section", "rotation"), SECTIONS.values(), ids=SECTIONS)
def test_what_is_gathered_is_the_cast_of_the_whole_rotated_master(ranks, section, rotation):
    losses, found, text, same = ranks(2, trained, {**section, "linear": {"rotation": rotation}, "report": "full"})[0]
    assert len(same) == 6
    assert all(same)
    words = "fprop along in_features, dgrad along tokens"
    words += ", wgrad along tokens, random Hadamard transforms of 32" if not section else ", Hadamard transforms of 32"
    assert found == words
    assert words in text
    assert losses[-1] < losses[0]


def reference(weights, codes, spec):
    return ReferenceShardCast(weights, spec)


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("granularity", ["128x128", "row", "tensor"])
@pytest.mark.parametrize("seed", [None, 2])
def test_shards_of_whole_blocks_are_rotated_as_the_whole_is(world, granularity, seed):
    spec = ResearchSpec(granularity=granularity, rotation=Rotation(32, seed))
    generator = torch.Generator().manual_seed(1)
    masters = [torch.randn(shape, generator=generator) for shape in ((96, 384), (3, 128), (384, 32))]
    _, scales, codes = cast_on_all_ranks(reference, masters, world, spec, "cpu")
    for master, scale, code in zip(masters, scales, codes, strict=True):
        whole = cast_matrix(master, spec)
        assert torch.equal(scale, whole.scale)
        assert torch.equal(code, whole.data.view(torch.uint8))


def test_shards_that_cut_a_block_are_refused():
    with pytest.raises(
        UserError, match="131 x 96 is sharded over 2 ranks in parts of 6288 elements, which are not whole blocks"
    ):
        weights_of(0, 2, "128x128", "cpu", [(131, 96)], ResearchSpec(granularity="128x128", rotation=Rotation(32)))
