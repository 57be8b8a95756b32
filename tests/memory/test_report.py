"""The report of a sweep, opened in a browser; its table, its frontier and the best point's stage."""

import csv
import json

import pytest

from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.memory import charts
from ds_fp8.memory.report import best_of, write_report
from tests.browser import visit
from tests.memory import workloads

RAW = workloads.stage()


def record(name, peak, tokens, status="ok", **more):
    measured = {} if status != "ok" else {"peak_bytes": peak, "reserved_bytes": peak, "tokens_per_second": tokens}
    measured |= {} if status != "ok" else {"loss": 2.5, "step_seconds": 1.0, "steps": 2, "process_bytes": 0}
    parts = {"master weights": peak // 3, "moments": peak // 3, "activations: MLP": peak // 4}
    estimate = {"peak_bytes": sum(parts.values()), "parts": parts}
    return {
        "key": name, "name": name, "status": status, "reason": "" if status == "ok" else "<b>CUDA & co</b>",
        "settings": {"fp8.enabled": name != "BF16", "train_batch_size": None}, "gpus": 2, "device": "a GPU",
        "seconds": 1.0, "estimate": estimate, "fits": {"memory_bytes": 80 << 30, "micro_batch": 4}, **measured, **more,
    }  # fmt: skip


RECORDS = [
    record("BF16", 40 << 30, 1000.0),
    record("infir2", 25 << 30, 1500.0),
    record("slow & <small>", 20 << 30, 600.0),
    record("too large", 90 << 30, None, "out of memory"),
    record("infir2 @ 4", 30 << 30, 1600.0, search="micro_batch", of="infir2", tried=4),
    record("infir2 @ 8", 60 << 30, None, "out of memory", search="micro_batch", of="infir2", tried=8),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(folder, RECORDS, RAW, "levels <of FP8>", "What it saves.")
    return folder


def test_a_browser_shows_the_report_without_error_or_network(folder, tmp_path):
    seen = visit(folder / "report.html", tmp_path)
    assert seen.console == []
    assert seen.requests == []
    assert seen.document.count("<svg") == 5
    assert seen.document.count("<tr") == 1 + len(RECORDS)
    assert "slow &amp; &lt;small&gt;" in seen.document


def test_a_browser_that_finds_errors_and_requests_says_so(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<link rel="icon" href="data:,"><img src="http://192.0.2.1/x"><script>missing()</script>')
    seen = visit(page, tmp_path)
    assert any("missing is not defined" in line for line in seen.console)
    assert any("192.0.2.1" in address for address in seen.requests)


def test_sorting_the_table(folder, tmp_path):
    page = tmp_path / "sorted.html"
    click = '<script>document.querySelectorAll("th")[6].click()</script></body>'
    page.write_text((folder / "report.html").read_text().replace("</body>", click))
    document = visit(page, tmp_path).document
    body = document[document.index("<tbody>") :]
    assert body.index("infir2 @ 4") < body.index(">infir2<") < body.index(">BF16<") < body.index("slow")


def test_the_table_as_csv_has_every_point_and_kind(folder):
    rows = list(csv.DictReader((folder / "sweep.csv").open()))
    assert [row["name"] for row in rows] == [r["name"] for r in RECORDS]
    assert int(rows[1]["peak_bytes"]) == 25 << 30
    assert rows[3]["peak_bytes"] == ""
    assert int(rows[0]["moments"]) == (40 << 30) // 3


def test_the_best_point_has_the_casts_that_were_measured(tmp_path):
    """null says that wgrad's input is cast as fprop's, which is not so in this preset."""
    raw = workloads.stage(fp8={"preset": "hybrid_fast", "linear": {"wgrad": {"input": None}}})
    write_report(tmp_path, [record("a", 1 << 30, 1.0)], raw, "a")
    best = json.loads((tmp_path / "best.json").read_text())
    assert parse_fp8(best).linear == parse_fp8(raw).linear
    assert "train_batch_size" not in best


def test_the_best_point_is_a_stage(folder):
    stage = json.loads((folder / "best.json").read_text())
    assert best_of(RECORDS)["name"] == "infir2 @ 4"
    assert stage["fp8"]["enabled"] is True
    assert "train_batch_size" not in stage
    assert stage["train"] == RAW["train"]


def test_nothing_ran(tmp_path):
    files = write_report(tmp_path, [RECORDS[3]], RAW, "none")
    assert {file.name for file in files} == {"sweep.csv", "report.html"}


def test_the_frontier_leaves_out_what_is_beaten():
    ran = [r for r in RECORDS if r["status"] == "ok"]
    assert [r["name"] for r in charts.frontier(ran)] == ["slow & <small>", "infir2", "infir2 @ 4"]
