"""Named presets of the "fp8" section: partial sections, merged under what the user writes. Others: ds_fp8.research."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from ds_fp8.config import registry
from ds_fp8.config.errors import UserError
from ds_fp8.config.schema import clipped_repr, nearest

Axis = Literal["linear", "param_gather", "grad_reduce", "optimizer"]
"""A section that presets set; each may come from another preset."""
AXES: tuple[str, ...] = get_args(Axis)
DEFAULT, FOR_TRAINED = "infir2", "precise"
"""Default presets for pre-training and for fine-tuning. The second is closer to the loss of BF16 and takes 1 to 5% more
time."""
_OTHER_KEYS = {"skip", "overrides", "backend", "expert_products", "smooth_swiglu", "outlier_channels"}
"""Keys of "linear" that do not choose casts: the default preset still applies."""


def _granularity(word: str) -> dict[str, str]:
    return {"granularity": word}


TENSORWISE: dict[str, Any] = {
    "linear": {
        "input": _granularity("tensor"),
        "weight": _granularity("tensor"),
        "grad_output": {**_granularity("tensor"), "format": "e5m2"},
    }
}
_FP8LM: dict[str, Any] = {**TENSORWISE, "grad_reduce": {"scale": "tensor"}}
_FP8LM_MOMENTS = {"exp_avg": "e4m3", "exp_avg_sq": "fp16", "granularity": "tensor", "scale": "pow2"}

# Moments in FP8 are rounded stochastically, unlike in the papers: rounding to nearest changes the final loss by more
# than the noise between runs (docs/log/optimizer_state.md).
PRESETS: dict[str, dict[str, Any]] = {
    # InfiR2 (arXiv 2509.22536): E4M3 everywhere, 128x128 weights, 1x128 activations and gradients, power-of-two scales.
    "infir2": {},
    # As infir2, with wgrad's input in 128x128 blocks: on Hopper 1x128 times 128x128 is the faster block-scaled product.
    "hybrid_fast": {"linear": {"wgrad": {"input": "128x128"}}},
    # hybrid_fast for fine-tuning: FP32 scales, exact for the amax of a group, and quantization errors of the 128 input
    # channels of largest energy corrected.
    "precise": {
        "linear": {
            "input": {"scale": "fp32"},
            "weight": {"scale": "fp32"},
            "wgrad": {"input": "128x128"},
            "outlier_channels": 128,
        }
    },
    # One scale per token and per output channel, E4M3.
    "rowwise": {"linear": {name: _granularity("row") for name in ("input", "weight", "grad_output")}},
    # One scale per tensor, E5M2 output gradients: the hybrid of Micikevicius et al. (arXiv 2209.05433), and the GEMMs
    # of FP8-LM (arXiv 2310.18313).
    "tensorwise": TENSORWISE,
    # FP8-LM (arXiv 2310.18313): levels O1, O2 and O3. Weights are sharded in 16 bits below O3. Masters are FP32, not
    # scaled FP16 as in the paper: ZeRO's master shards are FP32 in any case.
    "fp8lm_o1": {**_FP8LM, "param_gather": {"format": "bf16"}},
    "fp8lm_o2": {**_FP8LM, "param_gather": {"format": "bf16"}, "optimizer": _FP8LM_MOMENTS},
    "fp8lm_o3": {**_FP8LM, "optimizer": _FP8LM_MOMENTS},
    # COAT (arXiv 2410.19313): its linears, its moments with expanded dynamic range, gradients in BF16.
    "coat": {
        **TENSORWISE,
        "grad_reduce": {"format": "bf16"},
        "optimizer": {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"},
    },
    # infir2 with the smallest optimizer state: masters as corrections of the quantized weight, and COAT's moments.
    "compact": {"optimizer": {"master": "fp8_plus16", "exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"}},
}


def preset_values(preset: Any) -> dict[str, Any]:
    """Return the partial section of a preset."""
    if isinstance(preset, str):
        return _named(preset, "fp8.preset")
    if isinstance(preset, Mapping):
        # Other sections: the default preset.
        values = dict(PRESETS[DEFAULT])
        for axis, name in preset.items():
            _known(axis, AXES, "section of a preset", "fp8.preset")
            values[axis] = _named(name, f"fp8.preset.{axis}").get(axis, {})
        return values
    raise UserError(f"preset {clipped_repr(preset)} is not a name", key="fp8.preset", remedy=f'"preset": "{DEFAULT}"')


def as_section(value: Any) -> Any:
    """Expand "fp8": "NAME" or true to a mapping; return other values unchanged."""
    return {"preset": value} if isinstance(value, str) else {} if value is True else value


def without_words(section: Mapping[str, Any]) -> dict[str, Any]:
    """Move names of presets given as sections ("optimizer": "coat") into "preset"."""
    names = {axis: name for axis in AXES if isinstance(name := section.get(axis), str)}
    if not names:
        return dict(section)
    preset = section.get("preset", {})
    preset_values(preset)  # raises for invalid presets
    preset = {**(dict.fromkeys(AXES, preset) if isinstance(preset, str) else preset), **names}
    return {key: value for key, value in section.items() if key not in names} | {"preset": preset}


def leaves_preset_open(section: Any) -> bool:
    """Return whether an enabled section names neither a preset nor the formats of linears."""
    section = as_section(section)
    if not isinstance(section, Mapping) or section.get("enabled", True) is not True:
        return False
    preset, linear = section.get("preset", {}), section.get("linear", {})
    if not isinstance(preset, Mapping) or "linear" in preset or not isinstance(linear, Mapping):
        return False
    return linear.keys() <= _OTHER_KEYS


def with_preset(section: Any, name: str) -> dict[str, Any]:
    """Return a section with `name` as default preset of the linears."""
    section = as_section(section)
    preset = {**section["preset"], "linear": name} if "preset" in section else name
    return {**section, "preset": preset}


def with_assumed_preset(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the default preset filled in, before a model exists.

    For fine-tuning if the configuration loads weights, else for pre-training.
    """
    if not leaves_preset_open(raw.get("fp8")):
        return dict(raw)
    model, train = (raw[name] if isinstance(raw.get(name), Mapping) else {} for name in ("model", "train"))
    loaded = model.get("config") is None and (model.get("path") is not None or train.get("init_from") is not None)
    return {**raw, "fp8": with_preset(raw["fp8"], FOR_TRAINED if loaded else DEFAULT)}


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if nested else value
    return result


def _named(name: Any, key: str) -> dict[str, Any]:
    known = {**PRESETS, **registry.PRESETS}
    return known[_known(name, known, "preset", key)]


def _known(name: Any, choices: Mapping[str, Any] | tuple[str, ...], what: str, key: str) -> str:
    if isinstance(name, str) and name in choices:
        return name
    raise UserError(f"unknown {what} {clipped_repr(name)}", key=key, remedy=nearest(str(name), choices, "Known names"))
