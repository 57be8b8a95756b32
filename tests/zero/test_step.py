"""The own optimizer step: clipping, overflow, offloading, and what users write and read around it."""

import logging
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_grad,
    safe_set_local_fp32_param,
    safe_set_local_grad,
)

from ds_fp8.casts import quantize
from ds_fp8.config.errors import UserError
from ds_fp8.layers.linear.weights import GATHERED
from tests.zero import models
from tests.zero.test_options import freeze_a_layer

COAT = {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"}
SECTION = {"monitor": {"every": 0}, "optimizer": {"implementation": "ds_fp8"}}


def engine_of(fp8=None, own=True, clip=0.0, sizes=(131, 301)):
    """An engine with the own step, or with DeepSpeed's around the same optimizer."""
    config = models.config({**SECTION, **(fp8 or {})}) | {"gradient_clipping": clip}
    engine = models.build(config, sizes=sizes, own=own)
    assert (engine.fp8.step is not None) == own
    return engine


def clipped(own):
    """Losses and gradient norms of six steps."""
    engine, norms, losses = engine_of(own=own, clip=0.05), [], []
    for step in range(6):
        losses += models.train(engine, 1, start=step)
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def test_clipping_follows_deepspeeds(ranks):
    """The norm is summed in another order, in double precision."""
    (losses, norms), (their_losses, their_norms) = (ranks(2, clipped, own)[0] for own in (True, False))
    assert min(norms) > 0.05
    assert losses == pytest.approx(their_losses, rel=1e-6)
    assert norms == pytest.approx(their_norms, rel=1e-5)


def backward(engine, step, factor=1.0):
    engine.backward(engine(models.batch(step, dist.get_rank()).to(engine.device)) * factor)


def after_an_overflow(own):
    """Counts, loss scale and norm after each of three steps, the second of which one rank spoils, and the masters."""
    engine = engine_of({"optimizer": COAT}, own, 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([torch.zeros(1)], lr=1.0), lambda step: 1 / (1 + step)
    )
    engine.lr_scheduler = scheduler
    seen, said = [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ds_fp8").addHandler(handler)
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        backward(engine, step, factor if dist.get_rank() == 1 else 1.0)
        engine.step()
        numbers = [float(state["step"]) for state in engine.basic_optimizer.state.values()]
        norm = float(engine.get_global_grad_norm())
        counts = engine.global_steps, engine.skipped_steps, scheduler.last_epoch, engine.optimizer.loss_scale
        seen.append((counts, numbers, norm, engine.was_step_applied()))
    logging.getLogger("ds_fp8").removeHandler(handler)
    return seen, {name: models.full_master(p) for name, p in engine.module.named_parameters()}, said


def test_an_overflow_is_counted_as_deepspeed_counts_it(ranks):
    ours, theirs = (ranks(2, after_an_overflow, own) for own in (True, False))
    said = [line for line in ours[0][2] if "skipped" in line]  # Inf is NaN behind the cast of gradients
    assert said == ["a step was skipped, 1 so far: the gradient norm is nan"]
    for (seen, masters, _), (their_seen, their_masters, _) in zip(ours, theirs, strict=True):
        assert [entry[0][1:3] for entry in seen] == [(0, 1), (1, 1), (1, 2)]
        for (counts, numbers, norm, applied), (their_counts, their_numbers, their_norm, their_applied) in zip(
            seen, their_seen, strict=True
        ):
            assert (counts, numbers, applied) == (their_counts, their_numbers, their_applied)
            assert norm == pytest.approx(their_norm, rel=1e-6)
        for name, master in masters.items():
            torch.testing.assert_close(master, their_masters[name], rtol=1e-6, atol=1e-8)


def norm_of_gradients(engine):
    """The norm of a step that was taken, and what it is from all gradients."""
    gradients = [safe_get_full_grad(parameter) for parameter in engine.module.parameters() if parameter.requires_grad]
    return float(engine.get_global_grad_norm()), float(torch.cat([g.flatten() for g in gradients]).double().norm())


def moved_gradients():
    """Norms before and after the buffer of gradients was moved away and back, and what a full offload says."""
    engine = engine_of({"grad_reduce": {"format": "bf16"}})
    models.train(engine, 2)
    moved = {"include": [OffloadStateTypeEnum.lp_grads], "pin_memory": False}
    engine.offload_states(**moved)
    engine.reload_states()
    backward(engine, 2, factor=100.0)
    engine.step()
    try:
        engine.offload_states(pin_memory=False)
    except UserError as error:
        return *norm_of_gradients(engine), str(error)


def kept_bf16_shards():
    """Elements of BF16 shards that exist before and after states are offloaded: gradients, BF16 shards, moments."""
    engine = engine_of()
    models.train(engine, 1)

    def kept() -> int:
        return sum(p.ds_tensor.numel() for p in engine.module.parameters() if p.ds_tensor.is_contiguous())

    found = [kept()]
    for include in ([OffloadStateTypeEnum.lp_grads], [OffloadStateTypeEnum.lp_params]):
        engine.offload_states(include=include, pin_memory=False)
        found.append(kept())
        engine.reload_states()
        found.append(kept())
    with pytest.raises(UserError):
        engine.offload_states(include=[OffloadStateTypeEnum.optim_states], pin_memory=False)
    return *found, kept()


def test_offloading_keeps_no_more_bf16_shards_than_it_moves(ranks):
    for before, grads, grads_back, params, params_back, refused in ranks(2, kept_bf16_shards):
        assert before == grads == grads_back == params_back == refused
        assert params > 3 * before


def test_gradients_that_were_offloaded_count(ranks):
    for norm, expected, said in ranks(2, moved_gradients):
        assert expected > 100
        assert norm == pytest.approx(expected, rel=1e-6)
        assert "include=[OffloadStateTypeEnum.lp_params" in said


def left_out(micro_batches):
    """Norms, and gradients of a layer, of three steps; only the last micro-batch of the first and third reaches it."""
    engine = engine_of()
    engine.set_train_batch_size(2 * 2 * micro_batches)
    layer, seen = engine.module.layers[1].up, []
    used = layer.forward
    for step in range(3):
        for micro in range(micro_batches):
            reaches = micro == micro_batches - 1 and step != 1
            layer.forward = used if reaches else lambda x: x.new_ones(*x.shape[:-1], 301)
            backward(engine, step * micro_batches + micro)
            engine.step()
        seen.append((*norm_of_gradients(engine), float(safe_get_full_grad(layer.weight).norm())))
    return seen


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_no_micro_batch_reaches_has_no_gradient(ranks, micro_batches):
    for seen in ranks(2, left_out, micro_batches):
        for norm, expected, _ in seen:
            assert norm == pytest.approx(expected, rel=1e-6)
        first, missing, again = (gradient for _, _, gradient in seen)
        assert missing == 0
        assert first > 0
        assert again > 0


def written_and_left_out(when):
    """Of the second step of two, whose backward reaches all but a layer: norms, and the gradients of three weights.

    The user halves the embeddings' gradient, whole, before the second micro-batch, or each rank its part after it.
    """
    # DeepSpeed sets whole gradients only where they divide by the ranks.
    engine = engine_of(sizes=(132, 300))
    engine.set_train_batch_size(2 * 2 * 2)
    models.train(engine, 1)
    left_out, written = engine.module.layers[1].up, engine.module.embedding.weight
    left_out.forward = lambda x: x.new_ones(*x.shape[:-1], 300)
    for micro in range(2):
        backward(engine, 2 + micro)
        if micro == ("between micro-batches", "before the step").index(when):
            before = safe_get_full_grad(written)
            if micro == 0:
                safe_set_full_grad(written, before / 2)
            else:
                safe_set_local_grad(written, safe_get_local_grad(written) / 2)
            halved = safe_get_full_grad(written)
        if micro == 0:
            engine.step()
    after = safe_get_full_grad(written)
    engine.step()
    weights = left_out.weight, engine.module.layers[0].up.weight
    others = [float(safe_get_full_grad(weight).norm()) for weight in weights]
    return norm_of_gradients(engine), before, halved, after, safe_get_full_grad(written), others


@pytest.mark.parametrize("when", ["between micro-batches", "before the step"])
def test_a_gradient_that_the_user_writes_brings_back_no_others(ranks, when):
    for (norm, expected), before, halved, after, seen, (missing, other) in ranks(2, written_and_left_out, when):
        assert torch.equal(halved, before / 2)
        assert torch.equal(seen, after)
        assert torch.equal(seen, halved) == (when == "before the step")
        assert missing == 0
        assert other > 0
        assert norm == pytest.approx(expected, rel=1e-9)


def accumulator_of(section):
    settings = {key: value for key, value in models.config(section).items() if key != "data_types"}
    return str(models.build(settings | {"gradient_accumulation_steps": 2}).optimizer.grad_partitions_flat_buffer.dtype)


@pytest.mark.parametrize("section", [SECTION, {**SECTION, "grad_reduce": {"format": "bf16"}}])
def test_micro_batches_are_summed_in_fp32_unless_told_otherwise(ranks, section):
    assert ranks(2, accumulator_of, section) == ["torch.float32"] * 2


def frozen_on_the_way():
    """Masters of a layer that is frozen after two steps, before and after two more without weight decay."""
    engine = engine_of()
    models.train(engine, 2)
    freeze_a_layer(engine.module)
    norms = []
    for step in (2, 3):
        models.train(engine, 1, start=step)
        norms.append(norm_of_gradients(engine))
    return norms


def test_what_is_frozen_on_the_way_has_no_part_in_the_norm(ranks):
    for norms in ranks(2, frozen_on_the_way):
        for norm, expected in norms:
            assert norm == pytest.approx(expected, rel=1e-6)


def accumulated_in(dtype, coat):
    """Losses, norms and the gradient accumulator's dtype of a run whose accumulator has this dtype."""
    section = SECTION | ({"optimizer": COAT} if coat else {})
    engine = models.build(models.config(section) | {"data_types": {"grad_accum_dtype": dtype}})
    losses, norms = [], []
    for step in range(6):
        losses += models.train(engine, 1, start=step)
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms, engine.fp8.step is not None, str(engine.optimizer.grad_partitions_flat_buffer.dtype)


@pytest.mark.parametrize("coat", [False, True])
def test_one_micro_batch_may_be_accumulated_in_bf16(ranks, coat):
    (losses, norms, own, dtype), _ = ranks(2, accumulated_in, "bf16", coat)
    (expected, expected_norms, _, _), _ = ranks(2, accumulated_in, "fp32", coat)
    assert own
    assert dtype == "torch.bfloat16"
    assert losses != expected
    assert losses == pytest.approx(expected, rel=2e-3)
    assert norms == pytest.approx(expected_norms, rel=2e-2)


def offloaded():
    config = models.config(SECTION, offload_optimizer={"device": "cpu"})
    engine = models.build({**config, "zero_force_ds_cpu_optimizer": False})
    return engine.fp8.step is None, engine.fp8.report["optimizer_step"]


def test_the_report_says_why_deepspeeds_step_stays(ranks):
    assert ranks(2, offloaded) == [(True, "DeepSpeed's: offload_optimizer steps on the CPU")] * 2


def over_the_life_of_a_write():
    """Whether a weight has a BF16 shard, shows the BF16 of its masters, is gathered as the cast of what it shows."""
    engine = engine_of()
    models.train(engine, 1)
    weight, embedding = engine.module.layers[1].up.weight, engine.module.embedding.weight
    seen = []

    def look():
        exists, master = weight.ds_tensor.is_contiguous(), models.full_master(weight)
        with deepspeed.zero.GatheredParameters([weight]):
            shown = weight.detach().clone()
        unwritten = torch.equal(shown, master.bfloat16())
        weight.all_gather_coalesced([weight]).wait()
        cast = quantize(master if unwritten else shown.float(), "e4m3", "128x128")
        seen.append((exists, unwritten, models.same_cast(getattr(weight, GATHERED), cast)))
        weight.partition()

    look()
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        if dist.get_rank() == 0:
            weight.data.add_(1)
    look()
    backward(engine, 1, torch.nan)
    engine.step()
    look()
    models.train(engine, 1, start=1)
    look()
    return seen, engine.skipped_steps, embedding.ds_tensor.is_contiguous()


def test_what_a_user_writes_into_a_weight_holds_until_a_step_is_taken(ranks):
    """BF16 shards exist where something is gathered in BF16. In stock ZeRO-3, too, the next step overwrites them."""
    life = [(False, True, True), (True, False, True), (True, False, True), (False, True, True)]
    assert ranks(2, over_the_life_of_a_write) == [(life, 1, True)] * 2


def shown_with_nan():
    """What the next cast reads after masters with a NaN were shown to a rank that wrote nothing."""
    engine = engine_of(sizes=(132, 300))
    models.train(engine, 1)
    weight = engine.module.layers[1].up.weight
    master = safe_get_local_fp32_param(weight).clone()
    master.view(-1)[0] = torch.nan
    safe_set_local_fp32_param(weight, master)
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        shown = bool(weight.isnan().any())
    return shown, engine.fp8.weights.of(weight).from_bf16


def test_a_nan_that_was_only_shown_is_not_written(ranks):
    assert ranks(2, shown_with_nan) == [(True, False)] * 2


def written_locally(writers):
    """Losses of two steps after some ranks have written to their masters of a weight, and the weight after them."""
    engine = engine_of(sizes=(132, 300))
    losses = models.train(engine, 1)
    weight = engine.module.layers[1].up.weight
    if dist.get_rank() in writers:
        safe_set_local_fp32_param(weight, 2 * safe_get_local_fp32_param(weight))
    losses += models.train(engine, 2, start=1)
    return losses, models.full_master(weight)


def test_one_rank_may_write_its_masters_alone(ranks):
    for (losses, weight), (expected, before) in zip(
        ranks(2, written_locally, [0]), ranks(2, written_locally, []), strict=True
    ):
        assert losses[:2] == expected[:2]  # they count from the next step on
        assert losses[2] != expected[2]
        torch.testing.assert_close(weight[:150], 2 * before[:150], rtol=0.1, atol=2e-3)
        torch.testing.assert_close(weight[150:], before[150:], rtol=0.1, atol=2e-3)


def undisturbed():
    return models.train(engine_of(), 3)


def refused_load(folder):
    """Losses before and after a load that fails, and whether BF16 shards that nobody reads are there after it."""
    engine = engine_of()
    losses = models.train(engine, 1)
    engine.save_checkpoint(folder, tag="whole")
    losses += models.train(engine, 1, start=1)
    file = Path(folder, "whole", f"bf16_zero_pp_rank_{dist.get_rank()}_mp_rank_00_optim_states.pt")
    saved = torch.load(file, weights_only=False)
    for group in saved["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"]:
        del group["betas"]
    torch.save(saved, file)
    dist.barrier()
    with pytest.raises(UserError, match="not of an Adam optimizer"):
        engine.load_checkpoint(folder, tag="whole")
    kept = [p.ds_tensor.is_contiguous() for p in engine.module.parameters() if engine.fp8.weights.in_fp8(p)]
    return losses + models.train(engine, 1, start=2), any(kept)


def test_a_load_that_is_refused_changes_nothing(ranks, tmp_path):
    expected = ranks(2, undisturbed)
    for (losses, kept), its_losses in zip(ranks(2, refused_load, str(tmp_path)), expected, strict=True):
        assert losses == its_losses
        assert not kept
