"""Points of many GPUs: what is measured first, and what is said of it."""

import json

import many_gpus
import pytest

from ds_fp8.config.errors import UserError


def row(tokens, peak=None):
    return {"step_seconds": 1.0, "tokens_per_second_per_gpu": tokens, "peak_bytes": peak}


def test_efficiency_and_gain_are_of_the_same_model_and_link():
    points = many_gpus.points([2, 4, 8], peers=True, quick=False)
    assert len({point.name for point in points}) == len(points)
    rates = {
        "7b, 1 x 8192, 2 GPUs, deepspeed": 9000,
        "7b, 1 x 8192, 8 GPUs, deepspeed": 8000,
        "7b, 1 x 8192, 8 GPUs, deepspeed, sockets": 2000,
        "7b, 1 x 8192, 2 GPUs, hybrid_fast+coat/graph-auto": 15000,
        "7b, 1 x 8192, 8 GPUs, hybrid_fast+coat/graph-auto": 14400,
        "7b, 1 x 8192, 8 GPUs, hybrid_fast+coat/graph-auto, sockets": 6000,
    }
    rows = {name: row(rate) for name, rate in rates.items()}
    rows["1.5b, 1 x 2048, 8 GPUs, deepspeed"] = {"failed": "out of memory"}
    found = {line["point"]: line for line in many_gpus.summary(points, rows)}
    assert found.keys() == rates.keys()
    ours = found["7b, 1 x 8192, 8 GPUs, hybrid_fast+coat/graph-auto"]
    assert ours["efficiency"] == pytest.approx(0.96)
    assert ours["gain"] == pytest.approx(1.8)
    slow = found["7b, 1 x 8192, 8 GPUs, hybrid_fast+coat/graph-auto, sockets"]
    assert slow["gain"] == pytest.approx(3.0)
    assert slow["efficiency"] is None


def test_the_first_points_are_the_most_and_the_fewest_gpus():
    first = many_gpus.points([2, 4, 8], peers=True, quick=False)[:4]
    assert [(point.gpus, point.variant) for point in first] == [
        (8, "deepspeed"), (8, many_gpus.OURS), (2, "deepspeed"), (2, many_gpus.OURS),
    ]  # fmt: skip


@pytest.mark.parametrize("size", ["7b", "qwen3-30b"])
def test_a_peak_is_compared_with_its_estimate(size):
    bf16, ours = (
        next(p for p in many_gpus.points([8], peers=False, quick=False) if (p.size, p.variant) == (size, variant))
        for variant in ("bf16", many_gpus.OURS)
    )
    assert ours.estimated_bytes() < 0.75 * bf16.estimated_bytes()


def test_what_was_measured_is_not_run_again_and_what_fails_is_shown(tmp_path, capsys, monkeypatch):
    file = tmp_path / "many.json"
    started = []

    def measure(point, options):
        started.append(point.name)
        return row(100.0) if point.gpus == 1 else {"failed": "no second GPU"}

    monkeypatch.setattr(many_gpus, "measure", measure)
    arguments = ["--quick", "--only", "bf16", "--json", str(file)]
    assert many_gpus.main(arguments) == 1
    assert many_gpus.main(arguments) == 1
    assert started == ["tiny, 1 x 64, 1 GPUs, bf16", *2 * ["tiny, 1 x 64, 2 GPUs, bf16"]]
    assert "no second GPU" in capsys.readouterr().err
    assert [line["point"] for line in json.loads(file.read_text())["summary"]] == started[:1]
    assert many_gpus.main(["--quick", "--minutes", "-1"]) == 0
    assert "left out" in capsys.readouterr().out


def test_more_gpus_than_there_are_is_an_error():
    with pytest.raises(UserError, match="GPUs"):
        many_gpus.main(["--gpus", "64"])
