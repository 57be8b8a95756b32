"""Choose the tensors of a folder for serving, and those of them that are written as FP8 codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PretrainedConfig

from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import BLOCK, scale_shape
from ds_fp8.config.linear import LinearConfig, WeightCast
from ds_fp8.export.layouts import SCALE_SUFFIX, check_layout
from ds_fp8.layers import munit
from ds_fp8.layers.selection import first_matches, linear_layers

MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that servers stack into one matrix, which is FP8 as a whole or not at all."""


@dataclass(frozen=True)
class Entry:
    """A tensor of the model as the folder holds it."""

    name: str
    shape: tuple[int, ...]
    quantized: bool

    def tensors(self, plan: Plan) -> dict[str, torch.Tensor]:
        """Return the tensors that are stored for this one, by name, without data (on the meta device)."""
        if not self.quantized:
            return {self.name: torch.empty(self.shape, dtype=torch.bfloat16, device="meta")}
        scales = scale_shape(self.shape, plan.cast.granularity)
        return {
            self.name: torch.empty(self.shape, dtype=torch.float8_e4m3fn, device="meta"),
            self.name + SCALE_SUFFIX[plan.layout]: torch.empty(scales, dtype=torch.float32, device="meta"),
        }


@dataclass(frozen=True)
class Plan:
    """Contents of a folder except its numbers."""

    layout: str
    cast: WeightCast
    entries: list[Entry]
    left: dict[str, str] = field(default_factory=dict)
    """Linear layers in BF16, tied ones among them, with the reason."""

    @property
    def quantized(self) -> list[str]:
        """Return the names of the weights in FP8."""
        return [entry.name for entry in self.entries if entry.quantized]


def check_architecture(config: PretrainedConfig | None) -> None:
    """Raise UserError for a model that servers would take for another."""
    if config is not None and munit.is_munit(config):
        raise UserError(
            f'a model of type "{config.model_type}" is no {config.model_type.removeprefix(munit.PREFIX)}: its products '
            "and residuals have factors that servers do not know",
            remedy="run_dir/model holds it for ds_fp8: ds-fp8 evaluate, model.path, train.init_from",
        )


def make_plan(
    model: nn.Module,
    left: Mapping[str, str],
    linear: LinearConfig,
    layout: str,
    shape_of: Callable[[nn.Parameter], Sequence[int]] | None = None,
) -> Plan:
    """Plan the folder of a model.

    Args:
        model: On any device, without data too.
        left: Linear layers that training computed in BF16, with the reason; all others were FP8.
        linear: How training cast weights. Those that an override casts in another way are stored in BF16.
        layout: One of layouts.LAYOUTS.
        shape_of: Gives the whole shape of a parameter that is partitioned.

    Raises:
        UserError: servers do not know such models, the layout cannot hold weights of this cast, no layer is left to
            store in FP8, or the model keeps buffers beside its weights.
    """
    check_architecture(getattr(model, "config", None))
    cast = linear.weight
    check_layout(layout, cast)
    stored = model.state_dict().keys()
    buffers = [name for name, _ in model.named_buffers() if name in stored]
    if buffers:
        raise UserError(
            f"{type(model).__name__} keeps {buffers[0]} beside its weights, which exports do not hold",
            remedy="engine.save_16bit_model writes it, in BF16",
        )
    shape_of = shape_of or (lambda parameter: parameter.shape)
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # of tied ones the first
    if layout == "bf16":
        return Plan(layout, cast, [Entry(n, tuple(shape_of(p)), False) for n, p in model.named_parameters()])
    linears = linear_layers(model)
    reasons = {name: left[name] for name in linears if name in left}
    for name, pattern in first_matches(linears, linear.overrides).items():
        override = linear.overrides[pattern]
        if override != "bf16" and override.weight != cast:
            reasons.setdefault(name, f"trained with its weight cast {override.weight}, and a folder holds one cast")
    for name, pattern in {**dict.fromkeys(linears), **first_matches(linears, linear.overrides)}.items():
        casts = linear if pattern is None else linear.overrides[pattern]
        if casts != "bf16" and casts.rotation.fprop is not None:
            reasons.setdefault(name, "trained with its weight rotated, and servers rotate no activations")
    for name, layer in linears.items():
        rows, columns = shape_of(layer.weight)
        if names[id(layer.weight)] != f"{name}.weight":
            reasons.setdefault(name, f"shares its weight with {names[id(layer.weight)]}")
        elif cast.granularity == "128x128" and (rows % BLOCK or columns % BLOCK):
            reasons.setdefault(name, f"{rows} x {columns} is not a multiple of {BLOCK} x {BLOCK}, which servers need")
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        merged = next((group for group in MERGED if leaf in group), ())
        partner = next((other for other in merged if f"{parent}.{other}" in reasons), None)
        if partner is not None:
            reasons.setdefault(name, f"servers stack it with {partner}, which is in BF16")
    in_fp8 = {f"{name}.weight" for name in linears if name not in reasons}
    if not in_fp8:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])
        raise UserError(f"no layer of this model can be stored in FP8 ({why})", remedy="--format bf16")
    entries = [Entry(name, tuple(shape_of(p)), name in in_fp8) for name, p in model.named_parameters()]
    return Plan(layout, cast, entries, reasons)
