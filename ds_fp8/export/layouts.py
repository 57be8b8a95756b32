"""Layouts of FP8 weights in folders for serving: tensor names, and the "quantization_config" of config.json.

    fp8                 DeepSeek's layout, transformers' "fine-grained FP8": X.weight in float8_e4m3fn with
                        X.weight_scale_inv, FP32 factors of 128x128 blocks to multiply by
    compressed-tensors  X.weight and X.weight_scale: blocks, output channels or the whole tensor

vLLM, SGLang and transformers read both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, get_args

from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import BLOCK
from ds_fp8.config.linear import WeightCast

Layout = Literal["bf16", "fp8", "compressed-tensors"]
LAYOUTS: tuple[str, ...] = get_args(Layout)

SCALE_SUFFIX = {"fp8": "_scale_inv", "compressed-tensors": "_scale"}
"""Layout -> what follows a weight's name in the name of its scales."""

_STRATEGIES = {
    "128x128": {
        "weights": {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
        "input_activations": {"strategy": "group", "group_size": BLOCK},
    },
    "row": {"weights": {"strategy": "channel"}, "input_activations": {"strategy": "token"}},
    "tensor": {"weights": {"strategy": "tensor"}, "input_activations": {"strategy": "token"}},
}


def check_layout(layout: str, cast: WeightCast) -> None:
    """Raise UserError for a layout that does not exist or cannot hold weights cast as `cast` says."""
    if layout not in LAYOUTS:
        raise UserError(f'unknown layout "{layout}"', key="--format", remedy=f"one of {', '.join(LAYOUTS)}")
    if layout == "bf16":
        return
    if cast.format != "e4m3":
        raise UserError(
            f"servers read weights in E4M3, but these were trained in {cast.format.upper()}",
            key="fp8.linear.weight.format",
            remedy="--format bf16",
        )
    # Servers have kernels for these granularities only; converting to another would change the weights that were
    # trained.
    if cast.granularity not in _STRATEGIES:
        raise UserError(
            f"no layout holds weights with one scale a {cast.granularity}",
            key="fp8.linear.weight.granularity",
            remedy="--format bf16",
        )
    if layout == "fp8" and cast.granularity != "128x128":
        raise UserError(
            f"the layout fp8 has one scale a 128x128 block, and these weights have one a {cast.granularity}",
            key="fp8.linear.weight.granularity",
            remedy="--format compressed-tensors",
        )


def quantization_config(layout: str, cast: WeightCast, left: Iterable[str]) -> dict[str, Any]:
    """Return the "quantization_config" section of config.json.

    Args:
        layout: "fp8" or "compressed-tensors".
        cast: How the weights were cast in training.
        left: Full names of all linear layers, and modules of experts, in BF16: vLLM compares them exactly, transformers
            as prefix and suffix.
    """
    if layout == "fp8":
        result = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(left),
            "ignored_layers": list(left),  # the same to vLLM, which did not always know the other name
        }
        return result | ({"scale_fmt": "ue8m0"} if cast.scale == "pow2" else {})
    # Weights have stored scales ("dynamic": False); inputs get theirs from the numbers of each token or group, as in
    # training.
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    strategies = _STRATEGIES[cast.granularity]
    group = {
        "targets": ["Linear"],
        "weights": {**number, **strategies["weights"], "dynamic": False},
        "input_activations": {**number, **strategies["input_activations"], "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": [_all_of_experts(name) for name in left],
        "config_groups": {"group_0": group},
    }


def _all_of_experts(name: str) -> str:
    """Return a pattern for the matrices of a module of experts: readers of compressed-tensors ask for one by one."""
    return rf"re:{re.escape(name)}\..*" if name.rpartition(".")[2] == "experts" else name
