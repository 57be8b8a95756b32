"""Tokenizers: the same ids as sentencepiece, lossless, reproducible, and clear errors."""

import io
import json
import re
import threading

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, AutoTokenizer, ByT5Tokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from ds_fp8.config.errors import UserError
from ds_fp8.data import DataConfig, build_tokenizer
from ds_fp8.data.config import SMALLEST_VOCABULARY
from ds_fp8.data.sentencepiece_model import from_sentencepiece
from ds_fp8.data.synthetic import conversations, documents
from ds_fp8.data.tokenizer import encode_documents, encode_prompts, save_tokenizer, train_synthetic_model

ODD_TEXTS = (
    "",
    " ",
    "  two  spaces ",
    "\n\n1\n",
    "Tom",
    "12345 67",
    "naïve café, 漢字 and 😀",
    "tab\there\r\n",
    "▁ underline",
)


@pytest.fixture(scope="module")
def processor(tokenizer, cache_dir):
    (file,) = cache_dir.glob("*-640-*.model")
    return sentencepiece.SentencePieceProcessor(model_file=str(file))


def _corpus():
    texts = list(documents("train", 11, 300, "mixed"))
    return texts + [turn["content"] for chat in conversations("train", 11, 100, "mixed") for turn in chat]


def _ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_ids_equal_sentencepiece(tokenizer, processor):
    for text in (*_corpus(), *ODD_TEXTS):
        assert _ids(tokenizer, text) == processor.encode(text), text


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0▁<"), max_size=40))
def test_every_text_is_encoded_without_loss(tokenizer, text):
    ids = _ids(tokenizer, text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_corpus_survives_decoding(tokenizer):
    texts = _corpus()
    assert tokenizer.batch_decode([_ids(tokenizer, text) for text in texts]) == texts


@pytest.mark.parametrize("vocab_size", [SMALLEST_VOCABULARY, 500, 640])
def test_vocabulary_has_the_size_asked_for(vocab_size, cache_dir):
    tokenizer = build_tokenizer(DataConfig(vocab_size=vocab_size, format="chat"), cache_dir)
    assert len(tokenizer) == tokenizer.vocab_size == vocab_size
    ids = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    assert len(ids | set(tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]))) == 6


def test_numbers_are_tokens_of_their_own(tokenizer):
    for number in range(60):
        pieces = tokenizer.convert_ids_to_tokens(
            _ids(tokenizer, f"Tom has {number}. 3 + {number} = {number}, {number}?")
        )
        assert pieces.count(f"▁{number}") == 4 + (number == 3)
    assert not [
        piece for piece in tokenizer.get_vocab() if re.search(r"\d[^\dA-F]+$|[.,?]\d", piece) and "<" not in piece
    ]


def test_training_is_reproducible():
    assert train_synthetic_model(400) == train_synthetic_model(400)


def test_all_stages_share_one_tokenizer(tmp_path):
    for config in (DataConfig(), DataConfig(format="chat", difficulty="mixed", seed=5, examples=10)):
        build_tokenizer(config, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_ranks_may_build_at_once(tmp_path):
    found = []

    def build():
        found.append(build_tokenizer(DataConfig(vocab_size=400), tmp_path / "cache").get_vocab())

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(vocabulary == found[0] for vocabulary in found)
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".model"]


def test_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for loaded in (
        AutoTokenizer.from_pretrained(tmp_path),
        build_tokenizer(DataConfig(tokenizer=str(tmp_path)), tmp_path),
    ):
        assert loaded.chat_template == tokenizer.chat_template
        assert loaded.special_tokens_map == tokenizer.special_tokens_map
        assert len(loaded) == len(tokenizer)
        for text in (*_corpus()[:50], *ODD_TEXTS):
            assert _ids(loaded, text) == _ids(tokenizer, text)
            assert loaded.decode(_ids(loaded, text)) == tokenizer.decode(_ids(tokenizer, text))
        chat = next(conversations("train", 0, 1))
        assert loaded.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)


def _own_gpt2() -> GPT2Tokenizer:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(documents("train", 0, 300), vocab_size=400, show_progress=False)
    state = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in state["merges"]]
    return GPT2Tokenizer(vocab={**state["vocab"], "<|endoftext|>": len(state["vocab"])}, merges=merges)


@pytest.mark.parametrize(("model_type", "told"), [("qwen2", "is a Qwen2Tokenizer, with other ids;"), ("llama", None)])
@pytest.mark.parametrize("own", ["sentencepiece", "GPT2's class"])
def test_a_model_beside_it_does_not_change_a_tokenizer(own, model_type, told, tokenizer, tmp_path):
    """As in a finished run's folder. transformers takes every tokenizer of a Qwen2 model for Qwen2's."""
    tokenizer = tokenizer if own == "sentencepiece" else _own_gpt2()
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    note = save_tokenizer(tokenizer, tmp_path)
    assert note is told or note.startswith(told)
    for loaded in (
        build_tokenizer(DataConfig(tokenizer=str(tmp_path)), tmp_path),
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
    ):
        for text in (*_corpus()[:50], *ODD_TEXTS):
            assert _ids(loaded, text) == _ids(tokenizer, text)


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


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("options", [{}, {"byte_fallback": True, "normalization_rule_name": "identity"}])
def test_any_sentencepiece_model_keeps_its_ids(model_type, options, tmp_path):
    """With the trainer's usual settings: a space put in front, spaces merged, characters normalised."""
    model = io.BytesIO()
    texts = [text.replace("\n", " ") for text in documents("train", 0, 500)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type=model_type,
        vocab_size=450 if options else 200,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    file = tmp_path / "own.model"
    file.write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    tokenizer = build_tokenizer(DataConfig(tokenizer=str(file)), tmp_path)
    for text in (*texts[:100], "Tom  has ½ an apple ", " Ann", "x" * 9):
        assert _ids(tokenizer, text) == processor.encode(text), text
        assert tokenizer.decode(_ids(tokenizer, texts[0])) == texts[0]
    assert tokenizer.pad_token == tokenizer.eos_token == "</s>"
    assert tokenizer.chat_template is None


def test_chat_markers_are_added_where_there_is_no_template(tokenizer, tmp_path):
    bare = from_sentencepiece(next(_model_files(tokenizer, tmp_path)))
    bare.save_pretrained(tmp_path / "bare")
    documents_only = build_tokenizer(DataConfig(tokenizer=str(tmp_path / "bare")), tmp_path)
    assert documents_only.chat_template is None
    chat = build_tokenizer(DataConfig(tokenizer=str(tmp_path / "bare"), format="chat"), tmp_path)
    ids = chat.apply_chat_template([{"role": "user", "content": "Hi"}], return_dict=True)["input_ids"]
    assert chat.convert_ids_to_tokens(ids)[0] == "<|im_start|>"
    assert "<|im_end|>" in chat.convert_ids_to_tokens(ids)


def _model_files(tokenizer, tmp_path):
    build_tokenizer(DataConfig(vocab_size=400), tmp_path)
    return tmp_path.glob("*.model")


@pytest.mark.parametrize("name", ["nowhere.model", "folder.model", "empty-folder", "junk.model", "no_such/tokenizer"])
def test_missing_tokenizer_is_an_error_with_a_remedy(name, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "folder.model").mkdir()
    (tmp_path / "empty-folder").mkdir()
    (tmp_path / "junk.model").write_bytes(b"this is no protocol buffer")
    given = name if "/" in name else str(tmp_path / name)
    with pytest.raises(UserError) as error:
        build_tokenizer(DataConfig(tokenizer=given), tmp_path)
    assert error.value.key == "data.tokenizer"
    assert error.value.remedy
    assert name in str(error.value)


@pytest.mark.parametrize("content", ["[" * 200_000, "{}", "null", '{"version": 1, "model": {"type": "BPE"}}', "\xff"])
def test_a_damaged_tokenizer_is_named(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="no tokenizer could be loaded") as caught:
        build_tokenizer(DataConfig(tokenizer=str(tmp_path)), tmp_path)
    assert caught.value.key == "data.tokenizer"


@pytest.mark.parametrize(
    "name", ["/dev/zero", "/dev", "nowhere.jinja", "x" * 5000, "large.jinja", "latin.jinja", "loop.jinja"]
)
def test_a_chat_template_that_is_no_text_file_is_named(name, tmp_path, tokenizer, monkeypatch, cache_dir):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "large.jinja").write_bytes(b" " * (2 << 20))
    (tmp_path / "latin.jinja").write_bytes("ä".encode("latin-1"))
    (tmp_path / "loop.jinja").symlink_to("loop.jinja")
    with pytest.raises(UserError, match="cannot be read") as caught:
        build_tokenizer(DataConfig(chat_template=name, format="chat"), cache_dir)
    assert caught.value.key == "data.chat_template"
