"""Folders of models whose parts have other names, shapes or types in them than in transformers."""

import json

import pytest
import torch
from architectures import check, wrong
from deepspeed import comm as dist
from tiny_models import tiny_config
from transformers import AutoModelForImageTextToText
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_fp8
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.export import export_checkpoint, export_engine
from ds_fp8.export.plan import make_plan
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.published import IN_PARTS
from ds_fp8.zero.deepspeed.parameters import is_zero_parameter
from tests.export.trained import tensors
from tests.layers.moe import mixture
from tests.zero import models
from tests.zero.test_experts import train

TYPES = {
    "deepseek_v3": "a buffer, and shared experts",
    "qwen2_moe": "shared experts",
    "granitemoe": "experts in one 3-D tensor",
    "qwen2_5_vl": "names of the language model",
    "gemma4": "buffers of every layer",
    "olmo_hybrid": "a convolution in three parts",
    "hrm_text": "joined linear layers, in BF16 only",
}


@pytest.mark.parametrize("kind", TYPES)
def test_names_buffers_and_numbers_are_those_of_save_pretrained_and_of_the_engine(ranks, tmp_path, kind):
    result = ranks(2, check, kind, tmp_path, ("exports",), 1)[0]
    assert result["status"] == "trained", json.dumps(result)
    assert result["exports"].keys() == {"bf16", "fp8"}
    assert not wrong(result)


def names_after_zero_init(folder):
    """Names of the folder that a model came from, and those that it would be exported by."""
    saved = folder / "saved"
    AutoModelForImageTextToText.from_config(tiny_config("llava"), dtype=torch.bfloat16).save_pretrained(saved)
    dist.barrier()
    configuration = HfDeepSpeedConfig(models.config())  # kept, or transformers forgets it
    try:
        model = AutoModelForImageTextToText.from_pretrained(saved, dtype=torch.bfloat16)
    finally:
        unset_hf_deepspeed_config()
    assert configuration.is_zero3()
    assert all(is_zero_parameter(parameter) for parameter in model.parameters())
    plan = make_plan(model, {}, parse_fp8({"fp8": {}}).linear, "bf16")
    return set(tensors(saved)), {name for entry in plan.entries for name in entry.tensors(plan)}


def test_a_model_born_under_zero_init_has_the_names_of_its_folder(ranks, tmp_path):
    for saved, exported in ranks(2, names_after_zero_init, tmp_path):
        assert exported == saved


def test_a_linear_layer_that_folders_hold_in_parts_is_in_bf16_by_all_its_names():
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(tiny_config("minimax_m3_vl"), dtype=torch.bfloat16)
    plan = make_plan(model, {}, parse_fp8({"fp8": {}}).linear, "fp8")
    stored = "language_model.model.layers.0.block_sparse_moe.shared_experts."
    names = {f"{stored}gate_proj", f"{stored}up_proj", "model.language_model.layers.0.mlp.shared_experts.gate_up_proj"}
    assert {plan.left.get(name) for name in names} == {IN_PARTS}
    assert {name for entry in plan.entries for name in entry.tensors(plan)} > {f"{stored}up_proj.weight"}


def checkpoint_and_exports(folder):
    model = mixture("deepseek_v3")
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(1, 1.3, buffer.numel()))
    # ZeRO keeps the first of the weights below the one threshold whole, until they are as many as the other says.
    config = models.config({}, stage3_param_persistence_threshold=40_000, stage3_model_persistence_threshold=50_000)
    engine = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    train(engine, 2)
    engine.save_checkpoint(str(folder / "checkpoints"), tag="step_2")
    for layout in ("fp8", "bf16"):
        export_engine(engine, folder / layout, layout=layout)
    small = [m.weight for m in model.modules() if isinstance(m, FP8Linear) and m.weight.ds_numel <= 40_000]
    return {engine.fp8.weights.in_fp8(weight) for weight in small}


def test_a_checkpoint_gives_the_bytes_of_the_engine_with_buffers_and_both_thresholds(ranks, tmp_path):
    assert ranks(2, checkpoint_and_exports, tmp_path)[0] == {False, True}
    for layout in ("fp8", "bf16"):
        out, checkpoint = tmp_path / f"again_{layout}", tmp_path / "checkpoints/step_2"
        export_checkpoint(checkpoint, out, mixture("deepseek_v3").config, parse_fp8({"fp8": {}}), layout=layout)
        found, again = tensors(tmp_path / layout), tensors(out)
        assert again.keys() == found.keys()
        for name, tensor in found.items():
            assert again[name].dtype is tensor.dtype
            assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8)), name
