"""Masters as codes and corrections on real ranks: beside FP32 masters, and whatever reads or writes them.

Steps of theirs beside AdamW on FP32 numbers, offloads and loads: test_state_machine.py.
"""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from ds_fp8.config.errors import UserError
from ds_fp8.engine import initialize
from ds_fp8.engine.attach import parameters_with_corrections
from tests.optim.test_zero import to_universal, weights_and_moments
from tests.ranks import on_ranks
from tests.zero import models
from tests.zero.models import assert_same, masters
from tests.zero.test_options import tie

MOMENTS = {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"}
SIZES = (132, 300)  # DeepSpeed sets whole masters only where they divide by the ranks: here by 1 to 4


def section_of(master="fp8_plus16", **optimizer):
    return {"optimizer": {"master": master, "implementation": "ds_fp8", **optimizer}}


def state(engine) -> dict[str, torch.Tensor]:
    """Everything that masters are made of, and what is gathered."""
    kept = {f"{name} master": master for name, master in masters(engine).items()}
    for name, parameter in engine.module.named_parameters():
        weight = engine.fp8.weights.of(parameter)
        if weight is not None and weight.correction is not None:
            valid = weight.shard.valid
            parts = {"codes": weight.data[:valid], "scale": weight.scale, "correction": weight.correction[:valid]}
            kept |= {f"{name} {part}": numbers.to("cpu", copy=True) for part, numbers in parts.items()}
    return kept


def only_coded(model, trained):
    return {key: False for key, of_bf16 in parameters_with_corrections(model, trained).items() if not of_bf16}


@pytest.mark.parametrize(
    ("world", "moments", "threshold", "prepared"),
    [(1, "fp32", 300, {}), (2, "bf16", 0, {"prepare": tie}), (3, "bf16", 8000, {"born_sharded": True})],
)
@on_ranks()
def test_masters_of_what_is_all_gathered_in_bf16_are_fp32_in_less_memory(moments, threshold, prepared):
    """Those of embedding, head and vectors in FP32, or split into BF16 and 16 bits."""
    section, found = section_of(exp_avg=moments, exp_avg_sq=moments), []
    for context in (contextlib.nullcontext(), mock.patch.object(initialize, "parameters_with_corrections", only_coded)):
        with context:
            engine = models.engine(section, sizes=SIZES, stage3_param_persistence_threshold=threshold, **prepared)
        kept = {"losses": torch.tensor(models.train(engine, 3)), **state(engine), **models.bf16_weights(engine)}
        flat = engine.optimizer.fp32_partitioned_groups_flat
        found.append((kept, sum(one.untyped_storage().nbytes() for one in flat), len(flat)))
    (split, bytes_left, groups), (expected, nbytes, of_fp32) = found
    assert_same(split, expected)
    assert bytes_left < nbytes / 8
    assert groups > of_fp32


def universal(folder, tag, master, steps, load):
    section = None if master == "stock" else section_of(master)
    changes = {"checkpoint": {"load_universal": load is not None}}
    engine = models.engine(section, changes=changes, sizes=SIZES, stock=master == "stock")
    if load is not None:
        engine.load_checkpoint(folder, tag=load, load_module_strict=False)
    loaded = masters(engine)
    models.train(engine, steps)
    engine.save_checkpoint(folder, tag=tag)
    return loaded, masters(engine)


def test_universal_checkpoints_lose_nothing_between_ranks_and_masters(ranks, tmp_path):
    folder = str(tmp_path)
    kept = ranks(2, universal, folder, "a", "fp8_plus16", 3, None)[0][1]
    to_universal(folder, "a")
    loaded, more = ranks(3, universal, folder, "b", "fp8_plus16", 2, "a_universal")[0]
    assert_same(kept, loaded)
    assert_same(kept, ranks(2, universal, folder, "s", "stock", 1, "a_universal")[0][0])
    loaded, fp32 = ranks(2, universal, folder, "c", "fp32", 2, "a_universal")[0]
    assert_same(kept, loaded)
    to_universal(folder, "c")
    rounded = ranks(1, universal, folder, "d", "fp8_plus16", 0, "c_universal")[0][0]
    for name, master in fp32.items():
        coded = name.endswith(("up.weight", "down.weight"))
        torch.testing.assert_close(rounded[name], master, rtol=2.0**-19 * coded, atol=1e-8 * coded)
        torch.testing.assert_close(more[name], master, rtol=0, atol=1e-3)


def compact(folder):
    """Save a run with compact's states and BF16 gradients in every way; return its states, and its losses after it."""
    changes = {"data_types": {"grad_accum_dtype": "bf16"}}
    kept = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = models.engine(section_of(**MOMENTS), changes=changes, sizes=SIZES, **kept)
    models.train(engine, 4)
    engine.save_checkpoint(folder, tag="saved")
    engine.save_16bit_model(folder, "bf16.bin")
    return weights_and_moments(engine), masters(engine), models.train(engine, 3, start=4)


def stock_goes_on(folder, saved):
    """What stock DeepSpeed is made of that was given a universal checkpoint, or weights, and its losses after that."""
    stock = functools.partial(
        models.engine, changes={"checkpoint": {"load_universal": saved == "universal"}}, sizes=SIZES, stock=True
    )
    if saved == "universal":
        engine = stock()
        engine.load_checkpoint(folder, tag="saved_universal", load_module_strict=False)
        return weights_and_moments(engine), models.train(engine, 3, start=4)
    by_script = functools.partial(get_fp32_state_dict_from_zero_checkpoint, folder, tag="saved")
    weights = by_script() if saved == "script" else torch.load(f"{folder}/bf16.bin")
    engine = stock(prepare=lambda net: net.load_state_dict(weights))
    return {name: numbers.detach().float() for name, numbers in weights.items()}, models.train(engine, 3, start=4)


def test_stock_deepspeed_trains_on(ranks, tmp_path):
    folder = str(tmp_path)
    runs = ranks(2, compact, folder)
    to_universal(folder, "saved")
    for saved in ("universal", "script", "bf16"):
        for (states, numbers, losses), (found, on) in zip(runs, ranks(2, stock_goes_on, folder, saved), strict=True):
            rounded = {name: master.bfloat16().float() for name, master in numbers.items()}
            assert_same({"universal": states, "script": numbers, "bf16": rounded}[saved], found)
            assert on[0] == pytest.approx(losses[0], rel=0.01)
            # Without moments Adam begins anew.
            assert on == pytest.approx(losses, rel=0.01 if saved == "universal" else 0.06)


BF16_COLLECTIVES = {"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}


@on_ranks(1)
def test_what_cannot_be_is_refused():
    for section, zero, key in [
        (BF16_COLLECTIVES, {"stage": 2}, "fp8.optimizer.master"),
        ({}, {"stage": 2}, "zero_optimization.stage"),
        ({}, {"offload_optimizer": {"device": "cpu"}}, "zero_optimization.offload_optimizer"),
        ({"preset": "rowwise"}, {}, "fp8.optimizer.master"),
    ]:
        with pytest.raises(UserError) as error:
            models.engine(section | section_of(), **zero)
        assert error.value.key == key
        assert "master" in error.value.remedy or "stage" in error.value.remedy


@on_ranks(2)
def test_outlier_channels_and_weights_that_left_fp8():
    """Of masters, codes and scales; and the memory of masters."""
    linear = {"weight": {"scale": "fp32"}, "input": {"scale": "fp32"}, "outlier_channels": 16}
    engine = models.engine({"linear": linear} | section_of(), sizes=(256, 384))
    flat = sum(one.untyped_storage().nbytes() for one in engine.optimizer.fp32_partitioned_groups_flat)
    assert flat < 4 * sum(p.ds_numel for p in engine.module.parameters()) / 2 / 3  # embedding and biases are left
    losses = models.train(engine, 3)
    up = engine.module.layers[0].up.weight
    engine.fp8.weights.leave_fp8([up])
    losses += models.train(engine, 3, start=3)
    assert losses[-1] < losses[0]
    assert torch.equal(models.bf16_of(up), models.full_master(up).bfloat16())
