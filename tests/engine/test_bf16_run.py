"""A BF16 run through this package's step and graphs: overrides that keep every linear layer in BF16."""

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param as get_master
from deepspeed.utils import safe_get_full_optimizer_state as get_state

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.report.runs import RunRecord
from tests.engine.graphs_in_python import Run, model_of, take_step
from tests.engine.test_graph_decisions import REPLAYED, forward
from tests.layers.hugging_face import causal_lm
from tests.ranks import on_ranks
from tests.report.runs import finished_run
from tests.zero import models

IN_BF16 = {
    "linear": {"overrides": {"*": "bf16"}},
    "param_gather": {"format": "bf16"},
    "grad_reduce": {"format": "bf16"},
    "monitor": {"every": 1},
}
STEPS = 6


def losses_of(engine):
    """Losses and gradient norms."""
    return [take_step(engine, forward(engine, step=10 * step + engine.global_rank)) for step in range(STEPS)]


@on_ranks(2)
def test_its_losses_are_those_of_deepspeeds_bf16():
    model = model_of()
    section = models.config() | {"train_micro_batch_size_per_gpu": 1}
    theirs = losses_of(deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=section)[0])
    for graphs in (False, True):
        with Run(fp8=IN_BF16, graphs=graphs) as run:
            found, report = losses_of(run.engine), run.engine.fp8.report
            assert run.engine.fp8.step is not None
            assert report["graphs"] == "off: there is no CUDA device"  # the only reason
            assert (report["fp8_linears"], report["monitor"]["every"]) == (0, 0)
            assert any("no linear layer is in FP8" in note for note in report["notes"])
            assert (REPLAYED in run.log) == graphs
        for (loss, norm), (their_loss, their_norm) in zip(found, theirs, strict=True):
            assert loss == pytest.approx(their_loss, rel=2e-3)  # the loss is summed in another order
            assert norm == pytest.approx(their_norm, rel=1e-2)
        assert found[-1][0] != found[0][0]


def states(engine):
    """The FP32 masters and moments of every parameter."""
    parameters = dict(engine.module.named_parameters())
    found = {name: get_master(p) for name, p in parameters.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        found |= {f"{name} {moment}": get_state(p, moment) for name, p in parameters.items()}
    return {name: tensor.clone() for name, tensor in found.items()}


@on_ranks(2)
def test_the_last_steps_of_a_run_may_be_in_bf16(tmp_path):
    with Run(fp8={"preset": "precise"}, graphs=False) as run:
        before = [run.step(forward(run.engine))[0] for _ in range(3)]
        run.engine.save_checkpoint(tmp_path)
        saved = states(run.engine)
    with Run(fp8={"preset": "precise", **IN_BF16}, graphs=False) as run:
        run.engine.load_checkpoint(tmp_path)
        assert run.engine.global_steps == 3
        loaded = states(run.engine)
        after = [run.step(forward(run.engine))[0] for _ in range(2)]
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert before[0] > before[-1] > after[0] > after[-1]


def test_without_an_override_a_model_with_no_linear_in_fp8_is_an_error():
    with pytest.raises(UserError, match="no linear layer that can run in FP8"):
        convert(causal_lm("llama"), parse_fp8({"fp8": {"linear": {"skip": ["*"]}}}))


def test_it_is_no_fp8_run_to_a_report(tmp_path):
    in_bf16 = {"enabled": True, "fp8_linears": 0, "notes": []}
    assert RunRecord(finished_run(tmp_path / "own", 2.0, 10, 0.5, fp8=in_bf16)).kind == "bf16"
    assert RunRecord(finished_run(tmp_path / "fp8", 2.0, 10, 0.5)).kind == "fp8"
