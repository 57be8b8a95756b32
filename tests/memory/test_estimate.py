"""Estimates against the tensors of real engines: what lasts to the byte, and the most that is there in a step."""

import gc

import pytest
import torch

import ds_fp8
import ds_fp8.research  # of the preset "fishman"
from ds_fp8.config.presets import merge, preset_values
from ds_fp8.memory import estimate
from ds_fp8.memory.states import EMULATED
from ds_fp8.optim import AdamW
from tests.memory import workloads

PEAK = 0.08  # Relative: the aim of the estimates

ROWS, LENGTH = 2, 512
LEAF = {"leaf_module": {"classes": ["transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer"]}}
EVERY_GATHER = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, **LEAF}
FOUR_LAYERS = {"config": {"num_hidden_layers": 4}}  # What little is kept of a layer must be much beside what comes once
CASES = {
    "bf16": {"fp8": {"enabled": False}},
    "infir2": {},
    "outlier channels": {"fp8": {"preset": "precise"}},
    "longer rows": {"data": {"sequence_length": 2 * LENGTH}},
    "longer rows, MLP in tiles": {
        "fp8": {"activations": {"mlp_tile_tokens": 256}},
        "data": {"sequence_length": 4 * LENGTH},
        "model": FOUR_LAYERS,
    },
    "adapters of some linears": {"train": {"lora": {"targets": ["q_proj", "down_proj"], "dropout": 0.1}}},
    "adapters, base whole": {"train": {"lora": {}}, "fp8": {"preset": "precise", "param_gather": {"frozen": "whole"}}},
    "adapters in BF16": {"train": {"lora": {}}, "fp8": {"enabled": False}},
    "scales by tensor": {"fp8": {"preset": "fp8lm_o2"}},
    "masters of codes, compressed moments": {
        "fp8": {"preset": {"linear": "precise", "optimizer": "compact"}},
        "model": FOUR_LAYERS,
    },
    "gradients kept in BF16": {"data_types": {"grad_accum_dtype": "bf16"}, "gradient_accumulation_steps": 1},
}


def live_bytes() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def measured(raw):
    """(bytes of tensors between steps, the most during one) of a rank, beyond those that were there before."""
    before = live_bytes()
    model = workloads.model_of(raw)
    if raw["model"].get("activation_checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = {key: value for key, value in raw.items() if key not in ("model", "data", "train")}
    engine = ds_fp8.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
    )[0]
    length = raw["data"]["sequence_length"]
    ids = torch.randint(0, 97, (ROWS, length))
    positions = torch.arange(length).expand(ROWS, length).contiguous()

    def step():
        loss = engine(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss
        engine.backward(loss)
        engine.step()

    step()
    most = workloads.most_allocated(step, steps=3)
    lasting = live_bytes() - before - sum(t.nbytes for t in (ids, positions))
    engine.destroy()
    return lasting, lasting + most


def small(**changes):
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2}
    raw = workloads.stage(model={"config": sizes}, data={"sequence_length": LENGTH}, zero_optimization=EVERY_GATHER)
    return merge(raw, {"train_micro_batch_size_per_gpu": ROWS, **changes})


SLOW = {"longer rows, MLP in tiles": pytest.mark.slow}
# Those that change what is sent; the others add to what each rank has by itself
ON_TWO = ("bf16", "infir2", "outlier channels", "longer rows, MLP in tiles", "adapters, base whole")
ON_TWO += ("gradients kept in BF16",)  # of which one rank's step, a bound on a CPU, would be the peak


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [pytest.param(changes, 1 + (name in ON_TWO), id=name, marks=SLOW.get(name, ())) for name, changes in CASES.items()],
)
def test_a_step_takes_what_is_estimated(ranks, changes, gpus):
    raw = small(**changes)
    expected = estimate(raw, gpus=gpus, device="cpu")
    for lasting, peak in ranks(gpus, measured, raw):
        assert lasting == pytest.approx(expected.lasting_bytes, rel=1e-3)
        assert peak == pytest.approx(expected.peak_bytes, rel=PEAK)


def made(raw):
    """The most that was there while an engine was made, its BF16 weights included."""
    model, engines = workloads.model_of(raw), []
    config = {key: value for key, value in raw.items() if key not in ("model", "data", "train")}
    given = {"model": model, "model_parameters": list(model.parameters()), "config": config}
    most = workloads.most_allocated(lambda: engines.append(ds_fp8.initialize(**given)[0]))
    engines[0].destroy()
    return most


CAST = 29  # Bytes an element that the first cast of a weight takes, in torch, one weight after the other


def test_masters_of_codes_are_made_without_fp32_ones(ranks):
    changes = merge(CASES["masters of codes, compressed moments"], CASES["gradients kept in BF16"])
    raw = small(**merge(changes, {"zero_optimization": {"sub_group_size": 100_000}}))
    expected = estimate(raw, gpus=1, device="cpu")
    kinds = "master weights", "gradient shards", "FP8 weights"  # moments are made by the first step
    weights = expected.workload.model.parameters
    most = sum(expected.peak.parts[kind] for kind in kinds)
    most += 2 * sum(p.numel for p in weights) + CAST * max(p.numel for p in weights if p.in_fp8)
    assert ranks(1, made, raw)[0] == pytest.approx(most, rel=PEAK)


def test_checkpointed_layers(ranks):
    raw = small(fp8={"enabled": False}, model={"activation_checkpointing": True, **FOUR_LAYERS})
    expected = estimate(raw, gpus=1, device="cpu")
    for _, peak in ranks(1, measured, raw):
        assert peak == pytest.approx(expected.peak_bytes, rel=PEAK)


@pytest.mark.parametrize(
    ("section", "train", "gpus"),
    [({}, {}, 2), ({"enabled": False}, {}, 1), ({}, {"lora": {}}, 1)],
    ids=["fp8", "bf16", "adapters"],
)
def test_a_step_with_experts(ranks, section, train, gpus):
    sizes = {**workloads.MOE, "num_hidden_layers": 3}
    raw = workloads.stage(model={"config": sizes}, data={"sequence_length": LENGTH}, zero_optimization=EVERY_GATHER)
    raw = merge(raw, {"train_micro_batch_size_per_gpu": ROWS, "fp8": section, "train": train})
    expected = estimate(raw, gpus=gpus, device="cpu")
    # The step's part is a bound on a CPU, where it emulates what a GPU does in registers.
    computing = max(phase.total for phase in expected.phases if phase.name != "the optimizer step")
    for lasting, peak in ranks(gpus, measured, raw):
        assert lasting == pytest.approx(expected.lasting_bytes, rel=2e-3)
        assert peak == pytest.approx(computing, rel=PEAK)


def test_experts_in_fp8_take_less():
    raw = workloads.stage(model={"config": {**workloads.MOE, "num_hidden_layers": 8}}, data={"sequence_length": 256})
    fp8, bf16 = (estimate(merge(raw, {"fp8": section}), gpus=8) for section in ({}, {"enabled": False}))
    assert fp8.peak_bytes < 0.85 * bf16.peak_bytes


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize("preset", ["infir2", "precise"])
def test_states_of_8b_take_7_3_bytes_a_parameter(preset):
    """Embedding, head and vectors included, with `compact` and BF16 gradients on one GPU."""
    raw = merge(
        small(**CASES["gradients kept in BF16"]), {"fp8": {"preset": {"linear": preset, "optimizer": "compact"}}}
    )
    found = estimate({**raw, "model": {"config": LLAMA_8B}}, gpus=1)
    assert 8.0e9 < found.workload.model.numel < 8.1e9
    assert 7.2 < found.lasting_bytes / found.workload.model.numel <= 7.3


NUMEL = 1 << 20
CAUTION = 1.3  # How much more than it takes may be counted
KEPT = {
    **{name: preset_values(name)["optimizer"] for name in ("coat", "fishman", "fp8lm_o2", "fp8lm_o3")},
    "e4m3": {"exp_avg": "e4m3", "exp_avg_sq": "e4m3"},
    "bf16": {"exp_avg": "bf16", "exp_avg_sq": "bf16"},
}


@pytest.mark.parametrize("at_random", [True, False], ids=["auto", "nearest"])
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_an_emulated_step_takes_what_is_counted(kept, at_random):
    p = torch.nn.Parameter(torch.randn(NUMEL))
    p.grad = 1e-3 * torch.randn(NUMEL)
    optimizer = AdamW([p], **kept, stochastic_rounding=at_random)
    optimizer.set_segments(p, (NUMEL,))
    optimizer.step()
    counted = NUMEL * EMULATED[optimizer.precision.granularity][bool(optimizer.precision.stochastic_parts)]
    taken = workloads.most_allocated(optimizer.step)
    assert taken <= 1.01 * counted
    assert counted <= CAUTION * taken
