"""Reports on finished runs: what they say, and the page in a real browser."""

import json
import os
import re
from html.parser import HTMLParser
from unittest import mock

import pytest

from ds_fp8.cli import main
from ds_fp8.config.errors import UserError
from ds_fp8.report import charts
from ds_fp8.report.runs import RunRecord, find
from ds_fp8.report.verdict import judge_all
from tests.browser import look
from tests.report.runs import finished_run, twins


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two stages with their twins, reported on by the command."""
    folder = twins(tmp_path_factory.mktemp("runs"), "cpt", "sft")
    assert main(["report", str(folder), "--title", "FP8 & BF16"]) == 0
    return folder


def test_figures_are_those_of_the_runs(folder):
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["stages"]) == ["cpt", "sft"]
    cpt = summary["stages"]["cpt"]
    assert cpt["final_loss_gap"] == pytest.approx(0.01)
    assert cpt["all_gather_bytes_ratio"] == 0.53
    assert (cpt["fp8"]["first_loss"], cpt["fp8"]["last_loss"]) == (6.0, pytest.approx(0.515))
    assert (cpt["fp8"]["exact_match"], cpt["bf16"]["exact_match"]) == (0.8, 0.7)
    assert cpt["fp8"]["exact_match_standard_error"] == pytest.approx((0.8 * 0.2 / 50) ** 0.5)
    assert not summary["passed"]


class _Page(HTMLParser):
    """Collects what is open, texts of the body, and addresses."""

    def __init__(self):
        super().__init__()
        self.open, self.sources, self.texts, self.ids = [], [], [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in ("meta", "link"):
            self.open.append(tag)
        self.sources += [value for name, value in attributes.items() if name in ("src", "href", "xlink:href")]
        self.ids += [attributes["id"]] if "id" in attributes else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in ("meta", "link"):
            self.open.pop()

    def handle_data(self, data):
        if "body" in self.open and data.strip():
            self.texts.append(" ".join(data.split()))


def test_the_page_is_whole_and_begins_with_title_verdict_and_one_table(folder):
    page = _Page()
    text = (folder / "report.html").read_text()
    page.feed(text)
    assert page.open == []
    assert all(source.startswith(("data:", "#")) for source in page.sources)
    assert len(page.ids) == len(set(page.ids))
    assert page.texts[:2] == ["FP8 & BF16", "undecided:"]
    assert page.texts[2].startswith(
        "One seed decides nothing: what is between FP8 and BF16 in cpt and sft may be chance."
    )
    shown = " ".join(page.texts)
    head = shown[: shown.index("fp8/cpt")]
    for words in (
        "stage steps validation loss FP8 BF16 gap exact match FP8 BF16 cpt 10 0.5050 0.5000 +1.00% 80% 70% sft 10",
        "begun 2026-11-25 04:00:00 UTC took 6 min 40 s in 4 runs",
        "hardware a <processor> seed 1234 commit 8cc33d18606e command ds-fp8 train cpt.json",
    ):
        assert words in head, words
    for words in (
        "A <note> & more.",
        "3 < 4 & 5?",
        "expected: yes",
        "✗ wrong no.",
        "80% ± 6%",
        "0.53×",
        "Nothing saturated in any layer.",
        "fp8.enabled yes no",
        "layer 2 2.00 2.00",  # the worst of ten measurements, in percent
        "layer 0 21.0 21.0",  # dB
    ):
        assert words in shown, words
    assert "train.run_dir" not in shown
    assert "okens per second" not in shown  # on a CPU they mean nothing
    assert "peak" not in shown


@pytest.mark.parametrize(("scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(18, 23, 29)")])
def test_a_phone_and_a_desk_show_the_report(folder, tmp_path, scheme, paper):
    phone, desk = look(folder / "report.html", tmp_path, scheme)
    assert phone["paper"] == desk["paper"] == paper
    assert phone["height"] > 1.2 * desk["height"]  # in one column


def test_early_noise_does_not_set_the_range_of_an_axis(tmp_path):
    """A loss of 6 in the first steps, of 1.0 to 0.5 in the other 95: these fill the chart."""
    folder = finished_run(tmp_path / "run", 0.5, 10, 0.5, measured=False)
    losses = [6.0] * 5 + [1.0 - 0.5 * step / 95 for step in range(1, 96)]
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    figure = {}

    def keep(drawing, description):
        figure[description] = drawing
        return "<svg></svg>"

    with mock.patch.object(charts, "as_svg", keep):
        charts.losses(find([folder])[0])
    low, high = figure["Loss over the steps, run"].axes[0].get_ylim()
    assert 0.4 < low < 0.5
    assert 0.94 < high < 1.1


@pytest.mark.parametrize(("points", "joined"), [(2, False), (3, False), (4, True)])
def test_few_validation_points_are_not_joined(points, joined, tmp_path):
    folder = twins(tmp_path, "cpt")
    for kind in ("fp8", "bf16"):
        lines = [json.dumps({"step": step, "validation_loss": 3.0 - step / 10}) for step in range(points + 1)]
        (folder / kind / "cpt" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    drawn = []
    with mock.patch.object(charts, "as_svg", lambda figure, description: drawn.append(figure)):
        charts.gap(find([folder])[0], 0.0025)
    (line,) = [line for line in drawn[0].axes[0].lines if line.get_label() == "validation"]
    assert len(line.get_xdata()) == points
    assert (line.get_linestyle() == "-") == joined


@pytest.mark.parametrize(
    ("losses", "more", "level", "words"),
    [
        (
            [0.5],
            {},
            "good",
            r"Healthy: no step skipped, no layer degraded.\nvalidation loss 6.1000 to 0.5000 in 10 steps",
        ),
        ([0.5], {"skipped_steps": 3}, "look", "Needs a look: 3 of 10 steps were skipped"),
        ([None], {}, "bad", "Failed: after 10 steps the validation loss is not finite"),
        ([0.501, 0.5], {}, "good", r"FP8 ends no worse than BF16 in this run. One seed .*\n.* BF16 \+0.20%"),
        ([0.49, 0.5], {}, "good", r"FP8 ends no worse than BF16 in this run. One seed .*\n.* BF16 -2.00%"),
        (
            [0.51, 0.5],
            {},
            "undecided",
            r"One seed decides nothing: .*\n.* BF16 \+2.00%.* in BF16 \+1.59% \(0.25% a",
        ),
        ([0.53, 0.5], {}, "bad", r"FP8 ends worse than BF16 in this run.\n.* BF16 \+6.00%"),
        ([0.51, 0.5], {"steps": 1000}, "bad", r"FP8 ends worse than BF16 in this run.\n.* BF16 \+2.00%"),
        ([None, 0.5], {}, "bad", "No comparison: a final loss is missing"),
    ],
)
def test_verdicts_of_runs(losses, more, level, words, tmp_path):
    folders = []
    for enabled, loss in zip((True, False), losses, strict=False):
        # None: a loss that is not finite is null in result.json.
        folders.append(finished_run(tmp_path / f"{enabled}", loss, 10, 0.5, enabled, **more))
    verdict = judge_all(find(folders))
    assert verdict.level == level
    assert re.match(words, str(verdict)), str(verdict)


@pytest.mark.parametrize(
    ("fp8", "bf16", "level", "words"),
    [
        (0.8, 0.7, "good", r"exact match 80.0% against 70.0% \(\+10.0 points, standard error 8.6\)"),
        (0.9, 1.0, "undecided", r"exact match .* \(-10.0 points, standard error 4.2\)"),
        (0.94, 0.98, "good", "exact match"),
        (0.0, 0.0, "good", "exact match"),
    ],
)
def test_one_seed_that_answers_less_is_undecided_which_is_expected(fp8, bf16, level, words, tmp_path):
    """Its error is that of the 50 problems alone; another seed may change more."""
    folders = [
        finished_run(tmp_path / str(enabled), 0.5, 10, share, enabled)
        for enabled, share in ((True, fp8), (False, bf16))
    ]
    verdict = judge_all(find(folders))
    assert verdict.level == level
    assert ("One seed decides nothing" in verdict.headline) == (level == "undecided")
    assert re.search(words, verdict.figures), verdict.figures
    assert "ds-fp8 parity --seeds 3 can" in verdict.headline


def test_a_stage_that_answers_less_keeps_several_from_passing(tmp_path):
    folder = twins(tmp_path, "cpt", "sft", fp8=0.5)
    assert judge_all(find([folder])).headline.startswith("FP8 ends no worse than BF16 in all 2 stages.")
    file = folder / "fp8" / "sft" / "result.json"
    result = json.loads(file.read_text())
    file.write_text(json.dumps({**result, "exact_match": {"before": 0.0, "after": 0.1, "problems": 50}}))
    verdict = judge_all(find([folder]))
    assert (verdict.level, verdict.passed) == ("undecided", False)
    assert "what is between FP8 and BF16 in sft may be chance" in verdict.headline
    assert main(["report", str(folder)]) == 0
    assert "-60 ± 8 pt" in (folder / "report.html").read_text()


def test_learning_rate_and_gradient_norm_are_drawn_where_they_were_recorded(tmp_path):
    folder = finished_run(tmp_path / "run", 0.5, 10, 0.5)
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "Learning rate over the steps, run" in page
    assert "Gradient norm, before clipping over the steps, run" in page
    assert str(folder) in page
    metrics = folder / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    kept = [{key: value for key, value in record.items() if key != "gradient_norm"} for record in records]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in kept))
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "Learning rate over the steps, run" in page
    assert "Gradient norm" not in page


def test_two_runs_of_one_kind_are_told_apart_by_their_folders(tmp_path, capsys):
    first, second = (
        finished_run(tmp_path / name, loss, 10, 0.5, measured=False) for name, loss in (("a", 0.49), ("b", 0.5))
    )
    assert main(["report", str(first), str(second), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert f"The final loss of {first} is -2.000% from that of {second}, with one seed each." in printed
    assert list(json.loads((tmp_path / "out" / "summary.json").read_text())["stages"]["a"])[:2] == [
        str(first),
        str(second),
    ]


MICRO, STEPS_BETWEEN = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("fp8", "bf16", "differ"),
    [
        (
            {"optimizer": {"params": {"lr": 1e-3}}},
            {"optimizer": {"params": {"lr": 2e-3}}},
            "optimizer.params.lr (0.001, 0.002)",
        ),
        ({"train": {"steps": 20}}, {"train": {"steps": 10}}, "train.steps (20, 10)"),
        ({"train": {"seed": 1}}, {}, "train.seed (1, null)"),
        ({"train": {"eval_batches": 1}}, {}, "train.eval_batches (1, null)"),
        ({"train": {"init_from": "cpt"}}, {}, 'train.init_from ("cpt", null)'),
        ({MICRO: 2}, {MICRO: 4}, "train_batch_size (4, 8)"),
        (
            {str(key): 1 for key in range(7)},
            {},
            "0 (1, null), 1 (1, null), 2 (1, null), 3 (1, null), 4 (1, null) and 2 more",
        ),
        # What a twin in BF16 may have of its own.
        ({"fp8": {"enabled": True, "preset": "coat"}, "wandb": {"enabled": True}}, {"steps_per_print": 5}, ""),
        ({"train": {"init_from": "fp8/cpt", "save_every": 5}}, {"train": {"init_from": "bf16/cpt"}}, ""),
        ({"train": {"resume": "fp8/cpt"}}, {"train": {"resume": "bf16/cpt"}}, ""),
        ({MICRO: 4, STEPS_BETWEEN: 1}, {MICRO: 2, STEPS_BETWEEN: 2}, ""),
    ],
)
def test_runs_that_differ_in_more_than_fp8_get_no_verdict_on_it(fp8, bf16, differ, tmp_path):
    folder = twins(tmp_path, "cpt", "sft", fp8=0.5)
    for kind, values in (("fp8", fp8), ("bf16", bf16)):
        (folder / kind / "sft" / "config.json").write_text(json.dumps({"fp8": {"enabled": kind == "fp8"}, **values}))
    for folders in ([folder], [folder / "fp8" / "sft", folder / "bf16" / "sft"]):
        verdict = judge_all(find(folders))
        assert verdict.passed == (not differ)
        if differ:
            assert verdict.headline == f"No verdict on FP8: the runs of sft also differ in {differ}."
            assert verdict.figures == "final loss of FP8 against BF16 +0.00%"


@pytest.mark.parametrize("name", ["run", "seed_7"])
def test_a_run_alone_has_a_report(name, tmp_path, capsys):
    folder = finished_run(tmp_path / name, 0.5, 10, 0.5, measured=False)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("Healthy: ")
    assert "<svg" in (folder / "report.html").read_text()


def test_stages_of_a_copied_folder_keep_their_order(tmp_path):
    folder = twins(tmp_path, "cpt", "sft_stage1", "sft_stage2")
    for hour, name in enumerate(("sft_stage2", "cpt", "sft_stage1")):
        file = folder / "fp8" / name / "result.json"
        result = json.loads(file.read_text())
        result["made"]["started"] = f"2026-11-25 0{hour}:00:00 UTC"
        file.write_text(json.dumps(result))
        os.utime(file, (1000 - hour, 1000 - hour))
    assert [each.name for each in find([folder])] == ["sft_stage2", "cpt", "sft_stage1"]


def test_folders_that_hold_no_finished_run_are_named(tmp_path):
    finished_run(tmp_path / "run", 0.5, 1, 0.1)
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(UserError, match=r"not a finished run: result\.json is missing") as error:
        RunRecord(tmp_path / "run")
    assert error.value.remedy
    with pytest.raises(UserError, match="no folder"):
        find([tmp_path / "none"])
    folder = twins(tmp_path / "twins", "cpt", "sft")
    (folder / "bf16" / "sft" / "result.json").unlink()
    with pytest.raises(UserError, match="sft has finished in only one"):
        find([folder])


def _is(name: str, content: str):
    return lambda folder: (folder / name).write_text(content)


DAMAGES = {
    "no object": _is("result.json", "[]"),
    "nothing in it": _is("result.json", "{}"),
    "nested": _is("result.json", "[" * 100_000),
    "a link to a device": lambda folder: (
        (folder / "result.json").unlink(),
        (folder / "result.json").symlink_to("/dev/zero"),
    ),
    "a configuration in a list": _is("config.json", "[]"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_in_a_run_is_named(name, tmp_path):
    folder = finished_run(tmp_path / "run", 0.5, 10, 0.5)
    DAMAGES[name](folder)
    with pytest.raises(UserError) as caught:
        main(["report", str(folder)])
    assert re.search(r"(result|config)\.json", str(caught.value))
    assert caught.value.remedy
    assert "Traceback" not in str(caught.value)
    assert not (folder / "report.html").exists()
