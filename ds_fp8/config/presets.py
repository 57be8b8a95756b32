"""Named presets of the "fp8" section: partial sections, merged under what the user writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from ds_fp8.config.errors import UserError
from ds_fp8.config.schema import nearest, shown

Axis = Literal["linear", "param_gather", "grad_reduce", "optimizer"]
"""A section that presets differ in; each may take its values from another preset."""
AXES: tuple[str, ...] = get_args(Axis)
DEFAULT = "infir2"


def _granularity(word: str) -> dict[str, str]:
    return {"granularity": word}


_TENSORWISE: dict[str, Any] = {
    "linear": {
        "input": _granularity("tensor"),
        "weight": _granularity("tensor"),
        "grad_output": {**_granularity("tensor"), "format": "e5m2"},
    }
}
_STATIC: dict[str, Any] = {**_granularity("tensor"), "scale": "static"}
_FP8LM: dict[str, Any] = {**_TENSORWISE, "grad_reduce": {"scale": "tensor"}}
_FP8LM_MOMENTS = {"exp_avg": "e4m3", "exp_avg_sq": "fp16", "granularity": "tensor", "scale": "pow2"}

# None says stochastic_rounding: "auto" rounds moments in FP8 and masters in FP16 stochastically. The sources do not;
# rounded to nearest the final loss moves by more than chance does (docs/log/optimizer_state.md).
PRESETS: dict[str, dict[str, Any]] = {
    # InfiR2 (arXiv 2509.22536): E4M3 everywhere, 128x128 weights, 1x128 activations and gradients, power-of-two scales.
    "infir2": {},
    # As infir2, with wgrad's input in 128x128 blocks: on Hopper 1x128 times 128x128 is the faster block-scaled product.
    "hybrid_fast": {"linear": {"wgrad": {"input": "128x128"}}},
    # hybrid_fast for weights that exist: FP32 scales, which put the largest number of a group on a code, and the 128
    # channels of every input that hold the most energy multiplied with what casts lose there.
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
    "tensorwise": _TENSORWISE,
    # FP8-LM (arXiv 2310.18313): levels O1, O2 and O3. Weights are sharded in 16 bits before O3.
    "fp8lm_o1": {**_FP8LM, "param_gather": {"format": "bf16"}},
    "fp8lm_o2": {**_FP8LM, "param_gather": {"format": "bf16"}, "optimizer": _FP8LM_MOMENTS},
    "fp8lm_o3": {**_FP8LM, "optimizer": {**_FP8LM_MOMENTS, "master": "fp16_scaled"}},
    # COAT (arXiv 2410.19313): its linears and its optimizer, whose moments have their dynamic range expanded. It sends
    # gradients in BF16.
    "coat": {
        **_TENSORWISE,
        "grad_reduce": {"format": "bf16"},
        "optimizer": {"exp_avg": "e4m3_expanded", "exp_avg_sq": "e4m3_expanded"},
    },
    # Munit scaling (arXiv 2502.05967): no scale follows an amax. E4M3 as it is; E5M2 output gradients times 2^24.
    # That is our choice: gradients of a mean loss are about 1 / (tokens * hidden size), 2^-18 to 2^-36, and E5M2 goes
    # from 2^-16 to 2^15. Gradients are reduced in BF16, for their FP8 reduction has a scale for every group.
    "munit": {
        "linear": {
            "input": _STATIC,
            "weight": _STATIC,
            "grad_output": {**_STATIC, "format": "e5m2", "static_exponent": -24},
        },
        "grad_reduce": {"format": "bf16"},
    },
    # Fishman et al. (arXiv 2409.12517): its linears, with Smooth-SwiGLU, and its optimizer.
    "fishman": {
        "linear": {**_TENSORWISE["linear"], "smooth_swiglu": True},
        "grad_reduce": {"format": "bf16"},
        "optimizer": {"exp_avg": "e4m3", "exp_avg_sq": "e5m2", "granularity": "tensor"},
    },
}


_IN_BF16: dict[str, Any] = {"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}
_MXFP8 = {"format": "e4m3", "granularity": "1x32"}
_INT8 = {"format": "int8", "granularity": "tensor", "scale": "fp32"}
_NVFP4 = {"format": "e2m1", "granularity": "1x16", "scale": "e4m3"}
_MXFP4 = {"format": "e2m1", "granularity": "1x32"}
EMULATED_PRESETS: dict[str, dict[str, Any]] = {
    # OCP microscaling E4M3: 1x32 with power-of-two scales, every operand cast along its contraction. Emulated here.
    "mxfp8": {**_IN_BF16, "linear": dict.fromkeys(("input", "weight", "grad_output"), _MXFP8)},
    # HALO (arXiv 2501.02625), level 2: INT8 with one scale a tensor; forward products rotated, and output gradients
    # along tokens; weights gathered as they are multiplied. Blocks of 128 here, where the paper transforms whole
    # dimensions. Emulated here.
    "halo": {
        "param_gather": {"format": "int8"},
        "grad_reduce": {"format": "bf16"},
        "linear": {
            **dict.fromkeys(("input", "weight", "grad_output"), _INT8),
            "rotation": {"fprop": "in_features", "dgrad": "tokens", "block": 128},
        },
    },
    # NVFP4 pre-training (arXiv 2509.25149): E2M1, 1x16 with E4M3 scales, weights 16x16, gradients rounded
    # stochastically, wgrad's operands rotated with random signs. The layers that it keeps in BF16 are of each model:
    # overrides name them. Emulated here.
    "nvfp4": {
        **_IN_BF16,
        "linear": {
            "input": _NVFP4,
            "weight": {**_NVFP4, "granularity": "16x16"},
            "grad_output": {**_NVFP4, "rounding": "stochastic"},
            "rotation": {"wgrad": "tokens", "block": 16, "random": True},
        },
    },
    # Quartet (arXiv 2505.14669): MXFP4. Forward rotated by blocks of 32, to nearest with the scales of
    # least squared error. Backward has what forward multiplied, rotated again with random signs, all of it rounded
    # stochastically; clipped elements get no gradient. Scales are rounded up, so that nothing of it is clipped: the
    # paper's, rounded down, take a factor of 3/4 before and 16/9 after for that. Signs stay the same, where the paper
    # draws new ones at every step. Emulated here.
    "quartet": {
        **_IN_BF16,
        "linear": {
            **{name: {**_MXFP4, "scale": "mse"} for name in ("input", "weight")},
            "grad_output": {**_MXFP4, "rounding": "stochastic"},
            "rotation": {
                **{"fprop": "in_features", "dgrad": "out_features", "wgrad": "tokens"},
                **{"block": 32, "random": True},
            },
            "recast": {"of": "fprop"},
        },
    },
}
"""Presets that only the reference multiplies."""
_ALL = {**PRESETS, **EMULATED_PRESETS}


def preset_values(preset: Any) -> dict[str, Any]:
    """Return the partial section that `preset` stands for.

    Args:
        preset: a name, or a mapping from `AXES` to names; an axis that it does not hold takes the default's values.

    Raises:
        UserError: for anything else, naming the nearest preset or axis.
    """
    if isinstance(preset, str):
        return _ALL[_known(preset, _ALL, "preset", "fp8.preset")]
    if isinstance(preset, Mapping):
        # Sections that are not named are the default preset's.
        values = dict(PRESETS[DEFAULT])
        for axis, name in preset.items():
            _known(axis, AXES, "section of a preset", "fp8.preset")
            values[axis] = _ALL[_known(name, _ALL, "preset", f"fp8.preset.{axis}")].get(axis, {})
        return values
    raise UserError(f"preset {shown(preset)} is not a name", key="fp8.preset", remedy=f'"preset": "{DEFAULT}"')


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over`, section by section."""
    result = dict(base)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if nested else value
    return result


def _known(name: Any, choices: Mapping[str, Any] | tuple[str, ...], what: str, key: str) -> str:
    """Return `name` if it is one of `choices`; raise UserError otherwise."""
    if isinstance(name, str) and name in choices:
        return name
    raise UserError(f"unknown {what} {shown(name)}", key=key, remedy=nearest(str(name), choices, "Known names"))
