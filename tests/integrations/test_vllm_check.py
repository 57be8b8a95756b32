"""How scripts/vllm_check.py compares the tensors of vLLM with a folder's."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("change", "codes_are", "scales_are"),
    [
        ("none", "equal", "equal"),
        ("codes twice as large, half the scale", "the same numbers in other bytes", "the same numbers in other bytes"),
        ("another code", "in vLLM holds other bytes than", "equal"),
        ("another scale", "equal", "in vLLM holds other bytes than"),
    ],
)
def test_tensors_that_a_server_rewrote_are_told_from_wrong_ones(tmp_path, change, codes_are, scales_are):
    suffix = "weight_scale_inv"
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
