"""A damaged checkpoint is named and nothing is changed; what counts for nothing does no harm."""

from __future__ import annotations

import re

import pytest

from ds_fp8.config.errors import UserError, as_user_error
from ds_fp8.train import load_stage, resume
from tests.train.damage import DAMAGES, FROM, save_two, step

RANKS = 2


def settle(file: str, overrides: list[str]) -> tuple[int | None, list[str]]:
    """Return the step that a resume goes on from, None where it is refused, and what it says."""
    lines: list[str] = []
    try:
        stage = load_stage(file, overrides)
        state = resume.settle(stage, lines.append)
    except (UserError, OSError) as error:
        return None, [*lines, str(as_user_error(error))]
    return state.step, lines


@pytest.fixture
def damaged(tiny, write, tmp_path, monkeypatch):
    """Return the stage's file and the run folder of a run that goes on, on two ranks."""
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))
    tiny["train"]["run_dir"] = str(tmp_path / "run")
    file = write(tiny)
    return str(file), save_two(load_stage(file), RANKS)


@pytest.mark.parametrize("name", DAMAGES)
def test_no_damage_is_passed_over_in_silence(name, damaged, ranks):
    file, run_dir = damaged
    DAMAGES[name](run_dir)
    before = sorted(run_dir.rglob("*"))
    results = ranks(RANKS, settle, file, [])
    assert len({result[0] for result in results}) == 1, results
    went_on_from, lines = results[0]
    said = "\n".join(lines)
    if step_of := FROM.get(name):
        assert (went_on_from, len(lines)) == (step_of, 1)
        assert f"step_{step_of}: all as it was saved" in said
        assert re.search(rf"goes on behind step {step_of} of \d+$", said)
    else:
        assert went_on_from is None
        assert "remedy:" in said
        assert re.search("step_[68]|/checkpoints|config.json", said)
    # Whatever its hashes say, nothing in a checkpoint is executed.
    assert ("more than tensors and plain values: it names posix.mkdir" in said) is ("with code" in name)
    assert sorted(run_dir.rglob("*")) == before


def test_another_runs_damaged_checkpoint_is_refused_by_its_key(damaged, ranks, tmp_path):
    file, parent = damaged
    (step(parent, 6) / "random_rank_00001.pt").write_bytes(b"")
    for named, found in ((parent, None), (step(parent, 6), None), (step(parent, 4), 0)):
        overrides = [f"train.run_dir={tmp_path / 'branch'}", f"train.resume={named}"]
        went_on_from, lines = ranks(RANKS, settle, file, overrides)[0]
        assert went_on_from == found
        words = "all as it was saved" if found == 0 else "random_rank_00001.pt has 0 bytes instead of"
        assert words in lines[-1]
        assert found == 0 or "train.resume" in lines[-1]


def test_a_run_folder_that_was_renamed_goes_on(damaged, ranks, tmp_path):
    file, run_dir = damaged
    run_dir.rename(tmp_path / "elsewhere")
    assert ranks(RANKS, settle, file, [f"train.run_dir={tmp_path / 'elsewhere'}"])[0][0] == 6
