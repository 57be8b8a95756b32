"""act(gate) · up fused with quantization and outlier block, forward and backward; gated_activation.py has the maths."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.outliers_triton import ROWS, copy_tile, dequantize_channels, store_outlier_block, wide_input
from ds_fp8.casts.primitives_triton import (
    COMPILED,
    GROUP,
    MODES,
    TENSOR,
    TILE,
    amax_bits,
    empty_result,
    format_arguments,
    is_even,
    result_arguments,
    scale_of,
    store_cast,
    store_cast_columnwise,
    tiles,
)
from ds_fp8.config.formats import BLOCK, CastSpec
from ds_fp8.layers.linear.recipe import LinearRecipe

ACTIVATION_KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}  # constant ACTIVATION of kernels
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


@triton.jit
def _load(x, m, k, M, stride, offset, F, EVEN: tl.constexpr):
    """Return the FP32 tile at rows m and columns offset + k < offset + F."""
    address = x + m[:, None].to(tl.int64) * stride + (offset + k)[None, :]
    if EVEN:
        return tl.load(address).to(tl.float32)
    return tl.load(address, mask=(m < M)[:, None] & (k < F)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _forward_tiles(
    gate_up, row_factor, M, F, stride, product, quantized, pitch, quantized_scale, saved, saved_scale,
    ACTIVATION: tl.constexpr, SAVE: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    #     product = act(gate) * up                              gate = gate_up[:, :F], up = gate_up[:, F:]
    #     quantized = round(product / scale of its 1 x 128 group)  input of down_proj
    #     saved   = gate and up in E4M3                            for backward
    k = tl.program_id(0) * 128 + tl.arange(0, 128)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    g = _load(gate_up, m, k, M, stride, 0, F, EVEN)
    u = _load(gate_up, m, k, M, stride, F, F, EVEN)
    value, _ = activate(g, ACTIVATION)
    p = value * u
    if row_factor is not None:
        p *= tl.load(row_factor + m, mask=m < M, other=0.0)[:, None]
    if quantized is not None:
        store_cast(p, k, m, F, M, quantized, pitch, quantized_scale, None, M, 1, 1, 1, DTYPE, LARGEST, SMALLEST, POW2, EVEN)
    if product is not None:
        inside = (m < M)[:, None] & (k < F)[None, :]
        tl.store(product + m[:, None].to(tl.int64) * F + k[None, :], p.to(product.dtype.element_ty), mask=inside)
    if SAVE:  # gate and up are groups of their own: F is a multiple of 128 here
        store_cast(
            g, k, m, 2 * F, M, saved, 2 * F, saved_scale, None, M, 1, 1, 1, tl.float8e4nv, 448.0, SMALLEST, True, EVEN
        )
        store_cast(
            u, F + k, m, 2 * F, M, saved, 2 * F, saved_scale, None, M, 1, 1, 1, tl.float8e4nv, 448.0, SMALLEST, True, EVEN
        )


def gated_forward(
    gate_up: torch.Tensor,
    activation: str,
    spec: CastSpec,
    save: bool,
    fuse_cast: bool = True,
    room: int = 0,
    row_factor: torch.Tensor | None = None,
    product: bool = False,
) -> tuple[torch.Tensor | None, QuantizedTensor | None, QuantizedTensor | None]:
    """Return (product [T, F] or None, quantized product or None, gate_up [T, 2F] in FP8 or None).

    Quantized if `fuse_cast` and `spec` is 1x128; the product itself otherwise, or with `product`. `room`: padding of
    the quantized product (empty_result).
    """
    M, width = gate_up.shape
    F = width // 2
    gate_up = gate_up if gate_up.stride(-1) == 1 else gate_up.contiguous()
    quantized = uncast = saved = None
    if fuse_cast and spec.granularity == "1x128":
        quantized = empty_result(M, F, spec.format, "1x128", spec.scale, gate_up.device, room)
    if quantized is None or product:
        uncast = torch.empty(M, F, dtype=gate_up.dtype, device=gate_up.device)
    if save and F % 128 == 0:
        saved = empty_result(M, 2 * F, "e4m3", "1x128", "pow2", gate_up.device)
    if gate_up.numel():
        rows = 16
        _forward_tiles[(tiles(F), triton.cdiv(M, rows))](
            gate_up, row_factor, M, F, gate_up.stride(0), uncast, quantized and quantized.data, F + room, quantized and quantized.scale,
            saved and saved.data, saved and saved.scale,
            ACTIVATION=ACTIVATION_KINDS[activation], SAVE=saved is not None, ROWS=rows,
            EVEN=M % rows == 0 and is_even(F), num_warps=4, **format_arguments(spec.format, spec.scale),
        )
    if save and saved is None:
        from ds_fp8.casts import quantize

        # F is ragged: gate and up share the middle group, which the kernel would split.
        saved = quantize(gate_up, "e4m3", "1x128", "pow2")
    return uncast, quantized, saved


@triton.jit
def _gradients(
    dproduct, gate_up, scale, row_factor, m, k, M, F, stride, scale_group,
    ACTIVATION: tl.constexpr, SAVED_FP8: tl.constexpr, EVEN: tl.constexpr,
):
    """Return (dgate, dup, product, summands of drow_factor) of a tile, FP32."""
    dp = _load(dproduct, m, k, M, F, 0, F, EVEN)
    g = _load(gate_up, m, k, M, stride, 0, F, EVEN)
    u = _load(gate_up, m, k, M, stride, F, F, EVEN)
    if SAVED_FP8:
        if EVEN:  # full groups: one scale per row of the tile
            group = tl.min(k, 0) // 128
            g *= tl.load(scale + group * scale_group + m)[:, None]
            u *= tl.load(scale + (F // 128 + group) * scale_group + m)[:, None]
        else:
            inside = (m < M)[:, None] & (k < F)[None, :]
            g *= tl.load(scale + (k // 128)[None, :] * scale_group + m[:, None], mask=inside, other=0.0)
            u *= tl.load(scale + ((F + k) // 128)[None, :] * scale_group + m[:, None], mask=inside, other=0.0)
    #     dgate = dproduct * up * act'(gate);   dup = dproduct * act(gate);   product = act(gate) * up
    # The product is recomputed: wgrad of down_proj reads it columnwise, and forward saved only gate and up.
    value, slope = activate(g, ACTIVATION)
    dg, du, p = dp * u * slope, dp * value, value * u
    share = dp * p
    if row_factor is not None:
        factor = tl.load(row_factor + m, mask=m < M, other=0.0)[:, None]
        dg, du, p = dg * factor, du * factor, p * factor
    return dg, du, p, share


@triton.jit
def _backward_rows(
    dproduct, gate_up, scale, row_factor, M, F, stride, scale_group, data, row_scale, along, across, product_amax,
    drow_factor, dgate_up, product,
    ROWS: tl.constexpr, ACTIVATION: tl.constexpr, SAVED_FP8: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    """Quantize and store dgate and dup rowwise, ROWS tokens x 128 features.

    If requested, also the product's amax per tile, partial sums [F/128, M] of drow_factor, and dgate, dup and the
    product in high precision.
    """
    k = tl.program_id(0) * 128 + tl.arange(0, 128)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dg, du, p, share = _gradients(
        dproduct, gate_up, scale, row_factor, m, k, M, F, stride, scale_group, ACTIVATION, SAVED_FP8, True
    )
    if drow_factor is not None:
        tl.store(drow_factor + tl.program_id(0) * M + m, tl.sum(share, 1))
    store_cast(
        dg, k, m, 2 * F, M, data, 2 * F, row_scale, None, along, across, 1, 1, DTYPE, LARGEST, SMALLEST, POW2, True
    )
    store_cast(
        du, F + k, m, 2 * F, M, data, 2 * F, row_scale, None, along, across, 1, 1, DTYPE, LARGEST, SMALLEST, POW2, True
    )
    at = m[:, None].to(tl.int64) * F + k[None, :]
    if product is not None:
        tl.store(product + at, p.to(product.dtype.element_ty))
    if dgate_up is not None:
        at += m[:, None].to(tl.int64) * F
        tl.store(dgate_up + at, dg.to(dgate_up.dtype.element_ty))
        tl.store(dgate_up + F + at, du.to(dgate_up.dtype.element_ty))
    if product_amax is not None:
        # Several programs share a tile of 128 tokens: atomic maxima, independent of their order.
        tile = tl.program_id(1) * ROWS // 128 * tl.num_programs(0) + tl.program_id(0)
        tl.atomic_max(product_amax + tile, tl.max(amax_bits(p, 1), 0), sem="relaxed")


@triton.jit
def _backward_columns(
    dproduct, gate_up, scale, row_factor, M, F, stride, scale_group,
    column_data, column_scale, column_along, column_across,
    product_data, product_scale, product_along, product_across, product_amax,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, SAVED_FP8: tl.constexpr, PRODUCT: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, POW2: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr, PRODUCT_LARGEST: tl.constexpr, PRODUCT_POW2: tl.constexpr, SMALLEST: tl.constexpr,
):
    """Quantize and store dgate, dup and the product columnwise, 128 tokens x WIDTH features; PRODUCT: its mode."""
    # Groups lie along the tokens: a program holds 128 tokens, full groups, of a few features.
    k = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    first_m = tl.program_id(1) * 128
    m = first_m + 4 * tl.arange(0, 32)  # rows 4i, 4i + 1, ... in separate tensors, for store_cast_columnwise
    dg0, du0, p0, _ = _gradients(
        dproduct, gate_up, scale, row_factor, m, k, M, F, stride, scale_group, ACTIVATION, SAVED_FP8, True
    )
    dg1, du1, p1, _ = _gradients(
        dproduct, gate_up, scale, row_factor, m + 1, k, M, F, stride, scale_group, ACTIVATION, SAVED_FP8, True
    )
    dg2, du2, p2, _ = _gradients(
        dproduct, gate_up, scale, row_factor, m + 2, k, M, F, stride, scale_group, ACTIVATION, SAVED_FP8, True
    )
    dg3, du3, p3, _ = _gradients(
        dproduct, gate_up, scale, row_factor, m + 3, k, M, F, stride, scale_group, ACTIVATION, SAVED_FP8, True
    )
    store_cast_columnwise(
        dg0, dg1, dg2, dg3, first_m, k, M, 2 * F, column_data, column_scale, None, column_along, column_across,
        GROUP, DTYPE, LARGEST, SMALLEST, POW2,
    )
    store_cast_columnwise(
        du0, du1, du2, du3, first_m, F + k, M, 2 * F, column_data, column_scale, None, column_along, column_across,
        GROUP, DTYPE, LARGEST, SMALLEST, POW2,
    )
    if PRODUCT == TILE:  # amax from _backward_rows, which store_cast_columnwise reads as of a tensor
        tiles = tl.num_programs(0) * WIDTH // 128
        at = tl.program_id(0) * WIDTH // 128
        # Complete: launches of one stream run in order.
        amax = product_amax + tl.program_id(1) * tiles + at
        block = product_scale + tl.program_id(1) * product_along + at * product_across
        factor, _ = scale_of(tl.load(amax), PRODUCT_LARGEST, SMALLEST, PRODUCT_POW2)
        tl.store(block, factor)
        store_cast_columnwise(
            p0, p1, p2, p3, first_m, k, M, F, product_data, block, amax, 0, 0,
            TENSOR, PRODUCT_DTYPE, PRODUCT_LARGEST, SMALLEST, PRODUCT_POW2,
        )
    else:
        store_cast_columnwise(
            p0, p1, p2, p3, first_m, k, M, F, product_data, product_scale, None, product_along, product_across,
            PRODUCT, PRODUCT_DTYPE, PRODUCT_LARGEST, SMALLEST, PRODUCT_POW2,
        )


@triton.jit
def _backward_tiles(
    dproduct, gate_up, scale, M, F, stride, scale_group, dgate_up, product,
    ACTIVATION: tl.constexpr, SAVED_FP8: tl.constexpr, EVEN: tl.constexpr,
):
    k = tl.program_id(0) * 128 + tl.arange(0, 128)
    m = tl.program_id(1) * 32 + tl.arange(0, 32)
    dg, du, p, _ = _gradients(
        dproduct, gate_up, scale, None, m, k, M, F, stride, scale_group, ACTIVATION, SAVED_FP8, EVEN
    )
    inside = (m < M)[:, None] & (k < F)[None, :]
    at = m[:, None].to(tl.int64) * F + k[None, :]
    tl.store(product + at, p.to(product.dtype.element_ty), mask=inside)
    at = m[:, None].to(tl.int64) * 2 * F + k[None, :]
    tl.store(dgate_up + at, dg.to(dgate_up.dtype.element_ty), mask=inside)
    tl.store(dgate_up + F + at, du.to(dgate_up.dtype.element_ty), mask=inside)


def _saved_arguments(saved: QuantizedTensor | torch.Tensor) -> tuple:
    if isinstance(saved, QuantizedTensor):
        scale = saved.scale
        if not scale.dim():  # one for all
            scale = scale.expand(saved.shape[0], tiles(saved.shape[1]))
        # The kernel reads the scales of a group token by token: adjacent in memory.
        scale = scale if scale.stride(0) == 1 else scale.t().contiguous().t()
        return saved.data, scale, saved.data.stride(0), scale.stride(1)
    return saved, None, saved.stride(0), 0


def gated_backward_quantized(
    dproduct: torch.Tensor,
    saved: QuantizedTensor | torch.Tensor,
    activation: str,
    recipe: LinearRecipe,
    down: LinearRecipe,
    row_factor: torch.Tensor | None = None,
    wgrad: bool = True,
    uncast: tuple[bool, bool] = (False, False),
) -> tuple[QuantizedTensor | torch.Tensor | None, ...]:
    """Return the fields of GatedGradients; T and F are multiples of 128.

    Two launches, rowwise and columnwise: one would spill registers, which costs more than reading the inputs twice. The
    first also computes the amax per tile of the product, for scales of 128x128: the second holds a few features at a
    time, because narrow tiles are the fastest.
    """
    M, F = dproduct.shape
    dproduct = dproduct.contiguous()
    dy, x = recipe.grad_output, down.input
    row = empty_result(M, 2 * F, dy.format, "1x128", dy.scale, dproduct.device)
    column = empty_result(2 * F, M, dy.format, "1x128" if wgrad else None, dy.scale, dproduct.device)
    product = empty_result(F, M, x.format, down.wgrad_input if wgrad else None, x.scale, dproduct.device)
    shares = None if row_factor is None else torch.empty(tiles(F), M, device=dproduct.device)
    high = [
        torch.empty(M, width, dtype=dproduct.dtype, device=dproduct.device) if wanted else None
        for width, wanted in zip((2 * F, F), uncast, strict=True)
    ]
    if dproduct.numel() == 0:
        return row, column, product, None if shares is None else shares.sum(0), *high
    data, scale, stride, scale_group = _saved_arguments(saved)
    source = (dproduct, data, scale, row_factor, M, F, stride, scale_group)
    common = {"ACTIVATION": ACTIVATION_KINDS[activation], "SAVED_FP8": scale is not None}
    gradient = format_arguments(dy.format, dy.scale)
    of_product = {f"PRODUCT_{key}": value for key, value in format_arguments(x.format, x.scale).items()}
    del of_product["PRODUCT_SMALLEST"]
    product_amax = None
    if wgrad and down.wgrad_input == "128x128":
        # Bits of FP32 maxima: numbers >= 0 order like their bits.
        product_amax = torch.zeros(M // BLOCK * tiles(F), dtype=torch.int32, device=dproduct.device)
    # Two warps: the cost per thread of a scale is shared by twice as many elements.
    rows = width = 16
    _backward_rows[(tiles(F), M // rows)](
        *source, *result_arguments(row), product_amax, shares, *high, ROWS=rows, num_warps=2, **common, **gradient
    )
    if wgrad:
        _backward_columns[(F // width, M // BLOCK)](
            *source, *result_arguments(column), *result_arguments(product), product_amax, WIDTH=width,
            PRODUCT=MODES[down.wgrad_input], num_warps=2, **common, **gradient, **of_product,
        )
    return row, column, product, None if shares is None else shares.sum(0), *high


def gated_backward(
    dproduct: torch.Tensor, saved: QuantizedTensor | torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dgate_up [T, 2F], product [T, F]) in dproduct's dtype."""
    M, F = dproduct.shape
    dproduct = dproduct.contiguous()
    dgate_up = torch.empty(M, 2 * F, dtype=dproduct.dtype, device=dproduct.device)
    product = torch.empty_like(dproduct)
    if dproduct.numel():
        data, scale, stride, scale_group = _saved_arguments(saved)
        _backward_tiles[(tiles(F), triton.cdiv(M, 32))](
            dproduct, data, scale, M, F, stride, scale_group, dgate_up, product, ACTIVATION=ACTIVATION_KINDS[activation],
            SAVED_FP8=scale is not None, EVEN=M % 32 == 0 and is_even(F), num_warps=4,
        )
    return dgate_up, product


@triton.jit
def _extend_product(
    data, scale, gate_up, channels, wide, wide_scale, first_tile, M, F, pitch, width, stride, scale_m, scale_k,
    COUNT: tl.constexpr, ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POW2: tl.constexpr,
):
    """_extend_input of casts/outliers_triton.py for v = act(gate) · up, recomputed from gate_up [M, 2F]."""
    tile = first_tile + tl.program_id(0)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if tile * 128 < F:
        copy_tile(data, wide, m, tile, M, F, pitch, width)
        tl.store(wide_scale + tile * M + m, tl.load(scale + m * scale_m + tile * scale_k, mask=m < M), mask=m < M)
    else:
        # Recomputed for the outlier channels alone: the product was never stored in high precision.
        place = (tile - (F + 127) // 128) * 64 + tl.arange(0, 64)
        channel = tl.load(channels + place, mask=place < COUNT, other=0)
        inside = (m < M)[:, None] & (place < COUNT)[None, :]
        address = gate_up + m[:, None].to(tl.int64) * stride + channel[None, :]
        gate = tl.load(address, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(address + F, mask=inside, other=0.0).to(tl.float32)
        activated, _ = activate(gate, ACTIVATION)
        rounded = dequantize_channels(data, scale, m, channel, inside, pitch, scale_m, scale_k, DTYPE)
        store_outlier_block(activated * up, rounded, m, M, wide, wide_scale, tile, width, DTYPE, LARGEST, SMALLEST, POW2)


def extend_product_tiles(
    quantized: QuantizedTensor, gate_up: torch.Tensor, activation: str, channels: torch.Tensor
) -> QuantizedTensor:
    """Append the outlier block of `channels` to the quantized act(gate) · up [T, F] of gate_up [T, 2F]."""
    wide, first_tile = wide_input(quantized, len(channels))
    M, F = quantized.shape
    gate_up = gate_up if gate_up.stride(-1) == 1 else gate_up.contiguous()
    if M:
        _extend_product[wide.shape[1] // BLOCK - first_tile, triton.cdiv(M, ROWS.value)](
            quantized.data.view(torch.uint8), quantized.scale, gate_up, channels, wide.data.view(torch.uint8), wide.scale,
            first_tile, M, F, quantized.data.stride(0), wide.shape[1], gate_up.stride(0), *quantized.scale.stride(), COUNT=len(channels),
            ACTIVATION=ACTIVATION_KINDS[activation], num_warps=4, **format_arguments(quantized.format, quantized.scale_type),
        )
    return wide
