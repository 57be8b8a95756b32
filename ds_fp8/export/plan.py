"""Choose the tensors of a folder for serving, those of them that are written as FP8 codes, and their layout.

    fp8                 DeepSeek's layout, transformers' "fine-grained FP8": X.weight in float8_e4m3fn with
                        X.weight_scale_inv, FP32 factors of 128x128 blocks to multiply by
    compressed-tensors  X.weight and X.weight_scale: blocks, output channels or the whole tensor

vLLM, SGLang and transformers read both.

Experts are stored as a matrix of each, under the names that the model's first release gave them. transformers stacks
them into 3-D parameters when it loads a folder, and knows how to take them apart: the names, and which rows are whose,
come from it. Scales lie as their weight does, a block to an element.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import BLOCK, scale_shape
from ds_fp8.config.linear import LinearConfig, WeightCast
from ds_fp8.layers.experts.selection import cast_of_experts, expert_weights, names_of_experts
from ds_fp8.layers.selection import first_matches, linear_layers
from ds_fp8.research import munit

Parts = Callable[[torch.Tensor], dict[str, torch.Tensor]]
"""Returns the tensors that a parameter is stored as, by name."""
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that servers stack into one matrix, which is FP8 as a whole or not at all."""
LAYOUTS = ("bf16", "fp8", "compressed-tensors")
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


@dataclass(frozen=True)
class Entry:
    """A tensor of the model as the folder holds it."""

    name: str
    """Name of the parameter."""
    shape: tuple[int, ...]
    quantized: bool
    parts: Parts | None = field(default=None, compare=False)
    """How it is stored; None: as it is, under its name."""

    def stored(self, numbers: torch.Tensor | QuantizedTensor) -> dict[str, torch.Tensor | QuantizedTensor]:
        return {self.name: numbers} if self.parts is None else split(numbers, self.parts, self.shape)

    def tensors(self, plan: Plan) -> dict[str, torch.Tensor]:
        if not self.quantized:
            return self.stored(torch.empty(self.shape, dtype=torch.bfloat16, device="meta"))
        result = {}
        codes = torch.empty(self.shape, dtype=torch.float8_e4m3fn, device="meta")
        for name, part in ({self.name: codes} if self.parts is None else self.parts(codes)).items():
            scales = scale_shape(part.shape, plan.cast.granularity)
            result[name] = part
            result[name + SCALE_SUFFIX[plan.layout]] = torch.empty(scales, dtype=torch.float32, device="meta")
        return result


@dataclass(frozen=True)
class Plan:
    """Contents of a folder except its numbers."""

    layout: str
    cast: WeightCast
    entries: list[Entry]
    left: dict[str, str] = field(default_factory=dict)
    """Linear layers in BF16, tied ones among them, experts and routers, with the reason."""

    @property
    def quantized(self) -> list[str]:
        return [entry.name for entry in self.entries if entry.quantized]


def check_architecture(config: PretrainedConfig | None) -> None:
    """Raise UserError for a model that servers would take for another."""
    if config is not None and munit.is_munit(config):
        raise UserError(
            f'a model of type "{config.model_type}" is not a {config.model_type.removeprefix(munit.PREFIX)}: servers '
            "do not know the factors of its products and residuals",
            remedy="run_dir/model holds it for ds_fp8: ds-fp8 evaluate, model.path, train.init_from",
        )


def adapters_refused() -> UserError:
    """Return the error for a model of PEFT, which stays one when its adapters are merged in place."""
    return UserError(
        "this model has adapters of PEFT, whose layers stay when merged, and folders and servers hold plain models",
        remedy="load what model.save_pretrained wrote onto the base, call merge_and_unload(), and export an engine "
        "made of its result",
    )


def named_tensors(name: str, numbers: torch.Tensor | QuantizedTensor, layout: str) -> dict[str, torch.Tensor]:
    """Return a stored weight's tensors under the names of a folder: codes and scales, or the weight itself."""
    if isinstance(numbers, QuantizedTensor):
        return {name: numbers.data, name + SCALE_SUFFIX[layout]: numbers.scale.contiguous()}
    return {name: numbers.contiguous()}


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
        left: Linear layers, and weights of experts, that training computed in BF16, with the reason.
        linear: How training cast weights. Those that an override casts in another way are stored in BF16.
        layout: One of layouts.LAYOUTS.
        shape_of: Gives the whole shape of a parameter that is partitioned.
    """
    check_architecture(getattr(model, "config", None))
    # As PEFT marks a model, its own or one of transformers: layers below adapters have other names.
    if hasattr(model, "peft_config"):
        raise adapters_refused()
    cast = linear.weight
    check_layout(layout, cast)
    # Only buffers that are saved count: others are computed from the configuration.
    stored = model.state_dict().keys()
    buffers = [name for name, _ in model.named_buffers() if name in stored]
    if buffers:
        raise UserError(
            f"{type(model).__name__} keeps {buffers[0]} beside its weights, which exports do not hold",
            remedy="engine.save_16bit_model writes it, in BF16",
        )
    shape_of = shape_of or (lambda parameter: parameter.shape)
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # of tied ones the first
    parts = parts_of_parameters(model)

    def entries(in_fp8: Collection[str]) -> list[Entry]:
        return [Entry(n, tuple(shape_of(p)), n in in_fp8, parts.get(n)) for n, p in model.named_parameters()]

    if layout == "bf16":
        return Plan(layout, cast, entries(()))
    linears = linear_layers(model)
    # In this order: the first reason found for a layer is the one reported.
    reasons = {name: left[name] for name in linears if name in left}
    for name, pattern in first_matches(linears, linear.overrides).items():
        override = linear.overrides[pattern]
        if override != "bf16" and str(override.weight) != str(cast):
            reasons.setdefault(name, f"trained with its weight cast {override.weight}, and a folder holds one cast")
    for name, pattern in {**dict.fromkeys(linears), **first_matches(linears, linear.overrides)}.items():
        casts = linear if pattern is None else linear.overrides[pattern]
        if casts != "bf16" and casts.why_not_served is not None:
            reasons.setdefault(name, casts.why_not_served)
    for name, layer in linears.items():
        # Under ZeRO-3 a parameter has no data here: its whole shape is asked for.
        rows, columns = shape_of(layer.weight)
        if names[id(layer.weight)] != f"{name}.weight":
            reasons.setdefault(name, f"shares its weight with {names[id(layer.weight)]}")
        elif cast.granularity == "128x128" and (rows % BLOCK or columns % BLOCK):
            reasons.setdefault(name, f"{rows} x {columns} is not a multiple of {BLOCK} x {BLOCK}, which servers need")
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        merged = next((group for group in MERGED if leaf in group), ())
        # After all reasons are known: one layer in BF16 takes its whole group along.
        partner = next((other for other in merged if f"{parent}.{other}" in reasons), None)
        if partner is not None:
            reasons.setdefault(name, f"servers stack it with {partner}, which is in BF16")
    experts = _experts_in_fp8(model, left, linear, layout)
    in_fp8 = {f"{name}.weight" for name in linears if name not in reasons} | experts
    if not in_fp8:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])
        raise UserError(f"no layer of this model can be stored in FP8 ({why})", remedy="--format bf16")
    planned = entries(in_fp8)
    return Plan(layout, cast, planned, reasons | _beside_experts(planned, linears, names_of_experts(model)))


def plan_to_serve(
    model: nn.Module,
    left: Mapping[str, str],
    linear: LinearConfig,
    shape_of: Callable[[nn.Parameter], Sequence[int]] | None = None,
) -> Plan:
    """Plan the weights of a running server: in FP8 as training cast them; all in BF16 where no layout can."""
    why = linear.why_not_served
    if why is None:
        layout = "fp8" if linear.weight.granularity == "128x128" else "compressed-tensors"
        # MX and NVFP4 weights, or no layer at all that could be in FP8. What else is wrong is raised below too.
        try:
            return make_plan(model, left, linear, layout, shape_of)
        except UserError as error:
            why = error.problem
    plan = make_plan(model, left, linear, "bf16", shape_of)
    warnings.warn(f"servers are given all weights in BF16: {why}", stacklevel=2)
    return plan


def _experts_in_fp8(model: nn.Module, left: Mapping[str, str], linear: LinearConfig, layout: str) -> set[str]:
    """Return the weights of experts that are stored in FP8: all of a module's, or none."""
    names = names_of_experts(model)
    override_of = first_matches(names, linear.overrides)
    cast, found = linear.weight.spec, set()
    for module in {name.rpartition(".")[0] for name in names}:
        weights = [name for name in names if name.rpartition(".")[0] == module]
        casts = [linear.overrides[override_of[name]] if name in override_of else linear for name in weights]
        # Servers run the experts of a layer in one kernel, which takes codes for all of them or for none.
        alike = all(name not in left for name in weights) and all(own != "bf16" for own in casts)
        if alike and layout == "fp8" and all(cast_of_experts(own.weight.spec) == cast for own in casts):
            found.update(weights)
    return found


def _beside_experts(entries: Iterable[Entry], linears: Collection[str], experts: Collection[str]) -> dict[str, str]:
    """Return modules of layers with experts that are in BF16 and no linear layers: servers make linears of routers."""
    found = {}
    for entry in entries:
        module = entry.name.rpartition(".")[0]
        if entry.parts is None or entry.quantized or module in linears:
            continue
        # Under both names: transformers' own, and that of the folder, which vLLM has.
        if entry.name in experts:
            before, inside, _ = _stored_name(entry).partition(".experts.")
            # Some models store them as one tensor beside the router, such as Granite's input_linear.weight.
            stored = f"{before}.experts" if inside else before.removesuffix(".weight")
            found |= dict.fromkeys((module, stored), "experts in BF16")
        elif entry.name.endswith(".weight") and len(entry.shape) == 2:
            found |= dict.fromkeys((module, _stored_name(entry).removesuffix(".weight")), "a router or gate")
    return found


def _stored_name(entry: Entry) -> str:
    return next(iter(entry.stored(torch.empty(entry.shape, device="meta"))))


def parts_of_parameters(model: nn.Module) -> dict[str, Parts]:
    """Return how the parameters of layers with experts are stored, by name; those of all others as they are."""
    if not isinstance(model, PreTrainedModel):
        return {}
    layers = {name.rpartition(".")[0] for name, module in model.named_modules() if expert_weights(name, module)}
    names = [name for name, _ in model.named_parameters() if any(name.startswith(f"{layer}.") for layer in layers)]

    def parts_of(name: str) -> Parts:
        return lambda numbers: {
            stored: part.contiguous() if part.device.type != "meta" else part
            for stored, part in revert_weight_conversion(model, {name: numbers}).items()
        }

    return {name: parts_of(name) for name in names}


def split(
    numbers: torch.Tensor | QuantizedTensor, parts: Parts, shape: tuple[int, ...]
) -> dict[str, torch.Tensor | QuantizedTensor]:
    """Return what a parameter of `shape` is stored as, by name: BF16 tensors, or FP8 matrices of an expert each.

    The numbers of experts [E, N, K] in FP8 are codes and scales [E*N, K].
    """
    if not isinstance(numbers, QuantizedTensor):
        return parts(numbers)
    codes = parts(numbers.data.view(torch.uint8).view(shape))
    rows, columns = numbers.scale.shape
    scales = parts(numbers.scale.contiguous().view(shape[0], rows // shape[0], columns))
    result = {}
    for name, own in codes.items():
        # Sides of one block are lost where transformers takes the experts apart.
        scale = scales[name].view(scale_shape(own.shape, numbers.granularity))
        result[name] = replace(numbers, data=own.view(numbers.data.dtype), scale=scale)
    return result


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

    `left` are the full names of all linear layers, and modules of experts, in BF16: vLLM compares them exactly,
    transformers as prefix and suffix.
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
