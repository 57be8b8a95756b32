"""What estimates measure on the meta device, compared with what autograd really keeps."""

import pytest
import torch

from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.layers.attention import documents
from ds_fp8.memory import activations, estimate, read_workload
from tests.layers.test_sequence_parallel import shared
from tests.memory import workloads
from tests.memory.workloads import MOE

CASES = {
    "bf16": {"enabled": False},
    "fused": {},
    "fused, gate and up in BF16": {"activations": {"save": "bf16"}},
    "fused, MLP recomputed": {"activations": {"recompute": "mlp"}},
    "fused, MLP in tiles, activations in BF16": {"activations": {"mlp_tile_tokens": 128, "save": "bf16"}},
    "linear by linear": {"fuse": "off"},
    "linear by linear, inputs in BF16": {"fuse": "off", "activations": {"save": "bf16"}},
    "tensorwise": {"preset": "tensorwise"},
    "rowwise": {"preset": "rowwise"},
    "outlier channels": {"preset": "precise"},
    "outlier channels, linear by linear": {"preset": "precise", "fuse": "off"},
    "attention in BF16": {"linear": {"skip": ["lm_head", "self_attn"]}},
    "MLP in BF16": {"linear": {"skip": ["lm_head", "mlp"]}},
    "Smooth-SwiGLU": {"preset": "fishman"},
    "layers cast in several ways": {
        "fuse": "off",
        "linear": {"overrides": {"*.down_proj": {"input": {"granularity": "row"}}, "layers.0.self_attn": "bf16"}},
    },
    "one linear in FP8": {"linear": {"skip": ["lm_head", "mlp", "v_proj", "o_proj", "q_proj"]}},
}
ADAPTERS = {
    "all linears": ({}, {}),
    "with dropout": ({"dropout": 0.1}, {}),
    "attention": ({"targets": ["q_proj", "o_proj"]}, {}),
    "linear by linear": ({"dropout": 0.1}, {"fuse": "off"}),
    "bf16": ({}, {"enabled": False}),
}
SHARED_EXPERT = {**MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 384}
DECODED, MULTIPLIED = {"linear": {"expert_products": "bf16"}}, {"linear": {"expert_products": "fp8"}}
EXPERTS = {
    "fused": DECODED,
    "linear by linear": {**DECODED, "fuse": "off"},
    "bf16": {"enabled": False},
    "multiplied in fp8": MULTIPLIED,
    "kept in bf16": {**MULTIPLIED, "activations": {"save": "bf16"}},
    "gate and up again": {**MULTIPLIED, "activations": {"recompute": "mlp"}},
}
SLIDING = {"model_type": "gemma3_text", "head_dim": 64, "sliding_window": 64}


def of_decoder(w):
    """What the decoder keeps: its layers, its norm without the head's input, ids where they are learnt, cos and sin."""
    of_layers = sum(activations.kept(layer, w) for layer in w.model.layers)
    norm = activations.final_norm(w) - 2 * w.tokens * w.model.hidden
    ids = 8 * w.tokens * any(parameter.trainable for parameter in w.model.outside)
    return of_layers + norm + ids + 4 * w.tokens * w.model.layers[0].attention.head_dim


def measured_and_estimated(raw, rows, length, device="cuda"):
    raw["train_micro_batch_size_per_gpu"] = rows
    raw["data"]["sequence_length"] = length
    model, fp8 = workloads.model_of(raw), parse_fp8(raw)
    if fp8.enabled:
        convert(model, fp8)
    return workloads.kept_bytes(model, rows, length), of_decoder(read_workload(raw, device=device))


@pytest.mark.parametrize("section", CASES.values(), ids=CASES)
def test_layers_keep_what_the_measured_ones_do(section):
    raw = workloads.stage(fp8=section, zero_optimization={"stage": 3})
    kept, expected = measured_and_estimated(raw, 2, 128)
    assert kept == pytest.approx(expected, rel=1e-4)  # a GPU pads rows of scales to 16 bytes


@pytest.mark.parametrize(("lora", "section"), ADAPTERS.values(), ids=ADAPTERS)
def test_layers_with_adapters_keep_what_the_measured_ones_do(lora, section):
    raw = workloads.stage(fp8=section, zero_optimization={"stage": 3}, train={"lora": lora})
    kept, expected = measured_and_estimated(raw, 2, 128)
    assert kept == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="attention in FP8 is emulated on a CPU alone")
@pytest.mark.parametrize("fuse", ["auto", "off"])
def test_attention_in_fp8_keeps_half_in_rows_of_one_document(fuse):
    raw = workloads.stage(fp8={"fuse": fuse, "attention": {"format": "e4m3"}})
    kept, expected = measured_and_estimated(raw, 2, 128, "cpu")
    scales = 4 * 4  # of q, k and v, and the norm of v
    assert expected - kept == 3 * (2 * 128 * 4 * 256 - scales)  # a byte less of each q, k, v and output in 3 layers


@pytest.mark.skipif(torch.cuda.is_available(), reason="attention in FP8 is emulated on a CPU alone")
@pytest.mark.parametrize("fuse", ["auto", "off"])
def test_auto_counts_bf16_in_short_rows_and_fp8_in_long_ones(fuse, monkeypatch):
    def of(attention, long):
        monkeypatch.setattr(documents, "LONG", long)
        raw = workloads.stage(fp8={"fuse": fuse, "attention": {"format": attention}})
        return measured_and_estimated(raw, 2, 128, "cpu")

    kept, expected = of("auto", 129)
    assert kept == expected
    assert of("auto", 128) == of("e4m3", 128)
    assert kept != of("e4m3", 128)[0]


@pytest.mark.parametrize(("rows", "length"), [(1, 96), (3, 200), (1, 513)])
@pytest.mark.parametrize("section", [{}, {"enabled": False}, {"fuse": "off"}], ids=["fused", "bf16", "linear"])
def test_ragged_numbers_of_tokens(section, rows, length):
    kept, expected = measured_and_estimated(workloads.stage(fp8=section), rows, length)
    assert kept == expected


@pytest.mark.parametrize("section", [{}, {"enabled": False}], ids=["fused", "bf16"])
@pytest.mark.parametrize(
    ("model", "error"),
    [
        *[({"model_type": name}, 0) for name in ("qwen3", "llama", "mistral")],
        *[({"model_type": name, "pad_token_id": 0}, 0.02) for name in ("olmo2",)],
        ({**SLIDING, "pad_token_id": 0}, 0.025),  # masks, and two kinds of positions
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_other_architectures(model, error, section):
    kept, expected = measured_and_estimated(workloads.stage(fp8=section, model={"config": model}), 2, 128)
    assert kept == pytest.approx(expected, rel=error)


@pytest.mark.parametrize(
    ("model", "train", "case"),
    [
        *((MOE, {}, case) for case in EXPERTS),
        *((SHARED_EXPERT, {}, case) for case in ("fused", "bf16", "multiplied in fp8")),
        *((MOE, {"lora": {}}, case) for case in ("fused", "multiplied in fp8", "gate and up again")),
    ],
)
def test_layers_with_experts(model, train, case):
    raw = workloads.stage(fp8=EXPERTS[case], zero_optimization={"stage": 3}, model={"config": model}, train=train)
    kept, expected = measured_and_estimated(raw, 2, 128)
    assert kept == pytest.approx(expected, rel=0.05)


SHARED = {
    "bf16": {"enabled": False},
    "fused": {},
    "fused, activations in BF16": {"activations": {"save": "bf16"}},
    "linear by linear": {"fuse": "off"},
    "linear by linear, inputs in BF16": {"fuse": "off", "activations": {"save": "bf16"}},
}


def kept_by_a_rank(raw, rows, length):
    model, fp8 = workloads.model_of(raw), parse_fp8(raw)
    with shared(model, rows):
        if fp8.enabled:
            convert(model, fp8)
        return workloads.kept_bytes(model, rows, length // 2)


@pytest.mark.parametrize("section", SHARED.values(), ids=SHARED)
def test_layers_of_ranks_that_share_rows(ranks, section):
    raw = workloads.stage(
        sequence_parallel_size=2, fp8=section, zero_optimization={"stage": 3}, data={"sequence_length": 256}
    )
    w = read_workload(raw, gpus=2)
    assert w.tokens == 2 * 128
    assert ranks(2, kept_by_a_rank, raw, 2, 256) == [of_decoder(w)] * 2


def test_checkpointing_keeps_one_input_a_layer():
    raw = workloads.stage(fp8={"enabled": False})
    model = workloads.model_of(raw)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    kept = workloads.kept_bytes(model, 2, 128)
    w = read_workload(workloads.stage(fp8={"enabled": False}, model={"activation_checkpointing": True}))
    # cos and sin are arguments, and not kept apart.
    assert kept == of_decoder(w) - 4 * w.tokens * w.model.layers[0].attention.head_dim


def long_rows(**model):
    return workloads.stage(model=model, data={"sequence_length": 4096}, fp8={"activations": {"recompute": "mlp"}})


@pytest.mark.parametrize("shared_by", [1, 2])
def test_offload_leaves_one_input_on_the_device_and_the_others_on_the_host(shared_by):
    size = {"sequence_parallel_size": shared_by}
    kept = estimate({**long_rows(activation_checkpointing=True), **size}, gpus=2)
    offloaded = estimate({**long_rows(activation_checkpointing="offload"), **size}, gpus=2)
    w = kept.workload
    of_a_layer, layers = 2 * w.tokens * w.model.hidden, len(w.model.layers)
    for before, after in zip(kept.phases, offloaded.phases, strict=True):
        inputs = {"the optimizer step": 0, "backward of the embedding": 0, "the loss": layers}
        there = inputs.get(before.name) if before.name in inputs else int(before.name.split()[3])
        # Of a layer whose input is on the device it is not made again: one more that offload has.
        one = (there > 0) + before.name.startswith("backward of layer")
        assert before.total - after.total == (there - one) * of_a_layer, before.name
    assert (kept.host_bytes, offloaded.host_bytes) == (0, layers * of_a_layer)  # a power of two
    assert offloaded.as_json()["pinned_host_bytes"] == offloaded.host_bytes


def test_offload_by_either_key_and_on_a_cpu():
    w = read_workload(workloads.stage(model={"activation_checkpointing": "offload"}, data={"sequence_length": 1152}))
    assert activations.inputs_on_host(w) == 3 * 2 * 2048 * 2 * 256, "pinned memory is rounded up to powers of two"
    raw = long_rows(activation_checkpointing="offload")
    by_deepspeed = {**long_rows(activation_checkpointing=True), "activation_checkpointing": {"cpu_checkpointing": True}}
    assert estimate(by_deepspeed).peak_bytes == estimate(raw).peak_bytes
    assert estimate(raw, device="cpu").peak_bytes > estimate(raw).peak_bytes, "nothing is moved away"
    assert activations.inputs_on_host(read_workload(raw, device="cpu")) == 0
