"""A step that ends midway, by the user's interrupt or for want of memory, in a program that goes on."""

import contextlib
import functools
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from ds_fp8.config.errors import UserError
from ds_fp8.optim.adamw import AdamW
from ds_fp8.zero import quantizer, streams
from ds_fp8.zero.coded_masters import CodedQuantizer
from ds_fp8.zero.step import Step
from tests.zero import models
from tests.zero.test_parameter_gather import look_at_gathered

SIZES = (256, 640)


def engine_of(master, scale="pow2", own=True):
    fp8 = {"optimizer": {"master": master}, "linear": {"weight": {"scale": scale}}}
    return models.build(models.config({"monitor": {"every": 0}, **fp8}), sizes=SIZES, own=own)


def interrupt(engine, start, known=False):
    """End a step midway, all of whose kernels are launched: before the host knows that it counts, or after."""
    step = engine.fp8.step
    end_midway(engine, start, *((step._zero, "finish") if known else (streams.Fetch, "get")))


def end_midway(engine, start, place, name):
    with mock.patch.object(place, name, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        models.train(engine, 1, start=start)


def masters(engine):
    return {name: models.full_master(p).cpu() for name, p in engine.module.named_parameters()}


def against_whole_masters():
    """Look at gathered weights behind a step that ended midway, and behind another and a user's write.

    Returns for both looks by name whether they are the casts of the masters. Behind the write they can only be others
    where the step has found an amax: on GPUs.
    """
    engine = engine_of("fp32")
    models.train(engine, 2)
    before = masters(engine)
    interrupt(engine, 2)
    behind_it = look_at_gathered(engine, "infir2")
    after, bf16 = masters(engine), models.bf16_weights(engine)
    behind_it["stepped"] = all(not torch.equal(before[name], after[name]) for name in after)
    behind_it["bf16"] = all(torch.equal(bf16[name], after[name].bfloat16()) for name in after)
    models.train(engine, 1, start=3)
    interrupt(engine, 4, known=True)
    for layer in engine.module.layers:
        safe_set_full_fp32_param(layer.up.weight, 3 * safe_get_full_fp32_param(layer.up.weight))
    return behind_it, look_at_gathered(engine, "infir2")


def assert_casts_of_masters(found):
    for looks in found:
        for look in looks:
            assert len(look) >= 6
            assert all(look.values()), look


def under_deepspeeds_step():
    """Look at gathered weights behind a step of DeepSpeed's that ended midway; return as against_whole_masters."""
    engine = engine_of("fp32", own=False)
    models.train(engine, 2)
    end_midway(engine, 2, engine.optimizer, "_post_step")
    return look_at_gathered(engine, "infir2")


def masters_behind(interrupted):
    """Return masters that are codes and corrections, behind three steps, the last maybe ended midway, and a cast."""
    engine = engine_of("fp8_plus16", "fp32")  # scales that change with every step
    models.train(engine, 2)
    interrupt(engine, 2) if interrupted else models.train(engine, 1, start=2)
    engine.fp8.weights.requantize_and_wait()
    return masters(engine)


def assert_same_masters(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert [name for name in other if not torch.equal(one[name], other[name])] == []


def torn(folder):
    """Launch part of a step; return what readers of masters say then, the masters saved before, and those loaded."""
    engine = engine_of("fp8_plus16", "fp32")
    models.train(engine, 2)
    engine.save_checkpoint(folder)
    saved, said = masters(engine), []
    end_midway(engine, 2, CodedQuantizer, "_use")  # codes are written, by other scales
    readers = (
        lambda: models.train(engine, 1),
        lambda: engine.step(),
        lambda: masters(engine),
        lambda: models.bf16_weights(engine),
        lambda: engine.save_checkpoint(f"{folder}/torn"),
        lambda: engine.optimizer.refresh_fp32_params(),
        lambda: engine.load_checkpoint(folder, load_module_only=True),
        lambda: engine.fp8.stop_casting(),
    )
    for reader in readers:
        with pytest.raises(UserError) as error:
            reader()
        said.append(str(error.value))
    engine.load_checkpoint(folder)
    loaded = masters(engine)
    models.train(engine, 1, start=2)
    return said, saved, loaded


def unlaunched(place, name):
    """Write 0.5 to a BF16 shard, end the first step before any launch, and take it again.

    Returns the numbers that are gathered in between, and the norm of the gradients of the step.
    """
    engine = engine_of("fp32")
    weight = engine.module.layers[0].up.weight
    with models.deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        weight.data.fill_(0.5)
    end_midway(engine, 1, place, name)
    numbers = engine.fp8.weights.unsharded(weight).dequantize()
    engine.step()
    return numbers, engine.get_global_grad_norm()


def codes_without_states():
    """End the first step of masters that are codes before any launch; return them from before and after."""
    engine = engine_of("fp8_plus16", "fp32")
    before = masters(engine)
    end_midway(engine, 0, AdamW, "_state_of")
    after = masters(engine)
    engine.step()
    return before, after


@pytest.mark.parametrize("world", [1, 2])
def test_gathered_weights_are_those_of_the_masters(ranks, world):
    assert_casts_of_masters(ranks(world, against_whole_masters))


def test_deepspeeds_step_too(ranks):
    assert_casts_of_masters([look] for look in ranks(2, under_deepspeeds_step))


@pytest.mark.parametrize("world", [1, 2])
def test_codes_and_corrections_that_were_all_launched_are_the_steps(ranks, world):
    assert_same_masters(*(ranks(world, masters_behind, interrupted) for interrupted in (True, False)))


@pytest.mark.parametrize("world", [1, 2])
def test_codes_and_corrections_of_half_a_step_are_refused(ranks, world, tmp_path):
    for said, saved, loaded in ranks(world, torn, str(tmp_path)):
        assert all("partially updated" in one for one in said)
        assert len(said) == 8
        assert_same_masters([loaded], [saved])


@pytest.mark.parametrize(("place", "name"), [(Step, "_norm"), (AdamW, "_state_of")])
def test_nothing_is_lost_where_nothing_was_launched(ranks, place, name):
    for numbers, norm in ranks(2, unlaunched, place, name):
        assert torch.equal(numbers, torch.full_like(numbers, 0.5))
        assert norm > 0


def test_codes_and_corrections_are_not_refused_where_nothing_was_launched(ranks):
    for before, after in ranks(2, codes_without_states):
        assert same([before], [after])


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of this package's step, of its update, cast and gather."""

    ROOMS = ("/ds_fp8/zero/", "/ds_fp8/optim/")

    def __init__(self, line: int):
        self._lines, self.where = line, None

    def __enter__(self):
        self._patch = pytest.MonkeyPatch()
        with contextlib.suppress(ImportError):
            from triton.runtime.interpreter import GridExecutor

            self._patch.setattr(GridExecutor, "__call__", self._untraced(GridExecutor.__call__))
        sys.settrace(self._called)
        return self

    def __exit__(self, *error):
        sys.settrace(None)
        self._patch.undo()

    def _untraced(self, launch):
        """Kernels are run line by line where there is no GPU: four times as long where each is looked at."""

        def call(*args, **kwargs):
            sys.settrace(None)
            try:
                return launch(*args, **kwargs)
            finally:
                if self.where is None:
                    sys.settrace(self._called)

        return call

    def _called(self, frame, event, argument):
        file = frame.f_code.co_filename
        return self._line if any(room in file for room in self.ROOMS) else None

    def _line(self, frame, event, argument):
        self._lines -= event == "line"
        if self._lines == 0 and self.where is None:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._line


@contextlib.contextmanager
def in_one_pass():
    """Let kernels step and cast FP32 masters, through Triton's interpreter where there is no GPU."""
    with mock.patch.object(quantizer, "has_kernels", return_value=True):
        yield


KINDS = {
    "fp32": {"preset": "infir2"},
    "one pass": {"preset": "infir2"},
    "precise": {"preset": "precise"},
    "codes": {"preset": "precise", "optimizer": {"master": "fp8_plus16"}},
}


def at_every_line(kind, folder, overflow):
    """End steps at one line after another, far apart; return where what is left is wrong, and how many were ended."""
    interpreted = kind == "one pass"
    with in_one_pass() if interpreted else contextlib.nullcontext():
        return _at_every_line(engine_in(KINDS[kind]), folder, overflow, 11 if overflow else 23)


def engine_in(fp8):
    layers = [functools.partial(models.Block, inner=256)]  # the lines of three are the same
    return models.build(models.config({"monitor": {"every": 0}, **fp8}), sizes=(128, 256), layers=layers)


def _at_every_line(engine, folder, overflow, far_apart):
    models.train(engine, 2)
    engine.save_checkpoint(folder)
    written = engine.module.layers[0].up.weight
    if overflow:  # what a user wrote holds until a step counts
        with models.deepspeed.zero.GatheredParameters([written], modifier_rank=0):
            written.data.fill_(0.5)
        read = engine.fp8.weights.unsharded(written).dequantize()
    wrong, line, ended = [], 1, 0
    while True:
        before = (masters(engine), counts(engine)) if overflow else None
        engine.backward(engine(models.batch(line, 0).to(engine.device)) * (torch.inf if overflow else 1))
        with Interrupt(line) as interrupt, contextlib.suppress(KeyboardInterrupt):
            engine.step()
        if interrupt.where is None:
            return wrong, ended
        try:
            if overflow:
                if not same(before, (masters(engine), counts(engine))):
                    wrong.append((interrupt.where, "a skipped step has changed masters or counts"))
                if not torch.equal(engine.fp8.weights.unsharded(written).dequantize(), read):
                    wrong.append((interrupt.where, "what a user wrote is lost"))
            elif what := wrong_casts(engine):
                wrong.append((interrupt.where, what))
        except UserError:
            assert engine.fp8.weights.coded is not None
            engine.load_checkpoint(folder)
        line, ended = line + far_apart, ended + 1


def wrong_casts(engine):
    """Return what of a model is not that of its masters, or None."""
    loss = loss_of(engine)
    engine.fp8.weights.load_wrote()  # all casts are made again
    if loss != (again := loss_of(engine)):
        return f"codes: loss {loss} and {again}"
    if engine.fp8.weights.coded is None:
        bf16, whole = models.bf16_weights(engine), masters(engine)
        return next((f"BF16: {name}" for name in bf16 if not torch.equal(bf16[name], whole[name].bfloat16())), None)
    return None


def loss_of(engine):
    engine.eval()
    with torch.no_grad():
        loss = engine(models.batch(0, 0).to(engine.device)).item()
    engine.train()
    return loss


def counts(engine):
    return {str(index): state["step"] for index, state in enumerate(engine.fp8.optimizer.state.values())}


def same(one, other):
    return all(torch.equal(x[name], y[name]) for x, y in zip(one, other, strict=True) for name in y)


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_may_end_at_any_line(ranks, kind, overflow, tmp_path):
    wrong, ended = ranks(1, at_every_line, kind, str(tmp_path), overflow)[0]
    assert wrong == []
    assert ended > 15


def skipped_and_ended_midway():
    """Interrupt a step that is skipped, with all-gathers in BF16; return AdamW's counts of steps before and after."""
    engine = models.build(models.config({"param_gather": {"format": "bf16"}}), sizes=SIZES)
    models.train(engine, 2)
    counts = [[int(state["step"]) for state in engine.basic_optimizer.state.values()]]
    engine.backward(engine(models.batch(2, 0).to(engine.device)) * torch.inf)
    with mock.patch.object(streams.Fetch, "get", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        engine.step()
    return [*counts, [int(state["step"]) for state in engine.basic_optimizer.state.values()]]


def test_a_skipped_step_that_ends_midway_does_not_count(ranks):
    before, after = ranks(1, skipped_and_ended_midway)[0]
    assert before == after == [2] * len(before)


def loads_after_one_without_memory(fails):
    engine = engine_of("fp32")
    models.train(engine, 2)
    group = engine.fp8.weights
    if fails:
        without = mock.patch.object(group, "restore_bf16", side_effect=torch.OutOfMemoryError)
        with without, pytest.raises(torch.OutOfMemoryError):
            engine.optimizer.refresh_fp32_params()
    engine.optimizer.refresh_fp32_params()
    return {**masters(engine), **models.bf16_weights(engine)}, all(look_at_gathered(engine, "infir2").values())


def test_a_load_without_memory_leaves_the_next_one_as_it_is(ranks):
    (found, are_casts), (expected, _) = (ranks(1, loads_after_one_without_memory, fails)[0] for fails in (True, False))
    assert are_casts
    assert all(torch.equal(found[name], expected[name]) for name in expected)
