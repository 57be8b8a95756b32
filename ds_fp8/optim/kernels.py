"""One AdamW step in Triton: gradient, codes and scales are read once, and what changed is written once.

A program takes ROWS groups of 128 consecutive elements of the flat parameter. With 16 elements a thread every access is
16 bytes wide, codes lie in the same registers as their gradient, a group's largest and smallest magnitude are reductions
among 8 lanes, and what is computed once a group costs little. Per element

    exp_avg, exp_avg_sq = decode(codes, scales)
    exp_avg    = beta1 exp_avg + (1 - beta1) grad
    exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) grad²
    master     = (1 - lr weight_decay) master - step_size exp_avg / (root_factor sqrt(exp_avg_sq) + eps)
    codes, scales = encode(exp_avg, exp_avg_sq)              with fresh scales, as codecs.py has it

and on request the parameter in BF16 or FP16 and the largest magnitude of the new master per group. The update uses the
moments before they are rounded.

One scale per tensor needs the largest magnitude of all of it before anything can be encoded: the kernel then runs twice,
first only to reduce the new moments (MEASURE), then to write them with the scale found. Expansion takes two logarithms
and two exponentials an element and moment; on a GPU they are the approximate instructions (FAST), whose errors of 1e-5
are far below E4M3's.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from ds_fp8.formats import BLOCK, SMALLEST_SCALE
from ds_fp8.optim.codecs import EXPONENT_STEPS, LARGEST_EXPONENT, LOG2_RANGE, SCALE_MASKS, Codec
from ds_fp8.optim.moment import Moment
from ds_fp8.optim.reference import AdamStep

ROWS, WARPS = 16, 4
"""Groups of 128 that a program takes, and its warps."""
PLAIN, SCALED, EXPANDED = (tl.constexpr(i) for i in range(3))
"""How a moment is stored: as a number, in units of a scale, in units of a scale and raised to an exponent."""
_SMALLEST_NORMAL = tl.constexpr(0x00800000)
_SIGN = tl.constexpr(-0x80000000)
_LARGEST_FINITE = tl.constexpr(0x7F7FFFFF)
_PHILOX_ROUNDS = tl.constexpr(7)  # fewer rounds than the default ten pass the same tests (Salmon et al., SC 2011)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:
        result = libdevice.fast_log2f(x)
    else:
        result = tl.log2(x)
    return result


@triton.jit
def _divide(x, y, FAST: tl.constexpr):
    if FAST:
        result = libdevice.fast_dividef(x, y)
    else:
        result = x / y
    return result


@triton.jit
def _with_sign_of(magnitude, x):
    """`magnitude`, which is not negative, with the sign of x: one instruction on bits."""
    bits = magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & _SIGN)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _decode(codes, scale, exponent, rows, inside, KIND: tl.constexpr, DTYPE: tl.constexpr, MAX: tl.constexpr,
            LOG2_MAX: tl.constexpr, STEPS: tl.constexpr, SIGNED: tl.constexpr, TENSOR: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """FP32 tile of the numbers stored as `codes`, a loaded tile; FP8 codes come as bytes."""
    if DTYPE.primitive_bitwidth == 8:
        x = codes.to(DTYPE, bitcast=True).to(tl.float32)
    else:
        x = codes.to(tl.float32)
    if KIND != PLAIN:
        factor = tl.load(scale + (rows * 0 if TENSOR else rows), mask=inside, other=1.0)
        if KIND == EXPANDED:
            # scale * (|x| / MAX) ** (1 / power) as one exponential of one multiply-add; the log of 0 is -inf.
            steps = tl.load(exponent + rows, mask=inside, other=1).to(tl.float32)
            inverse = _divide(tl.zeros_like(steps) + STEPS, steps, FAST)
            offset = _log2(factor, FAST) - LOG2_MAX * inverse
            magnitude = tl.exp2(_log2(tl.abs(x), FAST) * inverse[:, None] + offset[:, None])
            x = _with_sign_of(magnitude, x) if SIGNED else magnitude
        else:
            x = x * factor[:, None]
    return x


@triton.jit
def _magnitude_bits(x):
    """Bits of |x|, which order like the numbers; 0 for what counts as zero."""
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    return tl.where(bits < _SMALLEST_NORMAL, 0, bits)


@triton.jit
def _scale_of(bits, MAX: tl.constexpr, MASK: tl.constexpr, SMALLEST: tl.constexpr):
    """amax / MAX rounded up as MASK says, from the bits of amax; 1 for a group of zeros, NaN for one of Inf or NaN."""
    amax = bits.to(tl.float32, bitcast=True)
    exact = tl.div_rn(amax, tl.zeros_like(amax) + MAX)
    rounded = ((exact.to(tl.int32, bitcast=True) + MASK) & (-1 - MASK)).to(tl.float32, bitcast=True)
    scale = tl.where(bits == 0, 1.0, tl.maximum(rounded, SMALLEST))
    return tl.where(bits > _LARGEST_FINITE, float("nan"), scale)


@triton.jit
def _power(x, exponent, FAST: tl.constexpr):
    return tl.exp2(_log2(x, FAST) * exponent)


@triton.jit
def _with_noise(y, noise, bend, KIND: tl.constexpr, MAX: tl.constexpr, MANTISSA: tl.constexpr,
                MIN_EXPONENT: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """One of the two numbers of the format around y >= 0, right on average over noise in [0, 1): _round_with_noise."""
    exponent = tl.maximum(y.to(tl.int32, bitcast=True) >> 23, MIN_EXPONENT + 127)
    step = ((exponent - MANTISSA) << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent + MANTISSA) << 23).to(tl.float32, bitcast=True)
    below = tl.floor(y * inverse) * step
    share = (y - below) * inverse
    if KIND == EXPANDED:
        low = _power(below, bend, FAST)
        share = tl.where(share > 0, (_power(y, bend, FAST) - low) / (_power(below + step, bend, FAST) - low), 0.0)
    return tl.minimum(tl.where(share + noise >= 1, below + step, below), MAX)


@triton.jit
def _encode_store(
    x, codes, scale, exponent, offsets, rows, inside, valid, noise, amax,
    KIND: tl.constexpr, DTYPE: tl.constexpr, MAX: tl.constexpr, LOG2_MAX: tl.constexpr, MASK: tl.constexpr, SMALLEST_SCALE: tl.constexpr,
    SMALLEST: tl.constexpr, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, LOG2_RANGE: tl.constexpr,
    STEPS: tl.constexpr, LARGEST_STEPS: tl.constexpr, SIGNED: tl.constexpr, NOISE: tl.constexpr,
    TENSOR: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Encode the tile x and store its codes, scales and exponents. `amax`: bits of the tensor's, where TENSOR."""
    if KIND == PLAIN:
        if NOISE and DTYPE == tl.bfloat16:
            # BF16 is the upper half of FP32.
            bits = (x.to(tl.int32, bitcast=True) + (noise * 65536.0).to(tl.int32)) & -65536
            x = bits.to(tl.float32, bitcast=True)
        result = x.to(DTYPE)
    else:
        if KIND == EXPANDED:
            bits = tl.abs(x).to(tl.int32, bitcast=True)
            largest = tl.max(bits, 1)
            largest = tl.where(largest < _SMALLEST_NORMAL, 0, largest)
            smallest = tl.min(tl.where(bits < _SMALLEST_NORMAL, _LARGEST_FINITE, bits), 1)
            factor = largest.to(tl.float32, bitcast=True)
            log_largest = _log2(tl.where(largest == 0, 1.0, factor), FAST)
            ratio = log_largest - _log2(smallest.to(tl.float32, bitcast=True), FAST)
            # Equal values have ratio 0, and a group of zeros a negative one.
            steps = tl.floor(_divide(tl.zeros_like(ratio) + STEPS * LOG2_RANGE, tl.maximum(ratio, 1e-6), FAST))
            steps = tl.minimum(tl.maximum(steps, 1.0), LARGEST_STEPS)
            power = steps * (1.0 / STEPS)
            offset = LOG2_MAX - log_largest * power
            # MAX * (|x| / largest) ** power; the smallest comes to 2.3 steps of the format, so nothing becomes zero.
            magnitude = bits.to(tl.float32, bitcast=True)
            if not FAST:
                magnitude = tl.where(bits < _SMALLEST_NORMAL, 0.0, magnitude)  # on a GPU the logarithm does
            y = tl.exp2(_log2(magnitude, FAST) * power[:, None] + offset[:, None])
            bend = _divide(tl.zeros_like(steps) + STEPS, steps, FAST)[:, None]
            tl.store(exponent + rows, steps.to(tl.uint8), mask=inside)
            tl.store(scale + rows, factor, mask=inside)
        else:
            bits = _magnitude_bits(x)
            if TENSOR:
                largest = tl.load(amax) + rows.to(tl.int32) * 0
                factor = _scale_of(largest, MAX, MASK, SMALLEST_SCALE)
                tl.store(scale + rows * 0, factor, mask=rows == 0)
            else:
                largest = tl.max(bits, 1)
                factor = _scale_of(largest, MAX, MASK, SMALLEST_SCALE)
                tl.store(scale + rows, factor, mask=inside)
            bend = inside
            inverse = tl.div_rn(tl.zeros_like(factor) + 1.0, factor)
            y = bits.to(tl.float32, bitcast=True) * inverse[:, None]
            if not SIGNED:
                y = tl.where((bits > 0) & (y < SMALLEST), SMALLEST, y)
        if NOISE:
            rounded = _with_noise(y, noise, bend, KIND, MAX, MANTISSA, MIN_EXPONENT, FAST)
            if KIND == EXPANDED or MASK == 0x7FF:
                # Noise must not round the largest down, or decoding and encoding again would find another scale.
                rounded = tl.where((bits == largest[:, None]) & (largest > 0)[:, None], MAX, rounded)
            y = tl.where(y == y, rounded, y)  # NaN stays
        # Casts to nearest need no clamp: rounding errors above MAX are far below half a step.
        result = (_with_sign_of(y, x) if SIGNED else y).to(DTYPE)
    if DTYPE.primitive_bitwidth == 8:
        result = result.to(tl.uint8, bitcast=True)
    if EVEN:
        tl.store(codes + offsets, result)
    else:
        tl.store(codes + offsets, result, mask=valid)


@triton.jit(do_not_specialize=["first", "numel", "seed"])
def _adamw(
    master, grad, low, master_amax, skip, first, numel,
    exp_avg, exp_avg_scale, exp_avg_exponent, exp_avg_sq, exp_avg_sq_scale, exp_avg_sq_exponent,
    new_exp_avg_scale, new_exp_avg_sq_scale, exp_avg_amax, exp_avg_sq_amax,
    beta1, beta2, eps, decay, step_size, root_factor, seed,
    KIND1: tl.constexpr, DTYPE1: tl.constexpr, MAX1: tl.constexpr, LOG2_MAX1: tl.constexpr, SMALLEST1: tl.constexpr, MANTISSA1: tl.constexpr,
    MIN_EXPONENT1: tl.constexpr,
    KIND2: tl.constexpr, DTYPE2: tl.constexpr, MAX2: tl.constexpr, LOG2_MAX2: tl.constexpr, SMALLEST2: tl.constexpr, MANTISSA2: tl.constexpr,
    MIN_EXPONENT2: tl.constexpr,
    MASK: tl.constexpr, SMALLEST_SCALE: tl.constexpr, LOG2_RANGE: tl.constexpr, STEPS: tl.constexpr,
    LARGEST_STEPS: tl.constexpr, TENSOR: tl.constexpr, MEASURE: tl.constexpr, NOISE: tl.constexpr, SKIP: tl.constexpr,
    LOW: tl.constexpr, AMAX: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    if SKIP:
        if tl.load(skip) != 0:
            return
    rows = (first + tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * 128 + tl.arange(0, 128)[None, :]
    # Whole programs need no masks, which would break up the wide accesses where numel is odd.
    valid = offsets < numel
    inside = rows * 128 < numel
    if EVEN:
        g = tl.load(grad + offsets).to(tl.float32)
        m_codes = tl.load(exp_avg + offsets)
        v_codes = tl.load(exp_avg_sq + offsets)
    else:
        g = tl.load(grad + offsets, mask=valid, other=0.0).to(tl.float32)
        m_codes = tl.load(exp_avg + offsets, mask=valid, other=0)
        v_codes = tl.load(exp_avg_sq + offsets, mask=valid, other=0)
    m = _decode(m_codes, exp_avg_scale, exp_avg_exponent, rows, inside, KIND1, DTYPE1, MAX1, LOG2_MAX1, STEPS, True, TENSOR, FAST)
    v = _decode(v_codes, exp_avg_sq_scale, exp_avg_sq_exponent, rows, inside, KIND2, DTYPE2, MAX2, LOG2_MAX2, STEPS, False, TENSOR, FAST)
    m = m * beta1 + g * (1.0 - beta1)
    v = v * beta2 + g * g * (1.0 - beta2)
    if MEASURE:
        tl.atomic_max(exp_avg_amax, tl.max(tl.max(_magnitude_bits(m), 1), 0), sem="relaxed")
        tl.atomic_max(exp_avg_sq_amax, tl.max(tl.max(_magnitude_bits(v), 1), 0), sem="relaxed")
    else:
        w = tl.load(master + offsets) if EVEN else tl.load(master + offsets, mask=valid, other=0.0)
        w = w * decay - step_size * _divide(m, tl.sqrt(v) * root_factor + eps, FAST)
        if EVEN:
            tl.store(master + offsets, w)
        else:
            tl.store(master + offsets, w, mask=valid)
        if LOW:
            if EVEN:
                tl.store(low + offsets, w.to(low.dtype.element_ty))
            else:
                tl.store(low + offsets, w.to(low.dtype.element_ty), mask=valid)
        if AMAX:
            tl.store(master_amax + rows, tl.max(tl.where(valid, tl.abs(w), 0.0), 1), mask=inside)
        noise1 = w
        noise2 = w
        if NOISE:
            # One random word an element: 16 bits for each moment.
            low_word = (offsets & 0xFFFFFFFF).to(tl.uint32)
            high_word = (offsets >> 32).to(tl.uint32)
            zero = low_word * 0
            word, _, _, _ = tl.philox(seed, low_word, high_word, zero, zero, _PHILOX_ROUNDS)
            noise1 = (word & 0xFFFF).to(tl.float32) * (1.0 / 65536.0)
            noise2 = (word >> 16).to(tl.float32) * (1.0 / 65536.0)
        _encode_store(
            m, exp_avg, new_exp_avg_scale, exp_avg_exponent, offsets, rows, inside, valid, noise1, exp_avg_amax,
            KIND1, DTYPE1, MAX1, LOG2_MAX1, MASK, SMALLEST_SCALE, SMALLEST1, MANTISSA1, MIN_EXPONENT1, LOG2_RANGE, STEPS, LARGEST_STEPS,
            True, NOISE, TENSOR, EVEN, FAST,
        )  # fmt: skip
        _encode_store(
            v, exp_avg_sq, new_exp_avg_sq_scale, exp_avg_sq_exponent, offsets, rows, inside, valid, noise2, exp_avg_sq_amax,
            KIND2, DTYPE2, MAX2, LOG2_MAX2, MASK, SMALLEST_SCALE, SMALLEST2, MANTISSA2, MIN_EXPONENT2, LOG2_RANGE, STEPS, LARGEST_STEPS,
            False, NOISE, TENSOR, EVEN, FAST,
        )  # fmt: skip


_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}


def adamw_step(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor | Moment,
    exp_avg_sq: torch.Tensor | Moment,
    step: AdamStep,
    *,
    low: torch.Tensor | None = None,
    master_amax: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    seed: int | None = None,
) -> None:
    """One step in place, on flat contiguous tensors of n elements of one CUDA device; nothing is allocated for groups.

    master FP32 [n]; grad floating point [n]; exp_avg and exp_avg_sq FP32 or BF16 [n], or Moments of n elements. low
    [n], BF16 or FP16, receives the new master rounded to nearest; master_amax FP32 [ceil(n/128)] the largest
    magnitude of the new master in every 128 elements (not with scales by tensor). Nothing is changed where the one element of `skip` is not zero.
    seed, at least 0 and below 2^31: round the moments stochastically with random numbers of this seed.
    """
    layout = next((moment.layout for moment in (exp_avg, exp_avg_sq) if isinstance(moment, Moment)), None)
    tensorwise = layout is not None and layout.granularity == "tensor"
    pieces = layout.pieces() if tensorwise else [(slice(0, master.numel()), slice(None))]
    # Every program needs the old scales, so the new ones go elsewhere: copies of the old where the step is skipped.
    amax = torch.zeros(2, layout.groups, dtype=torch.int32, device=master.device) if tensorwise else None
    moments = (exp_avg, exp_avg_sq)
    new_scales = [_scale(moment).clone() if tensorwise and isinstance(moment, Moment) else None for moment in moments]
    common = {
        "MASK": SCALE_MASKS[layout.scale_type] if layout else 0,
        "SMALLEST_SCALE": SMALLEST_SCALE,
        "LOG2_RANGE": LOG2_RANGE,
        "STEPS": EXPONENT_STEPS,
        "LARGEST_STEPS": LARGEST_EXPONENT,
        "TENSOR": tensorwise,
        "NOISE": seed is not None,
        "SKIP": skip is not None,
        "LOW": low is not None,
        "AMAX": master_amax is not None,
        "FAST": master.is_cuda,
        "ROWS": ROWS,
        "num_warps": WARPS,
    }
    for moment, number in zip(moments, "12", strict=True):
        common |= {f"{name}{number}": value for name, value in _codec_arguments(moment).items()}
    for elements, groups in pieces:
        numel = elements.stop - elements.start
        amaxes = (None, None) if amax is None else (amax[0, groups], amax[1, groups])
        arguments = (
            master[elements], grad[elements], None if low is None else low[elements], master_amax, skip,
        )  # fmt: skip
        state = (
            numel, *_moment_arguments(exp_avg, elements, groups), *_moment_arguments(exp_avg_sq, elements, groups),
            *(_scale(moment, groups) if new is None else new[groups] for moment, new in zip(moments, new_scales, strict=True)),
            *amaxes, step.beta1, step.beta2, step.eps, step.decay, step.step_size, step.root_factor,
            (seed or 0) ^ elements.start & 0x7FFFFFFF,
        )  # fmt: skip
        whole, rest = divmod(numel, ROWS * BLOCK)
        for measure in (True, False) if tensorwise else (False,):
            if whole:
                _adamw[(whole,)](*arguments, 0, *state, EVEN=True, MEASURE=measure, **common)
            if rest:
                _adamw[(1,)](*arguments, whole, *state, EVEN=False, MEASURE=measure, **common)
    for moment, new in zip(moments, new_scales, strict=True):
        if new is not None:
            moment.scale = new


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


def _moment_arguments(moment: torch.Tensor | Moment, elements: slice, groups: slice) -> tuple:
    """(codes, scale, exponent) of the piece; FP8 codes as bytes."""
    if not isinstance(moment, Moment):
        return moment[elements], None, None
    codes = moment.codes.view(torch.uint8) if moment.codes.dtype.itemsize == 1 else moment.codes
    return codes[elements], moment.scale[groups], None if moment.exponent is None else moment.exponent[groups]


def _scale(moment: torch.Tensor | Moment, groups: slice = slice(None)) -> torch.Tensor | None:
    return moment.scale[groups] if isinstance(moment, Moment) else None
