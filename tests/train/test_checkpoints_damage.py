"""A damaged checkpoint is named and nothing is changed; what counts for nothing does no harm."""

from __future__ import annotations

import re
import shutil

import pytest

from ds_fp8.config.errors import UserError, as_user_error
from ds_fp8.train import load_stage, resume
from tests.train.damage import DAMAGES, FILES, FROM, save_two, step

RANKS = 2


def settle(file: str, runs: list[list[str]]) -> list[tuple[int | None, str]]:
    """Return for each set of overrides the step that a resume goes on from, None where refused, and what it says."""
    found = []
    for overrides in runs:
        lines: list[str] = []
        try:
            state = resume.settle(load_stage(file, overrides), lines.append).step
        except (UserError, OSError) as error:
            state, lines = None, [*lines, str(as_user_error(error))]
        found.append((state, "\n".join(lines)))
    return found


@pytest.fixture
def damaged(tiny, write, tmp_path, monkeypatch):
    """Return the stage's file and the run folder of a run that goes on, on two ranks."""
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))
    tiny["train"]["run_dir"] = str(tmp_path / "run")
    file = write(tiny)
    return str(file), save_two(load_stage(file), RANKS)


def test_no_damage_is_passed_over_in_silence(damaged, ranks, tmp_path):
    file, run_dir = damaged
    folders = {name: tmp_path / str(number) / "run" for number, name in enumerate(DAMAGES)}
    for name, folder in folders.items():
        shutil.copytree(run_dir, folder)
        DAMAGES[name](folder)
    before = sorted(tmp_path.rglob("*"))
    results, others = ranks(RANKS, settle, file, [[f"train.run_dir={folder}"] for folder in folders.values()])
    assert [went_on_from for went_on_from, _ in results] == [went_on_from for went_on_from, _ in others]
    for name, (went_on_from, said) in zip(folders, results, strict=True):
        assert went_on_from == FROM.get(name), name
        if name in FROM:
            assert re.fullmatch(
                rf".*step_{FROM[name]}: all as it was saved .* behind step {FROM[name]} of \d+", said
            ), name
        else:
            assert "remedy:" in said, name
            assert re.search("step_[68]|/checkpoints|config.json", said), name
        # Whatever its hashes say, nothing in a checkpoint is executed.
        assert ("more than tensors and plain values: it names posix.mkdir" in said) is ("with code" in name), name
    assert sorted(tmp_path.rglob("*")) == before


def test_another_runs_damaged_checkpoint_is_refused_by_its_key_and_a_renamed_one_goes_on(damaged, ranks, tmp_path):
    file, parent = damaged
    shutil.copytree(parent, tmp_path / "elsewhere")
    (step(parent, 6) / FILES["optimizer"]).write_bytes(b"")
    named = (parent, step(parent, 6), step(parent, 4))
    branches = [[f"train.run_dir={tmp_path / 'branch'}", f"train.resume={each}"] for each in named]
    *damages, whole, renamed = ranks(RANKS, settle, file, [*branches, [f"train.run_dir={tmp_path / 'elsewhere'}"]])[0]
    for went_on_from, said in damages:
        assert went_on_from is None
        assert f"{FILES['optimizer']} has 0 bytes instead of" in said
        assert "train.resume" in said
    assert (whole[0], renamed[0]) == (0, 6)
    assert "all as it was saved" in whole[1]
