"""Recomputed layers: their inputs wait on the host, attention's results are kept, and no bit changes."""

import gc
import logging
import re

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.engine import model as checkpointing_section
from ds_fp8.graphs.conditions import why_not_recomputed
from ds_fp8.graphs.host_checkpoints import HostCheckpoints, _Input, keep_on_host, recomputed_by
from ds_fp8.layers.attention import selective_checkpointing
from ds_fp8.layers.attention.format import use_fp8_attention
from ds_fp8.layers.attention.selective_checkpointing import OPERATORS, keep_attention
from tests.layers.hugging_face import causal_lm, tokens
from tests.ranks import on_ranks
from tests.zero import models

LAYERS = 6
ON_HOST = {"activation_checkpointing": {"cpu_checkpointing": True}}


def recomputed(architecture="llama", reentrant=False, **changes):
    model = causal_lm(architecture, **{"num_hidden_layers": LAYERS, **changes})
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def loss_of(model, number=0):
    ids = tokens(2, 16).roll(number, 1)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def gradients(model, *numbers, backward=lambda losses: sum(losses).backward()):
    """Gradients of one or more forwards."""
    model.zero_grad()
    backward([loss_of(model, number) for number in numbers or (0,)])
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def inputs_kept():
    gc.collect()
    return sum(type(one) is _Input for one in gc.get_objects())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "qwen3_moe"])
def test_no_bit_of_a_gradient_changes(architecture, reentrant):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64} if "moe" in architecture else {}
    model = recomputed(architecture, reentrant, **experts)
    expected = gradients(model)
    assert keep_on_host(model)
    assert_same(gradients(model), expected)
    assert why_not_recomputed(list(model.modules())) == "inputs of recomputed layers are kept on the host"


@pytest.mark.parametrize("on_host", [False, True])
def test_at_most_two_inputs_are_on_the_device(on_host):
    """Both of what a forward keeps, and while layers are recomputed."""
    model, inputs, most = recomputed(), [], 0

    def alive():
        return sum(not storage.expired() for storage in inputs)

    def note(layer, args):
        nonlocal most
        inputs.append(StorageWeakRef(args[0].untyped_storage()))
        most = max(most, alive())

    for layer in model.model.layers:
        layer.register_forward_pre_hook(note)
    if on_host:
        keep_on_host(model)
    loss = loss_of(model)
    assert len(inputs) == LAYERS
    assert (alive(), most) == ((1, 2) if on_host else (LAYERS, LAYERS))
    most = 0
    loss.backward()
    assert len(inputs) == 2 * LAYERS
    assert most <= 2 if on_host else most >= LAYERS


def test_the_input_of_the_layer_before_is_fetched_while_a_layer_is_recomputed():
    model, order = recomputed(), []
    keep_on_host(model)
    (on_host,) = {recomputed_by(layer) for layer in model.model.layers}
    fetch, recompute = on_host._fetch, lambda layer, args: order.append(f"recompute {layer.self_attn.layer_idx}")

    def noted(kept):
        if kept.on_device is None:
            order.append("fetch")
        fetch(kept)

    on_host._fetch = noted
    loss = loss_of(model)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(recompute)
    loss.backward()
    # The last layer's input has not left the device.
    ahead = [what for index in reversed(range(1, LAYERS)) for what in ("fetch", f"recompute {index}")]
    assert order == [*ahead, "recompute 0"]


def test_several_forwards_before_a_backward_in_any_order():
    model = recomputed()

    def first_to_last(losses):
        for loss in losses:
            loss.backward()

    together, one_by_one = gradients(model, 0, 3), gradients(model, 0, 3, backward=first_to_last)
    keep_on_host(model)
    assert_same(gradients(model, 0, 3), together)
    assert_same(gradients(model, 0, 3, backward=first_to_last), one_by_one)


def test_a_forward_without_backward_leaves_nothing_behind():
    model = recomputed()
    expected = gradients(model)
    model.zero_grad()  # `expected` stays as it is
    keep_on_host(model)
    before = inputs_kept()
    loss = loss_of(model)
    assert inputs_kept() == before + LAYERS
    loss.backward()
    assert inputs_kept() == before  # although the loss is still held
    loss = loss_of(model)
    del loss
    assert inputs_kept() == before
    assert_same(gradients(model), expected)
    assert inputs_kept() == before
    with torch.no_grad():
        model(input_ids=tokens(), use_cache=False)
    assert inputs_kept() == before


def test_a_graph_can_be_retained():
    model = recomputed(reentrant=True)
    keep_on_host(model)
    expected = {name: 2 * gradient for name, gradient in gradients(model).items()}

    def twice(losses):
        losses[0].backward(retain_graph=True)
        losses[0].backward()

    assert_same(gradients(model, backward=twice), expected)


def test_masks_and_tables_that_layers_share_stay_where_they_are():
    on_host, weight = HostCheckpoints(), torch.randn(8, 8, requires_grad=True)
    mask, x = torch.ones(8, 8), torch.randn(8, 8, requires_grad=True)
    before = inputs_kept()
    y = on_host(lambda x, mask: torch.tanh(x @ weight) * mask, x, mask, use_reentrant=False)
    assert inputs_kept() == before + 1
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(torch.tanh(x @ weight).sum(), x)[0])


def test_only_what_torch_recomputes_is_moved():
    model = recomputed()
    assert not keep_on_host(causal_lm("llama"))
    model.model.layers[0]._gradient_checkpointing_func = own = lambda function, *args: function(*args)
    assert keep_on_host(model)
    kinds = [recomputed_by(layer) for layer in model.model.layers]
    assert kinds[0] is own
    assert all(isinstance(kind, HostCheckpoints) for kind in kinds[1:])
    assert not keep_on_host(model)  # it has been done
    model.gradient_checkpointing_enable()
    assert {recomputed_by(layer) for layer in model.model.layers} == {checkpoint}


# ---------------------------------------------------------------- DeepSpeed's section


def by_a_function_that_keeps_inputs_itself():
    model = causal_lm("llama")
    model.gradient_checkpointing_enable(offload=True)
    return model


ASKED, OTHERS = {"cpu_checkpointing": True}, {"partition_activations": True, "number_checkpoints": 4}


@pytest.mark.parametrize(
    ("make", "given", "fp8", "kept", "without_effect"),
    [
        (recomputed, {**ASKED, "profile": False}, True, True, []),
        (recomputed, {}, True, False, []),
        (recomputed, {"cpu_checkpointing": False}, True, False, []),
        (recomputed, ASKED, False, False, []),
        (lambda: causal_lm("llama"), ASKED, True, False, ASKED),
        (by_a_function_that_keeps_inputs_itself, ASKED, True, False, ASKED),
        (recomputed, OTHERS, True, False, OTHERS),
    ],
)
def test_the_key_of_deepspeed_keeps_inputs_on_the_host(caplog, make, given, fp8, kept, without_effect):
    raw = {"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": given, **({"fp8": {}} if fp8 else {})}
    model = make()
    for _ in range(1 + kept):  # a second engine of the same model
        with caplog.at_level(logging.WARNING, "ds_fp8"):
            checkpointing_section.apply_checkpointing_section(Configuration(raw), model)
    keys = ", ".join(f"activation_checkpointing.{key}" for key in without_effect)
    said = f"warning: {keys} has no effect: .*no layer is recomputed" if keys else ""
    assert re.match(said, " ".join(caplog.messages)) if said else not caplog.messages
    if make is recomputed:
        found = recomputed_by(model.model.layers[0])
        assert isinstance(found, HostCheckpoints) if kept else found is checkpoint


# ---------------------------------------------------------------- real ranks


def train(architecture, recompute, on_host, section):
    """(losses, BF16 weights, whether inputs were kept on the host) of two steps of two micro-batches each."""
    model = causal_lm(architecture)
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    engine = models.engine(section, model, {"gradient_accumulation_steps": 2, **(ON_HOST if on_host else {})})
    losses = models.train(engine, 2)
    assert isinstance(recomputed_by(engine.module.model.layers[0]), HostCheckpoints) == on_host
    return losses, models.bf16_weights(engine)


@pytest.mark.parametrize(("world", "section"), [(2, {}), (1, {"fuse": "off"}), (1, {"enabled": False})], ids=str)
@on_ranks()
def test_engines_train_the_same_bits(section):
    expected, trained = train("qwen3", None, False, section)
    for recompute in ["not reentrant", "reentrant"][: 2 - bool(section)]:
        losses, weights = train("qwen3", recompute, True, section)
        assert losses == expected, recompute
        for name, weight in trained.items():
            assert torch.equal(weights[name], weight), name


# ---------------------------------------------------------------- attention's results are kept


FEW = 3


class Forwards(TorchDispatchMode):
    """Counts attention's forward kernels."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name().removesuffix(".default") in OPERATORS
        return function(*args, **(kwargs or {}))


def step(model):
    """Loss and gradients of one step, and how often attention ran forward."""
    model.zero_grad()
    ids = tokens(2, 32)
    with Forwards() as forwards:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return forwards.count, loss.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("attention", ["bf16", "e4m3"])
@pytest.mark.parametrize("on_host", [False, True])
def test_attention_runs_once_and_no_bit_changes(architecture, attention, on_host):
    model = causal_lm(architecture, num_hidden_layers=FEW, attn_implementation="sdpa")
    in_fp8 = attention == "e4m3" and architecture != "gemma3_text"  # whose windows stay in BF16
    if in_fp8:
        use_fp8_attention(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if on_host:
        keep_on_host(model)
    twice, *expected = step(model)
    keep_attention(model)
    assert on_host or why_not_recomputed(list(model.modules())) is None
    for _ in range(2):
        once, loss, gradients = step(model)
        assert (twice, once) == (2 * FEW, FEW)
        assert torch.equal(loss, expected[0])
        for found, wanted in zip(gradients, expected[1], strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize(("reentrant", "words"), [(None, "no layer"), (True, "reentrant")])
def test_where_it_cannot_be_an_error_names_the_key(reentrant, words):
    model = causal_lm("llama")
    if reentrant:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(UserError, match=words) as error:
        keep_attention(model)
    assert error.value.key == "fp8.activations.keep_attention"


def test_where_there_is_nothing_to_keep_it_is_said(caplog):
    model = causal_lm("llama", attn_implementation="eager")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    keep_attention(model)
    selective_checkpointing._warn.cache_clear()
    with caplog.at_level("WARNING", logger="ds_fp8"):
        step(model)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "fp8.activations.keep_attention saves nothing" in said


def losses(preset, prefetch, activations):
    """Losses of steps, and how often attention ran forward in each."""
    model = causal_lm("qwen2", hidden_size=256, intermediate_size=384)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    section = {"preset": preset, "activations": activations}
    engine = models.engine(section, model, stage3_prefetch_bucket_size=prefetch)
    rows, found, counts = tokens(2, 64), [], []
    for _ in range(2):
        with Forwards() as forwards:
            found.append(models.take_step(engine, models.loss_of(engine, rows)))
        counts.append(forwards.count)
    return found, counts


# What is prefetched, and channels that are looked for once, make other operators run in the second forward.
@pytest.mark.parametrize(("world", "preset", "prefetch"), [(1, "hybrid_fast", 0), (2, "precise", 50_000_000)])
@on_ranks()
def test_an_engine_keeps_it_and_trains_to_the_same_bits(preset, prefetch):
    (plain, twice), (kept, once) = (losses(preset, prefetch, {"keep_attention": keep}) for keep in (False, True))
    assert plain == kept
    assert twice == [2 * once[0]] * 2
    assert once == [once[0]] * 2
    assert once[0] > 0
