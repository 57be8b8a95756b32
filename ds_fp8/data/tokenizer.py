"""The tokenizer of a stage: built in, a sentencepiece model file, or a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import sentencepiece
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from ds_fp8.config.errors import UserError, clipped
from ds_fp8.data.chat import CHATML_TEMPLATE, CHATML_TOKENS
from ds_fp8.data.sentencepiece_model import from_sentencepiece
from ds_fp8.data.synthetic import conversations, documents

if TYPE_CHECKING:
    from ds_fp8.data.config import DataConfig

PIECE_END = "||||"
"""Marks, in the training text alone, where a token has to end."""
MAX_TEMPLATE_BYTES = 1 << 20
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of a tokenizer that is all that its tokenizer.json says."""


def build_tokenizer(config: DataConfig, cache_dir: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer that `config.tokenizer` names, with eos and pad tokens and for "chat" a chat template.

    A tokenizer without a chat template gets ChatML for format "chat", as does any with `data.chat_template` "chatml".
    Its two markers become special tokens where they are none yet: the tokenizer may then be larger than the model's
    vocabulary (compare `embeddings_needed`).

    Raises:
        UserError: With the key data.tokenizer: there is no such tokenizer or it has no end-of-text token.
    """
    if config.tokenizer == "synthetic":
        tokenizer = from_sentencepiece(_synthetic_model(config.vocab_size, Path(cache_dir)))
    elif config.tokenizer.endswith(".model"):
        tokenizer = from_sentencepiece(_existing_file(config.tokenizer))
    else:
        tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_revision)
    if tokenizer.eos_token is None:
        raise UserError(
            f"the tokenizer {config.tokenizer} has no end-of-text token",
            key="data.tokenizer",
            remedy="set eos_token in its tokenizer_config.json",
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    template = config.chat_template
    if template is None and tokenizer.chat_template is None:
        template = "chatml" if config.format == "chat" or config.tokenizer == "synthetic" else None
    if template == "chatml":
        # Tokens that are there already (the built-in tokenizer has both) keep their ids.
        tokenizer.add_special_tokens({"additional_special_tokens": list(CHATML_TOKENS)})
        tokenizer.chat_template = CHATML_TEMPLATE
    elif template is not None:
        tokenizer.chat_template = _template(template)
    return tokenizer


def embeddings_needed(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many embeddings a model needs for all tokens: one more than the largest id.

    That is more than the number of tokens where ids have gaps, as those of o200k have.
    """
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def check_embeddings(tokenizer: PreTrainedTokenizerBase, there: int, key: str = "data.tokenizer") -> None:
    """Check that a model has an embedding for every token: one of too few would be read out of bounds.

    Args:
        tokenizer: With the chat template of the stage.
        there: Embeddings of the model.
        key: Key of the stage that is wrong if it does not.

    Raises:
        UserError: It has too few.
    """
    needed = embeddings_needed(tokenizer)
    if needed <= there:
        return
    added = [token for token in CHATML_TOKENS if tokenizer.get_vocab().get(token, 0) >= there]
    if added:
        raise UserError(
            f"the chat template adds {' and '.join(added)} to the tokenizer, and the model's vocabulary of {there} has "
            "no place for them",
            key="data.chat_template",
            remedy="give the tokenizer of a chat model of the same vocabulary, or a file with a template of its tokens",
        )
    raise UserError(
        f"the tokenizer has {needed} tokens, the model's vocabulary {there}",
        key=key,
        remedy="use the model's own tokenizer, or a model with at least as many tokens",
    )


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], add_bos: bool = True, add_eos: bool = True
) -> list[list[int]]:
    """Return token ids of each text: the beginning-of-text token if there is one, the text, the end-of-text token."""
    end = [tokenizer.eos_token_id] if add_eos else []
    return [ids + end for ids in encode_prompts(tokenizer, texts, add_bos)]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], add_bos: bool = True) -> list[list[int]]:
    """Return token ids of each text to be completed: as `encode_documents`, without the end-of-text token."""
    start = [tokenizer.bos_token_id] if add_bos and tokenizer.bos_token_id is not None else []
    backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    if backend is None or backend.truncation or backend.padding:
        return [start + ids for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
    # The same ids in little more than half the time: no masks, and no places in the text.
    return [start + encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def train_synthetic_model(vocab_size: int) -> bytes:
    """Return a serialised sentencepiece BPE model of the built-in corpus, the same bytes on every machine.

    BPE counts integers, where the unigram model iterates in floating point. Bytes stand in for characters outside the
    corpus, so that every text can be encoded.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_training_texts()),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        # One thread: the same bytes on machines with any number of cores.
        num_threads=1,
        character_coverage=1.0,
        byte_fallback=True,
        split_digits=False,
        pretokenization_delimiter=PIECE_END,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["\n"],
        control_symbols=list(CHATML_TOKENS),
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        minloglevel=2,
    )
    return model.getvalue()


def _training_texts() -> list[str]:
    """Return the same texts for every stage, so that all stages share one tokenizer.

    Every number up to 59 becomes one token: a small model learns to copy and to add those much sooner than digits.
    """
    texts = list(documents("train", 0, 3000, "mixed"))
    for messages in conversations("train", 0, 1000, "mixed"):
        texts.extend(message["content"] for message in messages)
        texts.extend(message["role"] for message in messages)
    # Often enough that BPE merges each number into one token.
    texts += [" ".join(["", *map(str, range(60))])] * 300
    # Otherwise "7." would be a token beside "7".
    return [re.sub(r"(\d)(?=\D)", rf"\1{PIECE_END}", text) for text in texts]


def _synthetic_model(vocab_size: int, cache_dir: Path) -> Path:
    """Return the file of the trained model, trained now if missing. Any number of processes may call at once."""
    digest = hashlib.sha256("\0".join(_training_texts()).encode()).hexdigest()[:8]
    path = cache_dir / f"synthetic-bpe-{vocab_size}-{digest}.model"
    if not path.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        model = train_synthetic_model(vocab_size)
        with tempfile.NamedTemporaryFile(dir=cache_dir, prefix=path.name, delete=False) as file:
            file.write(model)
        os.chmod(file.name, 0o644)  # the cache may be several users'
        # Atomic, and the same bytes from every process: whoever comes last replaces a file by its equal.
        os.replace(file.name, path)
    return path


def _existing_file(name: str) -> Path:
    path = Path(name).expanduser()
    if not os.path.isfile(path):
        raise UserError(
            f"no sentencepiece model at {name}",
            key="data.tokenizer",
            remedy='give an existing .model file, a Hugging Face tokenizer, or "synthetic"',
        )
    return path


def _template(name: str) -> str:
    file = Path(name).expanduser()
    try:
        if not file.is_file() and file.exists():
            raise OSError(None, "it is not a regular file")
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise OSError(None, f"it has more than {MAX_TEMPLATE_BYTES:,} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8
        raise UserError(
            f"the chat template {clipped(name)} cannot be read: {getattr(error, 'strerror', None) or error}",
            key="data.chat_template",
            remedy='give a file with a Jinja template, or "chatml", or leave the key out',
        ) from None


_PROBE = "  Tom's 12345 apples, 67.5%\n\n\tdef f(x): return café + 漢字 😀"


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str | None:
    """Write `tokenizer` beside the model in `folder`, as data.tokenizer reads it.

    Returns what transformers' AutoTokenizer makes of it where that is something else, and what to do, otherwise None:
    beside the config.json of some models, Qwen2's among them, it takes the model's own class for every tokenizer, which
    splits text in its own way.
    """
    tokenizer.save_pretrained(folder)
    try:
        read = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if encode_prompts(read, [_PROBE]) == encode_prompts(tokenizer, [_PROBE]):
            return None
        found = f"is a {type(read).__name__}, with other ids"
    except Exception as error:  # of whatever kind: that class expects another file
        found = f"cannot be read ({type(error).__name__})"
    if not tokenizer.is_fast:
        return f"{found}; give data.tokenizer the folder or name that it came from"
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": GENERIC[0]}, indent=2) + "\n")
    return f"{found}; load it with {GENERIC[0]}.from_pretrained, as data.tokenizer does"


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load a Hugging Face tokenizer.

    Args:
        name: a folder, or a name on the hub, which offline is looked up in the hub's cache.
        revision: branch, tag or commit of a name; None for its main branch.

    Raises:
        UserError: there is none (key data.tokenizer).
    """
    folder = Path(name).expanduser()
    local = os.path.isdir(folder)  # False for a name that no folder can have
    source = folder if local else name
    where = {} if local else {"revision": revision}
    try:
        about = get_tokenizer_config(source, **where)
        # Not by AutoTokenizer where the file is everything: see save_tokenizer.
        generic = about.get("tokenizer_class") in GENERIC and "auto_map" not in about
        # Without that file AutoTokenizer may build the tokenizer from the files of an older kind.
        whole = not local or (folder / "tokenizer.json").is_file()
        kind = PreTrainedTokenizerFast if generic and whole else AutoTokenizer
        return kind.from_pretrained(source, trust_remote_code=False, **where)
    except Exception as error:  # transformers and tokenizers fail in their own ways at damaged files
        reason = clipped((str(error).strip() or type(error).__name__).splitlines()[0])
        raise UserError(
            f"no tokenizer could be loaded from {clipped(name)} ({reason})",
            key="data.tokenizer",
            remedy='give a folder with tokenizer.json, a reachable Hugging Face name, a .model file, or "synthetic"',
        ) from None
