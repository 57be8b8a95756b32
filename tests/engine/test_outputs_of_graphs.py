"""Graphs of models whose loss the caller computes, of PEFT's adapters, and of DPO with its reference forward."""

import pytest
import torch
from torch.nn import functional as F

from ds_fp8.graphs.replay import watched
from tests.engine.graphs_in_python import Graphs, engine_of, log_of, model_of, take_step

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


def trained(loss_of, model, graphs, steps):
    """Figures of each step, what became of them, what was said."""
    engine, said = engine_of(model=model and model())
    log = log_of(engine, graphs, auto=True)
    found = [take_step(engine, loss_of(engine, step)) for step in range(steps)]
    outcome = graphs and (engine.fp8.graphs.off, engine.fp8.graphs.captured)
    engine.destroy()
    return found, list(log), said, outcome


def check(ranks, world, loss_of, model, steps):
    launched, captured = (ranks(world, trained, loss_of, model, graphs, steps) for graphs in (False, True))
    for theirs, ours in zip(launched, captured, strict=True):
        assert ours[0] == theirs[0]
        assert ours[3] == (None, 1), ours[2]
        assert ours[1].count("replayed for 0") >= 3
        assert ours[1].count("checked") >= 2
    return captured[0]


@pytest.mark.parametrize(
    ("loss_of", "model"),
    [
        *((fused, None), (fused, lora), (smoothed, None), (smoothed, lora), (by_position, lora), (unfused, None)),
        *((of_nobody, None), (of_nobody, reentrant), (in_place, None)),
    ],
)
def test_every_bit_is_that_of_python(ranks, loss_of, model):
    check(ranks, 1, loss_of, model, 9)


@pytest.mark.parametrize(("loss_of", "world"), [(preference, 2), (reference_first, 1)])
def test_a_step_of_dpo_with_adapters(ranks, loss_of, world):
    _, log, _, _ = check(ranks, world, loss_of, lora, 12)
    assert log[:8] == ["eager"] * 6 + ["captured for 0", "in the order of a dry run"]


def caches(_):
    """Whether a model returns a cache, by how it is called."""
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
    return {name: output.past_key_values is not None for name, output in found.items()}


def test_a_cache_is_made_in_training_where_it_is_asked_for(ranks):
    made = {"nothing said": False, "by position": False, "said": True, "given": True}
    assert ranks(1, caches, None)[0] == made | dict.fromkeys(("evaluation", "destroyed", "layers share it"), True)


def test_a_prefix_that_peft_gives_as_a_cache_is_trained_without_graphs(ranks):
    plain, ours = (ranks(1, trained, of_nobody, prefix, graphs, 5)[0] for graphs in (False, True))
    assert ours[0] == plain[0]
    assert ours[1].count("eager") == 5
    assert ours[2] == [
        'without CUDA graphs: ValueError: the model returns a DynamicCache: pass "use_cache": False, if it is a cache'
    ]
    assert ours[3] == (None, 0)


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


def metrics_beside(graphs):
    """Beside each training step a forward of another shape, whose outputs nobody differentiates."""
    engine, said = engine_of()
    found, outcome = [], None
    if graphs:
        graphs = engine.fp8.graphs = Graphs(engine, auto=True)
    for step in range(11):
        found.append(engine(**batch(step, 1), labels=batch(step, 1)["input_ids"]).loss.item())
        found += take_step(engine, fused(engine, step))
    if graphs:
        outcome = graphs.off, graphs.captured, list(graphs.log), said
    engine.destroy()
    return found, outcome


def test_what_cannot_be_captured_of_one_shape_leaves_the_others_their_graphs(ranks):
    plain, ours = (ranks(2, metrics_beside, graphs) for graphs in (False, True))
    for (launched, _), (found, (off, captured, log, said)) in zip(plain, ours, strict=True):
        assert found == launched
        assert (off, captured) == (None, 1)
        assert log.count("replayed for 0") >= 2
        assert said.count("without CUDA graphs: ValueError: no output of the model has received a gradient") == 1


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
        pending = any(graph.pending for graph in graphs._graphs)
        torch.distributed.destroy_process_group(group)
        found.append((pending, graphs.captured, take_step(engine, loss)[0]))
    graphs.process_group_ends(torch.distributed.group.WORLD)
    left = graphs.captured
    engine.destroy()
    return found, left


def test_a_pending_backward_outlives_another_process_group(ranks):
    plain = ranks(2, trained, fused, None, False, 4)
    for (found, left), theirs in zip(ranks(2, with_a_group_that_ends, None), plain, strict=True):
        assert left == 0
        assert [(pending, captured) for pending, captured, _ in found] == [
            (False, 0),
            (False, 0),
            (True, 1),
            (True, 1),
        ]
        assert [loss for *_, loss in found] == [loss for loss, _ in theirs[0]]
