"""A small corpus and a tokenizer, as the quickstart makes them: once for all tests of this machine."""

import os
import runpy
import tempfile
import zlib
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "examples" / "quickstart" / "make_data.py"
MAKE = runpy.run_path(str(PROGRAM))
"""Functions of that program, by name."""
FOLDER = Path(tempfile.gettempdir()) / f"ds_fp8_corpus_{os.getuid()}_{zlib.crc32(PROGRAM.read_bytes()):08x}"
MAKE["write"](FOLDER, (300, 400, 300))
TOKENIZER = str(FOLDER / "tokenizer")
DOCUMENTS = {"path": str(FOLDER / "documents.jsonl"), "tokenizer": TOKENIZER}
CHATS = {"path": str(FOLDER / "mixed.jsonl"), "tokenizer": TOKENIZER, "format": "chat"}
