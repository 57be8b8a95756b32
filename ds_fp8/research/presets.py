"""Presets of papers whose numerics core does not have."""

from __future__ import annotations

from typing import Any

from ds_fp8.config.presets import TENSORWISE

_STATIC: dict[str, Any] = {"granularity": "tensor", "scale": "static"}
_IN_BF16: dict[str, Any] = {"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}
_MXFP8 = {"format": "e4m3", "granularity": "1x32"}
_INT8 = {"format": "int8", "granularity": "tensor", "scale": "fp32"}
_NVFP4 = {"format": "e2m1", "granularity": "1x16", "scale": "e4m3"}
_MXFP4 = {"format": "e2m1", "granularity": "1x32"}
# Those that say "Emulated here" only the reference multiplies
PRESETS: dict[str, dict[str, Any]] = {
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
        "linear": {**TENSORWISE["linear"], "smooth_swiglu": True},
        "grad_reduce": {"format": "bf16"},
        "optimizer": {"exp_avg": "e4m3", "exp_avg_sq": "e5m2", "granularity": "tensor"},
    },
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
