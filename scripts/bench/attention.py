"""Causal attention, forward and backward: in FP8 against torch's kernels and Transformer Engine's modules in BF16.

    python scripts/bench/attention.py --json attention.json            1 x 32768 and 4 x 8192, of Qwen2.5-1.5B and -7B
    python scripts/bench/attention.py --size 7b --shapes 1x32768 --only cudnn,fp8
    python scripts/bench/attention.py --quick                          seconds on a CPU

A row is one attention of one layer: milliseconds of forward, and of forward and backward, the products' TFLOP/s in
both, bytes kept for backward, relative errors of the output and of the gradients of q, k and v against attention in
FP32, and the largest share of a tensor that is zero here and not there. q, k and v are views of one matrix, as in a
fused layer. Numbers are normal, their gradient's spread log-normal over tokens. The row "fp8, kernels" leaves out casts
and scales.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    GRADIENT_STD,
    SIZES,
    ModelSize,
    argument_parser,
    banner,
    device,
    first_line,
    measure,
    normal,
    print_banner,
    print_table,
    words,
    write_json,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.schema import nearest
from ds_fp8.layers.attention import cudnn as fp8_attention_cudnn
from ds_fp8.layers.attention.cudnn import BACKWARD, FORWARD, Saved
from ds_fp8.layers.attention.fp8_attention import fp8_attention, gradient_scales, quantize_heads
from ds_fp8.layers.decoder.rotary import HeadLayout

# (q [B, heads, S, D], k and v [B, kv_heads, S, D]) -> [B, S, heads, D]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

NAMES = ("output", "dq", "dk", "dv")


def torch_attention(kernel: SDPBackend | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the output of scaled_dot_product_attention with one of its kernels; None: torch chooses."""
    with sdpa_kernel(kernel) if kernel is not None else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.float(), *(x.float().repeat_interleave(groups, dim=1) for x in (k, v))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION if q.is_cuda else SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def of_transformer_engine(size: ModelSize, fp8: bool) -> Attention:
    """Return te.DotProductAttention in BF16, or in FP8 with its delayed scaling."""
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch import DotProductAttention, fp8_autocast

    module = DotProductAttention(size.heads, size.head_dim, num_gqa_groups=size.kv_heads, qkv_format="bshd").cuda()
    recipe = DelayedScaling(fp8_dpa=True, amax_history_len=1, amax_compute_algo="most_recent", reduce_amax=False)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with fp8_autocast(enabled=fp8, fp8_recipe=recipe):
            output = module(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask_type="causal")
        return output.view(*output.shape[:2], size.heads, size.head_dim)

    return attention


def contestants(size: ModelSize) -> dict[str, Callable[[], Attention]]:
    """Return what can be measured here, by name; each is made when its turn comes."""
    if device().type != "cuda":
        return {"sdpa": lambda: functools.partial(torch_attention, None), "fp8 (emulated)": lambda: fp8_attention}
    kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    found = {name: functools.partial(functools.partial, torch_attention, one) for name, one in kernels.items()}
    if importlib.util.find_spec("transformer_engine"):
        found["te bf16"] = functools.partial(of_transformer_engine, size, False)
        found["te fp8, delayed scaling"] = functools.partial(of_transformer_engine, size, True)
    return {**found, "fp8": lambda: fp8_attention}


def operands_of(size: ModelSize, rows: int, length: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return q, k and v as views of one matrix, and the output's gradient [B, S, heads, D]."""
    layout = HeadLayout(size.heads, size.kv_heads, size.head_dim)
    qkv = normal(rows * length, sum(layout.sizes))
    spread = normal(rows, length, 1, 1, seed=2).float().exp()
    gradient = normal(rows, length, size.heads, size.head_dim, std=GRADIENT_STD, seed=1) * spread
    return [x.requires_grad_() for x in layout.split(qkv, rows, length)], gradient.bfloat16()


def step(attention: Attention, operands: list[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor]:
    output = attention(*operands)
    return [output.detach(), *torch.autograd.grad(output, operands, gradient.to(output.dtype))]


def kept_bytes(attention: Attention, operands: list[torch.Tensor]) -> int | None:
    """Return the bytes that backward needs beyond the operands; the output is among them."""
    if device().type != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    output = attention(*operands)
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    del output
    return after - before


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> dict[str, float]:
    """Return relative errors by name, and the largest share of elements that are zero here and not there."""
    pairs = list(zip(found, exact, strict=True))
    relative = [((one.float() - other).norm() / other.norm()).item() for one, other in pairs]
    lost = max(((one == 0) & (other != 0)).float().mean().item() for one, other in pairs)
    return {**dict(zip(NAMES, relative, strict=True)), "lost": lost}


def measure_row(
    name: str,
    attention: Attention,
    operands: list[torch.Tensor],
    gradient: torch.Tensor,
    exact: list[torch.Tensor],
    milliseconds: float,
) -> dict[str, Any]:
    for _ in range(2):  # delayed scaling knows its scales after one step
        found = step(attention, operands, gradient)
    row: dict[str, Any] = {"name": name, "errors": errors(found, exact)}
    del found
    with torch.no_grad():
        row["forward"] = measure(lambda: attention(*operands), milliseconds=milliseconds)
    row["both"] = measure(lambda: step(attention, operands, gradient), milliseconds=milliseconds)
    row["kept_bytes"] = kept_bytes(attention, operands)
    return row


def measure_kernels(operands: list[torch.Tensor], gradient: torch.Tensor, milliseconds: float) -> dict[str, Any]:
    q, _, v = operands
    with torch.no_grad():
        casts = [quantize_heads(x.transpose(1, 2), FORWARD) for x in operands]
        scaling = q.shape[-1] ** -0.5
        scales = gradient_scales(gradient, *casts[:2], v.float().norm(dim=-1).amax(), scaling)
        do = quantize_heads(gradient, BACKWARD)

    def both() -> None:
        o, log_sums = fp8_attention_cudnn.forward(*casts, scaling)
        saved = Saved(*casts, type(do)(o, casts[2].scale, "tensor", "pow2"), log_sums, scaling)
        fp8_attention_cudnn.backward(saved, do, scales)

    forward = measure(lambda: fp8_attention_cudnn.forward(*casts, scaling), milliseconds=milliseconds)
    row = {"name": "fp8, kernels", "forward": forward, "both": measure(both, milliseconds=milliseconds)}
    return {**row, "errors": dict.fromkeys((*NAMES, "lost")), "kept_bytes": None}


def floating_point_operations(size: ModelSize, rows: int, length: int) -> int:
    """Return the FLOPs of forward's two products, half of each masked; backward has five of them."""
    return 2 * 2 * rows * size.heads * size.head_dim * length * length // 2


def measure_shape(name: str, shape: tuple[int, int], options: Any) -> list[dict[str, Any]]:
    size = SIZES[name]
    operands, gradient = operands_of(size, *shape)
    exact = step(exact_attention, operands, gradient)
    milliseconds = 60.0 if options.quick else options.milliseconds
    found = []
    for row_name, make in contestants(size).items():
        if options.only and not row_name.startswith(tuple(options.only)):
            continue
        try:
            found.append(measure_row(row_name, make(), operands, gradient, exact, milliseconds))
        except Exception as error:  # another library fails in its own way
            if row_name.startswith("fp8"):
                raise
            print(f"not measured: {row_name} ({first_line(error)})", flush=True)
        if row_name == "fp8":
            found.append(measure_kernels(operands, gradient, milliseconds))
    operations = floating_point_operations(size, *shape)
    for row in found:
        row |= {"size": name, "rows": shape[0], "length": shape[1]}
        row["tflops"] = 3.5 * operations / row["both"] / 1e9
    print_table(
        f"{name}: {size.heads} heads, {size.kv_heads} of k and v, of {size.head_dim}, {shape[0]} x {shape[1]} tokens",
        ("", "forward ms", "both ms", "TFLOP/s", "MB kept", *NAMES, "lost"),
        [
            (
                row["name"],
                row["forward"],
                row["both"],
                row["tflops"],
                row["kept_bytes"] and row["kept_bytes"] / 1e6,
                *(row["errors"][key] for key in (*NAMES, "lost")),
            )
            for row in found
        ],
    )
    return found


def parse_shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise UserError(f'"{text}" is no shape', key="--shapes", remedy="ROWSxTOKENS, such as 1x32768")
    return int(match[1]), int(match[2])


def parse_arguments(arguments: list[str] | None) -> Any:
    parser = argument_parser(__doc__)
    parser.add_argument("--size", type=words, help="7b, 1.5b, tiny (default 1.5b,7b; --quick: tiny)")
    parser.add_argument("--shapes", type=words, metavar="BxS,...", help="default 1x32768,4x8192; --quick: 2x96")
    parser.add_argument("--only", type=words, metavar="NAME,...", help="beginnings of the rows' names")
    parser.add_argument("--milliseconds", type=float, default=400.0, help="of repetitions of a measurement")
    options = parser.parse_args(arguments)
    options.size = options.size or (["tiny"] if options.quick else ["1.5b", "7b"])
    shapes = options.shapes or (["2x96"] if options.quick else ["1x32768", "4x8192"])
    options.shapes = [parse_shape(text) for text in shapes]
    for name in options.size:
        if name not in SIZES:
            raise UserError(f'unknown size "{name}"', key="--size", remedy=nearest(name, SIZES))
    known = contestants(SIZES[options.size[0]])
    for name in options.only or ():
        if not any(other.startswith(name) for other in known):
            raise UserError(f'no row is called "{name}"', key="--only", remedy=nearest(name, known))
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    facts = banner()
    if torch.cuda.is_available():
        # Transformer Engine is loaded before torch loads cuDNN's kernels: after them it finds those of another cuDNN.
        if (why := fp8_attention_cudnn.unavailable()) is not None:
            raise UserError(f"attention in FP8 cannot run here: {why}", remedy="a Hopper GPU with Transformer Engine")
        from transformer_engine.pytorch.utils import get_cudnn_version

        facts["cudnn"] = ".".join(map(str, get_cudnn_version()))  # of the one that is loaded
    print_banner(facts)
    rows = [row for name in options.size for shape in options.shapes for row in measure_shape(name, shape, options)]
    if options.json:
        write_json(options.json, banner=facts, rows=rows)
    return 0


if __name__ == "__main__":
    main_entry(main)
