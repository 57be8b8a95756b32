"""Outlier channels of sharded weights: residuals as of the whole weight, on any number of ranks, and checkpoints."""

from __future__ import annotations

import contextlib
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn

from ds_fp8.casts import quantize, scale_from_amax
from ds_fp8.casts.outliers import extend_weight, weight_residual
from ds_fp8.config.formats import CastSpec
from ds_fp8.layers.linear.weights import fprop_weight
from ds_fp8.zero import param
from ds_fp8.zero.param import FP8Param, ReferenceShardCast
from ds_fp8.zero.quantizer import OutlierResiduals, ReferenceResidualCast
from tests.layers.hugging_face import causal_lm, tokens
from tests.ranks import case, on_ranks
from tests.zero import models
from tests.zero.models import fp8_linears
from tests.zero.shard_casts import DEVICE, buffer_of, shards_of, weights_of

SECTION = {"preset": "precise"}
# Sizes of linears whose rows divide by 2, 3 and 4 ranks, and by none of them
WHOLE_ROWS, CUT_ROWS = (132, 300), (131, 301)


def channels_of(engine):
    return {name: linear.recipe.outliers.channels.tolist() for name, linear in fp8_linears(engine).items()}


@pytest.mark.parametrize(
    ("world", "sizes", "room", "scale"),
    [
        (1, CUT_ROWS, 4, "pow2"),
        (3, CUT_ROWS, 0, "pow2"),
        (2, CUT_ROWS, 0, "fp32"),
        (2, WHOLE_ROWS, 4, "pow2"),
        (4, WHOLE_ROWS, 4, "fp32"),
    ],
)
@on_ranks()
def test_operands_are_those_of_the_whole_master(sizes, room, scale):
    """Of every linear; all ranks choose alike; `room`: how many weights have room for blocks."""
    engine = models.engine({**SECTION, "linear": {"weight": {"scale": scale}}}, sizes=sizes)
    models.train(engine, 2)
    linears, shards = fp8_linears(engine), engine.fp8.weights
    assert len(linears) == 4
    assert sum(weight.has_room for weight in shards) == room
    for name, linear in linears.items():
        master, spec = safe_get_full_fp32_param(linear.weight), linear.recipe.weight
        whole, channels = quantize(master, spec.format, spec.granularity, spec.scale), linear.recipe.outliers.channels
        first = channels.clone()
        dist.broadcast(first, 0)
        assert len(channels) == 128
        assert torch.equal(channels, first), name
        expected = extend_weight(whole, weight_residual(master, whole, channels), channels)
        for finish in shards.unshard([linear.weight]):
            finish()
        assert models.same_cast(fprop_weight([linear.weight], linear.recipe), expected), name
        linear.weight.partition()
        read = shards.unsharded(linear.weight)
        assert models.same_cast(read, whole), name
        assert read.data.is_contiguous()


def without_room():
    """Let no weight leave room for outlier blocks."""
    return mock.patch.object(param, "width_with_outliers", lambda columns, channels: columns)


def losses_and_channels(room, section, sizes, steps):
    """Losses, and channels at the end, of weights with room for outlier blocks where there may be some, or without."""
    with contextlib.nullcontext() if room else without_room():
        engine = models.engine(section, sizes=sizes)
    assert any(weight.has_room for weight in engine.fp8.weights) == room
    found = models.train(engine, steps), channels_of(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize(("world", "channels"), [(1, 128), (2, 4), (3, 65)])
@on_ranks()
def test_blocks_that_gathers_bring_change_no_number(channels):
    """From the first step on, whose forward finds the channels, and where measured steps change them."""
    section = {**SECTION, "linear": {"outlier_channels": channels}, "monitor": {"every": 2}}
    found, expected = (losses_and_channels(room, section, WHOLE_ROWS, 4) for room in (True, False))
    assert found == expected


@on_ranks(2)
def test_training_follows_bf16_more_closely_than_without():
    bf16, precise, plain = (
        models.train(models.engine(section), 8) for section in (None, SECTION, {"preset": "infir2"})
    )
    assert precise == pytest.approx(bf16, rel=0.02)

    def distance(losses):
        return sum((a - b) ** 2 for a, b in zip(losses, bf16, strict=True))

    assert distance(precise) < distance(plain)


@on_ranks(2)
def test_residuals_are_counted_on_the_wire_and_gathers_bring_blocks_in_their_place():
    def of_channels(sizes):
        sent = []
        for section in (SECTION, {**SECTION, "linear": {"outlier_channels": 0}}):
            engine = models.engine(section, sizes=sizes)
            models.train(engine, 3)
            sent.append(engine.fp8.wire.sent()["all_gather_bytes"])
        return sent[0] - sent[1]

    # First found product by product, then three casts, each an all-reduce of 128 bytes a row; the sums of energies are
    # of the monitor and not counted.
    rows = 2 * (301 + 131)
    assert of_channels(CUT_ROWS) == 3 * 128 * rows + 128 * rows
    # Of 300 x 132 and 132 x 300, up to whole blocks and a block of 2 x 128; once more when channels were found.
    room = 2 * (300 * (256 + 256 - 132) + 132 * (384 + 256 - 300))
    whole = 2 * (300 * (256 + 256) + 132 * (384 + 256))
    amax = 4 * 4 * 2 * 2 * (8 - 4)  # of four casts: rows of scales are padded to multiples of 4
    assert of_channels(WHOLE_ROWS) == (3 * 2 * room + whole) // 2 + amax


@on_ranks(2)
def test_channels_are_looked_for_again_on_measured_steps_and_kept_in_checkpoints(tmp_path):
    """Before and after an input whose energy lies elsewhere, with a measurement every second step."""
    section = {**SECTION, "linear": {"outlier_channels": 4}, "monitor": {"every": 2}}
    engine = models.engine(section, sizes=WHOLE_ROWS)
    models.train(engine, 1)
    name, linear = next(iter(fp8_linears(engine).items()))
    first, address = channels_of(engine)[name], linear.recipe.outliers.channels.data_ptr()
    engine.save_checkpoint(str(tmp_path / "first"))
    loud = [channel for channel in range(132) if channel not in first][:4]
    master = safe_get_full_fp32_param(engine.module.embedding.weight)
    master[:, loud] = 30.0
    safe_set_full_fp32_param(engine.module.embedding.weight, master)
    models.train(engine, 4, start=1)
    engine.save_checkpoint(str(tmp_path / "last"))
    resumed = models.engine(section, sizes=WHOLE_ROWS)
    resumed.load_checkpoint(str(tmp_path / "last"))
    assert channels_of(resumed)[name] == channels_of(engine)[name] == loud
    engine.load_checkpoint(str(tmp_path / "first"))
    assert channels_of(engine)[name] == first != loud
    assert linear.recipe.outliers.channels.data_ptr() == address  # CUDA graphs read them where they are


def kernel_and_reference(master, sizes):
    """Bytes of all residuals by the kernel in Triton's interpreter, and by the reference, at one state of masters."""
    from ds_fp8.zero.cast_triton import TritonResidualCast

    engine = models.engine({**SECTION, "optimizer": {"master": master}}, sizes=sizes)
    models.train(engine, 1)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the step writes them on a stream of its own
    shards = engine.fp8.weights
    pairs = []
    for some in shards.quantizers:
        known = some._residuals._weights
        results = []
        for cast in (ReferenceResidualCast(), TritonResidualCast()):
            for one in known:
                one.residual.zero_()
            scales = some._scales.clone()
            for one in known:
                if one.weight.has_room:
                    one.weight.block_scales_in(scales).zero_()
            cast.write(known, scales, FP8Param.numbers)
            results.append(torch.cat([*(one.residual.flatten() for one in known), scales.view(torch.uint8)]))
        pairs.append(results)
    return pairs


def assert_nearly_equal(expected, found):
    """Triton's interpreter rounds to FP8 in its own way (tests/casts/test_kernels.py); places are what is compared."""
    assert torch.equal(expected.bitwise_and(0x7F) > 8, found.bitwise_and(0x7F) > 8) or (
        (expected == found).float().mean() > 0.9
    )
    assert ((expected == 0) == (found == 0)).float().mean() > 0.98


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2)])
def test_the_kernel_writes_those_of_one_rank(rank, world, dtype):
    kernels = pytest.importorskip("ds_fp8.zero.cast_triton", reason="Triton is not installed")
    spec = CastSpec(granularity="128x128", scale="fp32")
    weights = weights_of(rank, world, "128x128", DEVICE, spec=spec, channels=65)
    masters = [torch.randn(weight.shard.shape, device=DEVICE) * 0.02 for weight in weights]
    shards = {weight: shard.to(dtype) for weight, shard in shards_of(masters, weights).items()}
    cast, scales = ReferenceShardCast(weights, spec), buffer_of(weights)
    cast.write_amax(scales, shards.__getitem__)
    scales = scale_from_amax(scales, spec.format, spec.scale)
    cast.cast(scales, shards.__getitem__)
    known = OutlierResiduals(weights, torch.device(DEVICE))._weights
    for weight, _ in known:
        columns = weight.shard.shape[1]
        weight.outliers.channels = torch.linspace(0, columns - 1, min(65, columns), device=DEVICE).int()
    expected, found = [], []
    for write, results in ((ReferenceResidualCast(), expected), (kernels.TritonResidualCast(), found)):
        for one in known:
            one.residual.zero_()
        write.write(known, scales, shards.__getitem__)
        results += [one.residual.clone() for one in known]
    assert any(weight.has_room for weight in weights)
    assert world == 1 or not all(weight.has_room for weight in weights)
    assert_nearly_equal(*(torch.cat([one.flatten() for one in results]) for results in (expected, found)))


def test_the_kernel_writes_what_the_reference_does_from_masters_of_codes(ranks):
    pytest.importorskip("triton")
    for pairs in ranks(2, kernel_and_reference, "fp8_plus16", WHOLE_ROWS):
        for expected, found in pairs:
            assert_nearly_equal(expected, found)


def decoder(architecture, heads, section, rows, steps, **zero):
    """An engine around a small decoder, and the losses of its first steps over the same rows."""
    groups = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 128}
    model = causal_lm(architecture, hidden_size=256, intermediate_size=384, **groups)
    engine = models.engine(section, model, **zero)
    return engine, models.train(engine, steps, rows=lambda *_: rows)


@on_ranks(2)
def test_a_stack_may_have_weights_that_stay_whole():
    """k and v have 32,768 elements and q 65,536."""
    (one, losses), (other, sharded) = (
        decoder("qwen2", 2, SECTION, tokens(2, 64), 3, stage3_param_persistence_threshold=numel)
        for numel in (40_000, 0)
    )
    attention = one.module.model.layers[0].self_attn
    assert (attention.k_proj.weight.ds_persist, attention.q_proj.weight.ds_persist) == (True, False)
    assert not other.module.model.layers[0].self_attn.k_proj.weight.ds_persist
    assert losses == pytest.approx(sharded, rel=2e-3)


@on_ranks(3)
def test_a_stack_may_have_weights_with_room_and_without():
    """Of q, k and v only q divides by three ranks."""
    found = []
    for context in (contextlib.nullcontext(), without_room()):
        with context:
            engine, losses = decoder("qwen2", 3, SECTION, tokens(2, 64), 3)
        layer = engine.module.model.layers[0]
        weights = layer.self_attn.q_proj, layer.self_attn.k_proj, layer.mlp.up_proj
        found.append(([engine.fp8.weights.of(linear.weight).has_room for linear in weights], losses))
    (with_room, losses), (without, expected) = found
    assert (with_room, without) == ([True, False, True], [False] * 3)
    assert losses == expected


@pytest.mark.parametrize(("saved", "resumed", "silent"), [(64, 128, False), (128, 4, False), (64, 128, True)])
@on_ranks(2)
def test_another_number_of_channels_than_in_the_checkpoint_finds_them_again(tmp_path, saved, resumed, silent):
    """silent: the first input of the first linear is zero, whose channels are 0, 1, 2 and so on."""
    prepare = (lambda model: nn.init.zeros_(model.embedding.weight)) if silent else None
    engine, again = (
        models.engine({**SECTION, "linear": {"outlier_channels": count}}, prepare=prepare) for count in (saved, resumed)
    )
    models.train(engine, 1)
    engine.save_checkpoint(str(tmp_path))
    said = []
    again.fp8.health.say = said.append
    again.load_checkpoint(str(tmp_path))
    assert torch.tensor(models.train(again, 2, start=1)).isfinite().all()
    assert {len(channels) for channels in channels_of(again).values()} == {resumed}
    if dist.get_rank() == 0:
        assert ("4 inputs" if silent else f"{saved}, now {resumed}") in said[0]


@on_ranks(2)
def test_a_weight_that_another_module_reads_is_multiplied_with_residuals_of_its_own_cast():
    """Its weight gathered in FP8 and, once another module reads it, in BF16."""
    engine = models.engine(SECTION, sizes=(128, 256))
    models.train(engine, 2)
    linear, x = engine.module.layers[0].up, torch.randn(64, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    with deepspeed.zero.GatheredParameters([linear.weight, linear.bias]):
        exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    errors = []
    for _ in range(2):
        with torch.no_grad():
            errors.append(((linear(x).double() - exact).norm() / exact.norm()).item())
        deepspeed.zero.register_external_parameter(engine.module.embedding, linear.weight)
    assert errors[1] < 1.2 * errors[0]  # that of roundings to BF16, not of casts


@on_ranks(2)
def test_ranks_may_have_different_numbers_of_tiles_when_channels_are_found():
    """Rows of one tile and of three; every step is measured."""
    for save in ("fp8", "bf16"):
        activations = {"mlp_tile_tokens": 128, "save": save}
        section = {"preset": "precise", "monitor": {"every": 1}, "activations": activations}
        _, losses = decoder("llama", 2, section, tokens(1, 64 + 236 * dist.get_rank()), 3)
        with case(save):
            assert losses[2] < losses[1] < losses[0]


class ListedExperts(nn.Module):
    """A layer with a list of experts, of which every rank calls others; a leaf module, as ZeRO-3 needs it then."""

    def __init__(self, hidden: int):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.join = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        called = self.experts[0], self.experts[1 + dist.get_rank()]
        return x + torch.tanh(self.join(sum(expert(x) for expert in called)))


@on_ranks(2)
def test_experts_in_a_list_have_no_outlier_channels_for_not_every_rank_calls_them():
    def make_leaves(model):
        deepspeed.utils.set_z3_leaf_modules(model, [ListedExperts])

    section = {"preset": "precise", "monitor": {"every": 2}}
    engine = models.engine(section, layers=[ListedExperts], prepare=make_leaves, sizes=(128, 128))
    names = [name for name, linear in fp8_linears(engine).items() if linear.recipe.outliers is not None]
    assert names == ["layers.0.join"]
    assert any("no outlier channels: layers.0.experts.0 and others" in note for note in engine.fp8.report["notes"])
    losses = models.train(engine, 3)
    assert losses[-1] < losses[0]
