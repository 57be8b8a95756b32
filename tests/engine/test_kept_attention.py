"""Recomputed layers that keep attention's results: the same gradients, and each forward of attention once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.graphs.conditions import why_not_recomputed
from ds_fp8.graphs.host_checkpoints import keep_on_host
from ds_fp8.layers.attention import selective_checkpointing
from ds_fp8.layers.attention.format import use_fp8_attention
from ds_fp8.layers.attention.selective_checkpointing import OPERATORS, keep_attention
from tests.layers.hugging_face import causal_lm, tokens
from tests.ranks import on_ranks
from tests.zero import models

LAYERS = 3


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
    model = causal_lm(architecture, num_hidden_layers=LAYERS, attn_implementation="sdpa")
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
        assert (twice, once) == (2 * LAYERS, LAYERS)
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
    config = models.config({"preset": preset, "activations": activations}, stage3_prefetch_bucket_size=prefetch)
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    rows, found, counts = tokens(2, 64), [], []
    for _ in range(2):
        with Forwards() as forwards:
            found.append(models.take_step(engine, engine(input_ids=rows, labels=rows, use_cache=False).loss))
        counts.append(forwards.count)
    return found, counts


# What is prefetched, and channels that are looked for once, make other operators run in the second forward.
@pytest.mark.parametrize(("preset", "prefetch"), [("hybrid_fast", 0), ("precise", 50_000_000)])
@on_ranks(2)
def test_an_engine_keeps_it_and_trains_to_the_same_bits(preset, prefetch):
    (plain, twice), (kept, once) = (losses(preset, prefetch, {"keep_attention": keep}) for keep in (False, True))
    assert plain == kept
    assert twice == [2 * once[0]] * 2
    assert once == [once[0]] * 2
    assert once[0] > 0
