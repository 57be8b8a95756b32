"""Damage runs, exports and token stores twice each, and resume, export or evaluate: the right result, or an error.

    python scripts/faults/damages.py --pairs 20 --seed 1                     twenty resumes, exports, evaluations each
    python scripts/faults/damages.py --pairs 20 --jobs 24 --minutes 9        as many at once, no new ones after 9
    python scripts/faults/damages.py --seed 1 --only resume:7                one again, with all that it printed

A tiny stage on two CPU ranks is trained, once more with another seed, and exported. Then two places are drawn: files of
checkpoints, manifest, metrics, logs and token store of a run that was killed; of a finished run; of an export. They are
cut, emptied, extended, deleted, a byte of them is flipped, they change places with the file of another step, rank or
run, become a folder or a link, tokens and keys in them are changed. What follows must be as without the damage (weights
of a resume and its figures bit for bit, weights of an export, loss of an evaluation), or end with exit code 2 and an
error in words. Exits with 1 where anything else became of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tiny_runs import RANKS, ForkedRun, warm_up, write_stage

KINDS = ("resume", "export", "evaluate")
STEPS, SAVE_EVERY = 8, 2
FIGURES = ("steps", "first_loss", "last_train_loss", "first_validation_loss", "final_loss")  # Of result.json
LIMIT = 300  # Seconds after which a command counts as hung
Damage = Callable[[Path, random.Random, "Place"], str]


class Place:
    """The folders of a trial: what is damaged, the token store that it reads, and what was made before."""

    def __init__(self, folder: Path, made: Path, kind: str):
        self.made, self.cache = made, folder / "cache"
        self.run, self.export = folder / "run", folder / "export"
        shutil.copytree(made / "cache", self.cache)
        if kind == "evaluate":
            shutil.copytree(made / "export", self.export)
        else:
            shutil.copytree(made / "run", self.run, symlinks=True)
        if kind == "resume":
            # As one that was killed while it computed step 7.
            (self.run / "result.json").unlink()
            shutil.rmtree(self.run / "model")
            shutil.rmtree(self.run / "checkpoints" / f"step_{STEPS}")
            (self.run / "checkpoints" / "latest").write_text(f"step_{STEPS - SAVE_EVERY}")
            lines = (self.run / "metrics.jsonl").read_text().splitlines(keepends=True)
            last = next(n for n, line in enumerate(lines) if json.loads(line).get("step", 0) > STEPS - SAVE_EVERY)
            (self.run / "metrics.jsonl").write_text("".join(lines[:last]))
        self.kind = kind

    def files(self) -> list[Path]:
        """Return what can be damaged: files, with those of the store as often as those of a checkpoint."""
        root = self.export if self.kind == "evaluate" else self.run
        files = sorted(file for file in root.rglob("*") if file.is_file())
        files = [file for file in files if file.suffix not in (".png", ".html")]
        if self.kind == "resume":
            files += sorted(file for file in self.cache.rglob("*") if file.is_file())
        return files


def _bytes(change: Callable[[bytearray, random.Random], bytes]) -> Damage:
    def damage(file: Path, rng: random.Random, place: Place) -> str:
        file.write_bytes(change(bytearray(file.read_bytes()), rng))
        return ""

    return damage


def _flipped(content: bytearray, rng: random.Random) -> bytes:
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content


def _replace(file: Path, make: Callable[[], Any]) -> str:
    file.unlink()
    make()
    return ""


def swapped(file: Path, rng: random.Random, place: Place) -> str:
    """Exchange it with a file of its kind: of another rank or step, or take that of another run."""
    pattern = re.sub(r"\d+", "*", file.name)
    others = [other for other in sorted(file.parent.parent.rglob(pattern)) if other != file and other.is_file()]
    root = place.export if place.kind == "evaluate" else place.run
    if file.is_relative_to(root):
        theirs = place.made / ("other_export" if place.kind == "evaluate" else "other_run") / file.relative_to(root)
        if not others or rng.random() < 0.4:
            if theirs.is_file():
                shutil.copyfile(theirs, file)
            return "with another run's"
    if others:
        other, aside = rng.choice(others), file.with_name("aside")
        file.rename(aside)
        other.rename(file)
        aside.rename(other)
        return f"with {other.parent.name}/{other.name}"
    return "with nothing"


def changed_key(file: Path, rng: random.Random, place: Place) -> str:
    """Change, drop or add a value of a JSON file; the checksum in a manifest stays what it was."""
    try:
        whole = json.loads(file.read_text())
        inner = whole
        while isinstance(inner, dict) and inner:
            key = rng.choice(sorted(inner))
            if not isinstance(inner[key], dict) or rng.random() < 0.3:
                break
            inner = inner[key]
        how = rng.choice(["dropped", "null", "text", "number", "list"])
        if how == "dropped":
            del inner[key]
        else:
            inner[key] = {"null": None, "text": "other", "number": 7, "list": [[]]}[how]
        file.write_text(json.dumps(whole))
        return f"{key} {how}"
    except (ValueError, KeyError, TypeError, UnboundLocalError):
        _DAMAGES["cut"](file, rng, place)
        return "no JSON: cut"


def changed_tokens(file: Path, rng: random.Random, place: Place) -> str:
    """Change every third byte pair of it in the lowest bit: other tokens, all of them in the vocabulary."""
    content = bytearray(file.read_bytes())
    for index in range(0, len(content), 6):
        content[index] ^= 1
    file.write_bytes(content)
    return ""


_DAMAGES: dict[str, Damage] = {
    "cut": _bytes(lambda content, rng: content[: rng.randrange(len(content) + 1)]),
    "emptied": _bytes(lambda content, rng: b""),
    "flipped": _bytes(_flipped),
    "flipped ": _bytes(_flipped),
    "extended": _bytes(lambda content, rng: bytes(content) + bytes(rng.randrange(256) for _ in range(40))),
    "zeros": _bytes(lambda content, rng: bytes(len(content))),
    "deleted": lambda file, rng, place: _replace(file, lambda: None),
    "a folder": lambda file, rng, place: _replace(file, file.mkdir),
    "a link to nowhere": lambda file, rng, place: _replace(file, lambda: file.symlink_to("nowhere")),
    "a link to itself": lambda file, rng, place: _replace(file, lambda: file.symlink_to(file.name)),
    "exchanged": swapped,
    "exchanged ": swapped,
    "a key changed": changed_key,
    "tokens changed": changed_tokens,
}


def damage_twice(place: Place, rng: random.Random) -> tuple[list[str], set[str]]:
    """Do two damages; return them in words, and the names of the files."""
    done, names = [], set()
    for _ in range(2):
        files = place.files()
        folders = sorted({file.parent for file in files})
        newest = [
            folder for folder in folders if folder.name == f"step_{STEPS - SAVE_EVERY * (place.kind == 'resume')}"
        ]
        folder = rng.choice(folders + 3 * newest)  # what is read
        file = rng.choice([file for file in files if file.parent == folder])
        if rng.random() < 0.08 and file.parent not in (place.run, place.export, place.cache):
            how = rng.choice(["deleted", "a file", "a link to nowhere"])
            file = file.parent
            shutil.rmtree(file)
            if how == "a file":
                file.write_text("here")
            elif how == "a link to nowhere":
                file.symlink_to("nowhere")
            more = ""
        else:
            json_only = file.suffix in (".json", ".jsonl")
            fitting = [name for name in _DAMAGES if name != "a key changed" or json_only]
            fitting = [name for name in fitting if name != "tokens changed" or "cache" in file.parts]
            if file.name == "metrics.jsonl":  # a log: what still reads as one is believed
                fitting = [name for name in fitting if name.strip() not in ("flipped", "exchanged", "a key changed")]
            how = rng.choice(fitting)
            more = _DAMAGES[how](file, rng, place)
        done.append(f"{file.relative_to(place.run.parent)} {how.strip()} {more}".strip())
        names.add(file.name)
    return done, names


def command(arguments: list[str], output: Path) -> int:
    """Run a `ds-fp8` command in a forked process; return its exit code, None where it hung."""
    process = os.fork()
    if process == 0:
        with output.open("a") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        from ds_fp8.cli import main
        from ds_fp8.config.errors import main_entry

        code = 1
        try:
            main_entry(lambda: main(arguments))
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        os._exit(code)
    return _waited(process)


def _waited(process: int) -> int:
    began = time.monotonic()
    while time.monotonic() - began < LIMIT:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(process, 9)
    os.waitpid(process, 0)
    return -9


def tensors_of(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def same_tensors(folder: Path, other: Path) -> bool:
    import torch

    mine, theirs = tensors_of(folder), tensors_of(other)
    return mine.keys() == theirs.keys() and all(
        torch.equal(x.view(torch.uint8), theirs[name].view(torch.uint8)) for name, x in mine.items()
    )


def resume(place: Place, stage: Path, output: Path, damaged: set[str]) -> tuple[int, str]:
    """Resume a run; return its exit code, and what of its result is not that of the undisturbed run."""
    run = ForkedRun.start(stage, place.run, output)
    code = _waited(run.launcher)
    if code == -9:
        run.kill(*run.ranks)
    if code:
        return code, ""
    if not same_tensors(place.run / "model", place.made / "run" / "model"):
        return code, "other weights"
    mine, theirs = (json.loads((run / "result.json").read_text()) for run in (place.run, place.made / "run"))
    other = [key for key in FIGURES if mine[key] != theirs[key]]
    if other and "metrics.jsonl" in damaged:  # figures of steps whose records are gone
        other = [] if "metrics.jsonl" in output.read_text() else other
    return code, f"other {', '.join(other)}, without a word" if other else ""


def export(place: Place, stage: Path, output: Path, damaged: set[str]) -> tuple[int, str]:
    code = command(["export", str(place.run), str(place.export)], output)
    if code:
        return code, f"{place.export} is left" if place.export.exists() else ""
    right = same_tensors(place.export, place.made / "export")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (place.export, place.made / "export")]
    return code, "other weights" if not right else "another config.json" if configs[0] != configs[1] else ""


def evaluate(place: Place, stage: Path, output: Path, damaged: set[str]) -> tuple[int, str]:
    found = place.export.with_name("evaluated.json")
    code = command(["evaluate", str(place.export), str(stage), "--gpus", str(RANKS), "--out", str(found)], output)
    if code:
        return code, ""
    mine, theirs = (json.loads(file.read_text()) for file in (found, place.made / "evaluated.json"))
    other = [key for key in theirs if key in ("loss", "loss_as_trained", "perplexity") and mine.get(key) != theirs[key]]
    return code, f"another {', '.join(other)}" if other else ""


FOLLOWS = {"resume": resume, "export": export, "evaluate": evaluate}


def prepare(made: Path, preset: str) -> Path:
    """Train, export and evaluate what is damaged afterwards, and another run; return the stage."""
    os.environ["DS_FP8_CACHE"] = str(made / "cache")
    keys = {"steps": STEPS, "save_every": SAVE_EVERY, "keep_last": 3, "eval_every": 4, "timeout": 60}
    stage, log = write_stage(made, preset, **keys), made / "log.txt"
    raw = json.loads(stage.read_text())
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 2,
    }  # FP8 exports need multiples of 128
    raw["model"]["config"] |= sizes
    stage.write_text(json.dumps(raw))
    runs = [ForkedRun.start(stage, made / "run", log), ForkedRun.start(stage, made / "other_run", log, "train.seed=7")]
    codes = [run.wait() for run in runs]
    for export_, run in (("export", "run"), ("other_export", "other_run")):
        codes.append(command(["export", str(made / run), str(made / export_)], log))
    out = ["--gpus", str(RANKS), "--out", str(made / "evaluated.json")]
    codes.append(command(["evaluate", str(made / "export"), str(stage), *out], log))
    if any(codes):
        raise SystemExit(f"the undisturbed runs ended with {codes}:\n{log.read_text()[-3000:]}")
    return stage


def attempt(kind: str, number: int, seed: int, made: str, stage: str, deadline: float) -> tuple[str, str, str]:
    """Return what became of a pair of damages in a word, the damages, and what was printed."""
    if time.monotonic() > deadline:
        return "not begun", "", ""
    rng = random.Random(f"{seed} {kind} {number}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place, output = Place(folder, Path(made), kind), folder / "output.txt"
        damages, names = damage_twice(place, rng)
        os.environ["DS_FP8_CACHE"] = str(place.cache)
        try:
            code, wrong = FOLLOWS[kind](place, Path(stage), output, names)
        except Exception:
            code, wrong = 0, traceback.format_exc()
        printed = output.read_text(errors="replace") if output.exists() else ""
    first = next((line for line in printed.splitlines() if line.startswith("error:")), "")
    if code == 0:
        outcome = f"SILENT: {wrong}" if wrong else "right"
    elif code != 2 or not first or "Traceback" in printed:
        outcome = "HANGS" if code == -9 else f"FAILS with {code}"
    else:
        outcome = f"LEFT: {wrong}" if wrong else "refused"
    return outcome, f"{'; '.join(damages)} -> {first}", printed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="of each kind (default 20)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--preset", default="infir2")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="pairs at a time (default 1)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after so many")
    parser.add_argument("--only", metavar="KIND:NUMBER", help="this pair of the seed alone, with all that was printed")
    arguments = parser.parse_args()
    began, counts, bad = time.monotonic(), Counter(), []
    asked = [(kind, number) for number in range(arguments.pairs) for kind in arguments.kinds]
    if arguments.only:
        kind, number = arguments.only.split(":")
        asked = [(kind, int(number))]
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        warm_up(made / "cache")
        stage = prepare(made, arguments.preset)
        print(f"prepared in {time.monotonic() - began:.0f} s", flush=True)
        deadline = began + 60 * arguments.minutes
        # Each pair in a process of its own, forked from this one, which has imported everything.
        with ProcessPoolExecutor(arguments.jobs, get_context("fork"), max_tasks_per_child=None) as processes:
            begun = {
                processes.submit(attempt, *pair, arguments.seed, str(made), str(stage), deadline): pair
                for pair in asked
            }
            for done in as_completed(begun):
                kind, number = begun[done]
                try:
                    outcome, words, printed = done.result()
                except Exception as error:
                    outcome, words, printed = f"FAILS: {error}", "", ""
                counts[kind, outcome.partition(":")[0]] += 1
                line = f"{kind}:{number}: {outcome}: {words}"
                if outcome != "not begun":
                    print(line, flush=True)
                if arguments.only:
                    print(printed)
                if outcome not in ("right", "refused", "not begun"):
                    tail = [text for text in printed.splitlines() if text.strip()][-1:]
                    bad.append(f"{line}\n    {''.join(tail)}")
    print(*(f"\n{line}" for line in bad))
    for kind in arguments.kinds:
        found = ", ".join(f"{count} {what}" for (of, what), count in sorted(counts.items()) if of == kind)
        print(f"{kind}: {found}")
    minutes = (time.monotonic() - began) / 60
    tried = sum(count for (_, what), count in counts.items() if what != "not begun")
    print(f"seed {arguments.seed}: {tried} pairs, {len(bad)} wrong, {minutes:.1f} minutes")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
