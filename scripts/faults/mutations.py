"""Draw faults in the core's source by a seed, put each into a copy of the tree, and run its room's tests against it.

    python scripts/faults/mutations.py --seed 1 --count 60 --jobs 24 --json FILE
    python scripts/faults/mutations.py --seed 1 --tests-folder FOLDER     the same faults against other tests
    python scripts/faults/mutations.py --rooms zero --only 7 --tests zero=tests/zero,tests/optim

Rooms and kinds take turns: a dropped call, swapped operands, a constant one off, another dtype, a wait left out. A test
that fails kills a fault and ends its run, as the limit does. The tests of every room that was drawn also run without a
fault; the exit code is 1 where they do not pass, whatever survives.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROOMS = {name: (f"ds_fp8/{name}", f"tests/{name}") for name in ("casts", "gemm", "optim", "zero")}
ROOMS |= {"linear": ("ds_fp8/layers/linear", "tests/layers"), "graphs": ("ds_fp8/graphs", "tests/engine")}
"""Source and tests."""
KINDS = ("call", "operand", "constant", "dtype", "wait")
WAITS = {"wait", "wait_stream", "wait_event", "synchronize", "record_stream", "barrier", "record", "join"}
PAIRS = (
    "float32 bfloat16 bfloat16 float16 float16 bfloat16 float64 float32 uint8 int8 int32 int16 int64 int32 float half"
)
DTYPES = dict(zip(PAIRS.split()[::2], PAIRS.split()[1::2], strict=True)) | {"float8_e4m3fn": "float8_e5m2"}
SWAPPED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift, ast.Lt, ast.Gt, ast.LtE, ast.GtE)


def faults_in(file: Path) -> Iterator[tuple[str, Any, str]]:
    """Yield every fault that a file may have: kind, node, and the text in its place."""
    tree = ast.parse(file.read_text())
    # Nodes in these have no places of their own before Python 3.12.
    in_texts = {id(node) for text in ast.walk(tree) if isinstance(text, ast.JoinedStr) for node in ast.walk(text)}
    for node in ast.walk(tree):
        if id(node) in in_texts:
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = getattr(node.value.func, "attr", None)
            yield "wait" if called in WAITS else "call", node, "pass"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, SWAPPED):
            yield "operand", node, f"({ast.unparse(ast.BinOp(node.right, node.op, node.left))})"
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], SWAPPED):
            yield "operand", node, f"({ast.unparse(ast.Compare(node.comparators[0], node.ops, [node.left]))})"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield "constant", node, f"({node.value!r} {'+-'[node.lineno % 2]} 1)"
        elif isinstance(node, ast.Attribute) and node.attr in DTYPES:
            yield "dtype", node, f"{ast.unparse(node.value)}.{DTYPES[node.attr]}"


def draw(tree: Path, rooms: list[str], seed: int, count: int) -> list[dict]:
    """Return faults, rooms and kinds in turn."""
    rng, drawn, found = random.Random(seed), [], {}
    for room in rooms:
        for file in sorted((tree / ROOMS[room][0]).rglob("*.py")):
            lines = file.read_bytes().splitlines(keepends=True)
            starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
            for kind, node, new in faults_in(file):
                start = starts[node.lineno - 1] + node.col_offset
                end = starts[node.end_lineno - 1] + node.end_col_offset
                fault = {"room": room, "kind": kind, "file": str(file.relative_to(tree)), "line": node.lineno}
                fault |= {"start": start, "end": end, "old": b"".join(lines)[start:end].decode(), "new": new}
                found.setdefault((room, kind), []).append(fault)
    for turn in range(count * len(KINDS)):
        pool = found.get((rooms[turn % len(rooms)], KINDS[turn // len(rooms) % len(KINDS)]))
        if pool and len(drawn) < count:
            drawn.append({"number": len(drawn), **pool.pop(rng.randrange(len(pool)))})
    return drawn


def run_tests(tree: Path, tests: list[str], limit: float) -> dict:
    """Run tests until the first that fails; return whether one did, the seconds, and which."""
    paths = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    surroundings = {"PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", *tests]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        options = {"cwd": tree, "env": os.environ | surroundings, "start_new_session": True}
        process = subprocess.Popen(words, stdout=said, stderr=said, **options)
        try:
            became = {0: "survived", 1: "killed", 2: "killed"}.get(process.wait(limit), "killed by an error")
        except subprocess.TimeoutExpired:
            became = "killed by the limit"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        failed = [line for line in said.read().splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"became": became, "seconds": round(time.monotonic() - began, 1), "said": failed[:1]}


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("seed", 0), ("count", 60), ("jobs", 4), ("limit", 900), ("only", None)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=list(ROOMS))
    parser.add_argument("--tests", nargs="+", default=[], metavar="ROOM=PATH,PATH")
    parser.add_argument("--tests-folder", type=Path, default=ROOT / "tests")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True)
    tests = [f"{room}={where}" for room, (_, where) in ROOMS.items()] + options.tests
    tests = {room: where.split(",") for room, _, where in (text.partition("=") for text in tests)}
    drawn = draw(ROOT, options.rooms, options.seed, options.count)
    drawn = drawn if options.only is None else [drawn[options.only]]

    def try_one(fault: dict) -> dict:
        with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
            tree = Path(folder, "tree")
            others = shutil.ignore_patterns(".*", "__pycache__", "runs", "shared")
            shutil.copytree(ROOT, tree, symlinks=True, ignore=others)
            shutil.rmtree(tree / "tests")
            shutil.copytree(options.tests_folder, tree / "tests", ignore=others)
            if "file" in fault:
                text = (tree / fault["file"]).read_bytes()
                text = text[: fault["start"]] + fault["new"].encode() + text[fault["end"] :]
                (tree / fault["file"]).write_bytes(text)
            row = fault | run_tests(tree, tests[fault["room"]], options.limit)
        what = f"{row['kind']:8} {row['file']}:{row['line']}  {row['old']!r} -> {row['new']!r}" if "file" in row else ""
        print(f"{row['room']:7}{row.get('number', '-'):>4} {row['became']:20}{row['seconds']:6.1f} s  {what:.170}")
        return row

    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(try_one, [{"room": room} for room in sorted({one["room"] for one in drawn})] + drawn))
    for clean in [row for row in rows if "file" not in row]:
        of_room = [row for row in rows if row["room"] == clean["room"] and "file" in row]
        killed, seconds = sum(row["became"] != "survived" for row in of_room), sum(row["seconds"] for row in of_room)
        print(f"{clean['room']:8}{killed} of {len(of_room)} killed in {seconds:.0f} s; all tests {clean['seconds']} s")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return int(any(row["became"] != "survived" for row in rows if "file" not in row))


if __name__ == "__main__":
    sys.exit(main())
