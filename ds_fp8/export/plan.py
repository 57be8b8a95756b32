"""Plan the tensors of a folder for serving: their names, their layout, and the tensors in FP8.

    fp8                 DeepSeek's layout, transformers' "fine-grained FP8": X.weight in float8_e4m3fn with
                        X.weight_scale_inv, FP32 factors of 128x128 blocks to multiply by
    compressed-tensors  X.weight and X.weight_scale: blocks, output channels or one scale a tensor

vLLM, SGLang and transformers read both. Names are those of the model's first release, with one matrix an expert
(layers/published.py). Scales of stacked experts have the layout of their weight, one element a block.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import BLOCK, scale_shape
from ds_fp8.config.linear import LinearConfig, WeightCast
from ds_fp8.layers.experts.selection import cast_of_experts, expert_weights, names_of_experts, shape_of
from ds_fp8.layers.published import IN_3D, IN_PARTS, Published, published, why_not_in_fp8
from ds_fp8.layers.selection import first_matches, linear_layers

# Layers that servers stack into one matrix, in one format.
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
LAYOUTS = ("bf16", "fp8", "compressed-tensors")
# Layout -> suffix of the name of a weight's scales.
SCALE_SUFFIX = {"fp8": "_scale_inv", "compressed-tensors": "_scale"}

SCALED = "munit_"  # prefix of the types of models scaled by ds_fp8.research

_STRATEGIES = {
    "128x128": {
        "weights": {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
        "input_activations": {"strategy": "group", "group_size": BLOCK},
    },
    "row": {"weights": {"strategy": "channel"}, "input_activations": {"strategy": "token"}},
    "tensor": {"weights": {"strategy": "tensor"}, "input_activations": {"strategy": "token"}},
}

Tensors = dict[str, torch.Tensor | QuantizedTensor]  # by name


@dataclass(frozen=True)
class Entry:
    """The folder's tensors of one parameter or stored buffer of the model, or of several joined ones."""

    form: Published
    quantized: bool = False

    @property
    def name(self) -> str:
        """Return the name in the model, the first of joined ones."""
        return next(iter(self.form.shapes))

    def stored(self, of_model: Tensors) -> Tensors:
        """Return the folder's tensors, by its names, from the model's tensors by theirs."""
        weight = of_model[self.name]
        if self.form.parts is None:
            return {self.form.stored[0]: weight}
        if not isinstance(weight, QuantizedTensor):
            parts = self.form.parts(of_model)
            return {name: part if part.is_meta else part.contiguous() for name, part in parts.items()}
        # One matrix an expert. Data of experts [E, N, K] is [E*N, K], and so are the scales.
        shape = self.form.shapes[self.name]
        data = self.form.parts({self.name: weight.data.view(torch.uint8).view(shape)})
        scales = self.form.parts({self.name: weight.scale.contiguous().view(shape[0], -1, weight.scale.shape[-1])})
        result = {}
        for name, own in data.items():
            # transformers' split into experts drops dimensions of size 1: the view restores them.
            scale = scales[name].contiguous().view(scale_shape(own.shape, weight.granularity))
            result[name] = replace(weight, data=own.contiguous().view(weight.data.dtype), scale=scale)
        return result

    def tensors(self, plan: Plan) -> dict[str, torch.Tensor]:
        dtype = torch.float8_e4m3fn if self.quantized else self.form.dtype
        empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in self.form.shapes.items()}
        result = dict(self.stored(empty))
        for name, part in list(result.items()) if self.quantized else ():
            scales = scale_shape(part.shape, plan.cast.granularity)
            result[name + SCALE_SUFFIX[plan.layout]] = torch.empty(scales, dtype=torch.float32, device="meta")
        return result


@dataclass(frozen=True)
class Plan:
    """Contents of a folder without values. `left`: linear layers (tied ones, too), experts, routers in BF16; why."""

    layout: str
    cast: WeightCast
    entries: list[Entry]
    left: dict[str, str] = field(default_factory=dict)
    origin: str = "The FP8 weights are those of training, quantized from its FP32 master weights"

    @property
    def quantized(self) -> list[str]:
        return [entry.name for entry in self.entries if entry.quantized]


def check_architecture(config: PretrainedConfig | None) -> None:
    """Raise UserError for a model that servers would load as another model."""
    kind = getattr(config, "model_type", "")
    if kind.startswith(SCALED):
        raise UserError(
            f'a model of type "{kind}" is not a {kind.removeprefix(SCALED)}: servers do not know the factors of its '
            "products and residuals",
            remedy="run_dir/model holds it for ds_fp8: ds-fp8 evaluate, model.path, train.init_from",
        )


def adapters_refused() -> UserError:
    """Return the error for a model of PEFT, with adapters or with adapters merged in place."""
    return UserError(
        "this model has adapters of PEFT, whose layers stay when merged, and folders and servers hold plain models",
        remedy="load what model.save_pretrained wrote onto the base, call merge_and_unload(), and export an engine "
        "made of its result",
    )


def named_tensors(name: str, weight: torch.Tensor | QuantizedTensor, layout: str) -> dict[str, torch.Tensor]:
    """Return the folder's tensors of a weight, by name: data and scales, or the weight itself."""
    if isinstance(weight, QuantizedTensor):
        return {name: weight.data, name + SCALE_SUFFIX[layout]: weight.scale.contiguous()}
    return {name: weight.contiguous()}


def make_plan(model: nn.Module, left: Mapping[str, str], linear: LinearConfig, layout: str) -> Plan:
    """Plan the folder of a model.

    Args:
        model: On any device, sharded or on "meta".
        left: Linear layers, and weights of experts, in BF16 in training, with the reason.
        linear: The section fp8.linear of the training. Weights with another quantization, by an override, are stored
            in BF16.
        layout: One of LAYOUTS.
    """
    check_architecture(getattr(model, "config", None))
    if hasattr(model, "peft_config"):  # PEFT's mark: layers below adapters have other names
        raise adapters_refused()
    cast = linear.weight
    check_layout(layout, cast)
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # the first of tied ones
    forms = published(model)
    by_name = {name: form for form in forms for name in form.shapes}
    if layout == "bf16":
        return Plan(layout, cast, [Entry(form) for form in forms])
    linears = linear_layers(model)
    if (why := why_not_in_fp8(model)) is not None:
        raise UserError(why, remedy="--format bf16")
    # In this order: the first reason of a layer is reported.
    reasons = {name: left[name] for name in linears if name in left}
    overrides = {name: linear.overrides[key] for name, key in first_matches(linears, linear.overrides).items()}
    for name, override in overrides.items():
        if override != "bf16" and str(override.weight) != str(cast):
            reasons.setdefault(name, f"trained with its weight in {override.weight}, and a folder has one format")
    for name in linears:
        section = overrides.get(name, linear)
        if section != "bf16" and section.why_not_served is not None:
            reasons.setdefault(name, section.why_not_served)
    for name, layer in linears.items():
        rows, columns = shape_of(layer.weight)  # unsharded
        if names[id(layer.weight)] != f"{name}.weight":
            reasons.setdefault(name, f"shares its weight with {names[id(layer.weight)]}")
        elif cast.granularity == "128x128" and (rows % BLOCK or columns % BLOCK):
            reasons.setdefault(name, f"{rows} x {columns} is not a multiple of {BLOCK} x {BLOCK}, which servers need")
        elif by_name[f"{name}.weight"].parts is not None:
            reasons.setdefault(name, IN_PARTS)
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        merged = next((group for group in MERGED if leaf in group), ())
        # After all other reasons: one layer in BF16 keeps its group in BF16.
        partner = next((other for other in merged if f"{parent}.{other}" in reasons), None)
        if partner is not None:
            reasons.setdefault(name, f"servers stack it with {partner}, which is in BF16")
    experts = _experts_in_fp8(model, left, linear, layout, by_name)
    in_fp8 = {f"{name}.weight" for name in linears if name not in reasons} | experts
    if not in_fp8:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])
        raise UserError(f"no layer of this model can be stored in FP8 ({why})", remedy="--format bf16")
    planned = [Entry(form, not in_fp8.isdisjoint(form.shapes)) for form in forms]
    reasons |= _neighbours_of_experts(model, planned, left)
    return Plan(layout, cast, planned, _by_both_names(model, reasons, planned))


def plan_to_serve(model: nn.Module, left: Mapping[str, str], linear: LinearConfig) -> Plan:
    """Plan the weights of a running server: the quantized weights of training, or all BF16 if no layout holds them."""
    why = linear.why_not_served
    if why is None:
        layout = "fp8" if linear.weight.granularity == "128x128" else "compressed-tensors"
        # Fails for MX and NVFP4 weights and without FP8 layers; other errors are raised again below.
        try:
            return make_plan(model, left, linear, layout)
        except UserError as error:
            why = error.problem
    plan = make_plan(model, left, linear, "bf16")
    warnings.warn(f"servers are given all weights in BF16: {why}", stacklevel=2)
    return plan


def _experts_in_fp8(
    model: nn.Module, left: Mapping[str, str], linear: LinearConfig, layout: str, forms: Mapping[str, Published]
) -> set[str]:
    """Return the weights of experts to store in FP8: all of a module, or none."""
    names = names_of_experts(model)
    overrides = {name: linear.overrides[key] for name, key in first_matches(names, linear.overrides).items()}
    cast, found = linear.weight.spec, set()
    for module in {name.rpartition(".")[0] for name in names}:
        weights = [name for name in names if name.rpartition(".")[0] == module]
        casts = [overrides.get(name, linear) for name in weights]
        # Servers run the experts of a layer in one kernel: all in FP8, or none.
        alike = all(name not in left for name in weights) and all(own != "bf16" for own in casts)
        alike = alike and all(name in forms and forms[name].matrices for name in weights)
        if alike and layout == "fp8" and all(cast_of_experts(own.weight.spec) == cast for own in casts):
            found.update(weights)
    return found


def _neighbours_of_experts(model: nn.Module, entries: Iterable[Entry], left: Mapping[str, str]) -> dict[str, str]:
    """Return modules in BF16, no linears, of layers with experts, with reasons: servers load routers as linears."""
    experts, linears, found = set(names_of_experts(model)), linear_layers(model), {}
    layers = {name.rpartition(".")[0] for name, module in model.named_modules() if expert_weights(name, module)}
    for entry in entries:
        module = entry.name.rpartition(".")[0]
        if entry.quantized or module in linears or not any(entry.name.startswith(f"{layer}.") for layer in layers):
            continue
        if entry.name in experts:
            found[module] = "experts in BF16" if entry.name in left or entry.form.matrices else IN_3D
        elif entry.name.endswith(".weight") and entry.form.matrices:
            found[module] = "a router or gate"
    return found


def _by_both_names(model: nn.Module, reasons: Mapping[str, str], entries: Iterable[Entry]) -> dict[str, str]:
    """Return reasons by the names of modules in transformers, and by those of the folder, for vLLM."""
    experts, result = set(names_of_experts(model)), dict(reasons)
    for entry in entries:
        module = entry.name.rpartition(".")[0]
        for name in entry.form.stored if module in reasons and not entry.quantized else ():
            # Some models store experts as one tensor next to the router (Granite's input_linear.weight).
            before, inside, _ = name.partition(".experts.")
            listed = inside and entry.name in experts
            result[f"{before}.experts" if listed else name.removesuffix(".weight")] = reasons[module]
    return result


def check_layout(layout: str, cast: WeightCast) -> None:
    """Raise UserError for an unknown layout, or one that cannot hold weights of this format and granularity."""
    if layout not in LAYOUTS:
        raise UserError(f'unknown layout "{layout}"', key="--format", remedy=f"one of {', '.join(LAYOUTS)}")
    if layout == "bf16":
        return
    key, remedy = "fp8.linear.weight.granularity", "--format bf16"
    if cast.format != "e4m3":
        key = "fp8.linear.weight.format"
        problem = f"servers read weights in E4M3, but these were trained in {cast.format.upper()}"
    elif cast.granularity not in _STRATEGIES:  # servers have no kernels, and another granularity is another weight
        problem = f"no layout holds weights with one scale a {cast.granularity}"
    elif layout == "fp8" and cast.granularity != "128x128":
        remedy = "--format compressed-tensors"
        problem = f"the layout fp8 has one scale a 128x128 block, and these weights have one a {cast.granularity}"
    else:
        return
    raise UserError(problem, key=key, remedy=remedy)


def quantization_config(layout: str, cast: WeightCast, left: Iterable[str]) -> dict[str, Any]:
    """Return the "quantization_config" section of config.json.

    left: full names of all linear layers, and modules of experts, in BF16: vLLM compares them exactly, transformers as
    prefix and suffix.
    """
    if layout == "fp8":
        result = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(left),
            "ignored_layers": list(left),  # the name in earlier releases of vLLM
        }
        return result | ({"scale_fmt": "ue8m0"} if cast.scale == "pow2" else {})
    # Scales of weights are stored ("dynamic": False), those of inputs computed per token or group, as in training.
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
        # compressed-tensors matches the matrices of experts one by one.
        "ignore": [rf"re:{re.escape(n)}\..*" if n.rpartition(".")[2] == "experts" else n for n in left],
        "config_groups": {"group_0": group},
    }
