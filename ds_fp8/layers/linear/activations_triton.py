"""Activation functions and their derivatives in Triton; activations.py names them and has the reference."""

from __future__ import annotations

import triton
import triton.language as tl

from ds_fp8.casts.primitives_triton import COMPILED

ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
"""Name of an activation -> the constant ACTIVATION of kernels."""
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sigmoid(x):
    """Return 1 / (1 + exp(-x)) to within a few units in the last place, in half the instructions of tl.sigmoid.

    These kernels are bound by arithmetic. Beside the 1 of the sum subnormal numbers do not matter, against which exp
    and the division are guarded otherwise. Triton's interpreter runs no assembly.
    """
    if COMPILED:
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -_LOG2E], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [e + 1.0], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.sigmoid(x)


@triton.jit
def activate(g, ACTIVATION: tl.constexpr):
    """Return (act(g), act'(g))."""
    if ACTIVATION == 0:
        #     silu:       g s(g),           slope  s + g s (1 - s)
        #     gelu:       g P(g),           slope  P + g p(g)          P, p: the normal distribution and its density
        #     gelu_tanh:  g (1 + t) / 2,    slope  (1 + t) / 2 + g (1 - t^2) / 2 * inner'(g),  t = tanh(inner)
        sigmoid = _sigmoid(g)
        value = g * sigmoid
        slope = value * (1.0 - sigmoid) + sigmoid
    elif ACTIVATION == 1:
        below = 0.5 * (1.0 + tl.math.erf(g * 0.7071067811865476))
        value = g * below
        slope = below + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    else:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        # tanh(y) = 2 s(2y) - 1: the sigmoid is two instructions here.
        tanh = 2.0 * _sigmoid(2.0 * inner) - 1.0
        value = 0.5 * g * (1.0 + tanh)
        slope = 0.5 * (1.0 + tanh) + 0.5 * g * (1.0 - tanh * tanh) * 0.7978845608028654 * (1.0 + 0.134145 * g * g)
    return value, slope
