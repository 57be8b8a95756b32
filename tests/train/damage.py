"""Ways to damage a run folder with checkpoints of steps 4 and 6, and what a resume must make of each.

DAMAGES[name] = (outcome, change), where `change(run_dir)` does the damage and the outcome is
back       step 6 is named and set aside, and the run goes on from step 4
refused    there is nothing good left, and an error says so
warned     the run goes on from step 6, and a warning names the file
unharmed   the run goes on from step 6: nothing that counts was damaged
"""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from ds_fp8.train.checkpoints import name_latest
from ds_fp8.train.durable import write_atomically
from ds_fp8.train.manifest import Manifest, checksum, save_file
from ds_fp8.train.random_states import random_states
from ds_fp8.train.stage import Stage
from tests.train.tiny_stage import RESULT

Change = Callable[[Path], None]
BACK, REFUSED, WARNED, UNHARMED = "back", "refused", "warned", "unharmed"
DAMAGES: dict[str, tuple[str, Change]] = {}

FILES = {
    "model": "zero_pp_rank_0_mp_rank_00_model_states.pt",
    "optimizer": "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "random": "random_rank_00000.pt",
    "manifest": "manifest.json",
}


def step(run_dir: Path, number: int) -> Path:
    return run_dir / "checkpoints" / f"step_{number}"


def save_two(stage: Stage, ranks: int) -> Path:
    """Make the stage's run folder, with checkpoints of steps 4 and 6 that hold what DeepSpeed's do; returns it."""
    log = [{"step": number, "loss": 2.5} for number in range(1, 7)]
    for number in (4, 6):
        folder = step(stage.run_dir, number)
        folder.mkdir(parents=True)
        files = {}
        for rank in range(ranks):
            shard = torch.randn(500, generator=torch.Generator().manual_seed(number + rank))
            for name, state in {
                f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt": {"module": OrderedDict(w=shard.bfloat16())},
                f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": {
                    "zero_stage": ZeroStageEnum.weights,
                    "loss_scaler": LossScaler(1),
                    "fp32_flat_groups": [shard],
                },
                f"random_rank_{rank:05d}.pt": random_states(),
            }.items():
                files[name] = save_file(state, folder / name, rank)
        Manifest(number, ranks, stage.global_batch, number, (3.0, 2.5), stage.raw, {}, files).write(folder)
        name_latest(stage.run_dir, number)
        log.append({"step": number, "saved": True})
    write_atomically(stage.run_dir / "config.json", json.dumps(stage.raw))
    (stage.run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    return stage.run_dir


def _edit(change: Callable[[bytearray], bytes]) -> Change:
    def edit(file: Path) -> None:
        file.write_bytes(change(bytearray(file.read_bytes())))

    return edit


def _flip(content: bytearray, place: float) -> bytes:
    content[int(place * (len(content) - 1))] ^= 0x10
    return content


def _zero_block(content: bytearray) -> bytes:
    half = len(content) // 2
    content[half : half + 64] = bytes(64)
    return content


def _replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _replace_by_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def _replace_by_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


OF_A_FILE: dict[str, Change] = {
    "missing": Path.unlink,
    "empty": _edit(lambda content: b""),
    "half": _edit(lambda content: content[: len(content) // 2]),
    "one byte short": _edit(lambda content: content[:-1]),
    "one byte more": _edit(lambda content: content + b"\0"),
    "a bit flipped at the start": _edit(lambda content: _flip(content, 0.0)),
    "a bit flipped in the middle": _edit(lambda content: _flip(content, 0.5)),
    "a bit flipped near the end": _edit(lambda content: _flip(content, 0.97)),
    "a block of zeros": _edit(_zero_block),
    "all zeros": _edit(lambda content: bytes(len(content))),
    "garbage": _edit(lambda content: bytes(i * 37 % 251 for i in range(len(content)))),
    "a folder": _replace_by_folder,
    "a link to nowhere": _replace_by_link,
    "a named pipe": _replace_by_fifo,
}
for _file, _name in FILES.items():
    for _how, _change in OF_A_FILE.items():
        DAMAGES[f"{_file}: {_how}"] = (
            BACK,
            lambda run_dir, change=_change, name=_name: change(step(run_dir, 6) / name),
        )


def _damage(name: str, outcome: str) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        DAMAGES[name] = (outcome, change)
        return change

    return register


# ---------------------------------------------------------------- shards in the wrong place


def _swap(a: Path, b: Path) -> None:
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)


@_damage("optimizer shards of two ranks swapped", BACK)
def _(run_dir: Path) -> None:
    _swap(*sorted(step(run_dir, 6).glob("*optim_states.pt")))


@_damage("model shards of two ranks swapped", BACK)
def _(run_dir: Path) -> None:
    _swap(*sorted(step(run_dir, 6).glob("*model_states.pt")))


@_damage("optimizer shard of an older step", BACK)
def _(run_dir: Path) -> None:
    shutil.copy(step(run_dir, 4) / FILES["optimizer"], step(run_dir, 6))


@_damage("all shards of an older step", BACK)
def _(run_dir: Path) -> None:
    for file in step(run_dir, 4).glob("*.pt"):
        shutil.copy(file, step(run_dir, 6))


@_damage("a shard of a rank that does not exist", BACK)
def _(run_dir: Path) -> None:
    file = step(run_dir, 6) / FILES["optimizer"]
    shutil.copy(file, file.with_name(file.name.replace("rank_1", "rank_2")))


# ---------------------------------------------------------------- manifests that do not fit


@_damage("manifest: of an older step", BACK)
def _(run_dir: Path) -> None:
    shutil.copy(step(run_dir, 4) / FILES["manifest"], step(run_dir, 6))


@_damage("manifest: a file outside of the checkpoint", BACK)
def _(run_dir: Path) -> None:
    manifest = Manifest.read(step(run_dir, 4))
    outside = {"../step_4/" + name: saved for name, saved in manifest.files.items()}
    Manifest(**{**vars(manifest), "step": 6, "files": outside}).write(step(run_dir, 6))


# ---------------------------------------------------------------- whole checkpoints


@_damage("checkpoint: an empty folder", BACK)
def _(run_dir: Path) -> None:
    shutil.rmtree(step(run_dir, 6))
    step(run_dir, 6).mkdir()


@_damage("checkpoint: a file", BACK)
def _(run_dir: Path) -> None:
    shutil.rmtree(step(run_dir, 6))
    step(run_dir, 6).write_text("")


@_damage("checkpoint: an older one under its name", BACK)
def _(run_dir: Path) -> None:
    shutil.rmtree(step(run_dir, 6))
    shutil.copytree(step(run_dir, 4), step(run_dir, 6))


@_damage("both checkpoints", REFUSED)
def _(run_dir: Path) -> None:
    for number in (4, 6):
        (step(run_dir, number) / FILES["model"]).unlink()


@_damage("both manifests", REFUSED)
def _(run_dir: Path) -> None:
    for number in (4, 6):
        (step(run_dir, number) / FILES["manifest"]).write_text("{}")


@_damage("checkpoints: the folder is empty", REFUSED)
def _(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").mkdir()


@_damage("checkpoints: a file", REFUSED)
def _(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").write_text("")


@_damage("config: garbage, and no checkpoint", REFUSED)
def _(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "config.json").write_bytes(b"\xff\x00")


# ---------------------------------------------------------------- small files with wrong content


def _written(name: str, content: str | bytes) -> Change:
    def write(run_dir: Path) -> None:
        (run_dir / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def _gone(name: str) -> Change:
    def remove(run_dir: Path) -> None:
        place = run_dir / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()

    return remove


def _renamed(name: str) -> Change:
    return lambda run_dir: step(run_dir, 6).rename(step(run_dir, 6).with_name(name)) and None


def _rewritten(**changes: object) -> Change:
    """Change keys of a manifest, and leave its checksum."""

    def rewrite(run_dir: Path) -> None:
        file = step(run_dir, 6) / FILES["manifest"]
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return rewrite


def _signed(number: int = 6, **changes: object) -> Change:
    """Change keys of a manifest and make its checksum anew: "files.rank" is that of every file."""

    def sign(run_dir: Path) -> None:
        file = step(run_dir, number) / FILES["manifest"]
        content = json.loads(file.read_text())
        del content["checksum"]
        for key, value in changes.items():
            inner = key.removeprefix("files_")
            for place in content["files"].values() if inner != key else [content]:
                place[inner] = value
        file.write_text(json.dumps({**content, "checksum": checksum(content)}))

    return sign


def _of_another_run(run_dir: Path) -> None:
    manifest = Manifest.read(step(run_dir, 6))
    replace(manifest, config={**manifest.config, "train": {**manifest.config["train"], "seed": 99}}).write(
        step(run_dir, 6)
    )


def _without_a_rank(run_dir: Path) -> None:
    manifest = Manifest.read(step(run_dir, 6))
    (step(run_dir, 6) / FILES["random"]).unlink()
    left = {name: saved for name, saved in manifest.files.items() if name != FILES["random"]}
    replace(manifest, files=left).write(step(run_dir, 6))


def _link_to_itself(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").symlink_to("checkpoints")


def _nothing_saved_but(*names: str) -> Change:
    def delete(run_dir: Path) -> None:
        (run_dir / "result.json").write_text(json.dumps({**RESULT, "steps": 6}))
        shutil.rmtree(run_dir / "checkpoints")
        for name in {"saved.json", "metrics.jsonl", "result.json"} - set(names):
            (run_dir / name).unlink()

    return delete


def _a_folder(name: str) -> Change:
    def replace_by_folder(run_dir: Path) -> None:
        (run_dir / name).unlink(missing_ok=True)
        (run_dir / name).mkdir()

    return replace_by_folder


def _fifo_metrics(run_dir: Path) -> None:
    _replace_by_fifo(run_dir / "metrics.jsonl")


_WRONG_VALUES = {
    "data_step": (-5, "x", 1e308, 10**400, True, None, 3, 2**62),
    "step": ("6", 6.0, None),
    "ranks": ("2", 0, 10**9, [2]),
    "losses": ("x", [None], [1e308 * 10], {"a": 1}),
    "config": ([], None, "x"),
    "global_batch": (0, 5, "4"),
    "versions": ([], {"torch": 2}),
    "files": ({}, [], None, {"../x.pt": {"bytes": 1, "hash": "0" * 32, "rank": 0}}),
    "files_rank": ("x", None, -1, 7),
    "files_bytes": (None, "x", -1, 1e3),
    "files_hash": (None, "x", 5),
}
for _key, _values in _WRONG_VALUES.items():
    for _value in _values:
        DAMAGES[f"manifest, signed: {_key} = {str(_value)[:20]}"] = (BACK, _signed(**{_key: _value}))

DAMAGES |= {
    "manifest: another place in the data": (BACK, _rewritten(data_step=5)),
    "manifest: another number of ranks": (BACK, _rewritten(ranks=4)),
    "manifest: no files": (BACK, _rewritten(files={})),
    "manifest: files as a list": (BACK, _rewritten(files=[])),
    "manifest: an unknown key": (BACK, _rewritten(surprise=1)),
    "manifest: of a later format": (BACK, _rewritten(format=2)),
    "manifest: a list": (BACK, _written("checkpoints/step_6/manifest.json", "[]")),
    "manifest: nested without end": (BACK, _written("checkpoints/step_6/manifest.json", "[" * 100_000)),
    "checkpoint: deleted": (BACK, _gone("checkpoints/step_6")),
    "checkpoint: named as a later step": (BACK, _renamed("step_8")),
    "checkpoint: half written": (BACK, _renamed("step_6.part")),
    "checkpoint: half deleted": (BACK, _renamed("step_6.deleted")),
    "checkpoints: the folder is gone": (REFUSED, _gone("checkpoints")),
    "latest: garbage": (UNHARMED, _written("checkpoints/latest", b"\xff\xfe\x00")),
    "latest: of an older step": (UNHARMED, _written("checkpoints/latest", "step_4")),
    "latest: missing": (UNHARMED, _gone("checkpoints/latest")),
    "config: garbage": (UNHARMED, _written("config.json", "{")),
    "config: missing": (UNHARMED, _gone("config.json")),
    "checkpoint: of another run": (BACK, _of_another_run),
    "checkpoint: a rank's file neither there nor listed": (BACK, _without_a_rank),
    "checkpoints: a link to itself": (REFUSED, _link_to_itself),
    "nothing but metrics.jsonl is left": (REFUSED, _nothing_saved_but("metrics.jsonl")),
    "nothing but result.json is left": (REFUSED, _nothing_saved_but("result.json")),
    "nothing but saved.json is left": (REFUSED, _nothing_saved_but("saved.json")),
    "metrics: missing": (WARNED, _gone("metrics.jsonl")),
    "metrics: a named pipe": (WARNED, _fifo_metrics),
    "metrics: of another run": (WARNED, _written("metrics.jsonl", '{"step": 1, "loss": 9}\n{"step": 6, "loss": 9}\n')),
}
for _name in ("config.json", "metrics.jsonl", "saved.json", "result.json"):
    DAMAGES[f"{_name}: a folder"] = (REFUSED, _a_folder(_name))
for _damaged_line in (
    '{"step": 3, "loss": "x"}',
    '{"step": true, "loss": 1}',
    '{"step": 3, "event": "fallback"}',
    '{"step": 3, "answers": [{"prompt": 1}]}',
    '{"step": 3, "health": {"sites": ["a"], "input": {"amax": [1, 2]}}}',
    "[" * 100_000,
    "[]",
):
    DAMAGES[f"metrics: {_damaged_line[:50]}"] = (
        WARNED,
        _written(
            "metrics.jsonl", "".join(f'{{"step": {n}, "loss": 2.5}}\n' for n in range(1, 7)) + _damaged_line + "\n"
        ),
    )
for _name, _content in {
    "saved.json": (b"\xff", "{}", '{"step": "9"}', '{"step": true}', "[6]", "[" * 100_000),
    "result.json": (
        "null",
        '{"steps": "x"}',
        '{"steps": 12}',
        '{"steps": 12, "final_loss": "x"}',
        "[" * 100_000,
        b"\xff",
    ),
}.items():
    for _text in _content:
        DAMAGES[f"{_name}: {_text[:40]!r}"] = (WARNED, _written(_name, _text))
