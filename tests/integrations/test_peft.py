"""Models of PEFT on ranks, compared with stock DeepSpeed in BF16: trained, saved, loaded by PEFT, resumed, merged."""

from __future__ import annotations

from typing import Any, NamedTuple

import deepspeed
import peft
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import ds_fp8
from ds_fp8.casts import quantize
from ds_fp8.config.errors import UserError
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.train import Lora
from ds_fp8.train.adapters import add_adapters, with_adapters_merged
from tests.layers.hugging_face import causal_lm, tokens
from tests.numerics import error
from tests.ranks import on_ranks
from tests.zero import models

FP8 = {"monitor": {"every": 0}}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PARTS = ["q_proj", "v_proj", "down_proj"]


class Case(NamedTuple):
    options: dict  # Of the tuner's configuration
    tuner: str = "Lora"
    model: str = "untied"
    vocabulary: int | None = None  # What the embeddings are resized to
    fused: int = 2  # Layers that are fused
    recompute: bool | None = None  # use_reentrant of gradient checkpointing

    def config(self):
        targets = {"target_modules": LINEARS if self.tuner == "Lora" else PARTS}
        if self.tuner in ("PromptTuning", "PrefixTuning", "TrainableTokens", "AdaptionPrompt"):
            targets = {}
        return getattr(peft, f"{self.tuner}Config")(**{"task_type": "CAUSAL_LM", **targets, **self.options})


def lora(**options):
    return Case({"r": 8, "lora_alpha": 12, **options})


FUSED = {
    "plain": lora(),
    "dropout of nothing": lora(lora_dropout=1e-9),
    "rsLoRA": lora(use_rslora=True),
    "patterns": lora(rank_pattern={"q_proj": 4, "down_proj": 32}, alpha_pattern={"v_proj": 3}),
    "q and v": lora(target_modules=["q_proj", "v_proj"]),
    "one layer, rank 64": lora(layers_to_transform=[1], r=64),
    "biases trained": lora(bias="lora_only")._replace(model="biased"),
    "PiSSA": lora(init_lora_weights="pissa"),
}
UNFUSED = {
    "DoRA": lora(use_dora=True)._replace(fused=0),
    "adapters with biases": lora(lora_bias=True)._replace(fused=0),
    "invoked": lora(alora_invocation_tokens=tokens()[0, 5:6].tolist())._replace(fused=0),
}
PLAIN = ("BOFT", "Beft", "Deft", "Delora", "Frod", "Glora", "HRA", "LoHa", "LoKr", "OFT", "OSF", "Poly", "RandLora")
TUNERS = {
    **{key: {} for key in (*PLAIN, "Road", "Supertuning", "TinyLora", "UniLora")},
    **{key: {"r": 8} for key in ("Gralora", "Hira", "Lily", "Miss", "Peanut", "Psoft", "Shira")},
    **{key: {"r": 32} for key in ("Pvera", "Vera")},
    **{key: {"n_frequency": 100} for key in ("FourierFT", "WaveFT")},
    "C3A": {"block_size": 64},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LNTuning": {"target_modules": ["input_layernorm", "post_attention_layernorm"]},
    "VBLoRA": {"vector_length": 64},
    "AdaptionPrompt": {"adapter_len": 4, "adapter_layers": 2},
}
FUSED_TUNERS = {
    "TrainableTokens": {"token_indices": [3, 5, 7], "target_modules": ["embed_tokens"]},
    "PromptTuning": {"num_virtual_tokens": 4},
    "PrefixTuning": {"num_virtual_tokens": 4},
}
MERGED = [*FUSED.values(), UNFUSED["DoRA"]]
HOW = {"reentrant": True, "not reentrant": False}
BOTH = ["embed_tokens", "lm_head"]
SAVED = {
    "saved head": lora(modules_to_save=["lm_head"]),
    "saved embeddings": lora(modules_to_save=["embed_tokens"]),
    "saved embeddings, kept tied": lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "saved head and embeddings": lora(modules_to_save=BOTH),
    "resized": lora()._replace(vocabulary=112),
    "resized and saved": lora(modules_to_save=BOTH)._replace(vocabulary=112),
    "tokens": lora(trainable_token_indices=[3, 5, 7]),
    "tokens, kept tied": lora(trainable_token_indices={"embed_tokens": [3, 5]}, ensure_weight_tying=True),
    "tokens of both": lora(trainable_token_indices={name: [3, 5] for name in BOTH}),
    "tokens of resized ones": lora(trainable_token_indices={"embed_tokens": [100, 5]})._replace(vocabulary=112),
    "embeddings as target": lora(target_modules=["q_proj", "embed_tokens"]),
    "head as target": lora(target_modules=["q_proj", "lm_head"]),
    "both as targets": lora(target_modules=["q_proj", *BOTH]),
}
RECOMPUTED = {
    "plain": lora(),
    "DoRA": UNFUSED["DoRA"],
    **{name: SAVED[name] for name in ("saved head and embeddings", "tokens")},
    "saved MLP": lora(target_modules=["q_proj"], modules_to_save=["mlp"])._replace(fused=0),
}
CASES = {
    **FUSED,
    **UNFUSED,
    **{name: Case(options, name, fused=0) for name, options in TUNERS.items()},
    **{name: Case(options, name) for name, options in FUSED_TUNERS.items()},
    **{f"{name}, {kind}": case._replace(model=kind) for name, case in SAVED.items() for kind in ("tied", "untied")},
    **{
        f"{name}, {how}": case._replace(recompute=how == "reentrant")
        for name, case in RECOMPUTED.items()
        for how in HOW
    },
}
QUICK = {  # and ranks
    # Fused adapters; tuners that read weights, train prompts, share numbers between layers.
    **{"patterns": 2, "biases trained": 1, "OFT": 2, "PromptTuning": 1, "VBLoRA": 1},
    **{"resized and saved, untied": 2, "tokens of both, untied": 1, "both as targets, tied": 2},
    **{"saved embeddings, kept tied, tied": 2, "saved MLP, not reentrant": 1, "DoRA, reentrant": 2},
}
SLOW = pytest.mark.slow


def base_model(folder, case):
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/{case.model}", dtype=torch.bfloat16)
    if case.vocabulary:
        model.resize_token_embeddings(case.vocabulary)
    return model


def engine_of(model, section, seed=2):
    """With noise in all that is trained: B of an adapter is zero at first, and A's gradient with it."""
    generator = torch.Generator().manual_seed(seed)
    trained = [parameter for parameter in model.bfloat16().parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data += (0.02 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    config = models.config(section, stage3_param_persistence_threshold=0)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    initialize = deepspeed.initialize if section is None else ds_fp8.initialize
    return initialize(model=model, model_parameters=trained, config=config)[0]


@on_ranks(1)
def test_adapters_of_an_engines_model_are_refused_at_the_first_forward():
    engine = engine_of(causal_lm("llama"), FP8)
    get_peft_model(engine.module, FUSED["plain"].config())
    with pytest.raises(UserError, match=r"lora_A(.|\n)*would not be trained(.|\n)*before deepspeed\.initialize"):
        engine(input_ids=tokens(100))


def adapted(folder, case):
    torch.manual_seed(1)
    return get_peft_model(base_model(folder, case), case.config())


def steps(engine, first, last, **inputs):
    losses = []
    for step in range(first, last):
        torch.manual_seed(step)
        ids = torch.roll(tokens(), step) + dist.get_rank()
        losses.append(models.take_step(engine, engine(input_ids=ids, labels=ids, use_cache=False, **inputs).loss))
    return losses


def logits_of(model, **inputs):
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens(), use_cache=False, **inputs).logits.float()
    model.train()
    return logits


def trained(folder, case, section) -> dict[str, Any]:
    model = adapted(folder, case)
    if case.recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": case.recompute})
        model.enable_input_require_grads()
    engine = engine_of(model, section)
    inputs = {"task_ids": torch.zeros(2, dtype=torch.long)} if case.tuner == "Poly" else {}
    ids = tokens() + dist.get_rank()
    loss = engine(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    engine.backward(loss)
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    found = {"gradients": {name: safe_get_full_grad(p).float().clone() for name, p in named}}
    engine.step()
    found["losses"] = [loss.item(), *steps(engine, 1, 3, **inputs)]
    logits, state = logits_of(engine, **inputs), engine._zero3_consolidated_16bit_state_dict()
    fp8 = {name for name, module in engine.module.named_modules() if isinstance(module, FP8Linear)}
    found["fused"] = 0 if section is None else engine.fp8.report["fused_layers"]
    saved = f"{folder}/{dist.get_rank()}"
    if dist.get_rank() == 0 or case.config().is_prompt_learning:  # of which save_pretrained runs the encoder
        engine.module.save_pretrained(saved, state_dict=state)
    engine.destroy()
    if dist.get_rank() == 0:
        loaded = PeftModel.from_pretrained(base_model(folder, case), saved).bfloat16().eval()
        theirs = loaded.state_dict()
        found["unlike"] = [n for n in theirs.keys() | state.keys() if not torch.equal(theirs[n], state[n])]
        for name in fp8:
            weight = loaded.get_submodule(name).weight.data
            weight.copy_(quantize(weight, "e4m3", "128x128").dequantize())
        found["logits"] = error(logits, logits_of(loaded, **inputs))
        with loaded.disable_adapter():
            without = logits_of(loaded)
            found["off"] = error(logits[:, -without.shape[1] :], without)  # prompts come before
        if case in MERGED:
            unmerged = logits_of(loaded)
            found["merged"] = error(logits_of(loaded.merge_and_unload()), unmerged)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("peft")
    for name, kind in {"tied": "llama", "untied": "llama", "biased": "qwen2"}.items():
        causal_lm(kind, tie_word_embeddings=name == "tied").save_pretrained(path / name)
    return path


@pytest.mark.parametrize(
    ("world", "name"),
    [pytest.param(QUICK.get(name, 2), name, id=name, marks=() if name in QUICK else SLOW) for name in CASES],
)
@on_ranks()
def test_trained_and_loaded_by_peft_alone(folder, name):
    case = CASES[name]
    plain, found = (trained(folder, case, section) for section in (None, FP8))
    assert found["fused"] == case.fused
    assert found["losses"] == pytest.approx(plain["losses"], rel=0.005)
    assert found["gradients"].keys() == plain["gradients"].keys()
    for name, gradient in plain["gradients"].items():
        assert error(found["gradients"][name], gradient) < 0.35, name  # a router's; others 0.25
    if dist.get_rank() == 0:
        assert found["unlike"] == plain["unlike"] == []
        assert found["logits"] < 0.08
        assert plain["logits"] < 0.001 < 0.005 < plain["off"]
        assert found.get("merged", 0) < 0.02


@pytest.mark.parametrize(("section", "whole"), [(FP8, True), (FP8 | {"preset": "precise"}, False)])
@on_ranks(2)
def test_fused_adapters_resume_bit_by_bit(folder, section, whole):
    """Two steps behind a checkpoint, and those of another engine that has loaded it."""
    dropping = lora(lora_dropout=0.1)
    first, second = (engine_of(adapted(folder, dropping), section, seed) for seed in (2, 3))
    steps(first, 0, 2)
    first.save_checkpoint(folder / "checkpoint", exclude_frozen_parameters=not whole)
    steps(second, 7, 8)
    second.load_checkpoint(folder / "checkpoint", load_module_strict=whole)
    assert first.fp8.report["fused_layers"] == 2
    (losses, state), (expected, theirs) = (
        (steps(engine, 2, 4), engine._zero3_consolidated_16bit_state_dict()) for engine in (first, second)
    )
    first.destroy()
    second.destroy()
    assert losses == expected
    assert state is theirs is None or all(torch.equal(state[name], theirs[name]) for name in theirs)


@on_ranks(2)
def test_adapters_merged_into_a_live_engine_and_taken_out_again(folder):
    engine = engine_of(adapted(folder, FUSED["plain"]), FP8)
    steps(engine, 0, 2)
    logits = logits_of(engine)
    with engine.module.disable_adapter():
        assert error(logits_of(engine), logits) > 0.3
    # Weights with adapters are cast as they are together.
    for change, bound in (("merge", 0.12), ("unmerge", 0.06)):
        for layer in [module for module in engine.module.modules() if hasattr(module, "lora_A")]:
            with deepspeed.zero.GatheredParameters(list(layer.parameters()), modifier_rank=0):
                getattr(layer, change)()
        assert error(logits_of(engine), logits) < bound
    losses = steps(engine, 2, 3)
    engine.destroy()
    plain = trained(folder, FUSED["plain"], None)
    assert losses == pytest.approx(plain["losses"][2:], rel=0.01)


def several(folder, section):
    """Losses of the active one of two adapters, logits of either, what PEFT loads otherwise than it was."""
    model = adapted(folder, FUSED["plain"])
    model.add_adapter("other", lora(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False).config())
    engine = engine_of(model, section)
    losses, logits, unlike = steps(engine, 0, 3), [], None
    state = engine._zero3_consolidated_16bit_state_dict()
    for name in ("default", "other"):
        engine.module.set_adapter(name)
        logits.append(logits_of(engine))
    if dist.get_rank() == 0:
        engine.module.save_pretrained(folder / "several", state_dict=state)
        loaded = PeftModel.from_pretrained(base_model(folder, FUSED["plain"]), folder / "several")
        loaded.load_adapter(folder / "several" / "other", "other")
        theirs = loaded.bfloat16().state_dict()
        unlike = [name for name in theirs.keys() | state.keys() if not torch.equal(theirs[name], state[name])]
    engine.destroy()
    return losses, *logits, unlike


@on_ranks(2)
def test_one_of_several_adapters(folder):
    plain, found = (several(folder, section) for section in (None, FP8))
    assert found[0] == pytest.approx(plain[0], rel=0.005)
    assert max(error(found[i], plain[i]) for i in (1, 2)) < 0.12
    assert error(found[1], found[2]) > 0.4
    assert (found[3] or plain[3] or []) == []


def test_a_stage_merges_transposed_weights_and_embeddings():
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 64, "tie_word_embeddings": False}
    model, plain = (GPT2LMHeadModel(GPT2Config(**sizes)).bfloat16().eval() for _ in range(2))
    add_adapters(model, Lora(targets=["c_attn", "c_proj", "wte"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape).bfloat16()
    plain.load_state_dict(with_adapters_merged(model, model.state_dict()))
    ids = torch.arange(20)[None]
    assert error(plain(ids).logits, model(ids).logits) < 0.01
    model.disable_adapters()
    assert error(plain(ids).logits, model(ids).logits) > 0.5
