"""Mixtures of experts on GPUs: gathered experts bit for bit, and training beside BF16, decoded by CUDA kernels."""

import pytest
import torch

from ds_fp8.casts import quantize
from ds_fp8.layers.experts.experts import dequantize_rows
from ds_fp8.layers.linear.weights import UNSHARDED
from tests.zero.test_experts import EXACT, PREFETCH, gathered_against_whole, gradients, trained

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_decoded_weights_are_those_of_the_cpu(scale):
    weight = torch.nn.Parameter(torch.randn(3, 256, 384, generator=torch.Generator().manual_seed(0)).bfloat16())
    decoded = []
    for device in ("cpu", "cuda"):
        own = torch.nn.Parameter(weight.detach().to(device))
        setattr(own, UNSHARDED, quantize(own.detach().float().flatten(0, 1), "e4m3", "128x128", scale))
        decoded.append([dequantize_rows(own).cpu(), dequantize_rows(own, 128, 300).cpu()])
    for ours, expected in zip(*decoded, strict=True):
        assert torch.equal(ours, expected)


@two_gpus
def test_gathered_experts_are_the_cast_of_the_whole(gpu_ranks):
    for result in gpu_ranks(2, gathered_against_whole, "qwen3_moe", 2):
        assert set(result.values()) == {(True, True, True)}


@two_gpus
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_mixtures_train_as_bf16_does(gpu_ranks, architecture):
    fp8 = gpu_ranks(2, trained, architecture, {}, 12)[0]
    bf16 = gpu_ranks(2, trained, architecture, {"enabled": False}, 12)[0]
    assert fp8[0] == pytest.approx(bf16[0], rel=0.02)
    assert fp8[2] == 0


@two_gpus
def test_gradients_are_nearly_those_of_the_decoded_weights(gpu_ranks):
    arguments = ("different empty experts", "grouped_mm", None, 1)
    decoded = {**EXACT, "linear": {**EXACT["linear"], "expert_products": "bf16"}}
    ours = gpu_ranks(2, gradients, decoded, *arguments, 3, PREFETCH)
    expected = gpu_ranks(2, gradients, {"enabled": False}, *arguments, 1, PREFETCH)
    for mine, theirs in zip(ours, expected, strict=True):
        for name, gradient in theirs.items():
            assert (mine[name] - gradient).norm() <= 0.02 * gradient.norm(), name
