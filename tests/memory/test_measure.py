"""Layers measured on the meta device: what is counted, longer rows, and models of all kinds."""

import pytest
import torch
from transformers import AutoConfig

from ds_fp8.memory import activations, read_workload
from ds_fp8.memory.measure import Live
from tests.memory import workloads
from tests.memory.workloads import MOE

KIB = 1024
MULTIPLIED = {"linear": {"expert_products": "fp8"}}


def kib(n):
    return torch.empty(n * KIB, dtype=torch.uint8, device="meta")


def most(live):
    total = largest = 0
    for number, size in live.changes:
        total += size
        largest = largest if number else max(largest, total)
    return largest // KIB


def test_storages_count_until_their_last_reference_goes():
    given = kib(100)
    with Live() as live:
        live.ignore(given)
        x = kib(1)
        y = (x + 1)[: KIB // 2]  # a view keeps all of its storage
        del x
        z = given * 2
        assert live.bytes == 101 * KIB
        del y, z
        assert live.bytes == 0
    assert most(live) == 101


def test_a_kernel_counts_by_its_inputs_and_results():
    def reference(x):
        return x.float().sum(), x * 2  # 4 KiB of temporaries

    with Live() as live:
        x = kib(1)
        for _ in range(3):
            result = live.run(reference, x)
        del x, result
    assert most(live) == 3  # x, and the results of this call and of the one before


@pytest.mark.parametrize(
    ("section", "tokens"),
    [
        *((section, 2048 + 77) for section in ({}, {"fuse": "off"}, {"preset": "tensorwise"}, {"enabled": False})),
        (MULTIPLIED, 2048 + 77),
        (MULTIPLIED, 2048 + 3 * 128),
        ({"activations": {"mlp_tile_tokens": 128}}, 20 * 128 + 77),
        ({}, 2048),
    ],
)
def test_long_rows_take_what_shorter_ones_say(section, tokens):
    """Measured at few tokens and continued: the same as measured at all of them."""
    model = MOE if section is MULTIPLIED else {}
    w = read_workload(workloads.stage(fp8=section, model={"config": model}, data={"sequence_length": tokens}))
    w = w.resized("micro_batch", 1)
    layer = w.model.layers[0]
    found = activations.measured(layer, w)
    how = activations.Attention(1, False, True)
    assert found == activations._recorded(w.model, layer, tokens, how, True).measured


SIZES = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
    "num_key_value_heads": 4, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Models that no formula describes: states and convolutions, one product for q, k and v
OTHERS = {
    "mamba": {"state_size": 16},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 64},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
              "num_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "gpt_neox": {},
    "phi3": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("section", [{"enabled": False}, {}], ids=["bf16", "fp8"])
def test_models_that_no_formula_describes(kind, section):
    config = AutoConfig.for_model(kind, **{**SIZES, **OTHERS[kind]})
    w = read_workload(workloads.stage(fp8=section), model=config, sequence_length=128)
    kept = workloads.kept_of(config, w.fp8, 2, 128)
    found = sum(activations.kept(layer, w) for layer in w.model.layers)
    # Embeddings, cos and sin and the norm besides
    assert found == pytest.approx(kept, rel=0.1)
    assert all(activations.workspace(layer, w) > 2 * w.tokens * 128 for layer in w.model.layers)
