"""Models of a stage: the same on every rank, and refused when they do not fit the data."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from ds_fp8.data import build_tokenizer
from ds_fp8.report.runs import RunRecord
from ds_fp8.train import load_stage, trial
from ds_fp8.train.model import build_model, load_model_config
from ds_fp8.train.stored_model import stored_model
from tests.corpus import MAKE
from tests.refusals import refused


@pytest.fixture
def load(tiny, write):
    """The stage with overrides and its tokenizer."""

    def load(*overrides: str):
        stage = load_stage(write(tiny), overrides)
        return stage, build_tokenizer(stage.data)

    return load


def test_head_dim_is_a_size_of_models_that_do_not_list_it(load):
    heads = '"head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 2'
    experts = '"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128'
    sizes = f'"hidden_size": 128, "num_hidden_layers": 1, {heads}, {experts}'
    stage, tokenizer = load(f'model.config={{"model_type": "qwen3_moe", {sizes}}}')
    model = build_model(stage, load_model_config(stage, tokenizer))
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (4 * 24, 128)


def test_an_untrained_model_follows_from_the_seed_alone(load):
    stage, tokenizer = load()
    torch.rand(7)
    first = build_model(stage, load_model_config(stage, tokenizer)).state_dict()
    torch.rand(3)
    again = build_model(stage, load_model_config(stage, tokenizer)).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = build_model(load("train.seed=7")[0], load_model_config(stage, tokenizer)).state_dict()
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_model_is_bf16_and_as_wide_as_the_tokenizer(load):
    stage, tokenizer = load()
    model = build_model(stage, load_model_config(stage, tokenizer))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_ids_with_gaps_have_embeddings(load):
    """As those of o200k, whose special tokens lie beyond a gap."""
    stage, _ = load()
    words = Tokenizer(WordLevel({"<end>": 0, "one": 1, "two": 2, "far": 40}, unk_token="<end>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    model = build_model(stage, load_model_config(stage, tokenizer))
    ids = torch.tensor([tokenizer.encode("far")])
    assert model(input_ids=ids, labels=ids).loss is not None
    stage, _ = load("model.config.vocab_size=40")
    with refused("has 41 tokens, the model's vocabulary 40"):
        load_model_config(stage, tokenizer)


def test_markers_of_a_chat_template_without_an_embedding_are_named(load, tmp_path):
    """The model's own tokenizer is the right one: it is the template that adds tokens to it."""
    words = Tokenizer(WordLevel({"<end>": 0, "one": 1, "two": 2, "user": 3}, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path / "words")
    stage, tokenizer = load("model.config.vocab_size=4", "data.format=chat", f"data.tokenizer={tmp_path / 'words'}")
    with refused(r"adds <\|im_start\|> and <\|im_end\|>", "data.chat_template"):
        load_model_config(stage, tokenizer)


@pytest.mark.parametrize("where", ["model.path", "train.init_from", "a run"])
def test_stored_weights_are_loaded(where, load, tmp_path):
    stage, tokenizer = load()
    model = build_model(stage, load_model_config(stage, tokenizer))
    folder = tmp_path / "before" / ("model" if where == "a run" else "")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    key = "train.init_from" if where == "a run" else where
    stage, tokenizer = load("model.config=null", f"{key}={tmp_path / 'before'}", "train.seed=7")
    loaded = build_model(stage, load_model_config(stage, tokenizer)).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


WRONG = [
    ("model.config.hiden_size=60", "model.config.hiden_size", 'Did you mean "hidden_size"?'),
    ("model.config.model_type=qwem2", "model.config.model_type", 'Did you mean "qwen2"?'),
    ("model.config.hidden_size=wide", "model.config", "hidden_size"),
    ("model.config.num_key_value_heads=2", "model.config", "do not divide"),
    ("model.config.num_attention_heads=0", "model.config", "ZeroDivisionError"),
    ("model.config.hidden_act=nope", "model.config", "nope"),
    ("model.config.intermediate_size=100000000000", "model.config", "GiB"),
    ("data.sequence_length=129", "data.sequence_length", "max_position_embeddings 128"),
    ("model.config.vocab_size=100", "model.config.vocab_size", "vocabulary 100"),
    ("model.path=/no/such/folder", "model.path", "does not exist"),
    ("model.path=./nowhere", "model.path", "does not exist"),
    ("train.init_from=nowhere", "train.init_from", "run the stage that writes it first"),
    ("train.init_from={}/unfinished", "train.init_from", "no finished model"),
]


@pytest.mark.parametrize(("override", "key", "words"), WRONG, ids=[row[0] for row in WRONG])
def test_a_model_that_cannot_be_is_refused(override, key, words, load, tmp_path):
    (tmp_path / "unfinished" / "checkpoints").mkdir(parents=True)
    (tmp_path / "unfinished" / "config.json").write_text("{}")
    others = [] if override.startswith(("model.config", "data")) else ["model.config=null"]
    stage, tokenizer = load(*others, override.format(tmp_path))
    with refused(key=key, text=words):
        load_model_config(stage, tokenizer)


def test_a_run_that_was_made_longer_is_no_start_before_its_end(load, tmp_path):
    run = tmp_path / "before"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 4000}')
    (run / "result.json").write_text('{"steps": 4}')
    (run / "checkpoints" / "step_4").mkdir(parents=True)
    assert stored_model(None, str(run)).path == str(run / "model")
    (run / "checkpoints" / "step_127").mkdir()
    with refused("older than step 127"):
        stored_model(None, str(run))
    (run / "model" / "model.safetensors").touch()
    assert stored_model(None, str(run / "model")).path == str(run / "model")
    (run / "metrics.jsonl").touch()
    with refused("made longer, and is at step 127"):
        RunRecord(run)


def test_a_tokenizer_other_than_the_stored_models_is_refused(load, tmp_path):
    stage, tokenizer = load()
    build_model(stage, load_model_config(stage, tokenizer)).save_pretrained(tmp_path / "before")
    tokenizer.save_pretrained(tmp_path / "before")
    MAKE["train_tokenizer"](500).save_pretrained(tmp_path / "other")
    changes = ("model.config=null", f"model.path={tmp_path / 'before'}", f"data.tokenizer={tmp_path / 'other'}")
    stage, other = load(*changes)
    with refused("assigns other token ids", "data.tokenizer"):
        load_model_config(stage, other)


# Of models of which a few layers are tried
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 600,
}


@pytest.mark.parametrize(
    ("architecture", "attention", "sees"),
    [
        *[("llama", attention, False) for attention in ("packed", "sdpa", "eager", "flex_attention")],
        ("gemma3_text", "packed", False),
        ("opt", "packed", True),  # takes no positions
        ("gpt_oss", "eager", True),  # makes its mask without them
        ("mamba", "packed", True),  # mixes tokens by a state
        ("falcon", "eager", True),
        ("lfm2", "packed", True),  # by a convolution, in the third layer
    ],
)
def test_models_that_do_not_separate_documents_of_a_row_are_found(architecture, attention, sees):
    more = {"layer_types": ["full_attention", "full_attention", "conv"]} if architecture == "lfm2" else {}
    why = trial.check_rows(AutoConfig.for_model(architecture, **SIZES, **more), attention)
    assert bool(why) == sees
    assert not sees or why.endswith(" does not separate documents of a row")


def test_a_model_whose_tokens_see_padding_is_refused():
    config = AutoConfig.for_model("doge", **SIZES, keep_window_size=8)  # keys are chosen of those behind, too
    with refused("other logits for a document where padding is behind it", "model"):
        trial.check_rows(config, "eager")


def test_a_trial_changes_nothing():
    config = AutoConfig.for_model("llama", **SIZES)
    before, state = config.to_dict(), torch.get_rng_state()
    trial.check_rows(config, "packed")
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("architecture", "key", "words"),
    [
        ("falcon", "model.attn_implementation", '"eager"'),
        ("bloom", "model.attn_implementation", '"eager"'),  # would compute without a mask
        ("gpt_oss", "model.attn_implementation", "does not compute s_aux"),
        ("gemma2", "model.attn_implementation", "does not compute softcap"),
        ("bart", "model", "does not divide its loss by num_items_in_batch"),  # computes its loss by itself
        ("bert", "model", "tokens see those behind them"),
    ],
)
def test_models_that_a_stage_cannot_train_are_refused(architecture, key, words):
    config = AutoConfig.for_model(architecture, **SIZES)
    with refused(key=key, text=words):
        trial.check_rows(config, "packed")
    assert trial.attention_for(config) == ("packed" if key == "model" else "eager")


@pytest.mark.parametrize("attention", ["packed", "sdpa", "flex_attention"])
def test_a_model_that_sees_all_of_a_row_of_one_document_needs_eager_attention(attention):
    config = AutoConfig.for_model("doge", **SIZES)  # adds to a mask, and none is given with such a row
    with refused(key="model.attn_implementation", text=f'attention "{attention}" cannot be computed in Doge'):
        trial.check_rows(config, attention)
    trial.check_rows(config, "eager")


def test_a_model_that_cannot_be_tried_gets_rows_of_one_document():
    why = trial.check_rows(AutoConfig.for_model("vit", hidden_size=64, num_attention_heads=4), "packed")
    assert "could not be tried with" in why
