"""A small corpus and a tokenizer, as the quickstart makes them: once for all processes of a run."""

import runpy
from pathlib import Path

from tests.surroundings import leave

PROGRAM = Path(__file__).parents[1] / "examples" / "quickstart" / "make_data.py"
MAKE = runpy.run_path(str(PROGRAM))  # Functions of that program, by name
FOLDER = leave() / "corpus"
MAKE["write"](FOLDER, (300, 400, 300))
TOKENIZER = str(FOLDER / "tokenizer")
DOCUMENTS = {"path": str(FOLDER / "documents.jsonl"), "tokenizer": TOKENIZER}
CHATS = {"path": str(FOLDER / "mixed.jsonl"), "tokenizer": TOKENIZER, "format": "chat"}
