"""Masters as codes and corrections on real ranks: beside FP32 masters, and whatever reads or writes them."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from ds_fp8.engine import initialize
from ds_fp8.engine.attach import parameters_with_corrections
from tests.optim.test_zero import to_universal, weights_and_moments
from tests.zero import models

MOMENTS = {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"}
SIZES = (132, 300)  # DeepSpeed sets whole masters only where they divide by the ranks: here by 1 to 4


def config(master="fp8_plus16", scale="pow2", moments=False, fp8=None, **zero):
    kept = {"master": master, "implementation": "ds_fp8", **(MOMENTS if moments else {})}
    weight = {"linear": {"weight": {"scale": scale}}}
    return models.config({"monitor": {"every": 0}, **weight, **(fp8 or {}), "optimizer": kept}, **zero)


def whole(parameter):
    return safe_get_full_fp32_param(parameter).cpu()


def state(engine) -> dict[str, torch.Tensor]:
    """Everything that masters are made of, and what is gathered."""
    kept = {}
    for name, parameter in engine.module.named_parameters():
        weight = engine.fp8.weights.of(parameter)
        if weight is not None and weight.correction is not None:
            valid = weight.shard.valid
            parts = {"codes": weight.data[:valid], "scale": weight.scale, "correction": weight.correction[:valid]}
            kept |= {f"{name} {part}": numbers.to("cpu", copy=True) for part, numbers in parts.items()}
        kept[f"{name} master"] = whole(parameter)
    return kept


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def masters(engine):
    return {name: whole(p) for name, p in engine.module.named_parameters()}


def train(master, scale, sizes=(131, 301)):
    engine = models.build(config(master, scale), sizes=sizes)
    losses = models.train(engine, 6)
    kept = masters(engine)
    flat = engine.optimizer.fp32_partitioned_groups_flat
    memory = sum(one.untyped_storage().nbytes() for one in flat)
    coded = sum(weight.correction is not None for weight in engine.fp8.weights)
    return losses, kept, memory, coded


@pytest.mark.parametrize(("world", "scale"), [(1, "pow2"), (2, "fp32"), (3, "pow2")])
def test_a_run_is_that_of_fp32_masters(ranks, world, scale):
    fp32, coded = (ranks(world, train, master, scale) for master in ("fp32", "fp8_plus16"))
    assert_like_fp32(fp32, coded)


def assert_like_fp32(fp32, coded):
    for (losses, masters, memory, none), (found, kept, less, count) in zip(fp32, coded, strict=True):
        assert found == pytest.approx(losses, rel=3e-3)
        assert (none, count) == (0, 6)
        assert less < memory / 3  # embedding, head and biases are left
        for name, master in masters.items():
            assert (kept[name] - master).norm() < 0.05 * 6 * 3e-4 * master.numel() ** 0.5, name
    for name in coded[0][1]:
        assert all(torch.equal(coded[0][1][name], other[1][name]) for other in coded)


def only_coded(model, trained):
    return {key: False for key, of_bf16 in parameters_with_corrections(model, trained).items() if not of_bf16}


def tie(net):
    net.lm_head.weight = net.embedding.weight


def other_masters(split, moments, threshold, prepared):
    """Train with masters of embedding, head and vectors in FP32, or `split` into BF16 and 16 bits."""
    ds_config = config(stage3_param_persistence_threshold=threshold)
    ds_config["fp8"]["optimizer"] |= {"exp_avg": moments, "exp_avg_sq": moments}
    unsplit = mock.patch.object(initialize, "parameters_with_corrections", only_coded)
    with contextlib.nullcontext() if split else unsplit:
        engine = models.build(ds_config, sizes=SIZES, **prepared)
    found = {"losses": torch.tensor(models.train(engine, 3)), **state(engine), **models.bf16_weights(engine)}
    flat = engine.optimizer.fp32_partitioned_groups_flat
    return found, sum(one.untyped_storage().nbytes() for one in flat), len(flat)


@pytest.mark.parametrize(
    ("world", "moments", "threshold", "prepared"),
    [(1, "fp32", 300, {}), (2, "bf16", 0, {"prepare": tie}), (3, "bf16", 8000, {"born_sharded": True})],
)
def test_masters_of_what_is_all_gathered_in_bf16_are_fp32_in_less_memory(ranks, world, moments, threshold, prepared):
    split, fp32 = (ranks(world, other_masters, split, moments, threshold, prepared) for split in (True, False))
    for (found, bytes_left, groups), (expected, nbytes, of_fp32) in zip(split, fp32, strict=True):
        assert_same(found, expected)
        assert bytes_left < nbytes / 8
        assert groups > of_fp32


def batch(engine, number):
    return models.batch(number, dist.get_rank()).to(engine.device)


def universal(folder, tag, master, steps, load):
    ds_config = models.config() if master == "stock" else config(master)
    ds_config = {**ds_config, "checkpoint": {"load_universal": load is not None}}
    engine = models.build(ds_config, sizes=SIZES, stock=master == "stock")
    if load is not None:
        engine.load_checkpoint(folder, tag=load, load_module_strict=False)
    loaded = masters(engine)
    losses = models.train(engine, steps)
    engine.save_checkpoint(folder, tag=tag)
    return loaded, masters(engine), losses


def test_universal_checkpoints_lose_nothing_between_ranks_and_masters(ranks, tmp_path):
    folder = str(tmp_path)
    kept = ranks(2, universal, folder, "a", "fp8_plus16", 3, None)[0][1]
    to_universal(folder, "a")
    loaded, more, _ = ranks(3, universal, folder, "b", "fp8_plus16", 2, "a_universal")[0]
    assert_same(kept, loaded)
    assert_same(kept, ranks(2, universal, folder, "s", "stock", 1, "a_universal")[0][0])
    loaded, fp32, _ = ranks(2, universal, folder, "c", "fp32", 2, "a_universal")[0]
    assert_same(kept, loaded)
    to_universal(folder, "c")
    rounded = ranks(1, universal, folder, "d", "fp8_plus16", 0, "c_universal")[0][0]
    for name, master in fp32.items():
        coded = name.endswith(("up.weight", "down.weight"))
        torch.testing.assert_close(rounded[name], master, rtol=2.0**-19 * coded, atol=1e-8 * coded)
        torch.testing.assert_close(more[name], master, rtol=0, atol=1e-3)


def compact(folder):
    """What a run with compact's states and BF16 gradients is made of when it is saved, and its losses after that."""
    kept = config(moments=True, stage3_gather_16bit_weights_on_model_save=True)
    engine = models.build({**kept, "data_types": {"grad_accum_dtype": "bf16"}}, sizes=SIZES)
    models.train(engine, 5)
    engine.save_checkpoint(folder, tag="five")
    engine.save_16bit_model(folder, "bf16.bin")
    return weights_and_moments(engine), masters(engine), models.train(engine, 4, start=5)


def stock(folder, saved):
    """What stock DeepSpeed is made of that was given a universal checkpoint, or weights, and its losses after that."""
    ds_config = {**models.config(), "checkpoint": {"load_universal": saved == "universal"}}
    if saved == "universal":
        engine = models.build(ds_config, sizes=SIZES, stock=True)
        engine.load_checkpoint(folder, tag="five_universal", load_module_strict=False)
        return weights_and_moments(engine), models.train(engine, 4, start=5)
    by_script = functools.partial(get_fp32_state_dict_from_zero_checkpoint, folder, tag="five")
    weights = by_script() if saved == "script" else torch.load(f"{folder}/bf16.bin")
    engine = models.build(ds_config, sizes=SIZES, stock=True, prepare=lambda net: net.load_state_dict(weights))
    return {name: numbers.detach().float() for name, numbers in weights.items()}, models.train(engine, 4, start=5)


@pytest.fixture(scope="module")
def compact_run(ranks, tmp_path_factory):
    """The folder of a run with compact's states, saved in every way, and what `compact` says of it."""
    folder = str(tmp_path_factory.mktemp("compact"))
    runs = ranks(2, compact, folder)
    to_universal(folder, "five")
    return folder, runs


@pytest.mark.parametrize("saved", ["universal", "script", "bf16"])
def test_stock_deepspeed_trains_on(ranks, compact_run, saved):
    folder, runs = compact_run
    for (state, numbers, losses), (found, on) in zip(runs, ranks(2, stock, folder, saved), strict=True):
        rounded = {name: master.bfloat16().float() for name, master in numbers.items()}
        assert_same({"universal": state, "script": numbers, "bf16": rounded}[saved], found)
        assert on[0] == pytest.approx(losses[0], rel=0.01)
        # Without moments Adam begins anew.
        assert on == pytest.approx(losses, rel=0.01 if saved == "universal" else 0.06)


def refusal(ds_config):
    from ds_fp8.config.errors import UserError

    with pytest.raises(UserError) as error:
        models.build(ds_config)
    return error.value.key, error.value.remedy


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (
            {"stage": 2, "fp8": {"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}},
            "fp8.optimizer.master",
        ),
        ({"stage": 2}, "zero_optimization.stage"),
        ({"offload_optimizer": {"device": "cpu"}}, "zero_optimization.offload_optimizer"),
        ({"fp8": {"preset": "rowwise"}}, "fp8.optimizer.master"),
    ],
)
def test_what_cannot_be_is_refused(ranks, words, key):
    found, remedy = ranks(1, refusal, config(**words))[0]
    assert found == key
    assert "master" in remedy or "stage" in remedy


def sharded_by_hand(scale):
    """Masters, codes and scales with outlier channels, and a layer that has left FP8."""
    linear = {"weight": {"scale": scale}, "input": {"scale": scale}, "outlier_channels": 16}
    engine = models.build(config(scale=scale, fp8={"linear": linear}), sizes=(256, 384))
    losses = models.train(engine, 3)
    engine.fp8.weights.leave_fp8([engine.module.layers[0].up.weight])
    losses += models.train(engine, 3, start=3)
    up = engine.module.layers[0].up.weight
    return losses, models.bf16_weights(engine), whole(up), "layers.0.up.weight"


def test_outlier_channels_and_weights_that_left_fp8(ranks):
    for losses, numbers, master, name in ranks(2, sharded_by_hand, "fp32"):
        assert losses[-1] < losses[0]
        assert torch.equal(numbers[name], master.bfloat16())
