"""Tokenizers: loaded, saved and given a template without a change of ids, and clear errors."""

import json
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, AutoTokenizer, ByT5Tokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from ds_fp8.data import DataConfig, build_tokenizer, load_tokenizer
from ds_fp8.data.tokenizer import encode_documents, encode_prompts, save_tokenizer
from tests.corpus import CHATS, MAKE, TOKENIZER
from tests.refusals import refused

TEXTS = (
    *MAKE["documents"](50),
    *("", " ", "  two  spaces ", "\n\n1\n", "12345 67", "naïve café, 漢字 and 😀", "tab\there\r\n", "▁ underline"),
)


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for loaded in (
        AutoTokenizer.from_pretrained(tmp_path),
        build_tokenizer(DataConfig(path="x", tokenizer=str(tmp_path))),
    ):
        assert loaded.chat_template == tokenizer.chat_template
        assert loaded.special_tokens_map == tokenizer.special_tokens_map
        assert encode_documents(loaded, TEXTS) == encode_documents(tokenizer, TEXTS)
        chat = next(MAKE["chats"](1))
        assert loaded.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)


def _own_gpt2() -> GPT2Tokenizer:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(MAKE["documents"](300), vocab_size=400, show_progress=False)
    state = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in state["merges"]]
    return GPT2Tokenizer(vocab={**state["vocab"], "<|endoftext|>": len(state["vocab"])}, merges=merges)


@pytest.mark.parametrize(("model_type", "told"), [("qwen2", "is a Qwen2Tokenizer, with other ids;"), ("llama", None)])
@pytest.mark.parametrize("own", ["the quickstart's", "GPT2's class"])
def test_a_model_beside_it_does_not_change_a_tokenizer(own, model_type, told, tokenizer, tmp_path):
    """As in a finished run's folder. transformers takes every tokenizer of a Qwen2 model for Qwen2's."""
    tokenizer = tokenizer if own == "the quickstart's" else _own_gpt2()
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    note = save_tokenizer(tokenizer, tmp_path)
    assert note is told or note.startswith(told)
    for loaded in (load_tokenizer(str(tmp_path)), PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        assert encode_documents(loaded, TEXTS) == encode_documents(tokenizer, TEXTS)


def test_a_tokenizer_that_others_cannot_read_is_saved_all_the_same(tokenizer, tmp_path):
    (tmp_path / "config.json").write_text("no JSON")
    assert "cannot be read" in save_tokenizer(tokenizer, tmp_path)
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()


def test_of_a_tokenizer_without_tokenizer_json_its_origin_is_to_be_named(tmp_path):
    AutoConfig.for_model("qwen2").save_pretrained(tmp_path)
    assert "that it came from" in save_tokenizer(ByT5Tokenizer(), tmp_path)


def test_documents_and_prompts(tokenizer):
    (document,) = encode_documents(tokenizer, ["Tom has 3 apples."])
    (prompt,) = encode_prompts(tokenizer, ["Tom has 3"])
    assert document[0] == prompt[0] == tokenizer.bos_token_id
    assert document[-1] == tokenizer.eos_token_id
    assert document[: len(prompt)] == prompt
    assert tokenizer.eos_token_id not in prompt


def test_chat_markers_are_added_where_there_is_no_template(tmp_path):
    bare = _own_gpt2()
    bare.save_pretrained(tmp_path)
    assert build_tokenizer(DataConfig(path="x", tokenizer=str(tmp_path))).chat_template is None
    chat = build_tokenizer(DataConfig(path="x", tokenizer=str(tmp_path), format="chat"))
    ids = chat.apply_chat_template([{"role": "user", "content": "Hi"}], return_dict=True)["input_ids"]
    assert chat.convert_ids_to_tokens(ids)[0] == "<|im_start|>"
    assert "<|im_end|>" in chat.convert_ids_to_tokens(ids)
    assert len(chat) == len(bare) + 2
    # Markers that are there already keep their ids.
    assert len(build_tokenizer(DataConfig(**CHATS))) == len(load_tokenizer(TOKENIZER))


GENERIC = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
NONE = "no tokenizer could be loaded"
REFUSED = {  # what is wrong: files of the tokenizer's folder, keys of "data", words
    "no folder": (None, {}, NONE),
    "an empty folder": ({}, {}, NONE),
    "no name of the hub's": (None, {"tokenizer": "no_such/tokenizer"}, NONE + " from no_such/tokenizer"),
    **{
        f"damaged: {content[:9]}": ({"tokenizer.json": content, "tokenizer_config.json": GENERIC}, {}, NONE)
        for content in ("[" * 200_000, "{}", "null", '{"version": 1, "model": {"type": "BPE"}}', "\xff")
    },
    **{
        f"the template {name[:9]}": ({}, {**CHATS, "chat_template": name}, "the chat template .* cannot be read")
        for name in ("/dev", "nowhere.jinja", "x" * 5000, "latin.jinja")
    },
    # transformers makes one of a few special tokens, for which every text is nothing, or unknown.
    **{
        f"none beside {model_type}{', but its end' if more else ''}": (
            {"config.json": AutoConfig.for_model(model_type).to_json_string(), **more}, {}, "has no tokenizer files"
        )
        for model_type in ("qwen2", "gpt2", "gemma", "t5")
        for more in ({}, {"tokenizer_config.json": '{"eos_token": "</s>"}'})
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_tokenizer_is_named(case, tmp_path, monkeypatch):
    files, keys, words = REFUSED[case]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.jinja").write_bytes("ä".encode("latin-1"))
    if files is not None:
        (tmp_path / "own").mkdir()
    for name, content in (files or {}).items():
        (tmp_path / "own" / name).write_text(content)
    with refused(words, "data.chat_template" if "template" in case else "data.tokenizer"):
        build_tokenizer(DataConfig(**{"path": "x", "tokenizer": str(tmp_path / "own"), **keys}))


@pytest.mark.parametrize("where", ["vocab", "added"])
def test_ids_for_which_no_memory_is_enough_are_refused(where, tmp_path):
    about = json.loads((Path(TOKENIZER) / "tokenizer.json").read_text())
    about["model"]["vocab"]['\\": 123456789'] = 600  # a token that looks like an id
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    assert len(load_tokenizer(str(tmp_path))) > 500
    if where == "vocab":
        about["model"]["vocab"]["zzz"] = 2**31 - 1
    else:
        about["added_tokens"].append({**about["added_tokens"][-1], "content": "zzz", "id": 2**31 - 1})
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    with refused("ids of nine digits"):
        load_tokenizer(str(tmp_path))


def test_chatml_in_place_of_a_template_is_said(tmp_path, caplog):
    _own_gpt2().save_pretrained(tmp_path)
    for format, said in (("documents", False), ("chat", True)):
        with caplog.at_level("INFO", logger="ds_fp8"):
            build_tokenizer(DataConfig(path="x", tokenizer=str(tmp_path), format=format))
        assert ("no chat template: chats are written in ChatML" in caplog.text) is said
