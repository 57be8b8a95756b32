"""Write real text without a network: the Python sources and documentation that are installed here, as documents.

    python scripts/experiments/corpus.py --output corpus.jsonl --megabytes 190
    python scripts/experiments/corpus.py --output corpus.jsonl --tokenizer tokenizer --vocabulary 16384

A line of JSON with a key "text" for every file, once, in an order that the names decide. --tokenizer trains a BPE of
bytes on the first 40 megabytes and writes it as a Hugging Face tokenizer, with the marks that "chatml" needs.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ds_fp8.config.errors import UserError, main_entry

SUFFIXES = {".py", ".pyi", ".rst", ".md"}
SMALLEST, LARGEST = 500, 300_000
"""Bytes of a file: neither stubs nor tables."""
TRAINING_CHARACTERS = 40_000_000
END, SPECIAL = "<|endoftext|>", ["<|im_start|>", "<|im_end|>"]


def documents() -> list[Path]:
    """Return installed files, one of those with the same name and size, shuffled by a fixed seed."""
    found: dict[tuple[str, int], Path] = {}
    for folder in ("purelib", "stdlib"):
        for file in sorted(Path(sysconfig.get_path(folder)).rglob("*")):
            if file.suffix in SUFFIXES and file.is_file() and SMALLEST < file.stat().st_size < LARGEST:
                found.setdefault((file.name, file.stat().st_size), file)
    files = [found[key] for key in sorted(found)]
    random.Random(0).shuffle(files)
    return files


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE whose digits stand alone."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, *SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, additional_special_tokens=SPECIAL
    )


def some(files: list[Path]) -> Iterator[str]:
    total = 0
    for file in files:
        text = file.read_text(errors="ignore")
        total += len(text)
        yield text
        if total > TRAINING_CHARACTERS:
            return


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the .jsonl to write")
    parser.add_argument("--megabytes", type=float, help="stop there (default: all there is)")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="train a tokenizer, too, and write it there")
    parser.add_argument("--vocabulary", type=int, default=16384, help="its tokens (default 16384)")
    options = parser.parse_args(arguments)
    files = documents()
    if not files:
        raise UserError("no Python sources are installed here", remedy="run in an environment with packages")
    written = count = 0
    with options.output.open("w") as output:
        for file in files:
            text = file.read_text(errors="ignore")
            output.write(json.dumps({"text": text}) + "\n")
            written, count = written + len(text), count + 1
            if options.megabytes and written > options.megabytes * 1e6:
                break
    print(f"{count} documents, {written / 1e6:.1f} million characters: {options.output}")
    if options.tokenizer:
        train_tokenizer(some(files), options.vocabulary).save_pretrained(options.tokenizer)
        print(f"tokenizer: {options.tokenizer}")
    return 0


if __name__ == "__main__":
    main_entry(main)
