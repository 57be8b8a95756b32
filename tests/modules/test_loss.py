"""Cross entropy without logits: against the one with logits, alone, inside Hugging Face models, and under ZeRO-3."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from ds_fp8.modules import loss as loss_module
from ds_fp8.modules.loss import IGNORED, FusedHead, fuse_loss, linear_cross_entropy, linear_cross_entropy_reference
from tests.zero.models import config as ds_config

# Relative error of a loss or gradient against the computation with all logits in the same dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

# Tokens, hidden size, vocabulary.
SIZES = [(1, 3, 7), (5, 3, 61), (17, 8, 131), (64, 16, 1009), (2, 1, 1)]

VOCABULARY = 61
KINDS = ["llama", "qwen2", "qwen3", "mistral"]


def operands(tokens, hidden_size, vocabulary, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(tokens * vocabulary)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, generator=generator).to(device, dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[1::3] = IGNORED
    return hidden, weight, targets.to(device)


def loss_and_gradients(function, hidden, weight, targets, factor=1.0):
    loss = function(hidden, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss * factor, (hidden, weight))


def relative_error(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-12)).item()


@pytest.fixture
def three_tokens_a_chunk(monkeypatch):
    def set_chunk(vocabulary):
        monkeypatch.setattr(loss_module, "LOGITS_BYTES", 3 * 4 * vocabulary)

    return set_chunk


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_loss_and_gradients_are_those_of_all_logits(sizes, chunked, dtype, three_tokens_a_chunk):
    if chunked:
        three_tokens_a_chunk(sizes[2])
    given = operands(*sizes, dtype)
    ours = loss_and_gradients(linear_cross_entropy, *given, factor=0.37)
    theirs = loss_and_gradients(linear_cross_entropy_reference, *given, factor=0.37)
    for result, expected in zip(ours, theirs, strict=True):
        assert result.dtype is expected.dtype
        assert result.shape == expected.shape
        assert relative_error(result, expected) < TOLERANCE[dtype]


def test_ignored_tokens_and_no_tokens():
    hidden, weight, targets = operands(5, 3, 7)
    for result in loss_and_gradients(linear_cross_entropy, hidden, weight, torch.full_like(targets, IGNORED)):
        assert (result == 0).all()
    for result in loss_and_gradients(linear_cross_entropy, *operands(0, 3, 7)):
        assert (result == 0).all()


def test_an_ignored_token_does_not_spread_its_nan():
    hidden, weight, targets = operands(5, 3, 7)
    with torch.no_grad():
        hidden[1] = math.nan
    loss, dhidden, _ = loss_and_gradients(linear_cross_entropy, hidden, weight, targets)
    assert loss.isfinite()
    assert dhidden.isfinite().all()


def test_a_nan_in_a_counted_token_is_seen():
    hidden, weight, targets = operands(5, 3, 7)
    with torch.no_grad():
        hidden[0, 0] = math.nan
    assert all(result.isnan().any() for result in loss_and_gradients(linear_cross_entropy, hidden, weight, targets))


def test_the_gradient_of_the_loss_is_not_rounded_to_bf16():
    """1/3 in BF16 is off by 0.2%, for every element alike; the rounding of single elements averages out."""
    hidden, weight, targets = operands(64, 64, 1009, torch.bfloat16)
    whole = loss_and_gradients(linear_cross_entropy, hidden, weight, targets)[1:]
    third = loss_and_gradients(linear_cross_entropy, hidden, weight, targets, factor=1 / 3)[1:]
    for one, part in zip(whole, third, strict=True):
        assert part.dtype is torch.bfloat16
        assert (3 * part.double() * one.double()).sum() == pytest.approx(one.double().square().sum().item(), rel=2e-4)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_operand_gets_no_gradient(frozen):
    given = operands(17, 8, 131)
    expected = loss_and_gradients(linear_cross_entropy_reference, *given)[2 - frozen]
    given[frozen].requires_grad_(False)
    linear_cross_entropy(*given).backward()
    assert given[frozen].grad is None
    assert relative_error(given[1 - frozen].grad, expected) < TOLERANCE[torch.float32]


def test_without_gradients_the_loss_is_the_same():
    given = operands(17, 8, 131)
    with torch.no_grad():
        loss = linear_cross_entropy(*given)
    assert not loss.requires_grad
    assert loss == linear_cross_entropy(*given)


def test_backward_twice_and_no_second_derivative():
    hidden, weight, targets = operands(17, 8, 131)
    loss = linear_cross_entropy(hidden, weight, targets) / 3
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    (dhidden,) = torch.autograd.grad(loss * hidden.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dhidden.sum().backward()


def test_tokens_must_match():
    hidden, weight, targets = operands(5, 3, 7)
    with pytest.raises(ValueError, match="5"):
        linear_cross_entropy(hidden, weight, targets[:3])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [*SIZES, (300, 128, 50257)], ids=str)
@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True)], ids=str)
def test_liger_agrees_with_all_logits(sizes, wants, dtype):
    pytest.importorskip("liger_kernel")
    given = operands(*sizes, dtype, "cuda")
    expected = loss_and_gradients(linear_cross_entropy_reference, *given, factor=0.37)
    for operand, wanted in zip(given[:2], wants, strict=True):
        operand.requires_grad_(wanted)
    loss = linear_cross_entropy(*given)
    (loss * 0.37).backward()
    assert relative_error(loss.detach(), expected[0]) < TOLERANCE[dtype]
    for operand, wanted, theirs in zip(given[:2], wants, expected[1:], strict=True):
        if wanted:
            assert relative_error(operand.grad, theirs) < TOLERANCE[dtype]
        else:
            assert operand.grad is None


def build(kind, tied=False, seed=0, **changes):
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings | changes))


def fused_and_plain(kind, **settings):
    plain = build(kind, **settings)
    fused = copy.deepcopy(plain)
    assert fuse_loss(fused).fused
    return fused, plain


def batch(rows=2, tokens=9):
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[0, :4] = IGNORED
    labels[1, 6] = IGNORED
    return {"input_ids": ids, "labels": labels}


def assert_same_training(fused, plain, inputs):
    tolerance = TOLERANCE[torch.float32]
    ours, theirs = fused(**inputs), plain(**inputs)
    assert type(ours) is type(theirs)
    assert ours.logits is None
    assert "logits" not in ours
    assert ours.loss.dtype is theirs.loss.dtype
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=tolerance, nan_ok=True)
    ours.loss.backward()
    theirs.loss.backward()
    for (name, p), (other, q) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        assert relative_error(p.grad, q.grad) < tolerance, name


REDUCTIONS = {
    "mean": {},
    "items": {"num_items_in_batch": 5},
    "items tensor": {"num_items_in_batch": torch.tensor(7.5)},
    "shifted": {"shift_labels": batch()["labels"].roll(2, 1)},
    "shifted items": {"shift_labels": batch()["labels"].roll(2, 1), "num_items_in_batch": torch.tensor(3)},
    "ignore_index": {"ignore_index": int(batch()["labels"][1, 2])},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_models_train_alike(kind, reduction, tied):
    inputs = batch() | REDUCTIONS[reduction]
    if reduction == "ignore_index":
        inputs["labels"] = inputs["labels"].where(inputs["labels"] != IGNORED, inputs["ignore_index"])
    assert_same_training(*fused_and_plain(kind, tied=tied), inputs)


def gradients(model, autocast=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batch()).loss
    loss.backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_gradients_are_as_good_as_with_logits(kind, autocast):
    exact = gradients(build(kind))
    models = fused_and_plain(kind)
    if not autocast:
        models = [model.bfloat16() for model in models]
    fused, plain = (relative_error(gradients(model, autocast), exact) for model in models)
    assert 0 < fused < 1.1 * plain


def test_a_batch_without_labels_to_predict_has_no_mean_and_no_gradient():
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], IGNORED)
    fused, plain = fused_and_plain("llama")
    assert_same_training(fused, plain, inputs)
    assert fused(**inputs).loss.isnan()
    assert fused(**inputs, num_items_in_batch=4).loss == 0


def test_the_auxiliary_loss_of_experts_is_kept():
    fused, plain = fused_and_plain("mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)
    assert_same_training(fused, plain, batch())
    assert fused(**batch()).aux_loss > 0


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_a_fused_model_stays(tied, tmp_path):
    fused, plain = fused_and_plain("llama", tied=tied)
    assert isinstance(fused, type(plain))
    assert isinstance(fused.lm_head, torch.nn.Linear)
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert inspect.signature(fused.forward) == inspect.signature(plain.forward)
    assert fuse_loss(fused).fused
    assert type(fused).__mro__[1] is type(plain), "fusing twice fuses once"
    fused.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert type(loaded) is type(plain)
    assert torch.equal(loaded(batch()["input_ids"]).logits, plain(batch()["input_ids"]).logits)


def test_fusing_draws_no_random_numbers():
    model = build("llama")
    torch.manual_seed(3)
    fuse_loss(model)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert drawn == torch.rand(1)


def test_without_labels_nothing_changes():
    fused, plain = fused_and_plain("qwen3")
    ids = batch()["input_ids"]
    assert torch.equal(fused(ids).logits, plain(ids).logits)
    options = {"max_new_tokens": 8, "do_sample": False}
    fused(**batch())
    assert torch.equal(fused.generate(ids, **options), plain.generate(ids, **options))


def test_evaluation_outputs_and_tuples():
    fused, plain = fused_and_plain("llama")
    fused.eval()
    plain.eval()
    with torch.no_grad():
        loss = plain(**batch()).loss.item()
        output = fused(**batch(), output_hidden_states=True)
        assert output.loss.item() == pytest.approx(loss, rel=TOLERANCE[torch.float32])
        assert len(output.hidden_states) == 3
        parts = fused(**batch(), return_dict=False, use_cache=False)
        assert [part.item() for part in parts] == [pytest.approx(loss, rel=TOLERANCE[torch.float32])]


def test_labels_by_position_and_a_failed_forward():
    fused, plain = fused_and_plain("llama")
    ids, labels = batch().values()
    assert fused(ids, None, None, None, None, labels).logits is None
    with pytest.raises(ValueError, match="targets"):
        fused(input_ids=ids, labels=labels[:, :5])
    assert torch.equal(fused(ids).logits, plain(ids).logits), "labels of a failed call must not linger"


def test_a_loss_function_of_the_users_is_used_with_logits():
    fused, _ = fused_and_plain("llama")
    fused.loss_function = lambda logits, labels, **_: logits.sum()
    output = fused(**batch())
    assert output.loss == output.logits.sum()


class LargestTensor(TorchDispatchMode):
    """The largest number of elements that any operation has put out."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def test_no_tensor_is_as_large_as_the_logits(three_tokens_a_chunk):
    vocabulary, inputs = 1009, batch(rows=2, tokens=60)
    three_tokens_a_chunk(vocabulary)
    fused, plain = fused_and_plain("llama", vocab_size=vocabulary)
    largest = {}
    for model in (fused, plain):
        with LargestTensor() as mode:
            model(**inputs).loss.backward()
        largest[model] = mode.elements
    logits = inputs["labels"].numel() * vocabulary
    assert largest[plain] >= logits
    assert largest[fused] == fused.lm_head.weight.numel() < logits / 3


# What a model does with its logits before the loss, which fusing would skip.
LOGIT_WORK = {
    "gemma2": {"final_logit_softcapping": 5.0},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
}


@pytest.mark.parametrize("kind", LOGIT_WORK)
def test_models_that_work_on_their_logits_are_left_alone(kind):
    model = build(kind, **LOGIT_WORK[kind])
    before = type(model)
    result = fuse_loss(model)
    assert not result.fused
    assert "works on its logits" in result.description
    assert type(model) is before
    assert type(model.lm_head) is torch.nn.Linear
    assert model(**batch()).logits is not None


def test_gemma2_without_capping_is_fused():
    assert_same_training(*fused_and_plain("gemma2", final_logit_softcapping=None), batch())


def with_biased_head(model):
    model.lm_head = torch.nn.Linear(32, VOCABULARY)


def with_other_head(model):
    model.lm_head = torch.nn.Sequential(model.lm_head)


def with_own_loss(model):
    model.loss_function = lambda logits, labels, **_: logits.sum()


def with_replaced_forward(model):
    model.forward = model.forward


def with_doubled_loss(model):
    class Doubled(type(model)):
        def forward(self, **inputs):
            output = super().forward(**inputs)
            return output if output.loss is None else type(output)(loss=output.loss + output.logits.float().mean())

    model.__class__ = Doubled


def with_shift_labels_lost(model):
    class Forgetful(type(model)):
        def forward(self, input_ids=None, labels=None, shift_labels=None, **inputs):
            return super().forward(input_ids=input_ids, labels=labels, **inputs)

    model.__class__ = Forgetful


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_biased_head, "bias"),
        (with_other_head, "Sequential"),
        (with_own_loss, "loss function of its own"),
        (with_replaced_forward, "replaced"),
        (with_doubled_loss, "works on its logits"),
        (with_shift_labels_lost, "another loss"),
    ],
)
def test_other_models_are_left_with_the_reason(change, reason):
    model = build("llama")
    change(model)
    before = type(model)
    result = fuse_loss(model)
    assert not result.fused
    assert reason in result.description
    assert type(model) is before
    assert not any(isinstance(module, FusedHead) for module in model.modules())


def test_a_module_that_is_no_hugging_face_model_is_left():
    result = fuse_loss(torch.nn.Linear(3, 4))
    assert not result.fused
    assert "Linear is no model of transformers" in result.description


def zero_training(kind, tied, fused, bf16):
    """Losses of six micro-batches in three steps, an evaluation loss, a greedy answer, and the head's weight."""
    import deepspeed

    model = build(kind, tied=tied)
    if bf16:
        model = model.bfloat16()
    if fused:
        assert fuse_loss(model).fused
    settings = ds_config() | {"bf16": {"enabled": bf16}, "gradient_accumulation_steps": 2}
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0]
    inputs = batch()
    inputs["input_ids"] = (inputs["input_ids"] + deepspeed.comm.get_rank()) % VOCABULARY
    losses = []
    for _ in range(6):
        loss = engine(**inputs, use_cache=False, num_items_in_batch=torch.tensor(11.0)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        losses.append(engine(**inputs, use_cache=False).loss.item())
        answer = engine.module.generate(inputs["input_ids"][:1], max_new_tokens=3, do_sample=False, synced_gpus=True)
    released = engine.module.lm_head.weight.numel() == 0
    with deepspeed.zero.GatheredParameters([engine.module.lm_head.weight]):
        return losses, answer, released, engine.module.lm_head.weight.detach().float().clone()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_zero_3_trains_alike(ranks, tied, bf16):
    tolerance = TOLERANCE[torch.bfloat16 if bf16 else torch.float32]
    results = zip(
        ranks(2, zero_training, "qwen2", tied, True, bf16),
        ranks(2, zero_training, "qwen2", tied, False, bf16),
        strict=True,
    )
    for (losses, answer, released, weight), (plain_losses, plain_answer, _, plain_weight) in results:
        assert released, "the head's weight must have been partitioned for this test to mean something"
        assert losses[4] < losses[0]
        assert losses == pytest.approx(plain_losses, rel=tolerance)
        assert relative_error(weight, plain_weight) < tolerance
        assert bf16 or torch.equal(answer, plain_answer)
