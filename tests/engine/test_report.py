"""The start report: what is in FP8 and what is not, as it is printed."""

import contextlib
import functools
import io

import pytest
import torch
from torch import nn

import ds_fp8
from ds_fp8.engine.report import why_slow
from tests.layers.hugging_face import causal_lm
from tests.zero import models


def printed(architecture, changes, section, special=None):
    """(the start report, what rank 0 printed of it, in one line) of one rank."""
    model = causal_lm(architecture, **changes)
    raw = models.config({"report": "full", **section, "linear": {"backend": "reference"}})
    parameters = model.parameters()
    if special == "a forward of another package":
        model.forward = functools.partial(type(model).forward, model)
    elif special == "no optimizer":
        parameters = None
        del raw["optimizer"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        engine = ds_fp8.initialize(model=model, model_parameters=parameters, config=raw)[0]
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


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("granitemoe", "exports and servers have the experts in BF16: folders hold them in one 3-D tensor"),
        ("hrm_text", "exports and servers have this model in BF16 only: folders join"),
        ("qwen2_moe", None),
    ],
)
def test_what_folders_cannot_hold_in_fp8_is_said_before_the_training(ranks, architecture, words):
    _, text = ranks(1, printed, architecture, {"num_local_experts": 4, "num_experts": 4}, {})[0]
    assert ("exports and servers" in text) == (words is not None)
    assert words is None or words in text


def test_experts_gathered_in_fp8_count_with_their_share(ranks):
    report, text = ranks(2, printed, "qwen3_moe", {**MOE, "moe_intermediate_size": 256}, {})[0]
    experts = 2 * 8 * 3 * 256 * 256
    assert report["fp8_gathered_experts"] == experts
    share = experts / report["parameters"]
    assert f"experts {share:.1%} of the parameters: all-gathered in FP8, dequantized and multiplied in BF16" in text
    assert "stay BF16" not in text
    assert "only" not in text
    kept = sum(part["parameters"] for part in report["kept_in_bf16"])
    assert report["fp8_parameters"] + experts + kept == report["parameters"]
    gathered = 2 * report["parameters"] - report["fp8_gathered_parameters"]
    assert report["gathered_bytes_per_parameter"] == gathered / report["parameters"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="attention in FP8 is emulated on a CPU alone")
def test_attention_in_fp8_and_what_of_it_is_not(ranks):
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    report, text = ranks(2, printed, "qwen2", window, {"attention": {"format": "e4m3"}})[0]
    assert report["fp8_attention_layers"] == 1
    assert "1 layers, e4m3, gradients e5m2 (emulated), in rows without padding" in text
    assert "model.layers.1.self_attn: it has a sliding window" in text


def test_every_parameter_of_a_partitioned_model_is_accounted_for(ranks):
    report, text = ranks(2, printed, "llama", {}, {"graph": "auto"})[0]
    assert "CUDA graphs off: there is no CUDA device" in text
    kept = sum(part["parameters"] for part in report["kept_in_bf16"])
    assert report["fp8_parameters"] + kept == report["parameters"]
    assert "stay BF16" not in text
    assert "only" not in text


def test_the_short_report_says_what_runs_where_in_a_few_lines(ranks):
    _, text = ranks(2, printed, "llama", {}, {"report": "short"})[0]
    said = ("linears in FP8 14 (", "in BF16 embeddings", "products input e4m3", "wire weights e4m3", "step ds_fp8;")
    assert all(words in text for words in (*said, "CUDA graphs off", "loss without logits", "preset not named"))
    assert "hosts x ranks" not in text


def test_a_forward_of_another_package_is_explained(ranks):
    _, text = ranks(1, printed, "llama", {}, {"report": "short"}, "a forward of another package")[0]
    assert "whether logits are in memory is up to it" in text
    assert "fp8.loss has no effect" in text


def test_an_engine_that_evaluates_has_no_moments(ranks):
    _, text = ranks(1, printed, "llama", {}, {"report": "short"}, "no optimizer")[0]
    assert "optimizer step none: this engine evaluates CUDA" in text


@pytest.mark.parametrize(
    ("hidden", "tokens", "words"),
    [
        ([256], 10**6, "too small"),
        ([2048], None, "from 8192 tokens"),
        ([2048, 2048, 300], 8191, "8191 tokens a GPU and micro-batch are too few"),
        ([3584], 8192, None),
        ([4096], 2047, "begins at 2048"),
        ([16384], 16384, None),
        ([], 16, None),
    ],
)
def test_a_note_only_where_fp8_does_not_pay(hidden, tokens, words):
    text = why_slow([nn.Linear(size, 8, device="meta") for size in hidden], tokens)
    assert text is None if words is None else words in text
