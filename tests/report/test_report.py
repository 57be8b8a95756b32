"""Reports on finished runs: what they say, and the page in a real browser."""

import json
import os
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from ds_fp8.cli import main
from ds_fp8.commands import parity
from ds_fp8.config.errors import UserError
from ds_fp8.report import charts
from ds_fp8.report.charts import Line, chart
from ds_fp8.report.runs import RunRecord, by_point, find
from ds_fp8.report.verdict import MIN_STEPS, WORDS, judge
from tests.browser import look
from tests.report.runs import finished_run, pairs
from tests.train.conftest import ROOT


def judged(folders):
    return judge(by_point(find(folders)))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two stages in FP8 and BF16, reported on by the command."""
    folder = pairs(tmp_path_factory.mktemp("runs"), "cpt", "sft")
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
    assert (summary["verdict"], summary["reason"]) == ("undecided", "at all 2 stages, 10 steps decide nothing, 200 may")


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
    assert page.texts[:3] == ["FP8 & BF16", "undecided", ": at all 2 stages, 10 steps decide nothing, 200 may"]
    shown = " ".join(page.texts)
    head = shown[: shown.index("fp8/cpt")]
    for words in (
        "steps validation loss FP8 BF16 gap exact match FP8 BF16 cpt 10 0.5050 0.5000 +1.00% 80% 70% sft 10",
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


def labels(picture):
    """Return the numbers at the ticks of the y axis."""
    return [float(text.rstrip("%")) for text in re.findall(r'text-anchor="end">([^<]*)<', picture)]


def test_early_noise_does_not_set_the_range_of_an_axis(tmp_path):
    """A loss of 6 in the first steps, of 1.0 to 0.5 in the other 95: these fill the chart."""
    folder = finished_run(tmp_path / "run", 0.5, 10, 0.5, measured=False)
    losses = [6.0] * 5 + [1.0 - 0.5 * step / 95 for step in range(1, 96)]
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert labels(charts.losses(find([folder])[0])) == [0.5, 0.6, 0.7, 0.8, 0.9]


@pytest.mark.parametrize(("points", "joined"), [(2, False), (3, False), (4, True)])
def test_few_validation_points_are_not_joined(points, joined, tmp_path):
    folder = pairs(tmp_path, "cpt")
    for kind in ("fp8", "bf16"):
        lines = [json.dumps({"step": step, "validation_loss": 3.0 - step / 10}) for step in range(points + 1)]
        (folder / kind / "cpt" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    picture = charts.gap(find([folder])[0], 0.0025)
    assert picture.count("<circle") == points + 1  # and in the legend
    assert picture.count("<path") == 4 * joined  # of both losses, here and in the legend


def test_what_a_chart_draws():
    lines = [Line("a <b>", list(range(1001)), [step / 1000 for step in range(1001)], colour=1)]
    picture = chart("T & t", 'of "it"', lines)
    (path,) = re.findall(r'<path d="M([^"]*)" style="stroke:var\(--c1\)[^>]*1.4"', picture)[:1]
    places = [tuple(map(float, place.split())) for place in path.split("L")]
    assert len(places) == charts.MAX_POINTS
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(places))  # SVG counts downwards
    assert places[150] == pytest.approx((151, (charts.HEIGHT - charts.TOP - charts.BOTTOM) / 2), abs=2)
    assert (labels(picture), "a &lt;b&gt;" in picture, "T &amp; t" in picture) == (
        [0, 0.2, 0.4, 0.6, 0.8, 1],
        True,
        True,
    )
    assert 'aria-label="of &quot;it&quot;"' in picture
    assert labels(chart("", "", [Line("", [1, 2, 3], [-2.0, 0.0, 2.0])], log=True)) == [0.01, 0.1, 1, 10, 100]
    assert labels(chart("", "", [Line("", [1, 2], [0.1, 0.1])])) != []
    percent = chart("", "", [Line("", [1, 2], [0.001, 0.002])], percent=True, bands={"±1%": 0.01})
    assert labels(percent) == [-1, -0.5, 0, 0.5, 1]
    assert chart("", "", [Line("", [], [])]) is None


def test_the_points_of_a_grid_all_set_the_range():
    losses = {"fp8": [[9.0], [0.5]], "bf16": [[8.0, 8.2], []]}
    picture = charts.over_points("Loss", ["lr 1", "lr 2"], losses)
    assert max(labels(picture)) == 8
    assert ">lr 1<" in picture
    many = charts.over_points("Loss", [f"a long name {n}" for n in range(9)], {"fp8": [[float(n)] for n in range(9)]})
    assert ">9<" in many
    assert "long name" not in many


@pytest.mark.parametrize(
    ("losses", "more", "word", "words"),
    [
        (
            [0.5],
            {},
            "ran",
            r"ran: no step skipped, no layer degraded\nvalidation loss 6.1000 to 0.5000 in 10 steps of FP8 \(0.4980",
        ),
        ([0.5], {"skipped_steps": 3}, "ran", "ran: needs a look, 3 of 10 steps were skipped"),
        ([None], {}, "ran", "ran: needs a look, the final validation loss is not finite"),
        ([0.51, 0.5], {}, "undecided", "undecided: 10 steps decide nothing, 200 may"),
        (
            [0.49, 0.5],
            {"steps": 999},
            "undecided",
            r"undecided: one seed of 999 steps decides nothing, .*\n.*final loss -2.00%",
        ),
        ([0.51, 0.5], {"steps": 999}, "undecided", r".*\n.* loss \+2.00%, weights in BF16 \+1.59% \(0.25% a"),
        ([0.53, 0.5], {"steps": 999}, "worse", r"worse: FP8 has a higher final loss after 999 steps\n.* loss \+6.00%"),
        ([0.51, 0.5], {"steps": 1000}, "worse", r"worse: .* after 1,000 steps\n.* loss \+2.00%"),
        ([None, 0.5], {"steps": 1000}, "worse", "worse: FP8 diverges more often than BF16"),
    ],
)
def test_verdicts_of_runs(losses, more, word, words, tmp_path, capsys):
    folders = []
    for enabled, loss in zip((True, False), losses, strict=False):
        # None: a loss that is not finite is null in result.json.
        folders.append(finished_run(tmp_path / f"seed_{enabled:d}", loss, 10, 0.5, enabled, **more))
    verdict = judged(folders)
    assert verdict.word == word
    assert re.match(words, str(verdict)), str(verdict)
    assert str(judged(folders[::-1])) == str(verdict)  # FP8 against BF16 in whatever order they are given
    assert main(["report", *map(str, folders)]) == 0
    assert capsys.readouterr().out.startswith(f"{verdict}\n")
    assert json.loads((folders[0] / "summary.json").read_text())["verdict"] == word
    kind = word.replace(" ", "-")
    assert f'<p class="verdict {kind}"><b>{word}</b>: ' in (folders[0] / "report.html").read_text()


@pytest.mark.parametrize(
    ("fp8", "bf16", "words"), [(0.8, 0.7, r"\+10.0 ± 8.6"), (0.9, 1.0, "-10.0 ± 4.2"), (0.0, 0.0, r"\+0.0 ± 0.0")]
)
def test_one_seed_that_answers_less_is_undecided(fp8, bf16, words, tmp_path):
    """Its error is that of the 50 problems alone; another seed may change more."""
    folders = [
        finished_run(tmp_path / str(enabled), 0.5, 10, share, enabled, steps=400)
        for enabled, share in ((True, fp8), (False, bf16))
    ]
    verdict = judged(folders)
    assert verdict.word == "undecided"
    assert re.search(f"exact match {words} points", verdict.figures), verdict.figures


@pytest.mark.parametrize("words", [(ROOT / "docs/training.md").read_text(), parity.__doc__])
def test_the_docs_have_the_words_of_verdicts(words):
    assert all(word in words for word in (*WORDS[1:], f"below {MIN_STEPS} steps"))


def test_the_worst_stage_decides(tmp_path):
    folder = pairs(tmp_path, "cpt", "sft", fp8=0.5)
    for kind, name, loss in (("fp8", "cpt", 0.5), ("bf16", "cpt", 0.5), ("fp8", "sft", 0.53), ("bf16", "sft", 0.5)):
        file = folder / kind / name / "result.json"
        answers = {"before": 0.0, "after": 0.1 if name == "sft" and kind == "fp8" else 0.7, "problems": 50}
        more = {"steps": 400, "final_loss": loss, "exact_match": answers}
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    verdict = judged([folder])
    assert (verdict.word, verdict.reason) == (
        "worse",
        "at 1 of 2 stages (sft), FP8 has a higher final loss after 400 steps",
    )
    assert main(["report", str(folder)]) == 0
    assert "-60 ± 8 pt" in (folder / "report.html").read_text()


def test_what_a_run_recorded_is_drawn(tmp_path):
    (each,) = find([finished_run(tmp_path / "run", 0.5, 10, 0.5)])
    titles = [re.search("<b>(.*?)</b>", picture).group(1) for picture in charts.over_steps(each)]
    assert titles == ["Learning rate", "Gradient norm, before clipping"]  # on a CPU no speed
    each.run.result["device"] = "cuda"
    for record in each.run.metrics:
        record.pop("gradient_norm", None)
    assert [re.search("<b>(.*?)</b>", picture).group(1) for picture in charts.over_steps(each)] == [
        *("Learning rate", "Tokens per second")
    ]


def test_two_runs_of_one_kind_are_named_by_their_folders(tmp_path, capsys):
    first, second = (
        finished_run(tmp_path / name, loss, 10, 0.5, measured=False) for name, loss in (("a", 0.49), ("b", 0.5))
    )
    assert main(["report", str(first), str(second), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert f"ran: both runs are in FP8; final loss of {first} against {second} -2.000%" in printed
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
        # What a BF16 run may have of its own.
        ({"fp8": {"enabled": True, "preset": "coat"}, "wandb": {"enabled": True}}, {"steps_per_print": 5}, ""),
        ({"train": {"init_from": "fp8/cpt", "save_every": 5}}, {"train": {"init_from": "bf16/cpt"}}, ""),
        ({"train": {"resume": "fp8/cpt"}}, {"train": {"resume": "bf16/cpt"}}, ""),
        ({MICRO: 4, STEPS_BETWEEN: 1}, {MICRO: 2, STEPS_BETWEEN: 2}, ""),
    ],
)
def test_runs_that_differ_in_more_than_fp8_get_no_verdict_on_it(fp8, bf16, differ, tmp_path):
    folder = pairs(tmp_path, "cpt", "sft", fp8=0.5)
    for kind, values in (("fp8", fp8), ("bf16", bf16)):
        (folder / kind / "sft" / "config.json").write_text(json.dumps({"fp8": {"enabled": kind == "fp8"}, **values}))
    for folders in ([folder], [folder / "fp8" / "sft", folder / "bf16" / "sft"]):
        verdict = judged(folders)
        assert verdict.word == "undecided"
        assert (f"the runs of sft also differ in {differ}" in verdict.reason) == bool(differ), verdict.reason
        assert "FP8 against BF16: final loss +0.00%" in verdict.figures


def test_stages_of_a_copied_folder_keep_their_order(tmp_path):
    folder = pairs(tmp_path, "cpt", "sft_stage1", "sft_stage2")
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
    folder = pairs(tmp_path / "both", "cpt", "sft")
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
