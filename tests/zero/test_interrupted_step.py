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
from tests.ranks import case, on_ranks
from tests.zero import models

SIZES = (256, 640)


def engine_of(master, own=True):
    """An engine behind two steps; scales of codes and corrections change with every step."""
    weight = {"scale": "fp32" if master == "fp8_plus16" else "pow2"}
    engine = models.engine({"optimizer": {"master": master}, "linear": {"weight": weight}}, sizes=SIZES, own=own)
    models.train(engine, 2)
    return engine


def interrupt(engine, start, known=False):
    """End a step midway, all of whose kernels are launched: before the host knows that it counts, or after."""
    step = engine.fp8.step
    end_midway(engine, start, *((step._zero, "finish") if known else (streams.Fetch, "get")))


def end_midway(engine, start, place, name):
    with mock.patch.object(place, name, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        models.train(engine, 1, start=start)


def assert_gathered_weights_are_those_of_the_masters():
    """Behind a step that ended midway, and behind another and a user's write.

    Behind the write they can only be others where the step has found an amax: on GPUs.
    """
    engine = engine_of("fp32")
    before = models.masters(engine)
    interrupt(engine, 2)
    assert models.wrong_casts(engine) == []
    after, bf16 = models.masters(engine), models.bf16_weights(engine)
    assert not any(torch.equal(before[name], after[name]) for name in after)
    models.assert_same(bf16, {name: master.bfloat16() for name, master in after.items()})
    models.train(engine, 1, start=3)
    interrupt(engine, 4, known=True)
    for layer in engine.module.layers:
        safe_set_full_fp32_param(layer.up.weight, 3 * safe_get_full_fp32_param(layer.up.weight))
    assert models.wrong_casts(engine) == []


def assert_codes_and_corrections_that_were_all_launched_are_the_steps():
    found = []
    for interrupted in (True, False):
        engine = engine_of("fp8_plus16")
        interrupt(engine, 2) if interrupted else models.train(engine, 1, start=2)
        engine.fp8.weights.requantize_and_wait()
        found.append(models.masters(engine))
    models.assert_same(*found)


@on_ranks(1, 2)
def test_steps_that_were_launched_are_taken_and_halves_of_steps_are_refused(tmp_path):
    assert_gathered_weights_are_those_of_the_masters()
    assert_codes_and_corrections_that_were_all_launched_are_the_steps()
    engine = engine_of("fp8_plus16")
    folder, saved = str(tmp_path), models.masters(engine)
    engine.save_checkpoint(folder)
    end_midway(engine, 2, CodedQuantizer, "_use")  # codes are written, by other scales
    for reader in (
        lambda: models.train(engine, 1),
        lambda: engine.step(),
        lambda: models.masters(engine),
        lambda: models.bf16_weights(engine),
        lambda: engine.save_checkpoint(f"{folder}/torn"),
        lambda: engine.optimizer.refresh_fp32_params(),
        lambda: engine.load_checkpoint(folder, load_module_only=True),
        lambda: engine.fp8.stop_casting(),
    ):
        with pytest.raises(UserError, match="partially updated"):
            reader()
    engine.load_checkpoint(folder)
    models.assert_same(models.masters(engine), saved)
    models.train(engine, 1, start=2)


@on_ranks(2)
def test_nothing_is_lost_where_nothing_was_launched():
    for place, name in ((Step, "_norm"), (AdamW, "_state_of")):
        engine = models.engine({}, sizes=SIZES)
        weight = engine.module.layers[0].up.weight
        with models.deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.fill_(0.5)
        end_midway(engine, 0, place, name)
        with case(name):
            assert (engine.fp8.weights.unsharded(weight).dequantize() == 0.5).all()
            engine.step()
            assert engine.get_global_grad_norm() > 0
    coded = models.engine({"optimizer": {"master": "fp8_plus16"}}, sizes=SIZES)
    before = models.masters(coded)
    end_midway(coded, 0, AdamW, "_state_of")
    models.assert_same(models.masters(coded), before)
    coded.step()
    by_deepspeed = engine_of("fp32", own=False)
    end_midway(by_deepspeed, 2, by_deepspeed.optimizer, "_post_step")
    assert models.wrong_casts(by_deepspeed) == []


@on_ranks(1)
def test_a_skipped_step_that_ends_midway_does_not_count():
    """With all-gathers in BF16; AdamW's counts of steps."""
    engine = models.engine({"param_gather": {"format": "bf16"}}, sizes=SIZES)
    models.train(engine, 2)
    engine.backward(models.loss_of(engine, models.batch(2, 0)) * torch.inf)
    with mock.patch.object(streams.Fetch, "get", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        engine.step()
    assert {int(state["step"]) for state in engine.basic_optimizer.state.values()} == {2}


@on_ranks(1)
def test_a_load_without_memory_leaves_the_next_one_as_it_is():
    found = []
    for fails in (True, False):
        engine = engine_of("fp32")
        without = mock.patch.object(engine.fp8.weights, "restore_bf16", side_effect=torch.OutOfMemoryError)
        if fails:
            with without, pytest.raises(torch.OutOfMemoryError):
                engine.optimizer.refresh_fp32_params()
        engine.optimizer.refresh_fp32_params()
        found.append((models.masters(engine), models.bf16_weights(engine)))
        assert models.wrong_casts(engine) == []
    for one, other in zip(*found, strict=True):
        models.assert_same(one, other)


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


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_a_step_may_end_at_any_line(kind, overflow, tmp_path):
    """End steps at one line after another, far apart, and find nothing wrong that is left."""
    with in_one_pass() if kind == "one pass" else contextlib.nullcontext():
        layers = [functools.partial(models.Block, inner=256)]  # the lines of three are the same
        engine, folder = models.engine(KINDS[kind], sizes=(128, 256), layers=layers), str(tmp_path)
        models.train(engine, 2)
        engine.save_checkpoint(folder)
        written = engine.module.layers[0].up.weight
        if overflow:  # what a user wrote holds until a step counts
            with models.deepspeed.zero.GatheredParameters([written], modifier_rank=0):
                written.data.fill_(0.5)
            read = engine.fp8.weights.unsharded(written).dequantize()
        line, ended = 1, 0
        while True:
            before = (models.masters(engine), counts(engine)) if overflow else None
            loss = models.loss_of(engine, models.batch(line, 0))
            engine.backward(loss * (torch.inf if overflow else 1))
            with Interrupt(line) as interrupt, contextlib.suppress(KeyboardInterrupt):
                engine.step()
            if interrupt.where is None:
                break
            try:
                with case(interrupt.where):
                    if overflow:
                        models.assert_same(models.masters(engine), before[0])
                        models.assert_same(counts(engine), before[1])
                        assert torch.equal(engine.fp8.weights.unsharded(written).dequantize(), read)
                    else:
                        assert_casts_and_bf16_are_those_of_the_masters(engine)
            except UserError:
                assert engine.fp8.weights.coded is not None
                engine.load_checkpoint(folder)
            line, ended = line + (17 if overflow else 31), ended + 1
        assert ended > 10


def assert_casts_and_bf16_are_those_of_the_masters(engine):
    loss = evaluated(engine)
    engine.fp8.weights.load_wrote()  # all casts are made again
    assert loss == evaluated(engine)
    if engine.fp8.weights.coded is None:
        rounded = {name: master.bfloat16() for name, master in models.masters(engine).items()}
        models.assert_same(models.bf16_weights(engine), rounded)


def evaluated(engine):
    engine.eval()
    with torch.no_grad():
        loss = models.loss_of(engine, models.batch(0, 0)).item()
    engine.train()
    return loss


def counts(engine):
    return {str(index): state["step"] for index, state in enumerate(engine.fp8.optimizer.state.values())}
