"""How scripts/vllm_check.py compares the tensors of vLLM with a folder's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

from scripts.vllm_check import compare_tensors


class Served(torch.nn.Module):
    """One layer as vLLM holds it: codes and scales of three stacked layers, and a norm."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, codes, scales, norm, suffix):
        super().__init__()
        self.qkv_proj, self.norm = torch.nn.Module(), torch.nn.Module()
        for module, name, tensor in ((self.qkv_proj, "weight", codes), (self.qkv_proj, suffix, scales)):
            module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.norm.register_parameter("weight", torch.nn.Parameter(norm, requires_grad=False))


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize(
    ("change", "codes_are", "scales_are"),
    [
        ("none", "equal", "equal"),
        ("codes twice as large, half the scale", "the same numbers in other bytes", "the same numbers in other bytes"),
        ("another code", "in vLLM holds other bytes than", "equal"),
        ("another scale", "equal", "in vLLM holds other bytes than"),
    ],
)
def test_tensors_that_a_server_rewrote_are_told_from_wrong_ones(tmp_path, suffix, change, codes_are, scales_are):
    torch.manual_seed(0)
    codes, scales = (torch.randn(384, 256) * 50).clamp(-224, 224).to(torch.float8_e4m3fn), torch.rand(3, 2) + 0.5
    parts = zip(("q_proj", "k_proj", "v_proj"), codes.view(torch.uint8).split(128), scales.split(1), strict=True)
    stored = {"norm.weight": torch.ones(256, dtype=torch.bfloat16)}
    for name, own, scale in parts:
        stored |= {f"{name}.weight": own.view(codes.dtype).clone(), f"{name}.{suffix}": scale.clone()}
    save_file(stored, tmp_path / "model.safetensors")
    held, held_scales = codes.float(), scales.clone()
    if change.startswith("codes"):
        held[128:256, :128] *= 2
        held_scales[1, 0] /= 2
    held[5, 7] = 3 if change == "another code" else held[5, 7]
    held_scales[2, 1] *= 2 if change == "another scale" else 1
    model = Served(held.to(codes.dtype), held_scales, stored["norm.weight"], suffix)
    found = compare_tensors(model, tmp_path)
    assert found["norm.weight"] == "equal"
    assert codes_are in found["qkv_proj.weight"]
    assert scales_are in found[f"qkv_proj.{suffix}"]


def test_rows_are_not_taken_for_blocks_and_what_vllm_ignores_is_listed(tmp_path):
    codes, scales = torch.randn(384, 128).to(torch.float8_e4m3fn), torch.rand(384, 1) + 0.5
    stored = {"norm.weight": torch.ones(256, dtype=torch.bfloat16), "lm_head.weight": torch.ones(2)}
    for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
        rows = slice(number * 128, (number + 1) * 128)
        stored |= {f"{name}.weight": codes[rows].clone(), f"{name}.weight_scale": scales[rows].clone()}
    stored["q_proj.input_scale"] = torch.ones(1)
    save_file(stored, tmp_path / "model.safetensors")
    model = Served(codes, scales * 2, stored["norm.weight"], "weight_scale")
    found = compare_tensors(model, tmp_path)
    assert found["qkv_proj.weight"] == "equal"
    assert "in vLLM holds other bytes than" in found["qkv_proj.weight_scale"]
    missing = [name for name, verdict in found.items() if verdict == "vLLM's model has no such tensor"]
    assert missing == ["lm_head.weight", "q_proj.input_scale"]
    model.config = SimpleNamespace(tie_word_embeddings=True)
    assert "lm_head.weight" not in compare_tensors(model, tmp_path)


class ServedExperts(torch.nn.Module):
    """Two experts as vLLM stacks them, and how it names their parts."""

    def __init__(self, tensors):
        super().__init__()
        self.experts = torch.nn.Module()
        for name, tensor in tensors.items():
            self.experts.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def get_expert_mapping(self):
        parts = (("w13_", "gate_proj"), ("w2_", "down_proj"), ("w13_", "up_proj"))
        return [(f"experts.{own}", f"experts.{e}.{part}.", e, part) for e in range(2) for own, part in parts]


def test_experts_are_compared_matrix_by_matrix(tmp_path):
    torch.manual_seed(0)
    stored, held = {}, {"w13_weight": [], "w13_weight_scale_inv": [], "w2_weight": [], "w2_weight_scale_inv": []}
    for expert in range(2):
        for part, own in (("gate_proj", "w13"), ("up_proj", "w13"), ("down_proj", "w2")):
            rows, columns = (128, 256) if own == "w13" else (256, 128)
            codes = (torch.randn(rows, columns) * 50).clamp(-224, 224).to(torch.float8_e4m3fn)
            scales = torch.rand(rows // 128, columns // 128) + 0.5
            stored |= {f"experts.{expert}.{part}.weight": codes, f"experts.{expert}.{part}.weight_scale_inv": scales}
            held[f"{own}_weight"].append(codes.float())
            held[f"{own}_weight_scale_inv"].append(scales)
    save_file(stored, tmp_path / "model.safetensors")
    held = {name: torch.cat(parts).unflatten(0, (2, -1)) for name, parts in held.items()}
    held["w2_weight"][1, :128] *= 2
    held["w2_weight_scale_inv"][1, 0] /= 2
    held["w13_weight"][1, 3, 4] = 7
    held |= {name: held[name].to(torch.float8_e4m3fn) for name in ("w13_weight", "w2_weight")}
    found = compare_tensors(ServedExperts(held), tmp_path)
    assert found.pop("experts.w13_weight").startswith("torch.float8_e4m3fn [512, 256] in vLLM holds other bytes")
    rewritten = "the same numbers in other bytes"
    assert found == {
        "experts.w13_weight_scale_inv": "equal",
        "experts.w2_weight": rewritten,
        "experts.w2_weight_scale_inv": rewritten,
    }
    lost = {name: tensor for name, tensor in stored.items() if "1.down" not in name}
    save_file(lost, tmp_path / "model.safetensors")
    assert (
        "the folder has no experts.1.down_proj" in compare_tensors(ServedExperts(held), tmp_path)["experts.w2_weight"]
    )
