"""Linears of Transformer Engine and torchao in the place of a model's own, for continue_training.py."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from ds_fp8.config.errors import UserError

Autocast = Callable[[], contextlib.AbstractContextManager]

TRANSFORMER_ENGINE = {
    "te-block": "Float8BlockScaling",
    "te-current": "Float8CurrentScaling",
    "te-delayed": "DelayedScaling",
}
"""Peer -> class of its recipe."""
TORCHAO = {"torchao-tensorwise": "tensorwise", "torchao-rowwise": "rowwise", "torchao-wgrad-bf16": "rowwise_with_gw_hp"}
"""Peer -> name of its recipe."""
PRODUCTS = ("fprop", "dgrad", "wgrad")
HEAD = "lm_head"
"""The linear that stays in BF16."""


def use_peer(model: nn.Module, peer: str, in_bf16: Collection[str] = ()) -> Autocast:
    """Replace all linears but the head, in place.

    Args:
        model: On the CPU or a GPU, in BF16, whose decoder layers are in `model.model.layers`.
        peer: A key of TRANSFORMER_ENGINE or TORCHAO.
        in_bf16: Products of PRODUCTS that stay in BF16; torchao alone can.

    Returns:
        What returns a context for each forward.

    Raises:
        UserError: An unknown peer, one that is not installed, or products that it cannot keep in BF16.
    """
    package = "torchao" if peer in TORCHAO else "transformer_engine"
    if peer in (*TORCHAO, *TRANSFORMER_ENGINE) and importlib.util.find_spec(package) is None:
        raise UserError(f"{package} is not installed here", key="--peer", remedy=f"pip install {package}")
    if peer in TORCHAO:
        _use_torchao(model, TORCHAO[peer], in_bf16)
        return contextlib.nullcontext
    if peer not in TRANSFORMER_ENGINE:
        known = ", ".join((*TRANSFORMER_ENGINE, *TORCHAO))
        raise UserError(f'unknown peer "{peer}"', key="--peer", remedy=f"one of {known}")
    if in_bf16:
        raise UserError("Transformer Engine casts all products or none", key="--in_bf16", remedy="a peer of torchao")
    return _use_transformer_engine(model, TRANSFORMER_ENGINE[peer])


def _use_transformer_engine(model: nn.Module, recipe: str) -> Autocast:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and HEAD not in name:
            bias, sizes = linear.bias is not None, (linear.in_features, linear.out_features)
            own = te.Linear(*sizes, bias=bias, params_dtype=torch.bfloat16, device="cuda")
            own.load_state_dict(linear.state_dict(), strict=False)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, own)
    chosen = getattr(recipes, recipe)()
    return lambda: te.fp8_autocast(enabled=True, fp8_recipe=chosen)


def _use_torchao(model: nn.Module, recipe: str, in_bf16: Collection[str]) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config: Any = _without_casts(Float8LinearConfig.from_recipe_name(recipe), in_bf16)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: HEAD not in name)
    # Its casts are meant to be compiled; one cache of compiled code serves all layers.
    torch._dynamo.config.cache_size_limit = 128
    for layer in model.model.layers:
        layer.compile()


def _without_casts(config: Any, in_bf16: Collection[str]) -> Any:
    """Return torchao's configuration with some products in BF16."""
    from torchao.float8.config import CastConfig, ScalingType

    off, changes = CastConfig(scaling_type=ScalingType.DISABLED), {}
    operands = {
        "fprop": ("cast_config_input", "cast_config_weight"),
        "dgrad": ("cast_config_grad_output", "cast_config_weight_for_grad_input"),
        "wgrad": ("cast_config_input_for_grad_weight", "cast_config_grad_output_for_grad_weight"),
    }
    for product, names in operands.items():
        # All six are given: those of one tensor are otherwise taken from each other.
        changes |= {name: off if product in in_bf16 else getattr(config, name) for name in names}
    return dataclasses.replace(config, **changes)
