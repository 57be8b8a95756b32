"""Graphs of models whose loss the caller computes, of PEFT's adapters, and of DPO with its reference forward."""

import pytest
import torch
from torch.nn import functional as F

from tests.engine.graphs_in_python import Graphs, engine_of, model_of, take_step

peft = pytest.importorskip("peft")


def batch(step, rows=2):
    return {"input_ids": (torch.arange(32 * rows).view(rows, 32) * 7 + step) % 128, "use_cache": False}


def lora():
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    torch.manual_seed(0)
    model = peft.get_peft_model(model_of(), peft.LoraConfig(**options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.bfloat16()


def log_probabilities(logits, tokens):
    """Log-probability of each row."""
    found = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, tokens[:, 1:, None])
    return found.squeeze(-1).sum(-1)


def fused(engine, step):
    tokens = batch(step)
    return engine(**tokens, labels=tokens["input_ids"]).loss


def smoothed(engine, step):
    """Label smoothing, as Trainer computes it: the model gets no labels."""
    tokens = batch(step)
    logits = engine(**tokens).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens["input_ids"][:, 1:].flatten(), label_smoothing=0.1
    )


def by_position(engine, step):
    return engine(batch(step)["input_ids"], labels=batch(step)["input_ids"], use_cache=False).loss


def unfused(engine, step):
    """A model that returns logits beside its loss, which nobody uses."""
    tokens = batch(step)
    return engine(**tokens, labels=tokens["input_ids"], skip_logits=False).loss


def preference(engine, step, reference_first=False):
    """DPO: chosen and rejected rows in one batch, the reference is the model without its adapters."""
    tokens = batch(step)

    def reference():
        with torch.no_grad(), engine.module.disable_adapter():
            return log_probabilities(engine(**tokens).logits, tokens["input_ids"])

    if reference_first:
        theirs = reference()
    ours = log_probabilities(engine(**tokens).logits, tokens["input_ids"])
    if not reference_first:
        theirs = reference()
    chosen, rejected = (ours - theirs).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def reference_first(engine, step):
    return preference(engine, step, True)


def trained(loss_of, adapters, graphs, steps):
    """Figures of each step, what became of them, what was said."""
    engine, said = engine_of(model=lora() if adapters else None)
    log = []
    if graphs:
        engine.fp8.graphs = Graphs(engine, auto=True)
        log = engine.fp8.graphs.log
    found = [take_step(engine, loss_of(engine, step)) for step in range(steps)]
    outcome = graphs and (engine.fp8.graphs.off, engine.fp8.graphs.captured)
    engine.destroy()
    return found, list(log), said, outcome


def check(ranks, world, loss_of, adapters, steps):
    launched, captured = (ranks(world, trained, loss_of, adapters, graphs, steps) for graphs in (False, True))
    for theirs, ours in zip(launched, captured, strict=True):
        assert ours[0] == theirs[0]
        assert ours[3] == (None, 1), ours[2]
        assert ours[1].count("replayed for 0") >= 3
        assert ours[1].count("checked") >= 2
    return captured[0]


@pytest.mark.parametrize(
    ("loss_of", "adapters"),
    [(fused, False), (fused, True), (smoothed, False), (smoothed, True), (by_position, True), (unfused, False)],
)
def test_every_bit_is_that_of_python(ranks, loss_of, adapters):
    check(ranks, 1, loss_of, adapters, 9)


@pytest.mark.parametrize(("loss_of", "world"), [(preference, 2), (reference_first, 1)])
def test_a_step_of_dpo_with_adapters(ranks, loss_of, world):
    _, log, _, _ = check(ranks, world, loss_of, True, 12)
    assert log[:8] == ["eager"] * 6 + ["captured for 0", "in the order of a dry run"]


def asked_for_later(_):
    """The caller uses the logits for its loss only after the capture."""
    engine, _ = engine_of()
    engine.fp8.graphs = Graphs(engine, auto=True)
    found = None
    for step in range(6):
        tokens = batch(step)
        output = engine(**tokens, labels=tokens["input_ids"], skip_logits=False)
        loss = output.loss if step < 5 else output.loss + output.logits.float().mean()
        try:
            engine.backward(loss)
        except RuntimeError as error:
            found = str(error)
            break
        engine.step()
    engine.destroy()
    return found


def test_a_gradient_that_no_capture_had_is_an_error(ranks):
    found = ranks(1, asked_for_later, None)[0]
    assert "has a gradient, and had none when its CUDA graph was captured" in found
    assert '"graph": "off"' in found


def with_a_group_that_ends(_):
    """A group that graphs do not use ends between a replayed forward and its backward."""
    engine, _ = engine_of()
    graphs = engine.fp8.graphs = Graphs(engine, auto=True)
    found = []
    for step in range(4):
        group = torch.distributed.new_group()
        torch.distributed.barrier(group)
        loss = fused(engine, step)
        pending = graphs._graphs.pending
        torch.distributed.destroy_process_group(group)
        found.append((pending, graphs.captured, take_step(engine, loss)[0]))
    engine.destroy()
    return found


def test_a_pending_backward_outlives_another_process_group(ranks):
    plain = ranks(2, trained, fused, False, False, 4)
    for found, theirs in zip(ranks(2, with_a_group_that_ends, None), plain, strict=True):
        assert [(pending, captured) for pending, captured, _ in found] == [
            (False, 0),
            (False, 0),
            (True, 1),
            (True, 1),
        ]
        assert [loss for *_, loss in found] == [loss for loss, _ in theirs[0]]
