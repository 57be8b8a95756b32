"""Graphs of models whose loss the caller computes, of PEFT's adapters, and of DPO with its reference forward."""

import pytest
import torch
from torch.nn import functional as F

from ds_fp8.graphs.replay import watched
from tests.engine.graphs_in_python import Run, engine_of, model_of
from tests.ranks import on_ranks

peft = pytest.importorskip("peft")


def batch(step, rows=2):
    return {"input_ids": (torch.arange(32 * rows).view(rows, 32) * 7 + step) % 128, "use_cache": False}


def lora(rank=4, layers=1):
    options = {"r": rank, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    torch.manual_seed(0)
    model = peft.get_peft_model(model_of(layers=layers), peft.LoraConfig(**options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.bfloat16()


def reentrant():
    """As TRL makes it: recomputed, the weights of adapters released between forward and backward."""
    model = lora(rank=8, layers=2)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return model


def prefix():
    return peft.get_peft_model(model_of(), peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))


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


def of_nobody(engine, step):
    """As most loops call a model: nothing is said of a cache."""
    tokens = batch(step)["input_ids"]
    return engine(input_ids=tokens, labels=tokens).loss


def in_place(engine, step):
    """As Trainer scales the loss of several ranks; the model returns logits beside it."""
    loss = unfused(engine, step)
    loss *= 2
    return loss


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


def trained(loss_of, model, steps):
    """Runs with graphs and without, that with them first."""
    runs = []
    for graphs in (True, False):
        with Run(graphs=graphs, auto=True, model=model and model()) as run:
            for step in range(steps):
                run.step(loss_of(run.engine, step))
            run.outcome = graphs and (run.graphs.off, run.graphs.captured)
        runs.append(run)
    return runs


def check(loss_of, model, steps):
    ours, theirs = trained(loss_of, model, steps)
    assert ours.found == theirs.found
    assert ours.outcome == (None, 1), ours.said
    assert ours.log.count("replayed for 0") >= 3
    assert ours.log.count("checked") >= 2
    return ours.log


@pytest.mark.parametrize(
    ("loss_of", "model"),
    [
        *((smoothed, lora), (by_position, lora)),
        *((of_nobody, None), (of_nobody, reentrant), (in_place, None)),
    ],
)
@on_ranks(1)
def test_every_bit_is_that_of_python(loss_of, model):
    check(loss_of, model, 8)


@pytest.mark.parametrize(("loss_of", "world"), [(preference, 2), (reference_first, 1)])
@on_ranks()
def test_a_step_of_dpo_with_adapters(loss_of, world):
    assert check(loss_of, lora, 12)[:8] == ["eager"] * 6 + ["captured for 0", "in the order of a dry run"]


@on_ranks(1)
def test_a_cache_is_made_in_training_where_it_is_asked_for():
    engine, _ = engine_of()
    tokens, model = batch(0)["input_ids"], engine.module
    given = model(input_ids=tokens, use_cache=True).past_key_values
    found = {"nothing said": engine(input_ids=tokens), "by position": engine(tokens, *[None] * 6)}
    found |= {"said": engine(input_ids=tokens, use_cache=True), "given": engine(tokens[:, :1], past_key_values=given)}
    engine.eval()
    found["evaluation"] = engine(input_ids=tokens)
    engine.destroy()
    found["destroyed"] = model.train()(input_ids=tokens)
    engine, _ = engine_of(model=model_of(num_kv_shared_layers=1))  # which read what they share from it
    found["layers share it"] = engine(input_ids=tokens)
    engine.destroy()
    assert {name for name, output in found.items() if output.past_key_values is None} == {"nothing said", "by position"}


@on_ranks(1)
def test_a_prefix_that_peft_gives_as_a_cache_is_trained_without_graphs():
    ours, plain = trained(of_nobody, prefix, 5)
    assert ours.found == plain.found
    assert ours.log.count("eager") == 5
    asks = 'the model returns a DynamicCache: pass "use_cache": False, if it is a cache'
    assert ours.said == [f"without CUDA graphs: ValueError: {asks}"]
    assert ours.outcome == (None, 0)


def test_a_forward_waits_for_no_backward_once_it_has_had_one():
    weight, used, of_view = torch.ones(4, requires_grad=True), set(), set()
    (loss, logits), forward = watched([weight.mean(), weight * 2], used)
    loss *= 2
    assert not forward().done
    loss.backward()
    assert forward().done
    assert used == {0}
    assert weight.grad.tolist() == [0.5] * 4
    logits.sum().backward()
    assert used == {0, 1}
    assert weight.grad.tolist() == [2.5] * 4
    (view,), forward = watched([(weight * 1)[:2]], of_view)
    view *= 2
    view.sum().backward()
    assert of_view == {0}
    assert forward().done
    del view
    assert forward() is None


@on_ranks(2)
def test_what_cannot_be_captured_of_one_shape_leaves_the_others_their_graphs():
    """Beside each training step a forward of another shape, whose outputs nobody differentiates."""
    runs = []
    for graphs in (False, True):
        with Run(graphs=graphs, auto=True) as run:
            for step in range(11):
                run.found.append(run.engine(**batch(step, 1), labels=batch(step, 1)["input_ids"]).loss.item())
                run.step(fused(run.engine, step))
            outcome = graphs and (run.graphs.off, run.graphs.captured)
        runs.append(run)
    assert runs[1].found == runs[0].found
    assert outcome == (None, 1)
    assert run.log.count("replayed for 0") >= 2
    assert run.said.count("without CUDA graphs: ValueError: no output of the model has received a gradient") == 1


@on_ranks(1)
def test_a_gradient_that_no_capture_had_is_an_error():
    """The caller uses the logits for its loss only after the capture."""
    with Run(auto=True) as run:
        for step in range(5):
            run.step(unfused(run.engine, step))
        tokens = batch(5)
        output = run.engine(**tokens, labels=tokens["input_ids"], skip_logits=False)
        words = r'has a gradient, and had none when its CUDA graph was captured(.|\n)*"graph": "off"'
        with pytest.raises(RuntimeError, match=words):
            run.engine.backward(output.loss + output.logits.float().mean())


@on_ranks(2)
def test_a_pending_backward_outlives_another_process_group():
    """A group that graphs do not use ends between a replayed forward and its backward."""
    with Run(graphs=False) as plain, Run(auto=True) as run:
        graphs, seen = run.graphs, []
        for step in range(4):
            group = torch.distributed.new_group()
            torch.distributed.barrier(group)
            loss = fused(run.engine, step)
            seen.append((any(graph.pending for graph in graphs._graphs), graphs.captured))
            torch.distributed.destroy_process_group(group)
            run.step(loss)
            plain.step(fused(plain.engine, step))
        graphs.process_group_ends(torch.distributed.group.WORLD)
        assert graphs.captured == 0
        assert seen == [(False, 0), (False, 0), (True, 1), (True, 1)]
        assert run.found == plain.found
