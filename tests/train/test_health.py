"""The health of FP8 on real ranks: what is measured, what is said, and layers that move to BF16 while training."""

import json
import math

import pytest
import torch
from deepspeed import comm as dist

import ds_fp8
from ds_fp8.cli import main
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.monitor.cast_monitor import TENSOR_CLASSES, CastFigures
from ds_fp8.monitor.records import FIGURES, health_curves, health_record, layers_in_bf16
from ds_fp8.train import load_stage, train
from ds_fp8.train.metrics import MetricsLog, read_metrics
from tests.layers.hugging_face import causal_lm, tokens
from tests.zero import models

LOSSES = 0.03  # Relative difference between the losses of a layer in FP8 and in BF16
SITES = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
ALL_SITES = [f"model.layers.{layer}.{site}" for layer in range(2) for site in SITES]


def build(section, fuse="auto", zero=None, **changes):
    """An engine around a tiny Qwen2, and a function that trains it one step and returns the loss."""
    model = causal_lm("qwen2")
    config = models.config(section and {"fuse": fuse, **section}, **(zero or {})) | changes
    config = {key: value for key, value in config.items() if value is not None}
    parameters = list(model.parameters())
    # Without an "optimizer" section both twins get this package's.
    optimizer = None if "optimizer" in config else ds_fp8.AdamW(parameters, lr=3e-4)
    engine = ds_fp8.initialize(model=model, optimizer=optimizer, model_parameters=parameters, config=config)[0]
    world = dist.get_world_size()

    def step(number):
        ids = tokens(2 * world, 16).roll(number, 1)[2 * dist.get_rank() :][:2]
        return models.take_step(engine, engine(input_ids=ids, labels=ids).loss)

    return engine, step


def measure(section):
    """What two steps showed, with evaluation between them, and the shares over everything."""
    engine, step = build({"monitor": {"every": 2}, **section})
    reports = []
    for number in range(2):
        step(number)
        reports.append(engine.fp8.health.last)
        engine.fp8.health.last = None
        engine.eval()
        with torch.no_grad():
            engine(input_ids=tokens(1, 9))
        engine.train()
    return reports, engine.fp8.saturation()


@pytest.mark.parametrize("preset", ["infir2", "tensorwise", "fp8lm_o1"])
def test_every_site_and_class_is_measured_alike_on_all_ranks(ranks, preset):
    (first, shares), (second, _) = ranks(2, measure, {"preset": preset})
    assert first == second
    report, nothing = first
    assert nothing is None, "the second step of two is not to be measured"
    assert list(report.measurement) == list(TENSOR_CLASSES)
    for tensor_class, sites in report.measurement.items():
        assert list(sites) == ALL_SITES, tensor_class
        for figures in sites.values():
            assert 0 < figures.amax < math.inf
            assert 20 < figures.snr_db < 40  # E4M3 leaves 31 dB of ordinary numbers, E5M2 25
            assert 0 < figures.scale_min <= figures.scale_max
            assert 0 <= figures.flushed < 0.5
    assert 0 <= shares["underflow"] < 0.5
    assert not report.degraded


def weights_measured(gather):
    """Figures of the weights in a step, and the master weights before and after it."""
    section = {"monitor": {"every": 1}, "param_gather": {"format": gather}}
    engine, step = build(section)
    before = {name: models.full_master(p).clone() for name, p in engine.module.named_parameters()}
    step(0)
    after = {name: models.full_master(p).clone() for name, p in engine.module.named_parameters()}
    return engine.fp8.health.last.measurement["weight"], before, after


@pytest.mark.parametrize("gather", ["e4m3", "bf16"])
def test_figures_of_weights_are_those_of_the_master_weights_however_they_are_gathered(ranks, gather):
    measured, before, after = ranks(2, weights_measured, gather)[0]
    masters = after if gather == "e4m3" else before
    for layer in range(2):
        parts = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
        figures = measured[f"model.layers.{layer}.self_attn.qkv_proj"]
        assert figures.amax == pytest.approx(max(masters[part].abs().max().item() for part in parts), rel=2**-8)
        blocks = [b.abs().max() for part in parts for row in masters[part].split(128) for b in row.split(128, 1)]
        scales = [2.0 ** math.ceil(math.log2(amax.item() / 448)) for amax in blocks]
        assert (figures.scale_min, figures.scale_max) == (min(scales), max(scales))


def degrade(section, fuse="auto", zero=None, move=(), steps=5, changes=None):
    """(losses, lines said, layers moved, names of FP8 linears left, weights, bytes by step) of this rank."""
    engine, step = build(section, fuse, zero, **(changes or {}))
    health, said = engine.fp8.health, []
    if health is not None:
        health.say = said.append
        health.move_to_bf16(move)
    losses, sent = [], []
    for number in range(steps):
        engine.fp8.wire.take()
        losses.append(step(number))
        sent.append(engine.fp8.wire.take())
    left = [name for name, module in engine.module.named_modules() if isinstance(module, FP8Linear)]
    return losses, said, health.layers_in_bf16 if health else [], left, models.bf16_weights(engine), sent


def same_weights(results):
    """Whether all ranks have the same weights, bit for bit."""
    return all(torch.equal(weight, results[0][4][name]) for result in results for name, weight in result[4].items())


QUIET = {"monitor": {"every": 0}}
# A threshold that every layer is past; the third measurement moves it
HOPELESS = {"monitor": {"every": 1, "min_snr_db": 90.0, "fallback": True}}
REUSE = {"stage3_prefetch_bucket_size": 50000, "stage3_max_reuse_distance": 10**9}


@pytest.fixture(scope="module")
def twins(ranks):
    """(in BF16, in FP8 throughout) on two ranks."""
    return ranks(2, degrade, {"enabled": False}), ranks(2, degrade, QUIET)


@pytest.mark.parametrize(("fuse", "zero", "count"), [("auto", {}, 2), ("auto", REUSE, 2), ("off", {}, 14)])
def test_layers_that_degrade_go_on_in_bf16_on_all_ranks_together(ranks, twins, fuse, zero, count):
    results = ranks(2, degrade, HOPELESS, fuse, zero)
    for (losses, _, moved, left, _, sent), (expected, *_, plain), (in_fp8, *_) in zip(results, *twins, strict=True):
        assert left == []
        assert moved == results[0][2]
        assert len(moved) == count
        if fuse == "auto":
            assert losses[:3] == in_fp8[:3]
        assert losses[3:] != in_fp8[3:]
        assert losses == pytest.approx(expected, rel=LOSSES)
        assert sent[-1]["grad_bytes"] > 1.5 * sent[0]["grad_bytes"]
        if not zero:
            assert sent[-1]["all_gather_bytes"] > 1.5 * sent[0]["all_gather_bytes"]
            assert sent[-1]["all_gather_bytes"] == pytest.approx(plain[-1]["all_gather_bytes"], rel=0.05)
    assert same_weights(results)
    said = results[0][1]
    assert sum("now runs in BF16" in line for line in said) == count
    assert len(said) == len(set(said)), "something is said twice"


@pytest.mark.parametrize(
    ("fuse", "layer", "linears"), [("auto", "model.layers.1", 7), ("off", "model.layers.0.mlp.up_proj", 1)]
)
def test_one_layer_alone_is_moved(ranks, twins, fuse, layer, linears):
    results, (bf16, fp8) = ranks(2, degrade, QUIET, fuse, None, [layer]), twins
    for (losses, _, _, left, *_), (expected, *_) in zip(results, bf16, strict=True):
        assert len(left) == 14 - linears
        assert not any(name.startswith(layer) for name in left)
        assert losses == pytest.approx(expected, rel=LOSSES)
        assert losses != fp8[0][0]
    assert same_weights(results)


def test_a_model_that_has_moved_as_a_whole_trains_as_bf16_does_bit_for_bit(ranks):
    """With one optimizer for both, and without clipping: the own step sums the norm in another order."""
    section = {**QUIET, "loss": "off", "grad_reduce": {"format": "bf16"}}
    alike = {"gradient_clipping": 0.0, "optimizer": None, "zero_allow_untested_optimizer": True}
    moved = ranks(2, degrade, section, "auto", None, ["model.layers.0", "model.layers.1"], 5, alike)
    twins = ranks(2, degrade, {"enabled": False}, "auto", None, (), 5, alike)
    assert [result[0] for result in moved] == [result[0] for result in twins]
    assert all(torch.equal(weight, twins[0][4][name]) for name, weight in moved[0][4].items())


# ---------------------------------------------------------------- what a run leaves


def figures(snr_db=31.0, flushed=0.01):
    return CastFigures(2.0, 0.0, flushed, snr_db, 2.0**-10, 2.0**-8)


def test_a_record_has_every_figure_of_every_site():
    measurement = {"input": {"a": figures(), "b": figures(snr_db=None)}, "grad_weight": {}}
    record = json.loads(json.dumps(health_record(7, measurement)))
    assert record["step"] == 7
    assert record["health"]["sites"] == ["a", "b"]
    assert record["health"]["input"]["snr_db"] == [31.0, None]
    assert record["health"]["input"].keys() == set(FIGURES)
    assert "grad_weight" not in record["health"]


def test_curves_leave_out_what_is_not_known():
    curves = health_curves({"input": {"a": figures(snr_db=None)}})
    assert curves == {"FP8/input/flushed/a": 0.01, "FP8/input/saturated/a": 0.0}


def run_stage(file, overrides):
    """The records of metrics.jsonl after a stage was run on these ranks."""
    stage = load_stage(file, overrides)
    train(stage)
    return read_metrics(stage.run_dir / "metrics.jsonl", 10**9)


def test_a_run_logs_its_health_and_resumes_with_the_same_layers_in_bf16(ranks, tiny, write, tmp_path, monkeypatch):
    tiny["fp8"]["monitor"] = {"every": 1, "min_snr_db": 33.0, "fallback": True}
    tiny["train"] |= {"steps": 6, "save_every": 3, "run_dir": str(tmp_path / "run")}
    tiny["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "tiny"}
    file = write(tiny)
    whole = ranks(2, run_stage, file, [])[0]
    measured = [record for record in whole if "health" in record]
    assert [record["step"] for record in measured] == [1, 2, 3, 4, 5, 6]
    assert list((tmp_path / "csv" / "tiny").glob("FP8_*snr_db*"))
    layers = layers_in_bf16(whole)
    assert layers
    assert any(record.get("event") == "degraded" for record in whole)

    again = ranks(2, run_stage, file, ["train.steps=8"])[0]
    assert layers_in_bf16(again)[: len(layers)] == layers
    assert [record["step"] for record in again if "health" in record] == list(range(1, 9))
    last = next(record for record in reversed(again) if "health" in record)
    moved = tuple(f"{layer}." for layer in layers)
    assert not any(f"{site}.".startswith(moved) for site in last["health"]["sites"])

    # Another run that goes on from there has them in BF16 before it measures anything, and says so in its report.
    others = [f"train.run_dir={tmp_path / 'branch'}", f"train.resume={tmp_path / 'run' / 'checkpoints' / 'step_6'}"]
    branch = ranks(2, run_stage, file, [*others, "train.steps=2", "fp8.monitor.every=0"])[0]
    assert layers_in_bf16(branch) == layers
    assert [record["step"] for record in branch if record.get("event") == "fallback"] == [0]
    main(["report", str(tmp_path / "branch")])
    summary = json.loads((tmp_path / "branch" / "summary.json").read_text())
    assert summary["verdict"] == "ran"
    assert summary["reason"].startswith(f"needs a look, {len(layers)} layers moved to BF16")


MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "output_router_logits": True,
}
LAYERS = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]


def test_a_run_of_a_mixture_logs_its_routing_and_reports_it(ranks, tiny, write, tmp_path):
    tiny["fp8"]["monitor"] = {"every": 2}
    tiny["model"]["config"] = MIXTURE
    tiny["train"] |= {"steps": 4, "run_dir": str(tmp_path / "run")}
    tiny["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "tiny"}
    records = ranks(2, run_stage, write(tiny), [])[0]
    measured = [record for record in records if "routing" in record]
    assert [record["step"] for record in measured] == [1, 3]
    for record in measured:
        found = record["routing"]
        assert found["layers"] == LAYERS
        assert all(0.5 < entropy <= 1 for entropy in found["entropy"])
        assert found["mean"]["entropy"] == pytest.approx(sum(found["entropy"]) / 2, abs=1e-3)
        assert all(0.25 <= share <= 0.5 for share in found["largest_share"])
        assert all(0 <= count <= 2 for count in found["experts_without_tokens"])
        assert 1.9 < record["auxiliary_loss"] < 4  # top_k where all experts get as many tokens
    names = {file.name for file in (tmp_path / "csv" / "tiny").glob("Routing_*")}
    assert {"Routing_entropy_mean.csv", "Routing_auxiliary_loss.csv"} <= names
    main(["report", str(tmp_path / "run")])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "entropy of tokens per expert, end" in page
    assert "Auxiliary loss" in page
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stages"]["run"]["fp8"]["routing"] == {
        **measured[-1]["routing"]["mean"],
        "auxiliary_loss": measured[-1]["auxiliary_loss"],
    }


def test_a_log_that_goes_back_forgets_layers_but_a_run_does_not(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", [], writes=True)
    log.append({"step": 3, "event": "fallback", "layers": ["a"]})
    log.go_back(2)
    assert layers_in_bf16(log.records) == []
