"""Cross entropy without logits: inside Hugging Face models and under ZeRO-3, against the one with logits."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from peft import CPTConfig, LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from ds_fp8.config.errors import UserError
from ds_fp8.layers.head.cross_entropy import IGNORED
from ds_fp8.layers.head.loss import NO_LOGITS, FusedHead, fuse_loss, withholds_logits
from tests.layers.copies import assert_independent_copy, copied
from tests.layers.hugging_face import causal_lm
from tests.layers.losses import TOLERANCE, limit_chunks
from tests.numerics import error

VOCABULARY = 61


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def build(kind, tied=False, **changes):
    return causal_lm(kind, torch.float32, **SMALL | {"tie_word_embeddings": tied} | changes)


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
    assert ours.logits is NO_LOGITS
    assert "logits" not in ours
    assert ours.loss.dtype is theirs.loss.dtype
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=tolerance, nan_ok=True)
    ours.loss.backward()
    theirs.loss.backward()
    for (name, p), (other, q) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        assert error(p.grad, q.grad) < tolerance, name


REDUCTIONS = {
    "mean": {},
    "items": {"num_items_in_batch": 5},
    "items tensor": {"num_items_in_batch": torch.tensor(7.5)},
    "shifted": {"shift_labels": batch()["labels"].roll(2, 1)},
    "shifted items": {"shift_labels": batch()["labels"].roll(2, 1), "num_items_in_batch": torch.tensor(3)},
    "ignore_index": {"ignore_index": int(batch()["labels"][1, 2])},
}


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen2", False)])
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
@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_in_bf16_gradients_are_as_good_as_with_logits(kind, autocast):
    exact = gradients(build(kind))
    models = fused_and_plain(kind)
    if not autocast:
        models = [model.bfloat16() for model in models]
    fused, plain = (error(gradients(model, autocast), exact) for model in models)
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
    state = torch.get_rng_state()
    assert fuse_loss(copy.deepcopy(plain)).fused
    assert torch.equal(torch.get_rng_state(), state), "fusing draws no random numbers"
    assert inspect.signature(fused.forward) == inspect.signature(plain.forward)
    assert fuse_loss(fused).fused
    assert type(fused).__mro__[1] is type(plain), "fusing twice fuses once"
    fused.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert type(loaded) is type(plain)
    assert torch.equal(loaded(batch()["input_ids"]).logits, plain(batch()["input_ids"]).logits)


def test_without_labels_nothing_changes():
    fused, plain = fused_and_plain("qwen3")
    ids = batch()["input_ids"]
    assert torch.equal(fused(ids).logits, plain(ids).logits)
    options = {"max_new_tokens": 8, "do_sample": False}
    fused(**batch())
    assert torch.equal(fused.generate(ids, **options), plain.generate(ids, **options))


def test_evaluation_outputs_and_tuples():
    fused, plain = fused_and_plain("llama")
    assert torch.equal(fused(**batch(), skip_logits=False).logits, plain(**batch()).logits), "in training, when asked"
    fused.eval()
    plain.eval()
    with torch.no_grad():
        expected = plain(**batch())
        with_logits = fused(**batch())
        assert torch.equal(with_logits.logits, expected.logits), "metrics are computed from them"
        assert with_logits.loss == expected.loss
        loss = expected.loss.item()
        output = fused(**batch(), output_hidden_states=True, skip_logits=True)
        assert output.logits is NO_LOGITS
        assert output.loss.item() == pytest.approx(loss, rel=TOLERANCE[torch.float32])
        assert len(output.hidden_states) == 3
        parts = fused(**batch(), return_dict=False, use_cache=False, skip_logits=True)
        assert [part.item() for part in parts] == [pytest.approx(loss, rel=TOLERANCE[torch.float32])]


LORA = {"attention": {}, "head": {"target_modules": ["lm_head"]}, "saved head": {"modules_to_save": ["lm_head"]}}


@pytest.mark.parametrize("targets", LORA)
def test_a_model_wrapped_by_peft_is_fused_inside(targets):
    def wrap(model):
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **LORA[targets]))

    plain, fused = wrap(build("llama")), wrap(build("llama"))
    result = fuse_loss(fused)
    assert result.fused == withholds_logits(fused) == (targets == "attention")
    if not result.fused:
        assert "(peft." in result.description
    ours, theirs = fused(**batch()), plain(**batch())
    assert (ours.logits is NO_LOGITS) == result.fused
    ours.loss.backward()
    theirs.loss.backward()
    for (name, p), q in zip(fused.named_parameters(), plain.parameters(), strict=True):
        if q.requires_grad:
            assert error(p.grad, q.grad) < TOLERANCE[torch.float32], name


USES = {
    "a method": lambda logits: logits.float(),
    "an index": lambda logits: logits[..., :-1, :],
    "arithmetic": lambda logits: 2 * logits,
    "a loop": list,
    "a question": bool,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_logits_that_were_not_made_say_how_to_get_them(use):
    output = fused_and_plain("llama")[0](**batch())
    with pytest.raises(UserError, match="without logits") as caught:
        use(output.logits)
    assert caught.value.key == "fp8.loss.mode"
    assert "off" in caught.value.remedy
    assert "skip_logits=False" in caught.value.remedy
    assert not hasattr(output.logits, "shape")
    assert len(output.to_tuple()) == len(output.keys()) == 1 + ("past_key_values" in output)


def test_an_adapter_that_reads_logits_keeps_them():
    """CPT of PEFT computes a loss of its own from them."""

    def wrap(model):
        torch.manual_seed(1)
        ids = [3, 5, 7]
        cpt = CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=ids, cpt_tokens_type_mask=[1, 2, 4], cpt_mask=[1] * 3)
        return get_peft_model(model, cpt)

    plain, fused = wrap(build("llama")), wrap(build("llama"))
    result = fuse_loss(fused)
    assert (result.fused, result.description) == (False, "that of PEFT's CPT, which reads logits")
    assert fused(**batch()).loss == plain(**batch()).loss


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save"])
def test_a_fused_model_can_be_copied(how):
    fused, _ = fused_and_plain("qwen3")
    expected = fused(**batch()).loss
    assert_independent_copy(fused, copied(fused, how))
    assert copied(fused, how)(**batch()).loss == expected
    assert copied(fused, how)(**batch()).logits is NO_LOGITS


def test_labels_by_position_and_a_failed_forward():
    fused, plain = fused_and_plain("llama")
    ids, labels = batch().values()
    assert fused(ids, None, None, None, None, labels).logits is NO_LOGITS
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


def test_no_tensor_is_as_large_as_the_logits(monkeypatch):
    vocabulary, inputs = 1009, batch(rows=2, tokens=60)
    limit_chunks(monkeypatch, 3, vocabulary)
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
@pytest.mark.parametrize("training", [True, False])  # from_pretrained returns models in evaluation mode
def test_models_that_work_on_their_logits_are_left_alone(kind, training):
    model = build(kind, **LOGIT_WORK[kind]).train(training)
    before = type(model)
    result = fuse_loss(model)
    assert not result.fused
    assert "changes its logits" in result.description
    assert type(model) is before
    assert type(model.lm_head) is torch.nn.Linear
    assert model(**batch()).logits is not None


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


# By what is said of it: how a model is changed
CHANGED = {
    "without bias": lambda model: setattr(model, "lm_head", torch.nn.Linear(32, VOCABULARY)),
    "Sequential": lambda model: setattr(model, "lm_head", torch.nn.Sequential(model.lm_head)),
    "custom loss function": lambda model: setattr(model, "loss_function", lambda logits, labels, **_: logits.sum()),
    "replaced": lambda model: setattr(model, "forward", model.forward),
    "changes its logits": with_doubled_loss,
    "another loss": with_shift_labels_lost,
}


@pytest.mark.parametrize("reason", CHANGED)
def test_other_models_are_left_with_the_reason(reason):
    model = build("llama")
    CHANGED[reason](model)
    before = type(model)
    result = fuse_loss(model)
    assert not result.fused
    assert reason in result.description
    assert type(model) is before
    assert not any(isinstance(module, FusedHead) for module in model.modules())
    assert "Linear is not a model of transformers" in fuse_loss(torch.nn.Linear(3, 4)).description
