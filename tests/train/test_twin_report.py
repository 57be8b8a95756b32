"""The comparison of FP8 runs with their BF16 twins."""

import base64
import json
from html.parser import HTMLParser

import pytest

from ds_fp8.errors import UserError
from ds_fp8.train.twin_report import KINDS, RunRecord, write_report


def finished_run(folder, loss, gathered, answered):
    """What a run of ten steps leaves in its folder."""
    folder.mkdir(parents=True)
    result = {
        "steps": 10,
        "first_loss": 6.0,
        "last_train_loss": loss + 0.01,
        "first_validation_loss": 6.1,
        "final_loss": loss,
        "exact_match": {"before": 0.0, "after": answered, "problems": 50},
        "bytes_per_step": {"all_gather_bytes": gathered, "grad_bytes": gathered // 2, "other_bytes": 8},
        "tokens_per_second": 1000.0,
        "step_seconds": 0.5,
        "peak_memory_bytes": 2**30,
        "skipped_steps": 0,
        "ranks": 2,
        "device": "cpu",
        "parameters": 12345,
        "versions": {"torch": "2.13.0"},
        "fp8": {"enabled": True, "casts": {"input": "e4m3 1x128 pow2"}, "notes": ["a <note> & more"]},
    }
    (folder / "result.json").write_text(json.dumps(result))
    records = [{"step": 0, "validation_loss": 6.1}]
    records += [{"step": step, "loss": 6.0 - step * (6.0 - loss) / 10} for step in range(1, 11)]
    records += [{"step": 10, "validation_loss": loss, "exact_match": answered}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def runs(tmp_path):
    for stage in ("cpt", "sft"):
        finished_run(tmp_path / "fp8" / stage, 0.505, 530, 0.8)
        finished_run(tmp_path / "bf16" / stage, 0.5, 1000, 0.7)
    return {s: {kind: RunRecord(tmp_path / kind / s) for kind in KINDS} for s in ("cpt", "sft")}


def test_figures_are_those_of_the_runs(runs, tmp_path):
    file, _ = write_report(runs, tmp_path / "out", "title")
    summary = json.loads(file.read_text())
    assert list(summary["stages"]) == ["cpt", "sft"]
    cpt = summary["stages"]["cpt"]
    assert cpt["final_loss_gap"] == pytest.approx(0.01)
    assert cpt["all_gather_bytes_ratio"] == 0.53
    assert (cpt["fp8"]["first_loss"], cpt["fp8"]["last_loss"]) == (6.0, pytest.approx(0.515))
    assert (cpt["fp8"]["exact_match"], cpt["bf16"]["exact_match"]) == (0.8, 0.7)


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.sources = [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)
        self.sources += [attributes[name] for name in ("src", "href") if name in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_nothing_of_the_network(runs, tmp_path):
    _, file = write_report(runs, tmp_path / "out", "FP8 & BF16")
    text = file.read_text()
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert all(source.startswith("data:") for source in page.sources)
    pictures = [source.split(",", 1)[1] for source in page.sources if source.startswith("data:image/png")]
    assert len(pictures) == 4
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    assert "FP8 &amp; BF16" in text
    assert "a &lt;note&gt; &amp; more" in text
    assert "+1.00%" in text


def test_a_run_that_has_not_finished_is_named(tmp_path):
    finished_run(tmp_path / "run", 0.5, 1, 0.1)
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(UserError, match="not a finished run") as error:
        RunRecord(tmp_path / "run")
    assert error.value.remedy
