"""Ways to damage a run folder with checkpoints of steps 4 and 6, and what a resume must make of each.

DAMAGES[name](run_dir) does the damage, which an error names, but where the run goes on FROM a step.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from ds_fp8.train.checkpoints import Manifest, checksum, save_file
from ds_fp8.train.run_folder import write_atomically
from ds_fp8.train.stage import Stage
from ds_fp8.zero.deepspeed.checkpoints import load_tensors

Change = Callable[[Path], None]

FILES = {
    "model": "zero_pp_rank_0_mp_rank_00_model_states.pt",
    "optimizer": "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
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
            }.items():
                files[name] = save_file(state, folder / name, rank)
        Manifest(number, ranks, stage.global_batch, number, (3.0, 2.5), stage.raw, {}, files).write(folder)
        write_atomically(stage.run_dir / "checkpoints" / "latest", f"step_{number}")
        log.append({"step": number, "saved": True})
    write_atomically(stage.run_dir / "config.json", json.dumps(stage.raw))
    (stage.run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    return stage.run_dir


def stopped_at(number: int, run_dir: Path, copy: Path) -> None:
    """Copy a finished run as one that was stopped at a step, whose checkpoint is its newest."""
    shutil.copytree(run_dir, copy)
    (copy / "result.json").unlink()
    for later in (one for one in (copy / "checkpoints").glob("step_*") if int(one.name[5:]) > number):
        shutil.rmtree(later)
    (copy / "checkpoints" / "latest").write_text(f"step_{number}")


def _edit(change: Callable[[bytearray], bytes]) -> Change:
    def edit(file: Path) -> None:
        file.write_bytes(change(bytearray(file.read_bytes())))

    return edit


def _flip(content: bytearray) -> bytes:
    content[len(content) // 2] ^= 0x10
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
    "one byte short": _edit(lambda content: content[:-1]),
    "a bit flipped": _edit(_flip),
    "a folder": _replace_by_folder,
    "a link to nowhere": _replace_by_link,
    "a named pipe": _replace_by_fifo,
}


class Crafted:
    """Makes the folder `trace` when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self._trace),)


def craft(file: Path, trace: Path) -> None:
    """Add code to a file of a checkpoint, and let the manifest say that it belongs there."""
    state = load_tensors(file)
    saved = save_file({**state, "extra": Crafted(trace)}, file.with_suffix(".new"), 0)
    file.with_suffix(".new").rename(file)
    manifest = Manifest.read(file.parent)
    manifest.files[file.name] = saved
    manifest.write(file.parent)


def _of_step_6(name: str, change: Change) -> Change:
    return lambda run_dir: change(step(run_dir, 6) / name)


def _in_both(name: str, change: Change) -> Change:
    def both(run_dir: Path) -> None:
        for number in (4, 6):
            change(step(run_dir, number) / name)

    return both


def _manifest(signed: bool, **changes: object) -> Change:
    """Change keys of a manifest; its checksum is made anew if `signed`."""

    def change(run_dir: Path) -> None:
        file = step(run_dir, 6) / FILES["manifest"]
        content = json.loads(file.read_text())
        before = content.pop("checksum")
        content |= changes
        file.write_text(json.dumps({**content, "checksum": checksum(content) if signed else before}))

    return change


def _swapped(kind: str) -> Change:
    def swap(run_dir: Path) -> None:
        a, b = sorted(step(run_dir, 6).glob(kind))
        content = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(content)

    return swap


def _of_step_4(kind: str) -> Change:
    def copy(run_dir: Path) -> None:
        for file in step(run_dir, 4).glob(kind):
            shutil.copy(file, step(run_dir, 6))

    return copy


def _of_a_rank_more(run_dir: Path) -> None:
    file = step(run_dir, 6) / FILES["optimizer"]
    shutil.copy(file, file.with_name(file.name.replace("rank_1", "rank_2")))


def _older_under_its_name(run_dir: Path) -> None:
    shutil.rmtree(step(run_dir, 6))
    shutil.copytree(step(run_dir, 4), step(run_dir, 6))


def _emptied(run_dir: Path) -> None:
    for path in step(run_dir, 6).iterdir():
        path.unlink()


def _garbage_alone(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "config.json").write_bytes(b"\xff\x00")


def _link_to_itself(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").symlink_to("checkpoints")


def _written(name: str, content: bytes) -> Change:
    return lambda run_dir: (run_dir / name).write_bytes(content) and None


def _renamed(name: str) -> Change:
    return lambda run_dir: step(run_dir, 6).rename(step(run_dir, 6).with_name(name)) and None


DAMAGES: dict[str, Change] = {
    **{f"{file}: {how}": _of_step_6(FILES[file], change) for file in FILES for how, change in OF_A_FILE.items()},
    **{
        f"{file}: with code": lambda run_dir, file=file: craft(step(run_dir, 6) / FILES[file], run_dir.parent / "trace")
        for file in ("model", "optimizer")
    },
    "optimizer shards of two ranks swapped": _swapped("*optim_states.pt"),
    "model shards of two ranks swapped": _swapped("*model_states.pt"),
    "optimizer shards of an older step": _of_step_4("*optim_states.pt"),
    "all shards of an older step": _of_step_4("*.pt"),
    "manifest: of an older step": _of_step_4("manifest.json"),
    "a shard of a rank that does not exist": _of_a_rank_more,
    "checkpoint: an older one under its name": _older_under_its_name,
    "checkpoint: an empty folder": _emptied,
    "checkpoint: deleted": lambda run_dir: shutil.rmtree(step(run_dir, 6)),
    "checkpoint: named as a later step": _renamed("step_8"),
    "checkpoint: half written": _renamed("step_6.part"),
    "checkpoint: half deleted": _renamed("step_6.deleted"),
    "manifest: another place in the data": _manifest(False, data_step=5),
    "manifest: no files": _manifest(False, files={}),
    "manifest: of another format": _manifest(True, format=1),
    "manifest: nested without end": _written("checkpoints/step_6/manifest.json", b"[" * 100_000),
    "latest: garbage": _written("checkpoints/latest", b"\xff\xfe\x00"),
    "config: garbage": _written("config.json", b"{"),
    "metrics: garbage": _written("metrics.jsonl", b"\xff[{\n"),
    "both checkpoints": _in_both(FILES["model"], Path.unlink),
    "both manifests": _in_both(FILES["manifest"], lambda file: file.write_text("{}") and None),
    "checkpoints: a link to itself": _link_to_itself,
    "config: garbage, and no checkpoint": _garbage_alone,
}
# Damages that leave a whole checkpoint of this step as the newest
FROM = {
    **dict.fromkeys(("checkpoint: deleted", "checkpoint: half written", "checkpoint: half deleted"), 4),
    **dict.fromkeys(("latest: garbage", "config: garbage", "metrics: garbage"), 6),
}
