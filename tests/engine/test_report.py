"""The start report: what is in FP8 and what is not, as it is printed."""

import contextlib
import io

import pytest
import torch

from tests.layers.hugging_face import causal_lm
from tests.zero import models


def printed(architecture, changes, section):
    """(the start report, what rank 0 printed of it, in one line) of one rank."""
    import ds_fp8

    model = causal_lm(architecture, **changes)
    fp8 = {**section, "linear": {"backend": "reference"}}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        engine = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=models.config(fp8))[0]
    report = engine.fp8.report
    engine.destroy()
    return report, " ".join(output.getvalue().replace("│", " ").split())


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 320}


def test_experts_that_stay_bf16_are_said_first_and_little_fp8_is_a_warning(ranks):
    experts = {**MOE, "moe_intermediate_size": 264}
    (report, text), (_, silent) = ranks(2, printed, "qwen3_moe", experts, {})
    share = sum(part["parameters"] for part in report["kept_in_bf16"][:2]) / report["parameters"]
    assert text.index(f"{share:.0%} of the parameters stay BF16: experts") < text.index("linears in FP8")
    in_fp8 = report["fp8_parameters"] / report["parameters"]
    assert in_fp8 < 1 / 3
    assert f"only {in_fp8:.0%} of the parameters are in FP8" in text
    assert "a router or gate: 2 tensors, 4,096 parameters" in text
    assert "experts, matrices of 256 x 264 do not divide into 128x128 blocks: 2 tensors" in text
    assert silent == ""


def test_experts_gathered_in_fp8_count_with_their_share(ranks):
    report, text = ranks(2, printed, "qwen3_moe", {**MOE, "moe_intermediate_size": 256}, {})[0]
    experts = 2 * 8 * 3 * 256 * 256
    assert report["fp8_gathered_experts"] == experts
    share = experts / report["parameters"]
    assert f"experts {share:.1%} of the parameters: gathered in FP8, decoded and multiplied in BF16" in text
    assert "stay BF16" not in text
    assert "only" not in text
    kept = sum(part["parameters"] for part in report["kept_in_bf16"])
    assert report["fp8_parameters"] + experts + kept == report["parameters"]
    gathered = 2 * report["parameters"] - report["fp8_gathered_parameters"]
    assert report["gathered_bytes_per_parameter"] == gathered / report["parameters"]
    attention = report["fp8_parameters"]
    layers = attention + experts
    ratio = layers / (attention + experts / 4)
    assert report["expert_parallelism_below_tokens"] == pytest.approx(3 / 2 / 400e9 * 310e12 / 6 * ratio, rel=0.02)
    assert f"below about {report['expert_parallelism_below_tokens']:,} tokens a GPU" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="attention in FP8 is emulated on a CPU alone")
def test_attention_in_fp8_and_what_of_it_is_not(ranks):
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    report, text = ranks(2, printed, "qwen2", window, {"attention": {"format": "e4m3"}})[0]
    assert report["fp8_attention_layers"] == 1
    assert "1 layers e4m3, gradients e5m2 (emulated), in rows without padding" in text
    assert "model.layers.1.self_attn: it has a sliding window" in text


def test_every_parameter_of_a_partitioned_model_is_accounted_for(ranks):
    report, text = ranks(2, printed, "llama", {}, {"graph": "auto"})[0]
    assert "CUDA graphs off: there is no CUDA device" in text
    kept = sum(part["parameters"] for part in report["kept_in_bf16"])
    assert report["fp8_parameters"] + kept == report["parameters"]
    assert "stay BF16" not in text
    assert "only" not in text


def notes_on_loaded_weights(folder, section):
    """Notes of the start report on the preset, for a model that `from_pretrained` reads."""
    from transformers import AutoModelForCausalLM

    import ds_fp8

    model = AutoModelForCausalLM.from_pretrained(folder)
    config = models.config({**section, "linear": {"backend": "reference", **section.get("linear", {})}})
    engine = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    notes = [note for note in engine.fp8.report["notes"] if "preset" in note]
    engine.destroy()
    return notes


def test_who_loads_weights_and_names_no_preset_hears_of_precise(ranks, tmp_path):
    causal_lm("llama").save_pretrained(tmp_path)
    (note,) = ranks(1, notes_on_loaded_weights, str(tmp_path), {})[0]
    assert str(tmp_path) in note
    assert '"preset": "precise"' in note
    for made in ({"preset": "infir2"}, {"linear": {"outlier_channels": 64}}):
        assert ranks(1, notes_on_loaded_weights, str(tmp_path), made)[0] == []
    assert ranks(1, printed, "llama", {}, {})[0][0]["notes"] == [
        "emulated arithmetic: the numerics of FP8, slower than BF16"
    ]
