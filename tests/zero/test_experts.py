"""Mixtures of experts under ZeRO-3 with experts gathered in FP8, on real ranks."""

import pytest
import torch

from ds_fp8.casts import quantize
from ds_fp8.layers.experts import FP8Experts
from ds_fp8.layers.weights import GATHERED
from tests.layers.hugging_face import SIZES
from tests.layers.moe import mixture
from tests.zero import models
from tests.zero.test_training import QUIET

LENGTH = 32


def engine_of(architecture, section, prepare=None, changes=None, **zero):
    import ds_fp8

    models.leave_modules_to_themselves()
    model = mixture(architecture, **(changes or {}))
    if prepare is not None:
        prepare(model)
    config = {**models.config({**QUIET, **section}, **zero)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    return ds_fp8.initialize(model=model, model_parameters=parameters, config=config)[0]


def experts_of(engine):
    """Weights of experts by name."""
    return {
        f"{name}.{own}": weight
        for name, module in engine.module.named_modules()
        if "experts" in name.split(".")[-1:] and name.endswith(".experts")
        for own, weight in module.named_parameters(recurse=False)
    }


def batch(step, rank, rows=2):
    """Rows that count upwards from random starts, different on every step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(0, SIZES["vocab_size"], (rows, 1), generator=generator)
    return (start + torch.arange(LENGTH)) % SIZES["vocab_size"]


def train(engine, steps, start=0):
    """Losses, averaged over the ranks."""
    from deepspeed import comm as dist

    losses = []
    for step in range(start, start + steps):
        ids = batch(step, dist.get_rank())
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def gathered_against_whole(architecture, steps):
    """By weight: whether what is gathered is the cast of the whole master, and of each expert alone, bit for bit."""
    engine = engine_of(architecture, {})
    train(engine, steps)
    result = {}
    for name, weight in experts_of(engine).items():
        master = models.full_master(weight)
        whole = quantize(master.flatten(0, 1), "e4m3", "128x128")
        alone = torch.cat([quantize(expert, "e4m3", "128x128").data.view(torch.uint8) for expert in master])
        weight.all_gather_coalesced([weight]).wait()
        ours = getattr(weight, GATHERED)
        codes = ours.data.view(torch.uint8)
        assert weight.isnan().all()
        assert weight.shape == master.shape
        assert weight.untyped_storage().nbytes() == 2
        result[name] = (
            torch.equal(codes, whole.data.view(torch.uint8)),
            torch.equal(codes, alone),
            torch.equal(ours.scale, whole.scale),
        )
        weight.partition()
        assert getattr(weight, GATHERED) is None
    return result


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gathered_experts_are_the_cast_of_the_whole(ranks, world):
    for result in ranks(world, gathered_against_whole, "qwen3_moe", 2):
        assert len(result) == 4
        assert set(result.values()) == {(True, True, True)}


def trained(architecture, section, steps):
    """(losses, the experts' modules in FP8, largest difference of a weight between ranks)."""
    from deepspeed import comm as dist

    engine = engine_of(architecture, section)
    losses = train(engine, steps)
    apart = 0.0
    for weight in models.bf16_weights(engine).values():
        first = weight.clone()
        dist.broadcast(first, 0)
        apart = max(apart, (first.float() - weight.float()).abs().max().item())
    count = sum(isinstance(module, FP8Experts) for module in engine.module.modules())
    return losses, count, apart


ARCHITECTURES = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixtures_train_as_bf16_does(ranks, architecture):
    fp8 = ranks(2, trained, architecture, {}, 6)
    bf16 = ranks(2, trained, architecture, {"enabled": False}, 6)
    assert fp8[0][0] == pytest.approx(bf16[0][0], rel=0.02)
    assert fp8[0][0] != bf16[0][0]
    assert fp8[0][1] == (1 if architecture == "deepseek_v3" else 2)
    assert fp8[0][2] == 0
    assert len(fp8) == 2


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixtures_end_within_one_percent_of_bf16(ranks, architecture, world):
    fp8 = ranks(world, trained, architecture, {}, 50)[0][0]
    bf16 = ranks(world, trained, architecture, {"enabled": False}, 50)[0][0]
    print(f"{architecture}, {world} ranks: BF16 {bf16[0]:.4f} -> {bf16[-1]:.4f}, FP8 {fp8[0]:.4f} -> {fp8[-1]:.4f}")
    assert bf16[-1] < bf16[0] / 2
    assert sum(fp8[-5:]) == pytest.approx(sum(bf16[-5:]), rel=0.01)
