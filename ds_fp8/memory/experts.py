"""Bytes that the experts of a layer keep between forward and backward, and those that backward needs besides.

T tokens, each for k of E experts with H hidden and I intermediate features. Multiplied in BF16, with decoded weights,
there are S = Tk rows of a token for an expert; in FP8 R, S and what fills the tiles of 128 rows of every expert.
"""

from __future__ import annotations

from ds_fp8.layers.experts.layout import worst_case_rows
from ds_fp8.memory.model_shape import LayerShape
from ds_fp8.memory.workload import BF16, FP32, Workload

WITH_SCALES = 1 + FP32 / 128
"""Bytes of an element in FP8, cast in groups of 128."""


def experts_kept(layer: LayerShape, w: Workload) -> int:
    """Return what backward of the experts reads, beside their input.

    BF16: 2SH, gate and up 4SI, act(gate) 2SI, the product 2SI, and the output before its weight 2SH. FP8: gate and up
    2RI(1 + 1/32), or 4RI in BF16, or nothing with recompute "mlp"; the router's weight and the place of each row 8R,
    and the rows of each token 4S.
    """
    experts, rows = layer.experts, w.tokens * layer.experts.chosen
    if not experts.multiplied:
        return BF16 * rows * (2 * layer.hidden + 4 * experts.intermediate)
    # Buffers are made for the worst routing, so that no size depends on what the router chooses.
    padded = worst_case_rows(rows, experts.count)
    element = WITH_SCALES if w.fp8.activations.save == "fp8" else BF16
    gate_up = 0 if w.fp8.activations.recompute == "mlp" else int(2 * padded * experts.intermediate * element)
    return gate_up + 2 * FP32 * padded + FP32 * rows


def experts_workspace(layer: LayerShape, w: Workload) -> int:
    """Return what backward of the experts allocates.

    BF16: gradients of gate, up and rows 2S(2I + H) and of all weights 6EHI, and gate_up decoded 4EHI, if in FP8. FP8:
    the gradients of all weights 6EHI beside five casts of I features and two of H, R(5I + 2H)(1 + 1/32).
    """
    experts, H = layer.experts, layer.hidden
    matrices, rows = experts.count * H * experts.intermediate, w.tokens * experts.chosen
    if experts.multiplied:
        casts = worst_case_rows(rows, experts.count) * (5 * experts.intermediate + 2 * H) * WITH_SCALES
        return int(casts) + 3 * BF16 * matrices
    decoded = 2 * BF16 * matrices if w.gathers_in_fp8 and any(p.in_fp8 for p in layer.parameters) else 0
    return BF16 * rows * (2 * experts.intermediate + H) + 3 * BF16 * matrices + decoded
