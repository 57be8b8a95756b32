"""Fuzz what users write: configurations, --set overrides, JSON texts, sweeps, data files, chats, folders, commands.

    python scripts/fuzz.py --cases 2000 [--only overrides data] [--seed 1]

Every case must be accepted, or refused by a UserError with a remedy within seconds; neither may write a file. Each
kind runs in a process of its own. Exit code 1 if a case did otherwise.
"""

from __future__ import annotations

import argparse
import bz2
import collections
import copy
import functools
import gzip
import io
import json
import lzma
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import hypothesis
import pyarrow
import pyarrow.parquet
from fuzz_folders import FOLDER_KINDS, FolderJudges, folder_strategies
from hypothesis import HealthCheck
from hypothesis import strategies as st

from ds_fp8.commands.arguments import count

CONFIGS = Path(__file__).resolve().parents[1] / "ds_configs"
STAGES = {str(file.relative_to(CONFIGS)): file.read_text() for file in sorted(CONFIGS.glob("*/*.json"))
          if file.parent.name != "sweeps"}  # fmt: skip
SWEEPS = {file.name: file.read_text() for file in sorted((CONFIGS / "sweeps").glob("*.json"))}
SECONDS = 10  # Processor time that a case may take
PATIENCE = 120  # Seconds after which a case hangs

# ---------------------------------------------------------------- what is drawn

TEXT = st.text(max_size=12) | st.sampled_from(["auto", "", " ", "true", "1e-3", "/", "..", "/dev/null", "/proc/1", "~",
                                               "\0", "\ud800", "x" * 5000, "ä", "infir2", "coat", "fp32", "e5m2",
                                               "tensor", "cpu", "nvme", "SGD", "Lion"])  # fmt: skip
NUMBERS = (
    st.integers(-3, 5)
    | st.integers()
    | st.floats()
    | st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**18, 10**400, -(10**400), 1e-320, 1e308, 1e30, 0.5, -0.0])
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXT
# Values that JSON can hold, and somewhat more
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=5
)


def paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*path, key))


def at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def known_paths() -> list[tuple[str, ...]]:
    """Return every key that a configuration may have, as far as it can be listed."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from ds_fp8.config.deepspeed_json import DeepSpeedValues, known_keys
    from ds_fp8.config.fp8 import FP8Config
    from ds_fp8.data import DataConfig
    from ds_fp8.train import ModelConfig, TrainConfig

    found = [(key,) for key in sorted(known_keys())] + [(key,) for key in DeepSpeedValues.model_fields]
    sections = {"fp8": FP8Config, "data": DataConfig, "model": ModelConfig, "train": TrainConfig}
    sections["zero_optimization"] = DeepSpeedZeroConfig
    for name, section in sections.items():
        for key, field in section.model_fields.items():
            found.append((name, field.alias or key))
            inner = getattr(field.annotation, "model_fields", {})
            found += [(name, key, below) for below in inner]
    adam = ("lr", "betas", "eps", "weight_decay", "torch_adam", "amsgrad", "maximize", "foreach", "fused")
    return found + [("optimizer", "type")] + [("optimizer", "params", key) for key in adam]


@st.composite
def changed(draw: st.DrawFn, raw: Any, more: list[tuple[str, ...]]) -> Any:
    """Draw `raw` with one to three changes: values replaced, moved, removed, misspelt, or added at a path of `more`."""
    raw = copy.deepcopy(raw)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([*paths(raw)] or [("a",)]))
        if more and draw(st.booleans()):
            path = draw(st.sampled_from(more))
        parent = raw
        for key in path[:-1]:
            if isinstance(parent, dict):
                inner = parent.setdefault(key, {})
            else:
                inner = parent[key] if isinstance(key, int) and key < len(parent) else None
            if not isinstance(inner, dict | list):
                break
            parent = inner
        else:
            change(draw, raw, parent, path[-1])
    return raw


def change(draw: st.DrawFn, raw: Any, parent: Any, key: Any) -> None:
    kind = draw(st.sampled_from(["value", "value", "value", "other", "remove", "misspell", "wrap"]))
    there = key in parent if isinstance(parent, dict) else True
    if isinstance(parent, list) and not (isinstance(key, int) and key < len(parent)):
        return
    if kind == "remove" and there:
        del parent[key]
    elif kind == "misspell" and there and isinstance(parent, dict):
        parent[draw(st.sampled_from([key[1:], key + "s", key.upper(), key.replace("_", "-")]))] = parent.pop(key)
    elif kind == "other":
        parent[key] = copy.deepcopy(at(raw, draw(st.sampled_from(list(paths(raw)) or [()]))))
    elif kind == "wrap" and there:
        parent[key] = draw(st.sampled_from([lambda v: [v], lambda v: {"a": v}, str]))(parent[key])
    else:
        parent[key] = draw(VALUES)


# Bytes that parsers stumble over
INSERTED = [
    *(b"NaN", b"1e999", b"[" * 50_000, b'{"a":' * 5000, b"9" * 5000, b'"\\ud800"'),
    *(b"//", b"/*", b"#", b"\0" * 64, b"\xef\xbb\xbf", b"\xff\xfe", b"'''"),
    *(b'"', b"}", b",", b":", b"\n"),
]


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw `content` with one to three damages: cut, overwritten, repeated, or with something put in."""
    for _ in range(draw(st.integers(1, 3))):
        place, length = draw(st.integers(0, len(content))), draw(st.sampled_from([1, 1, 2, 8, 100, 10_000]))
        put = draw(st.binary(max_size=8) | st.sampled_from(INSERTED))
        kind = draw(st.sampled_from(["cut", "insert", "replace", "repeat", "truncate", "remove"]))
        content = {
            "cut": content[place:],
            "insert": content[:place] + put + content[place:],
            "replace": content[:place] + put + content[place + len(put) :],
            "repeat": content[: place + length] + content[place:],
            "truncate": content[:place],
            "remove": content[:place] + content[place + length :],
        }[kind]
    return content


OVERRIDE_VALUES = (
    VALUES.map(lambda value: json.dumps(value, ensure_ascii=False))
    | TEXT
    | st.sampled_from(["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "9" * 10_000, "1e999", "-1e999", "NaN",
                       "-Infinity", "[1,", '{"a": 1, "a": 2}', '"\\ud800"', "0x10", "1_000"])
)  # fmt: skip


@st.composite
def overrides(draw: st.DrawFn, known: list[tuple[str, ...]]) -> list[str]:
    """Draw one or two arguments of --set: values of another stage, or odd ones, at keys that exist, and odd keys."""
    stages = list(map(json.loads, STAGES.values()))
    existing = {".".join(map(str, path)): at(raw, path) for raw in stages for path in paths(raw)}
    if draw(st.integers(0, 3)) == 0:
        return [f"{key}={json.dumps(existing[key])}" for key in [draw(st.sampled_from(sorted(existing)))]]
    key = st.sampled_from([*map(".".join, known), *existing])
    odd = st.sampled_from(["", ".", "a..b", "a" * 10_000, ".".join("a" * 3000), "train.steps.x", "fp8", "data"])
    key = st.one_of(key, key, key, key, odd | TEXT)
    equals = st.sampled_from(["=", "=", "=", "=", "", "==", " = "])
    return [draw(key) + draw(equals) + draw(OVERRIDE_VALUES) for _ in range(draw(st.integers(1, 2)))]


ROWS = [{"text": f"Text {n} of few words.", "messages": [{"role": "user", "content": f"{n}?"},
                                                         {"role": "assistant", "content": f"{n}."}]}
        for n in range(40)]  # fmt: skip
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
# A row with every field that is read
CHAT = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Ask.", "weight": 0},
        {"role": "tool", "content": "rain", "tool_call_id": "call12345"},
        {"role": "assistant", "content": "Rain."},
    ],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
    "chat_template_kwargs": {"enable_thinking": False},
}
BESIDE = [(name,) for name in ("documents", "functions", "tool_defs", "system", "images", "conversations", "prompt")]
BESIDE += [("messages", 2, key) for key in ("function_call", "train", "refusal", "audio", "thinking")]
BESIDE += [("chat_template_kwargs", key) for key in ("tools", "messages", "chat_template", "bos_token")]
TEMPLATE = (
    "{%- for t in tools or [] %}{{- t | tojson }}{%- endfor %}{%- for m in messages %}{{- '[' + m.role + ']' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{- m.reasoning_content or '' }}{{- m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}{{- c.function | tojson }}{%- endfor %}{{- '[end]' }}{% endgeneration %}"
    "{%- else %}{{- m.content + '[end]' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '[assistant]' if enable_thinking else '[assistant]' }}{%- endif %}"
)
TEMPLATES = [TEMPLATE, TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")]
COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}


def contents() -> dict[str, bytes]:
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    return {
        ".txt": "\n\n".join(row["text"] for row in ROWS).encode(),
        ".jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
        ".json": json.dumps(ROWS).encode(),
        ".parquet": table.getvalue(),
    }


@st.composite
def data_files(draw: st.DrawFn) -> tuple[str, bytes, str]:
    """Draw (ending, content, format) of a file that is damaged, before or after it was compressed, or wrongly named."""
    good = contents()
    kind, compression = draw(st.sampled_from(sorted(good))), draw(st.sampled_from(["", *COMPRESSED]))
    content = good[kind]
    if draw(st.booleans()):
        content = draw(damaged(content))
    content = COMPRESSED[compression](content)
    if draw(st.booleans()):
        content = draw(damaged(content))
    if draw(st.integers(0, 9)) == 0:
        kind = draw(st.sampled_from(sorted(good)))
    if draw(st.integers(0, 9)) == 0:
        compression = draw(st.sampled_from(list(COMPRESSED)))
    return kind + compression, content, draw(st.sampled_from(["documents", "chat"]))


# ---------------------------------------------------------------- what is done with it


@contextmanager
def untouched() -> Iterator[None]:
    before = sorted(os.listdir())
    yield
    assert sorted(os.listdir()) == before, f"written: {sorted(set(os.listdir()) - set(before))}"


class Judges(FolderJudges):
    """Each method takes a case as it was drawn, and lets the package accept or refuse it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._known: list | None = None

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return path

    @property
    def known(self) -> list[tuple[str, ...]]:
        self._known = self._known or known_paths()
        return self._known

    def strategy(self, kind: str) -> st.SearchStrategy:
        if kind in FOLDER_KINDS:
            return folder_strategies(self, kind, changed, damaged, TEXT)
        stages, sweeps = list(map(json.loads, STAGES.values())), list(map(json.loads, SWEEPS.values()))
        dotted = [(section, ".".join(path)) for path in self.known for section in ("set", "grid")]
        return {
            "configurations": st.sampled_from(stages).flatmap(lambda raw: changed(raw, self.known)),
            "overrides": st.tuples(st.sampled_from(sorted(STAGES)), overrides(self.known)),
            "texts": st.sampled_from([*STAGES.values(), *SWEEPS.values()]).flatmap(lambda t: damaged(t.encode())),
            "sweeps": st.sampled_from(sweeps).flatmap(lambda raw: changed(raw, dotted)),
            "data": data_files(),
            "chats": st.tuples(changed(CHAT, BESIDE) | changed(CHAT, []), st.sampled_from(TEMPLATES)),
        }[kind]

    def configurations(self, raw: Any) -> None:
        from ds_fp8.train import load_stage

        load_stage(self.file("stage.json", json.dumps(raw)))

    def overrides(self, case: tuple[str, list[str]]) -> None:
        from ds_fp8.train import load_stage

        load_stage(CONFIGS / case[0], case[1])

    def texts(self, content: bytes) -> None:
        from ds_fp8.train import load_stage

        load_stage(self.file("stage.json", content))

    def sweeps(self, raw: Any) -> None:
        from ds_fp8.memory.sweep import check_points
        from ds_fp8.report.compare import read_points

        points = read_points(self.file("sweep.json", json.dumps(raw)))
        check_points(points[:5], CONFIGS / "quickstart" / "cpt.json")

    def data(self, case: tuple[str, bytes, str]) -> None:
        import datasets

        from ds_fp8.data import DataConfig
        from ds_fp8.data.sources import read_examples

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        ending, content, kind = case
        stream = read_examples(DataConfig(path=str(self.file(f"data{ending}", content)), format=kind))
        for _ in islice(stream, 1000):
            pass

    def chats(self, case: tuple[dict, str]) -> None:
        from ds_fp8.data import DataConfig
        from ds_fp8.data.chat import tokenize_chats
        from ds_fp8.data.sources import read_examples

        row, template = case
        path = self.file("chats.jsonl", json.dumps(row))
        tokenize_chats(byte_tokenizer(template), list(read_examples(DataConfig(path=str(path), format="chat"))))


@functools.lru_cache
def byte_tokenizer(template: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="[end]", chat_template=template)


KINDS = ("configurations", "overrides", "texts", "sweeps", "data", "chats", *FOLDER_KINDS)
SHARES = {"models": 10}  # Kinds whose cases take long, of which so many times fewer are drawn


def fuzz(kind: str, cases: int, seed: int, folder: Path) -> tuple[collections.Counter, dict[str, str]]:
    """Run `cases` cases of one kind in the working directory, which must be empty.

    Returns:
        How many were accepted and refused, and what else happened: by place, with one case each.
    """
    from ds_fp8.config.errors import as_user_error

    judges, counts, wrong = Judges(folder), collections.Counter(), {}
    current = folder / "current"

    def judge(case: Any) -> None:
        current.write_text(ascii(case)[:100_000])  # what died, if it does
        signal.alarm(PATIENCE)
        started = time.process_time()
        try:
            with untouched():
                getattr(judges, kind)(case)
            outcome = "accepted"
        except Exception as raised:
            error = as_user_error(raised)  # as main_entry takes it
            outcome = "failed" if error is None else "refused"
            if error is None:
                place = traceback.extract_tb(raised.__traceback__)[-1]
                where = f"{type(raised).__name__} at {place.filename}:{place.lineno}: {str(raised)[:200]}"
                wrong[where] = ascii(case)[:2000]
            elif not error.remedy or len(str(error)) > 3000 or (not str(error).isprintable() and "\0" in str(error)):
                wrong[f"a refusal without remedy, or too long: {error.problem[:200]}"] = ascii(case)[:2000]
        finally:
            signal.alarm(0)
        if time.process_time() - started > SECONDS:
            wrong[f"slower than {SECONDS} s ({outcome})"] = ascii(case)[:2000]
        counts[outcome] += 1

    options = hypothesis.settings(
        max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
    )
    signal.signal(signal.SIGALRM, _hangs)
    hypothesis.seed(seed)(options(hypothesis.given(judges.strategy(kind))(judge)))()
    return counts, wrong


def _hangs(number: int, frame: Any) -> None:
    raise TimeoutError(f"no end after {PATIENCE} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", type=count, default=2000, help="of each kind (default 2000; a tenth of the slow ones)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        counts, wrong = fuzz(options.only[0], options.cases, options.seed, Path(os.environ["FUZZ_FOLDER"]))
        print("\n".join(f"  {what}\n    {case}" for what, case in wrong.items()) + f"\nRESULT {json.dumps(counts)}")
        return bool(wrong)
    failed = False
    for kind in options.only:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as work:
            cases = max(1, options.cases // SHARES.get(kind, 1))
            command = [sys.executable, __file__, "--here", "--only", kind, "--cases", str(cases)]
            process = subprocess.run(
                [*command, "--seed", str(options.seed)],
                cwd=work,
                env={**os.environ, "FUZZ_FOLDER": folder, "HF_HOME": f"{folder}/hf", "LOG_LEVEL": "ERROR"},
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            report, _, counts = process.stdout.rpartition("RESULT ")
            counts = counts.strip() or f"died ({process.returncode}) at {(Path(folder) / 'current').read_text()[:2000]}"
        print(f"{kind}: {counts} in {time.monotonic() - started:.0f} s\n{report.rstrip()}", flush=True)
        failed = failed or process.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
