"""What users write is accepted or refused, whatever it is: a few hundred drawn cases of scripts/fuzz.py."""

import os
from pathlib import Path

# Scripts run with their own folder on the path.
import fuzz
import pytest

CASES = {"configurations": 80, "overrides": 80, "texts": 60, "sweeps": 40, "data": 40}
CASES |= {"runs": 60, "reports": 16, "models": 16, "commands": 40}


def fuzzed(kind: str, tmp_path: Path) -> tuple:
    folder, work = tmp_path / "cases", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        return fuzz.fuzz(kind, CASES[kind], seed=0, folder=folder)


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_no_case_fails_hangs_or_writes(kind, tmp_path, ranks):
    # A run that resumes is collective.
    counts, wrong = ranks(1, fuzzed, kind, tmp_path)[0] if kind == "runs" else fuzzed(kind, tmp_path)
    assert not wrong, "\n".join(f"{what}\n  {case}" for what, case in wrong.items())
    assert counts["accepted"] + counts["refused"] >= CASES[kind] // 2
    assert counts["accepted"]
    assert counts["refused"]


def test_the_fuzzer_notices_what_it_looks_for(tmp_path, monkeypatch):
    """A traceback, a file that is written and a refusal without a remedy are told apart from refusals."""
    from ds_fp8.config.errors import UserError

    def judge(self, raw):
        choice = len(str(raw)) % 4
        if choice == 0:
            raise KeyError("a fault of ours")
        if choice == 1:
            Path(f"written{os.getpid()}").touch()
        if choice == 2:
            raise UserError("no remedy")

    monkeypatch.setattr(fuzz.Judges, "configurations", judge)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    counts, wrong = fuzz.fuzz("configurations", 20, seed=0, folder=tmp_path)
    kinds = " ".join(wrong)
    assert "KeyError" in kinds
    assert "written" in kinds
    assert "without remedy" in kinds
    assert counts["failed"]
