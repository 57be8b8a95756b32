"""FP8 weights in folders of any maker: which scales belong to which codes, and the numbers that they stand for.

A tensor N in float8 has its scales, to multiply by, under N_scale_inv, N_scale or N_weight_scale: one for the tensor
(or for each expert of a stack), one for each output channel, or one for each block of the size that config.json or
hf_quant_config.json states; a block at an edge may be shorter. Everything else is refused by name: codes must never be
read as numbers, nor with another block than they were cast with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ds_fp8.config.errors import UserError

COMPRESSED_TENSORS = "compressed-tensors"
Form = str | tuple[int, int]
""""tensor", "channel", or the rows and columns of a block."""
UNSTATED: tuple[Form, ...] = ("tensor", "channel")
"""Forms that the shape of the scales alone tells."""
MODELOPT: dict[str, Form] = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel", "FP8_PB_WO": (128, 128)}
SCALES = ("_scale_inv", "_scale", "_weight_scale")
CODES = ("F8_E4M3", "F8_E5M2")
OF_ACTIVATIONS = re.compile(r"(^|[._])(input|output|act|activation|[qkv]|kv|prob|[kv]_cache|kv_cache)_scale(_inv)?$")
"""Scales of activations and caches, which weights do not depend on."""
ANY_SCALE = re.compile(r"scale(_inv|_\d+)?$|zero_point$|_(packed|absmax|qzeros)$")


def forms_of(quantization: Mapping[str, Any]) -> tuple[Form, ...] | None:
    """Return the forms of scales that a "quantization_config" allows; None where it describes no FP8 weights."""
    method = quantization.get("quant_method")
    if not quantization or method == "fbgemm_fp8":
        return UNSTATED
    if method == "fp8":
        block = quantization.get("weight_block_size")
        return UNSTATED if block is None else _block(block)
    if method == "modelopt":
        form = MODELOPT.get(quantization.get("quant_algo", ""))
        return None if form is None else (form,)
    if method != COMPRESSED_TENSORS or quantization.get("format") != "float-quantized":
        return None
    forms: list[Form] = []
    for group in (quantization.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        if (weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True)) != ("float", 8, True):
            return None
        found = {"tensor": ("tensor",), "channel": ("channel",), "block": _block(weights.get("block_structure"))}
        own = found.get(weights.get("strategy"))
        if own is None:
            return None
        forms += own
    return tuple(dict.fromkeys(forms)) or None


def _block(sizes: Any) -> tuple[Form, ...] | None:
    is_block = isinstance(sizes, list | tuple) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)
    return ((sizes[0], sizes[1]),) if is_block else None


@dataclass
class Codes:
    """A stored FP8 weight. `codes[...]` decodes it, so that transformers reads it as a slice of a file."""

    codes: Any
    """Slice of a file, [..., N, K] float8."""
    scales: Any
    form: Form

    def __getitem__(self, where: Any) -> torch.Tensor:
        shape, scales = self.codes.get_shape(), self.scales[...].float()
        if self.form == "tensor":
            factors = scales.view(*([1] * len(shape)) if scales.numel() == 1 else (-1, 1, 1))
        elif self.form == "channel":
            factors = scales if scales.dim() == len(shape) else scales.unsqueeze(-1)
        else:
            # The last blocks may be shorter.
            rows = scales.repeat_interleave(self.form[0], -2)[..., : shape[-2], :]
            factors = rows.repeat_interleave(self.form[1], -1)[..., : shape[-1]]
        return (self.codes[...].float() * factors).bfloat16()[where]


def _fits(form: Form, shape: list[int], scales: list[int]) -> bool:
    if len(shape) not in (2, 3):
        return False
    if form == "tensor":
        return math.prod(scales) == 1 or (len(shape) == 3 and scales in ([shape[0]], [shape[0], 1, 1]))
    if form == "channel":
        stacked = len(shape) == 3 and scales == [shape[0], 1, shape[2]]  # matrices of experts as [K, N]
        return scales in (shape[:-1], [*shape[:-1], 1]) or stacked
    return scales == [*shape[:-2], -(-shape[-2] // form[0]), -(-shape[-1] // form[1])]


def stored_tensors(
    files: Iterable[Path], quantization: Mapping[str, Any], key: str, opened: ExitStack
) -> dict[str, Any] | None:
    """Return the tensors of safetensors files as slices, `Codes` for FP8 weights; None where there are none of those.

    Args:
        files: The files of a model.
        quantization: Its "quantization_config".
        key: Configuration key that names the model, for errors.
        opened: Holds the files open.

    Raises:
        UserError: a weight in FP8 has no scales, or others than the stated ones.
    """
    tensors: dict[str, Any] = {}
    for file in files:
        held = opened.enter_context(safe_open(file, framework="pt"))
        tensors |= {name: held.get_slice(name) for name in held.keys()}  # noqa: SIM118
    weights = [name for name, tensor in tensors.items() if tensor.get_dtype().startswith(CODES)]
    if not weights:
        return None
    forms, result, used = forms_of(quantization) or (), dict(tensors), set()
    for name in weights:
        scales = [name + end for end in SCALES if name + end in tensors]
        shape = tensors[name].get_shape()
        if len(scales) != 1:
            raise _refused(name, shape, key, f"has {' and '.join(scales) or 'no scale'} beside it")
        found = tensors[scales[0]]
        if not found.get_dtype().startswith(("F32", "F16", "BF16", "F8_E8M0", "F64")):
            raise _refused(name, shape, key, f"has scales in {found.get_dtype()}")
        fitting = [form for form in forms if _fits(form, shape, found.get_shape())]
        if not fitting or len({_sizes(form, shape) for form in fitting}) > 1:
            stated = " or ".join(f"{f[0]}x{f[1]} blocks" if isinstance(f, tuple) else f"one a {f}" for f in forms)
            raise _refused(
                name, shape, key, f"has scales {found.get_shape()}, where the folder states {stated or 'none'}"
            )
        result[name] = Codes(tensors[name], found, fitting[0])
        used.add(scales[0])
    # What activations are cast by is no part of the model.
    return {name: tensor for name, tensor in result.items() if name not in used and not OF_ACTIVATIONS.search(name)}


def _sizes(form: Form, shape: list[int]) -> tuple[int, int]:
    """Return rows and columns that share a scale, as far as the weight goes: two forms may mean the same."""
    rows, columns = {"tensor": (shape[-2], shape[-1]), "channel": (1, shape[-1])}.get(form, form)
    return min(rows, shape[-2]), min(columns, shape[-1])


def check_pickled(files: Iterable[Path], key: str) -> None:
    """Raise UserError where files of torch.save hold FP8 weights, which are read from safetensors alone."""
    for file in files:
        tensors = torch.load(file, map_location="meta", mmap=True, weights_only=True)
        found = next((name for name, tensor in tensors.items() if "float8" in str(getattr(tensor, "dtype", ""))), None)
        if found is not None:
            raise _refused(found, list(tensors[found].shape), key, f"lies in {file.name}, and not in safetensors")


def check_unexpected(names: Collection[str], key: str) -> None:
    """Raise UserError for scales that met no weight: what they belong to was read as plain numbers."""
    scales = sorted(name for name in names if ANY_SCALE.search(name) and not OF_ACTIVATIONS.search(name))
    if scales:
        raise UserError(
            f"{scales[0]}{f' and {len(scales) - 1} more' if len(scales) > 1 else ''} met no FP8 weight of the model",
            key=key,
            remedy="give the model in BF16, or convert it to BF16 with the tool that quantised it",
        )


def _refused(name: str, shape: list[int], key: str, problem: str) -> UserError:
    return UserError(
        f"the FP8 weight {name} {shape} {problem}",
        key=key,
        remedy="give the model in BF16, or the block in config.json (quantization_config.weight_block_size) that its "
        "maker cast with",
    )
