"""The tokenizer of a stage: loaded, given a chat template, checked against the model, saved beside it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from ds_fp8.config.errors import UserError, clipped, first_line
from ds_fp8.config.log import logger
from ds_fp8.data.chat import CHATML_TEMPLATE, CHATML_TOKENS

if TYPE_CHECKING:
    from ds_fp8.data.config import DataConfig

# Classes of a tokenizer that is all that its tokenizer.json says
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")

# A number of nine digits that is neither inside a token nor a length: tokenizers would make room for all before it
HUGE_ID = re.compile(rb'(?<!\\)(?<!max_length)(?<!per_word)":\s*[1-9]\d{8}')


def build_tokenizer(config: DataConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer that `config.tokenizer` names, with eos and pad tokens and for "chat" a chat template.

    A tokenizer without a chat template gets ChatML for format "chat", as does any with `data.chat_template` "chatml".
    Its two markers become special tokens where they are none yet: the tokenizer may then be larger than the model's
    vocabulary (compare `embeddings_needed`).
    """
    config.check_named()
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
        template = "chatml" if config.format == "chat" else None
        if template:
            logger.info("the tokenizer %s has no chat template: chats are written in ChatML", config.tokenizer)
    if template == "chatml":
        # Tokens that are there already keep their ids.
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
    """Raise UserError, with `key`, where a model has embeddings for fewer than all tokens: it would read beyond."""
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


def _template(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
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
    """Load a tokenizer from a folder, or by its name on the hub, which offline is looked up in the hub's cache."""
    folder = Path(name).expanduser()
    local = os.path.isdir(folder)  # False for a name that no folder can have
    source = folder if local else name
    where = {} if local else {"revision": revision}
    try:
        about = get_tokenizer_config(source, **where)
        # A tokenizer that is tokenizer.json alone is not read by AutoTokenizer: see save_tokenizer.
        generic = about.get("tokenizer_class") in GENERIC and "auto_map" not in about
        # Without that file AutoTokenizer may build the tokenizer from the files of an older kind.
        file = folder / "tokenizer.json"
        has_file = local and file.is_file()
        if has_file and HUGE_ID.search(file.read_bytes()):
            raise ValueError("tokenizer.json has ids of nine digits, for which no memory is enough")
        kind = PreTrainedTokenizerFast if generic and (has_file or not local) else AutoTokenizer
        tokenizer = kind.from_pretrained(source, trust_remote_code=False, **where)
        # Where a model's class finds no files transformers makes a tokenizer of its special tokens, and T5's "▁".
        if len(tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()) < 2:
            raise ValueError("it has no tokenizer files, or not all of them")
        return tokenizer
    except Exception as error:  # transformers and tokenizers fail in their own ways at damaged files
        reason = first_line(error)
        raise UserError(
            f"no tokenizer could be loaded from {clipped(name)} ({reason})",
            key="data.tokenizer",
            remedy="give a folder with tokenizer.json, or a reachable Hugging Face name",
        ) from None
