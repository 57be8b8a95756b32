"""Weights that nothing trains are cast once, and again when somebody has written to them; steps leave them alone."""

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from peft import LoraConfig, get_peft_model

import ds_fp8
from ds_fp8.casts import quantize
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.weights import UNSHARDED
from ds_fp8.train.model import shard_one_by_one
from ds_fp8.zero.param import ReferenceShardCast
from tests.layers.hugging_face import causal_lm
from tests.zero import models
from tests.zero.test_state_machine import freeze_most

SECTION = {"monitor": {"every": 0}}


class Casts:
    """Counts the elements that are cast while it is entered."""

    def __enter__(self):
        self.elements, self._stock = 0, ReferenceShardCast.cast

        def cast(shard_cast, *args):
            self.elements += sum(weight.shard.valid for weight in shard_cast._weights)
            return self._stock(shard_cast, *args)

        ReferenceShardCast.cast = cast
        return self

    def __exit__(self, *_):
        ReferenceShardCast.cast = self._stock


def over_all_ranks(number):
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


def gathered(weight):
    weight.all_gather_coalesced([weight]).wait()
    numbers = getattr(weight, UNSHARDED).dequantize()
    weight.partition()
    return numbers


def lora_step():
    """Of the step of a LoRA run: bytes for parameters, those of adapters and vectors, elements cast, adapters."""
    torch.manual_seed(dist.get_rank())
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(causal_lm("qwen2"), LoraConfig(r=4, target_modules=targets)).bfloat16()
    # What is small stays whole: all adapters here, and vectors.
    config = models.config(SECTION, stage3_param_persistence_threshold=2000)
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    for step in range(2):
        tokens = models.batch(step, dist.get_rank())
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.fp8.wire.take()
        with Casts() as casts:
            engine.step()
    whole = [p for p in engine.module.parameters() if p.ds_persist]
    adapters = [p for name, p in engine.module.named_parameters() if "lora" in name]
    assert {id(p) for p in adapters} <= {id(p) for p in whole}
    sent = engine.fp8.wire.take()["all_gather_bytes"]
    kept = sum(p.ds_tensor.nbytes for p in whole)
    return sent, kept, kept / sum(p.ds_tensor.nbytes for p in adapters), over_all_ranks(casts.elements)


def test_a_step_of_lora_sends_adapters_and_no_weights(ranks):
    for sent, kept, share, cast in ranks(2, lora_step):
        assert sent == kept
        assert 1 < share < 1.1
        assert cast == 0


def with_adapters(frozen_on_host, section=None):
    """Losses of a model with adapters that is sharded one by one; where the BF16 shards lie of what is frozen.

    Then the bytes gathered until the first step's end, and after it.
    """
    import ds_fp8

    torch.manual_seed(0)
    model = get_peft_model(causal_lm("qwen2"), LoraConfig(r=4, target_modules="all-linear")).bfloat16()
    config = models.config(SECTION | (section or {}), stage3_param_persistence_threshold=2000)
    shard_one_by_one(model, config, frozen_on_host)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = ds_fp8.initialize(model=model, model_parameters=trained, config=config)[0]
    losses, gathers = [], []
    for step in range(3):
        tokens = models.batch(step, dist.get_rank()).to(engine.device)
        losses.append(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.backward(losses[-1])
        engine.step()
        if step != 1:
            gathers.append(engine.fp8.wire.take()["all_gather_bytes"])
    frozen = [p for p in engine.module.parameters() if not p.requires_grad]
    assert {p.device.type for p in frozen} == {engine.device.type}
    places = [
        {p.ds_tensor.device.type for p in frozen if engine.fp8.weights.on_host(p) is coded} for coded in (True, False)
    ]
    return [loss.item() for loss in losses], places, gathers


def test_frozen_weights_may_be_sharded_into_host_memory(ranks):
    assert ranks(2, with_adapters, True) == ranks(2, with_adapters, False)


def test_frozen_weights_that_every_rank_has_whole_are_not_gathered(ranks):
    for preset in ("infir2", "precise"):
        sharded, whole = (
            ranks(2, with_adapters, True, {"preset": preset, "param_gather": {"frozen": codes}})
            for codes in ("sharded", "whole")
        )
        for (losses, places, (first, later)), (expected, same, before) in zip(whole, sharded, strict=True):
            assert (losses, places) == (expected, same)
            assert first <= before[0]  # once, and each product's again when its channels were found
            assert later < before[1] / 2  # adapters


def left_by_one(codes):
    """Losses of a run that a weight leaves FP8 in; by how many bytes it frees; weights kept whole then, at the end."""
    section = SECTION | {"param_gather": {"frozen": codes}}
    engine = models.build(models.config(section), prepare=freeze_most)
    weights, one = engine.fp8.weights, engine.module.layers[0].up.weight
    losses, before, expected = models.train(engine, 1), weights.nbytes, weights.kept_numel - one.ds_numel
    weights.leave_fp8([one])
    freed = before - weights.nbytes
    losses += models.train(engine, 2, start=1)
    kept = weights.kept_numel
    engine.destroy()
    return losses, freed / one.ds_numel, kept == expected, weights.kept_numel


def test_codes_are_kept_for_as_long_as_they_are_used(ranks):
    (losses, freed, others, end), (expected, *_) = (ranks(2, left_by_one, codes)[0] for codes in ("whole", "sharded"))
    assert losses == expected
    assert 1 <= freed < 1.01
    assert others
    assert end == 0


def casts_of_steps():
    """Elements cast at the start, in a step, and how many there are by whether they learn; bytes of a step's amax."""
    with Casts() as casts:
        engine = models.build(models.config(SECTION, stage3_param_persistence_threshold=0), prepare=freeze_most)
    started, stepped = casts.elements, []
    for step in range(2):
        engine.backward(engine(models.batch(step, dist.get_rank())))
        engine.fp8.wire.take()
        with Casts() as casts:
            engine.step()
        stepped.append((over_all_ranks(casts.elements), engine.fp8.wire.take()["all_gather_bytes"]))
    weights = [module.weight for module in engine.module.modules() if isinstance(module, FP8Linear)]
    counts = [sum(w.ds_numel for w in weights if w.requires_grad is learns) for learns in (True, False)]
    return over_all_ranks(started), stepped, counts


def test_a_step_casts_what_it_has_changed(ranks):
    for started, stepped, (learning, frozen) in ranks(2, casts_of_steps):
        assert started in (0, learning + frozen)  # at the start, or with the first gather
        assert frozen > learning > 0
        scales = 2 * 3 * 4 + 2  # of up [301, 131] and down [131, 301], rows of scales padded to 4, and the stack's end
        assert [elements for elements, _ in stepped] == [learning] * 2
        assert all(0 < sent <= 4 * scales for _, sent in stepped)


def writes(how, folder, frozen_codes):
    """A frozen weight, as gathered before and after it is unfrozen or loaded, and the cast of its BF16 numbers."""
    section = SECTION | {"param_gather": {"frozen": frozen_codes}}
    engine = models.build(models.config(section), prepare=freeze_most, sizes=(132, 300))
    frozen = engine.module.layers[0].up.weight
    engine.save_checkpoint(folder)
    models.train(engine, 2)
    before = gathered(frozen)
    if how == "load module only":
        with deepspeed.zero.GatheredParameters([frozen], modifier_rank=0):
            if dist.get_rank() == 0:
                frozen.data.fill_(5)
        assert (gathered(frozen) == 5).all()
        engine.load_checkpoint(folder, load_module_only=True)
    else:
        frozen.requires_grad_(True)
        models.train(engine, 2, start=2)
    return gathered(frozen), before, quantize(bf16(frozen), "e4m3", "128x128").dequantize()


@pytest.mark.parametrize("codes", ["sharded", "whole"])
@pytest.mark.parametrize("how", ["load module only", "unfrozen"])
def test_what_is_loaded_or_unfrozen_is_cast_again(ranks, tmp_path, how, codes):
    for found, before, expected in ranks(2, writes, how, str(tmp_path), codes):
        assert torch.equal(found, expected)
        torch.testing.assert_close(found, before, rtol=0.1, atol=1e-3)


def mixed(codes="sharded"):
    """Losses of a run in which one weight of a fused product is frozen, and whether every weight is cast aright."""
    section = SECTION | {"param_gather": {"frozen": codes}}
    engine = models.build(models.config(section), layers=[branches], prepare=freeze_a_branch)
    losses = models.train(engine, 3)
    linears = [module.weight for module in engine.module.modules() if isinstance(module, FP8Linear)]
    wholes = [models.full_master(weight) if weight.requires_grad else bf16(weight) for weight in linears]
    return losses, [
        torch.equal(gathered(weight), quantize(whole, "e4m3", "128x128").dequantize())
        for weight, whole in zip(linears, wholes, strict=True)
    ]


def bf16(weight):
    with deepspeed.zero.GatheredParameters([weight]):
        return weight.detach().float().clone()


def branches(hidden):
    return models.Branches(hidden, (256, 128, 128))


def freeze_a_branch(model):
    model.layers[0].weights()[0].requires_grad_(False)


def test_a_fused_product_may_be_frozen_in_part(ranks):
    (losses, right), (expected, _) = ranks(2, mixed)[0], ranks(3, mixed)[0]
    assert (losses, right) == ranks(2, mixed, "whole")[0]
    assert len(right) == 4
    assert all(right)
    assert len(losses) == len(expected) == 3
