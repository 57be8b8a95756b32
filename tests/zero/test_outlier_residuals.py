"""Outlier channels of sharded weights: residuals as of the whole weight, on any number of ranks, and checkpoints."""

from __future__ import annotations

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn

import ds_fp8
from ds_fp8.casts import quantize, scale_from_amax
from ds_fp8.casts.outliers import extend_weight, weight_residual
from ds_fp8.config.formats import CastSpec
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.weights import fprop_weight
from ds_fp8.zero import param
from ds_fp8.zero.param import FP8Param, ReferenceShardCast
from ds_fp8.zero.quantizer import OutlierResiduals, ReferenceResidualCast
from tests.layers.hugging_face import causal_lm, tokens
from tests.zero import models
from tests.zero.shard_casts import DEVICE, buffer_of, shards_of, weights_of

SECTION = {"preset": "precise", "monitor": {"every": 0}}
# Sizes of linears whose rows divide by 2, 3 and 4 ranks, and by none of them
WHOLE_ROWS, CUT_ROWS = (132, 300), (131, 301)


def linears(engine):
    return [(name, module) for name, module in engine.module.named_modules() if isinstance(module, FP8Linear)]


def operands_of_whole_weights(section, sizes):
    """Whether the operand of every linear is that of its whole master; the channels; weights with room for blocks."""
    engine = models.build(models.config(section), sizes=sizes)
    models.train(engine, 3)
    same, shards = {}, engine.fp8.weights
    for name, linear in linears(engine):
        master, spec = safe_get_full_fp32_param(linear.weight), linear.recipe.weight
        whole, channels = quantize(master, spec.format, spec.granularity, spec.scale), linear.recipe.outliers.channels
        expected = extend_weight(whole, weight_residual(master, whole, channels), channels)
        for finish in shards.unshard([linear.weight]):
            finish()
        same[name] = models.same_cast(fprop_weight([linear.weight], linear.recipe), expected)
        linear.weight.partition()
        read = shards.unsharded(linear.weight)
        same[name] &= models.same_cast(read, whole) and read.data.is_contiguous()
    channels = {name: linear.recipe.outliers.channels.tolist() for name, linear in linears(engine)}
    return same, channels, sum(weight.has_room for weight in shards)


@pytest.mark.parametrize(
    ("world", "sizes", "room", "scale"),
    [
        (1, CUT_ROWS, 6, "pow2"),
        (2, CUT_ROWS, 0, "fp32"),
        (3, CUT_ROWS, 0, "pow2"),
        (2, WHOLE_ROWS, 6, "pow2"),
        (4, WHOLE_ROWS, 6, "fp32"),
    ],
)
def test_operands_are_those_of_the_whole_master(ranks, world, sizes, room, scale):
    section = {**SECTION, "linear": {"weight": {"scale": scale}}}
    results = ranks(world, operands_of_whole_weights, section, sizes)
    same, channels, has_room = results[0]
    assert has_room == room
    assert len(same) == 6
    assert all(same.values()), same
    assert all(len(found) == 128 for found in channels.values())
    assert all(result[1] == channels for result in results)  # all ranks chose alike


def losses_and_channels(room, section, sizes, steps):
    """Losses, and channels at the end, of weights with room for outlier blocks where there may be some, or without."""
    with pytest.MonkeyPatch.context() as patch:
        if not room:
            patch.setattr(param, "width_with_outliers", lambda columns, channels: columns)
        engine = models.build(models.config(section), sizes=sizes)
    assert any(weight.has_room for weight in engine.fp8.weights) == room
    losses = models.train(engine, steps)
    return losses, {name: linear.recipe.outliers.channels.tolist() for name, linear in linears(engine)}


@pytest.mark.parametrize(("world", "channels"), [(1, 128), (2, 4), (3, 65)])
def test_blocks_that_gathers_bring_change_no_number(ranks, world, channels):
    """From the first step on, whose forward finds the channels, and where measured steps change them."""
    section = {**SECTION, "linear": {"outlier_channels": channels}, "monitor": {"every": 2}}
    found, expected = (ranks(world, losses_and_channels, room, section, WHOLE_ROWS, 6) for room in (True, False))
    assert found == expected


def test_training_follows_bf16_more_closely_than_without(ranks):
    bf16 = ranks(2, losses_of_12_steps, {"enabled": False})[0]
    precise, plain = (ranks(2, losses_of_12_steps, {**SECTION, "preset": name})[0] for name in ("precise", "infir2"))
    assert precise == pytest.approx(bf16, rel=0.02)
    assert distance(precise, bf16) < distance(plain, bf16)


def losses_of_12_steps(section):
    return models.train(models.build(models.config(section)), 12)


def distance(left, right):
    return sum((a - b) ** 2 for a, b in zip(left, right, strict=True))


def test_residuals_are_counted_on_the_wire(ranks):
    none = {**SECTION, "linear": {"outlier_channels": 0}}
    with_block, without = (ranks(2, gathered_bytes, section)[0] for section in (SECTION, none))
    rows = 3 * (301 + 131)
    # First found product by product, then three casts, each an all-reduce of 128 bytes a row; the sums of energies are
    # of the monitor and not counted.
    assert with_block - without == 3 * 128 * rows + 128 * rows


def test_gathers_bring_outlier_blocks_in_place_of_residuals(ranks):
    none = {**SECTION, "linear": {"outlier_channels": 0}}
    with_block, without = (ranks(2, gathered_bytes, section, WHOLE_ROWS)[0] for section in (SECTION, none))
    # Of 300 x 132 and 132 x 300, up to whole blocks and a block of 2 x 128; once more when channels were found.
    room = 3 * (300 * (256 + 256 - 132) + 132 * (384 + 256 - 300))
    whole = 3 * (300 * (256 + 256) + 132 * (384 + 256))
    amax = 4 * 4 * 3 * 2 * (8 - 4)  # of four casts: rows of scales are padded to multiples of 4
    assert with_block - without == (3 * 2 * room + whole) // 2 + amax


def gathered_bytes(section, sizes=CUT_ROWS):
    engine = models.build(models.config(section), sizes=sizes)
    models.train(engine, 3)
    return engine.fp8.wire.sent()["all_gather_bytes"]


def channels_over_time(folder):
    """Channels before and after an input whose energy lies elsewhere, with a measurement every second step."""
    engine = models.build(
        models.config({**SECTION, "linear": {"outlier_channels": 4}, "monitor": {"every": 2}}), sizes=(132, 300)
    )
    name, linear = linears(engine)[0]
    models.train(engine, 1)
    first = linear.recipe.outliers.channels.tolist()
    address = linear.recipe.outliers.channels.data_ptr()
    loud = [channel for channel in range(132) if channel not in first][:4]
    master = safe_get_full_fp32_param(engine.module.embedding.weight)
    master[:, loud] = 30.0
    safe_set_full_fp32_param(engine.module.embedding.weight, master)
    models.train(engine, 4, start=1)
    engine.save_checkpoint(folder)
    resumed = models.build(
        models.config({**SECTION, "linear": {"outlier_channels": 4}, "monitor": {"every": 2}}), sizes=(132, 300)
    )
    resumed.load_checkpoint(folder)
    loaded = dict(linears(resumed))[name].recipe.outliers.channels.tolist()
    outliers = linear.recipe.outliers
    return first, loud, outliers.channels.tolist(), loaded, address == outliers.channels.data_ptr()


def test_channels_are_looked_for_again_on_measured_steps_and_kept_in_checkpoints(ranks, tmp_path):
    for first, loud, later, loaded, in_place in ranks(2, channels_over_time, str(tmp_path)):
        assert first != loud
        assert later == loud
        assert loaded == loud
        assert in_place  # CUDA graphs read them where they are


def kernel_and_reference(master, sizes):
    """Bytes of all residuals by the kernel in Triton's interpreter, and by the reference, at one state of masters."""
    from ds_fp8.zero.cast_triton import TritonResidualCast

    engine = models.build(models.config({**SECTION, "optimizer": {"master": master}}), sizes=sizes)
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
    config = models.config(section, **zero)
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    losses = [models.take_step(engine, engine(input_ids=rows, labels=rows, use_cache=False).loss) for _ in range(steps)]
    return engine, losses


def losses_of_a_decoder(threshold):
    """Losses of a model whose k and v have 32,768 elements and q 65,536, and whether k is whole on this rank."""
    engine, losses = decoder("qwen2", 2, SECTION, tokens(2, 64), 4, stage3_param_persistence_threshold=threshold)
    attention = engine.module.model.layers[0].self_attn
    return losses, attention.k_proj.weight.ds_persist, attention.q_proj.weight.ds_persist


def test_a_stack_may_have_weights_that_stay_whole(ranks):
    losses, k_is_whole, q_is_whole = ranks(2, losses_of_a_decoder, 40_000)[0]
    assert (k_is_whole, q_is_whole) == (True, False)
    sharded, k_is_whole, _ = ranks(2, losses_of_a_decoder, 0)[0]
    assert not k_is_whole
    assert losses == pytest.approx(sharded, rel=2e-3)


def losses_of_a_stack_of_both(room):
    """Losses of a model of whose q, k and v only q divides by three ranks, and how many weights have room."""
    with pytest.MonkeyPatch.context() as patch:
        if not room:
            patch.setattr(param, "width_with_outliers", lambda columns, channels: columns)
        engine, losses = decoder("qwen2", 3, SECTION, tokens(2, 64), 3)
    layer = engine.module.model.layers[0]
    weights = layer.self_attn.q_proj, layer.self_attn.k_proj, layer.mlp.up_proj
    return losses, [engine.fp8.weights.of(linear.weight).has_room for linear in weights]


def test_a_stack_may_have_weights_with_room_and_without(ranks):
    losses, with_room = ranks(3, losses_of_a_stack_of_both, True)[0]
    expected, without = ranks(3, losses_of_a_stack_of_both, False)[0]
    assert (with_room, without) == ([True, False, True], [False] * 3)
    assert losses == expected


def other_numbers_of_channels(folder, saved, resumed, silent=False):
    """Numbers of channels, losses and lines after a checkpoint with `saved` channels where `resumed` are asked for.

    silent: whether the first input of the first linear is zero.
    """
    sections = [{**SECTION, "linear": {"outlier_channels": count}} for count in (saved, resumed)]
    prepare = (lambda model: nn.init.zeros_(model.embedding.weight)) if silent else None
    engine = models.build(models.config(sections[0]), prepare=prepare)
    models.train(engine, 1)
    engine.save_checkpoint(folder)
    engine = models.build(models.config(sections[1]), prepare=prepare)
    said = []
    engine.fp8.health.say = said.append
    engine.load_checkpoint(folder)
    losses = models.train(engine, 2, start=1)
    return {len(linear.recipe.outliers.channels) for _, linear in linears(engine)}, losses, said


@pytest.mark.parametrize(("saved", "resumed"), [(64, 128), (128, 4)])
def test_another_number_of_channels_than_in_the_checkpoint_finds_them_again(ranks, tmp_path, saved, resumed):
    counts, losses, said = ranks(2, other_numbers_of_channels, str(tmp_path), saved, resumed)[0]
    assert counts == {resumed}
    assert torch.tensor(losses).isfinite().all()
    assert f"{saved}, now {resumed}" in said[0]


def test_the_first_channels_of_a_silent_input_are_found_again_where_more_are_asked_for(ranks, tmp_path):
    """They are 0, 1, 2 and so on, as those of an input that has no more."""
    counts, losses, said = ranks(2, other_numbers_of_channels, str(tmp_path), 64, 128, True)[0]
    assert counts == {128}
    assert torch.tensor(losses).isfinite().all()
    assert "6 inputs" in said[0]


def error_of_a_linear_whose_weight_is_read_elsewhere():
    """Relative error of a linear's output, its weight gathered in FP8 and, once another module reads it, in BF16."""
    engine = models.build(models.config(SECTION), sizes=(128, 256))
    models.train(engine, 3)
    _, linear = linears(engine)[0]
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    with deepspeed.zero.GatheredParameters([linear.weight, linear.bias]):
        exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    errors = []
    for _ in range(2):
        with torch.no_grad():
            errors.append(((linear(x).double() - exact).norm() / exact.norm()).item())
        deepspeed.zero.register_external_parameter(engine.module.embedding, linear.weight)
    return errors


def test_a_weight_that_another_module_reads_is_multiplied_with_residuals_of_its_own_cast(ranks):
    for in_fp8, in_bf16 in ranks(2, error_of_a_linear_whose_weight_is_read_elsewhere):
        assert in_bf16 < 1.2 * in_fp8  # that of roundings to BF16, not of casts


def losses_of_tiles(save):
    """Losses of ranks whose rows are one tile and three tiles long; every step is measured."""
    activations = {"mlp_tile_tokens": 128, "save": save}
    section = {"preset": "precise", "monitor": {"every": 1}, "activations": activations}
    return decoder("llama", 2, section, tokens(1, 64 + 236 * dist.get_rank()), 3)[1]


@pytest.mark.parametrize("save", ["fp8", "bf16"])
def test_ranks_may_have_different_numbers_of_tiles_when_channels_are_found(ranks, save):
    for losses in ranks(2, losses_of_tiles, save):
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


def losses_of_listed_experts():
    def make_leaves(model):
        deepspeed.utils.set_z3_leaf_modules(model, [ListedExperts])

    config = models.config({"preset": "precise", "monitor": {"every": 2}})
    engine = models.build(config, layers=[ListedExperts], prepare=make_leaves, sizes=(128, 128))
    names = [name for name, linear in linears(engine) if linear.recipe.outliers is not None]
    return models.train(engine, 4), names, engine.fp8.report["notes"]


def test_experts_in_a_list_have_no_outlier_channels_for_not_every_rank_calls_them(ranks):
    for losses, names, notes in ranks(2, losses_of_listed_experts):
        assert losses[-1] < losses[0]
        assert names == ["layers.0.join"]
        assert any("no outlier channels: layers.0.experts.0 and others" in note for note in notes)
