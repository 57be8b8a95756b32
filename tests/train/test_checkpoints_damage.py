"""A damaged checkpoint is named, renamed and passed over; where nothing good is left the run says so."""

from __future__ import annotations

import pytest

from ds_fp8.config.errors import UserError
from ds_fp8.train import load_stage, resume
from tests.train.damage import BACK, DAMAGES, REFUSED, UNHARMED, save_two, step

RANKS = 2


def settle(file: str, overrides: list[str]) -> tuple[int | None, list[str]]:
    """Return the step that a resume goes on from, None where it is refused, and what it says."""
    lines: list[str] = []
    try:
        stage = load_stage(file, overrides)
        state = resume.settle(stage, lines.append)
    except UserError as error:
        return None, [*lines, str(error)]
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
    outcome, change = DAMAGES[name]
    change(run_dir)
    results = ranks(RANKS, settle, file, [])
    assert len({result[0] for result in results}) == 1, results
    went_on_from, lines = results[0]
    said = "\n".join(lines)
    if outcome == UNHARMED:
        assert (went_on_from, len(lines)) == (6, 1)
        assert "step_6: all as it was saved" in said
    elif outcome == BACK:
        assert went_on_from == 4, said
        no_checkpoint = name.removeprefix("checkpoint: ") in ("deleted", "half written", "half deleted")
        assert any((run_dir / "checkpoints").glob("step_[68].damaged")) != no_checkpoint
        assert ("WARNING" in said and ("step_6" in said or "step_8" in said)) != no_checkpoint
        assert "step_4: all as it was saved" in said
    else:
        assert outcome == REFUSED
        assert went_on_from is None
        assert "remedy:" in said
        # And again: what was renamed does not make the folder look new.
        assert ranks(RANKS, settle, file, [])[0][0] is None


def test_a_damaged_checkpoint_keeps_its_files_under_another_name(damaged, ranks):
    file, run_dir = damaged
    (step(run_dir, 6) / "random_rank_00001.pt").write_bytes(b"")
    said = ranks(RANKS, settle, file, [])[0][1][0]
    assert "random_rank_00001.pt has 0 bytes instead of" in said
    assert len(list((run_dir / "checkpoints" / "step_6.damaged").iterdir())) == 7


def test_another_runs_damaged_checkpoint_is_passed_over_and_left_as_it_is(damaged, ranks, tmp_path):
    file, parent = damaged
    (step(parent, 6) / "random_rank_00001.pt").write_bytes(b"")
    overrides = [f"train.run_dir={tmp_path / 'branch'}", f"train.resume={parent}"]
    went_on_from, lines = ranks(RANKS, settle, file, overrides)[0]
    assert went_on_from == 0
    assert "step_6 is damaged" in lines[0]
    assert "step_4: all as it was saved" in lines[1]
    assert step(parent, 6).is_dir()
    named = [overrides[0], f"train.resume={step(parent, 6)}"]
    assert "no complete checkpoint" in ranks(RANKS, settle, file, named)[0][1][-1]


def test_a_run_folder_that_was_renamed_goes_on(damaged, ranks, tmp_path):
    file, run_dir = damaged
    run_dir.rename(tmp_path / "elsewhere")
    assert ranks(RANKS, settle, file, [f"train.run_dir={tmp_path / 'elsewhere'}"])[0][0] == 6
