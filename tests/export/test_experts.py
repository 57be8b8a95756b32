"""Folders of models whose parts have other names and shapes in them than in transformers, first of all experts."""

import json
import re
from importlib.util import find_spec

import pytest
import torch
from architectures import check, wrong
from deepspeed import comm as dist
from tiny_models import auto_class, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_fp8
from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.export import export_checkpoint, export_engine, served_weights
from ds_fp8.export.plan import make_plan, quantization_config
from ds_fp8.layers.experts.selection import names_of_experts
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.published import IN_PARTS
from ds_fp8.zero.deepspeed.parameters import is_zero_parameter
from tests.export.trained import tensors
from tests.layers.moe import EXPERTS, mixture
from tests.refusals import refused
from tests.zero import models
from tests.zero.test_experts import engine_of, train

# Router, experts, gate, up and down, as in the folders that Qwen and Mistral published
NAMES = {
    "qwen3_moe": ("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
}


def trained_and_exported(folder, architecture, section):
    """By name what is served, and the masters of the experts; a folder and a checkpoint are written."""
    engine = engine_of(architecture, section)
    train(engine, 2)
    engine.save_checkpoint(str(folder / "checkpoints"), tag="step_2")
    for layout in ("fp8", "bf16"):
        export_engine(engine, folder / layout, layout=layout)
    served = {name: (codes.clone(), scales) for name, codes, scales in served_weights(engine)}
    weights = dict(engine.module.named_parameters())
    masters = {name: models.full_master(weights[name]) for name in weights if ".experts." in name}
    return {name: (codes.view(torch.uint8), scales) for name, (codes, scales) in served.items()}, masters


@pytest.fixture(params=NAMES, scope="module")
def exported(request, ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, *ranks(2, trained_and_exported, folder, request.param, {})[0]


def decoded(found, name):
    scale = found[f"{name}.weight_scale_inv"]
    return QuantizedTensor(found[f"{name}.weight"], scale, "128x128", "pow2").dequantize()


def test_every_expert_is_stored_under_its_published_names(exported):
    architecture, folder, _, masters = exported
    found, whole = tensors(folder / "fp8"), tensors(folder / "bf16")
    router, experts, gate, up, down = NAMES[architecture]
    for layer in (0, 1):
        prefix = f"model.layers.{layer}."
        gate_up = masters[f"{prefix}mlp.experts.gate_up_proj"]
        downs = masters[f"{prefix}mlp.experts.down_proj"]
        for number in range(EXPERTS):
            expected = dict(zip((gate, up, down), (*gate_up[number].chunk(2), downs[number]), strict=True))
            for part, master in expected.items():
                name = f"{prefix}{experts}.{number}.{part}"
                assert found[f"{name}.weight"].dtype is torch.float8_e4m3fn
                assert (decoded(found, name) - master).norm() < 0.04 * master.norm()
                assert torch.equal(whole[f"{name}.weight"], master.bfloat16())
        assert found[f"{prefix}{router}.weight"].dtype is torch.bfloat16
    assert not any("gate_up_proj" in name or name.endswith("experts.down_proj") for name in (*found, *whole))
    section = json.loads((folder / "fp8" / "config.json").read_text())["quantization_config"]
    assert f"model.layers.0.{router}" in section["modules_to_not_convert"]
    assert not any("experts" in name for name in section["modules_to_not_convert"])


def test_transformers_reads_them(exported):
    architecture, folder, _, masters = exported
    found = tensors(folder / "fp8")
    _, experts, _, _, down = NAMES[architecture]
    for layout in ("fp8", "bf16"):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder / layout, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        for name, weight in model.named_parameters():
            if name in masters:
                error = (weight.float() - masters[name]).norm() / masters[name].norm()
                assert error < (0.04 if layout == "fp8" else 0.004), name
        if layout == "fp8":
            read = model.get_parameter("model.layers.1.mlp.experts.down_proj")[3]
            assert torch.equal(read.float(), decoded(found, f"model.layers.1.{experts}.3.{down}"))


def test_served_weights_and_checkpoints_are_the_same_bytes(exported):
    architecture, folder, served, _ = exported
    found = tensors(folder / "fp8")
    assert served.keys() == {name for name in found if not name.endswith("_scale_inv")}
    for name, (codes, scales) in served.items():
        assert torch.equal(codes, found[name].view(torch.uint8)), name
        assert (scales is None) == (f"{name}_scale_inv" not in found)
        assert scales is None or torch.equal(scales, found[f"{name}_scale_inv"])
    zero = models.config()
    out = folder / "from_checkpoint"
    export_checkpoint(
        folder / "checkpoints" / "step_2",
        out,
        mixture(architecture).config,
        parse_fp8({"fp8": {}}),
        deepspeed_config=zero,
    )
    again = tensors(out)
    assert again.keys() == found.keys()
    for name, tensor in found.items():
        assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("architecture", NAMES)
def test_experts_that_were_trained_in_bf16_are_stored_so(ranks, tmp_path, architecture):
    section = {"linear": {"overrides": {"layers.0.mlp.experts.down_proj": "bf16"}}}
    ranks(2, trained_and_exported, tmp_path, architecture, section)
    found = tensors(tmp_path / "fp8")
    _, experts, *matrices = NAMES[architecture]
    for layer, dtype in ((0, torch.bfloat16), (1, torch.float8_e4m3fn)):
        for part in matrices:
            assert found[f"model.layers.{layer}.{experts}.0.{part}.weight"].dtype is dtype
    section = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    named = {name for name in section["modules_to_not_convert"] if "experts" in name}
    # transformers has one name for both architectures, and folders their own.
    assert named == {"model.layers.0.mlp.experts", f"model.layers.0.{experts}"}


def test_compressed_tensors_leaves_out_every_matrix_of_experts_in_bf16():
    cast = parse_fp8({"fp8": {"preset": "rowwise"}}).linear.weight
    left = ["lm_head", "model.layers.0.mlp.experts", "model.layers.0.mlp.gate"]
    patterns = quantization_config("compressed-tensors", cast, left)["ignore"]

    def ignored(name):  # as vLLM and compressed-tensors read them
        return any(re.match(p[3:], name) if p.startswith("re:") else p == name for p in patterns)

    assert all(ignored(f"model.layers.0.mlp.experts.{e}.{part}") for e in (0, 17) for part in ("up_proj", "w2"))
    assert ignored("model.layers.0.mlp.gate")
    assert not ignored("model.layers.10.mlp.experts.0.up_proj")
    assert not ignored("model.layers.0.mlp.shared_expert.up_proj")


def test_experts_that_a_folder_has_in_one_tensor_are_named_without_its_ending():
    small = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
    shape = {**small, "num_attention_heads": 1, "num_key_value_heads": 1, "num_local_experts": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("granitemoe", **shape), dtype=torch.bfloat16)
    left = dict.fromkeys(names_of_experts(model), "in BF16 in training")
    plan = make_plan(model, left, parse_fp8({"fp8": {}}).linear, "fp8")
    layer = "model.layers.0.block_sparse_moe"
    assert {name for name, why in plan.left.items() if why == "experts in BF16"} == {
        f"{layer}.experts",
        f"{layer}.input_linear",
        f"{layer}.output_linear",
    }


# ---------------------------------------------------------------- other names and shapes than in transformers


TYPES = {
    "deepseek_v3": "a buffer, and shared experts",
    "granitemoe": "experts in one 3-D tensor",
    "qwen2_5_vl": "names of the language model",
    "gemma4": "buffers of every layer",
    "olmo_hybrid": "a convolution in three parts",
    "kimi_k25": "joined linear layers of a tower",
}


@pytest.mark.parametrize("kind", TYPES)
def test_names_buffers_and_numbers_are_those_of_save_pretrained_and_of_the_engine(ranks, tmp_path, kind):
    result = ranks(2, check, kind, tmp_path, ("exports",), 1)[0]
    assert result["status"] == "trained", json.dumps(result)
    assert result["exports"].keys() == {"bf16", "fp8"}
    assert all(found.startswith("right") for found in result["exports"].values()), result["exports"]
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


def test_tied_weights_have_the_name_that_save_pretrained_keeps(tmp_path):
    model = AutoModelForCausalLM.from_config(tiny_config("camembert"), dtype=torch.bfloat16)
    assert "lm_head.decoder.weight" in dict(model.named_parameters())  # not that of the embeddings, which come later
    model.save_pretrained(tmp_path)
    for layout in ("bf16", "fp8"):
        plan = make_plan(model, {}, parse_fp8({"fp8": {}}).linear, layout)
        names = {name for entry in plan.entries for name in entry.tensors(plan)}
        assert {name for name in names if not name.endswith("_scale_inv")} == tensors(tmp_path).keys()


# Inkling's has joined layers in its mapping alone: this configuration has only experts
@pytest.mark.parametrize("kind", ["hrm_text", *(["inkling_mm_model"] if find_spec("scipy") else [])])
def test_a_model_that_transformers_cannot_read_in_fp8_is_refused(kind):
    with torch.device("meta"):
        model = auto_class(kind).from_config(tiny_config(kind), dtype=torch.bfloat16)
    assert make_plan(model, {}, parse_fp8({"fp8": {}}).linear, "bf16").entries
    with refused("transformers cannot read it in FP8"):
        make_plan(model, {}, parse_fp8({"fp8": {}}).linear, "fp8")


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
