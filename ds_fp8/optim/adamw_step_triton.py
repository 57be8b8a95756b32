"""adamw_step_reference of adamw.py in Triton: everything is read once and written once.

A program takes ROWS groups of 128 consecutive elements of the flat parameter. With 16 elements per thread accesses are
16 bytes wide, data and gradient of an element are in the same thread, and reductions of a group take 8 lanes. Per element

    exp_avg, exp_avg_sq = dequantize(data, scales)
    exp_avg    = beta1 exp_avg + (1 - beta1) grad
    exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) grad²
    master     = (1 - lr weight_decay) master - step_size exp_avg / (root_factor sqrt(exp_avg_sq) + eps)
    data, scales = quantize(exp_avg, exp_avg_sq)             with new scales, as in moments.py

and optionally the parameter in BF16 or FP16; masters may be BF16 and corrections (masters.py). The update uses the
moments before rounding.

A scale per tensor needs the amax of all new moments first: the kernel runs twice, to reduce their amax (MEASURE) and to
write them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ds_fp8.casts.primitives_triton import random_word
from ds_fp8.config.formats import BLOCK, SMALLEST_SCALE
from ds_fp8.optim.adamw import AdamStep
from ds_fp8.optim.masters import SplitMasters
from ds_fp8.optim.masters_triton import join_split, split_master
from ds_fp8.optim.moments import EXPONENT_STEPS, LARGEST_EXPONENT, LOG2_RANGE, SCALE_MASKS, Codec, Moment, shared_layout
from ds_fp8.optim.moments_triton import (
    EXPANDED,
    PLAIN,
    SCALED,
    dequantize_tile,
    divide,
    normal_magnitude_bits,
    quantize_store,
)

ROWS, WARPS = 16, 4  # groups of 128 that a program takes, and its warps
BEYOND = tl.constexpr(0x85EBCA6B)  # odd: distinguishes indices that differ in their upper 32 bits
SMALLEST_OF_SCALES = tl.constexpr(SMALLEST_SCALE)
NO_POLICY = tl.constexpr("")  # a default must be a constexpr: Triton compiles no plain string as one
# Scalar accesses: scales per tensor have any alignment, which would recompile the kernel.
_SCALARS = [
    "exp_avg_scale", "exp_avg_sq_scale", "new_exp_avg_scale", "new_exp_avg_sq_scale", "exp_avg_bits", "exp_avg_sq_bits",
]


@triton.jit
def load(pointers, valid, EVEN: tl.constexpr, POLICY: tl.constexpr = NO_POLICY):
    """Load, zeros where not `valid`; without mask if EVEN."""
    if EVEN:
        x = tl.load(pointers, eviction_policy=POLICY)
    else:
        x = tl.load(pointers, mask=valid, other=0, eviction_policy=POLICY)
    return x


@triton.jit
def store(pointers, x, valid, EVEN: tl.constexpr, POLICY: tl.constexpr = NO_POLICY):
    if EVEN:
        tl.store(pointers, x, eviction_policy=POLICY)
    else:
        tl.store(pointers, x, mask=valid, eviction_policy=POLICY)


@triton.jit
def new_moments(g, m, v, beta1, beta2):
    """Return the new moments. FMAs are explicit: compilers choose them differently, and last bits would vary."""
    zeros = tl.zeros_like(g)
    m = tl.fma(g, zeros + (1.0 - beta1), m * beta1)
    v = tl.fma(v, zeros + beta2, g * g * (1.0 - beta2))
    return m, v


@triton.jit
def new_master(w, m, v, decay, step_size, root_factor, eps, FAST: tl.constexpr):
    """Return the new master from the new moments, with explicit FMAs."""
    zeros = tl.zeros_like(w)
    denominator = tl.fma(tl.sqrt(v), zeros + root_factor, zeros + eps)
    return tl.fma(divide(m, denominator, FAST), zeros - step_size, w * decay)


@triton.jit(do_not_specialize=["first", "numel", "seed"], do_not_specialize_on_alignment=_SCALARS)
def _adamw(
    master, grad, low, ties, skip, factor, first, numel,
    exp_avg, exp_avg_scale, exp_avg_exponent, exp_avg_sq, exp_avg_sq_scale, exp_avg_sq_exponent,
    new_exp_avg_scale, new_exp_avg_sq_scale, exp_avg_bits, exp_avg_sq_bits,
    beta1, beta2, eps, decay, step_size, root_factor, seed,
    KIND1: tl.constexpr, DTYPE1: tl.constexpr, MAX1: tl.constexpr, LOG2_MAX1: tl.constexpr, SMALLEST1: tl.constexpr, MANTISSA1: tl.constexpr,
    MIN_EXPONENT1: tl.constexpr,
    KIND2: tl.constexpr, DTYPE2: tl.constexpr, MAX2: tl.constexpr, LOG2_MAX2: tl.constexpr, SMALLEST2: tl.constexpr, MANTISSA2: tl.constexpr,
    MIN_EXPONENT2: tl.constexpr,
    MASK: tl.constexpr, LOG2_RANGE: tl.constexpr, STEPS: tl.constexpr, LARGEST_STEPS: tl.constexpr,
    TENSOR: tl.constexpr, MEASURE: tl.constexpr, NOISE1: tl.constexpr, NOISE2: tl.constexpr, SKIP: tl.constexpr,
    LOW: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr,
):
    if SKIP:
        # On the device: no host sync for the gradient norm.
        if tl.load(skip) != 0:
            return
    #     g  = grad * factor                                   factor: clipping and loss scale
    #     m  = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    #     w  = decay w - step_size m / (root_factor sqrt(v) + eps)
    #     master, low, m, v = w, round(w), quantize(m), quantize(v)
    rows = (first + tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * 128 + tl.arange(0, 128)[None, :]
    # No masks in full programs (EVEN): they would split wide accesses if numel is odd.
    valid = offsets < numel
    inside = rows * 128 < numel
    g = load(grad + offsets, valid, EVEN).to(tl.float32)
    m_data = load(exp_avg + offsets, valid, EVEN)
    v_data = load(exp_avg_sq + offsets, valid, EVEN)
    if factor is not None:
        g = g * tl.load(factor)
    m = dequantize_tile(m_data, exp_avg_scale, exp_avg_exponent, rows, inside, KIND1, DTYPE1, MAX1, LOG2_MAX1, STEPS, True, TENSOR, FAST)
    v = dequantize_tile(v_data, exp_avg_sq_scale, exp_avg_sq_exponent, rows, inside, KIND2, DTYPE2, MAX2, LOG2_MAX2, STEPS, False, TENSOR, FAST)
    m, v = new_moments(g, m, v, beta1, beta2)
    if MEASURE:
        # Subnormals count as zero, in the amax, too.
        tl.atomic_max(exp_avg_bits, tl.max(tl.max(normal_magnitude_bits(m), 1), 0), sem="relaxed")
        tl.atomic_max(exp_avg_sq_bits, tl.max(tl.max(normal_magnitude_bits(v), 1), 0), sem="relaxed")
    else:
        w = load(master + offsets, valid, EVEN)
        if ties is None:
            w = w.to(tl.float32)
        else:
            # Split masters: BF16 in `low`, 16 more bits in `master`, a tie bit each; no other program has bits of these bytes.
            bit = (tl.arange(0, 128) % 8)[None, :]
            tie = (load(ties + offsets // 8, valid, EVEN).to(tl.int32) >> bit) & 1
            w = join_split(load(low + offsets, valid, EVEN), w, tie)
        w = new_master(w, m, v, decay, step_size, root_factor, eps, FAST)
        if ties is None:
            store(master + offsets, w, valid, EVEN)
            if LOW:
                store(low + offsets, w.to(low.dtype.element_ty), valid, EVEN)
        else:
            bf16, correction, tie = split_master(w)
            store(low + offsets, bf16, valid, EVEN)
            store(master + offsets, correction, valid, EVEN)
            eighths = rows[:, None] * 16 + tl.arange(0, 16)[None, :]
            tie = tl.sum(tl.reshape(tie << bit, [ROWS, 16, 8]), 2)
            store(ties + eighths, tie.to(tl.uint8), eighths * 8 < numel, EVEN)
        # Placeholders without noise: Triton needs a tensor of this shape in every branch.
        noise1 = w
        noise2 = w
        if NOISE1 or NOISE2:
            # A random word per element: 16 bits for each moment.
            word = random_word(offsets, seed.to(tl.uint32) + (offsets >> 32).to(tl.uint32) * BEYOND)
            noise1 = (word & 0xFFFF).to(tl.float32) * (1.0 / 65536.0)
            noise2 = (word >> 16).to(tl.float32) * (1.0 / 65536.0)
        quantize_store(
            m, exp_avg, new_exp_avg_scale, exp_avg_exponent, offsets, rows, inside, valid, noise1, exp_avg_bits,
            KIND1, DTYPE1, MAX1, LOG2_MAX1, MASK, SMALLEST_OF_SCALES, SMALLEST1, MANTISSA1, MIN_EXPONENT1, LOG2_RANGE, STEPS, LARGEST_STEPS,
            True, NOISE1, TENSOR, EVEN, FAST,
        )
        quantize_store(
            v, exp_avg_sq, new_exp_avg_sq_scale, exp_avg_sq_exponent, offsets, rows, inside, valid, noise2, exp_avg_sq_bits,
            KIND2, DTYPE2, MAX2, LOG2_MAX2, MASK, SMALLEST_OF_SCALES, SMALLEST2, MANTISSA2, MIN_EXPONENT2, LOG2_RANGE, STEPS, LARGEST_STEPS,
            False, NOISE2, TENSOR, EVEN, FAST,
        )


_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}


def adamw_step(
    master: torch.Tensor | SplitMasters,
    grad: torch.Tensor,
    exp_avg: torch.Tensor | Moment,
    exp_avg_sq: torch.Tensor | Moment,
    step: AdamStep,
    low: torch.Tensor | None = None,
) -> None:
    """adamw_step_reference on the GPU. Allocates memory for scales per tensor only."""
    states = (exp_avg, exp_avg_sq)
    layout = shared_layout(*states)
    by_tensor = layout is not None and layout.granularity == "tensor"
    pieces = layout.pieces() if by_tensor else [(slice(0, grad.numel()), slice(None))]
    #     first launch   bits   = max |new moment|
    #     second launch  scale' = f(bits); data = round(new moment / scale')
    # The second launch recomputes the new moment from old data and scale: new scales have separate memory and replace
    # the old ones afterwards. They begin as copies of the old ones, in case the step is skipped.
    bits = torch.zeros(2, layout.groups, dtype=torch.int32, device=grad.device) if by_tensor else None
    new_scales = [state.scale.clone() if by_tensor and isinstance(state, Moment) else None for state in states]
    common = common_arguments(*states, grad, step)
    common |= {"TENSOR": by_tensor, "LOW": low is not None, "ROWS": ROWS, "num_warps": WARPS}
    for elements, groups in pieces:
        if isinstance(master, SplitMasters):
            piece = master.piece(elements)
            stored, low_piece, ties = piece.correction, piece.bf16.view(torch.int16), piece.ties
        else:
            stored, low_piece, ties = master[elements], None if low is None else low[elements], None
        arguments = (stored, grad[elements], low_piece, ties, step.skip, step.factor)
        count = elements.stop - elements.start
        numbers = (
            count,
            *state_arguments(exp_avg, elements, groups),
            *state_arguments(exp_avg_sq, elements, groups),
            *(
                state_arguments(state, elements, groups)[1] if new is None else new[groups]
                for state, new in zip(states, new_scales, strict=True)
            ),
            *((None, None) if bits is None else (row[groups] for row in bits)),
            *step.numbers,
            # A seed per piece, whose offsets begin at 0. `&` binds first: the seed stays below 2^31.
            (step.seed or 0) ^ elements.start & 0x7FFFFFFF,
        )  # fmt: skip
        # Two launches: full programs without masks, and one program with masks for the rest.
        full, rest = divmod(count, ROWS * BLOCK)
        # Launches of one stream run in order: the maxima are complete in the second.
        for measure in (True, False) if by_tensor else (False,):
            if full:
                _adamw[(full,)](*arguments, 0, *numbers, EVEN=True, MEASURE=measure, **common)
            if rest:
                _adamw[(1,)](*arguments, full, *numbers, EVEN=False, MEASURE=measure, **common)
    for state, new in zip(states, new_scales, strict=True):
        if new is not None:
            state.scale = new


def common_arguments(
    exp_avg: torch.Tensor | Moment, exp_avg_sq: torch.Tensor | Moment, grad: torch.Tensor, step: AdamStep
) -> dict[str, object]:
    """Return the constexpr arguments of every kernel that updates moments."""
    states = (exp_avg, exp_avg_sq)
    layout = shared_layout(*states)
    common = {
        "MASK": SCALE_MASKS[layout.scale_type] if layout else 0,
        "LOG2_RANGE": LOG2_RANGE,
        "STEPS": EXPONENT_STEPS,
        "LARGEST_STEPS": LARGEST_EXPONENT,
        "NOISE1": step.seed is not None and "exp_avg" in step.stochastic,
        "NOISE2": step.seed is not None and "exp_avg_sq" in step.stochastic,
        "SKIP": step.skip is not None,
        # Triton's interpreter has no approximate instructions.
        "FAST": grad.is_cuda,
    }
    for moment, number in zip(states, "12", strict=True):
        common |= {f"{name}{number}": value for name, value in _codec_arguments(moment).items()}
    return common


def _codec_arguments(moment: torch.Tensor | Moment) -> dict[str, object]:
    codec: Codec | None = moment.codec if isinstance(moment, Moment) else None
    dtype = _DTYPES[codec.dtype if codec else moment.dtype]
    kind = PLAIN if codec is None else EXPANDED if codec.expanded else SCALED
    return {
        "KIND": kind.value,
        "DTYPE": dtype,
        "MAX": codec.max if codec else 1.0,
        "LOG2_MAX": math.log2(codec.max) if codec else 0.0,
        "SMALLEST": codec.smallest if codec else 0.0,
        "MANTISSA": codec.mantissa_bits if codec else 0,
        "MIN_EXPONENT": codec.min_exponent if codec else 0,
    }


def state_arguments(state: torch.Tensor | Moment, elements: slice, groups: slice) -> tuple:
    """Return (data, scale, exponent) of the piece; FP8 as bytes."""
    if not isinstance(state, Moment):
        return state[elements], None, None
    data = state.data.view(torch.uint8) if state.data.dtype.itemsize == 1 else state.data
    return data[elements], state.scale[groups], None if state.exponent is None else state.exponent[groups]
