"""Names and shapes by which transformers' folders hold a model: those of its first release, which servers read.

transformers renames, stacks and fuses what it loads, and knows how to take it apart again: all of it comes from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ds_fp8.config.errors import UserError, first_line
from ds_fp8.layers.experts.selection import shape_of
from ds_fp8.layers.selection import linear_layers

Tensors = dict[str, torch.Tensor]
IN_PARTS = "folders hold it in parts, or in another order, and those are in BF16"
IN_3D = "folders hold them in one 3-D tensor, and no FP8 layout has that"


class Published(NamedTuple):
    """Parameters or buffers of a model, and what a folder holds in their place."""

    shapes: dict[str, tuple[int, ...]]
    """In the model, by name; several where the folder joins them."""
    dtype: torch.dtype
    """In the folder: a buffer's own, as servers keep some in FP32; BF16."""
    stored: tuple[str, ...]
    """Names in the folder."""
    parts: Callable[[Tensors], Tensors] | None
    """Makes the folder's tensors of the model's, both by name; None: the one tensor, as it is."""
    matrices: bool
    """Whether the folder holds matrices."""


def stored_buffers(model: nn.Module) -> Tensors:
    """Return the buffers that are saved; others are computed from the configuration."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def published(model: nn.Module) -> list[Published]:
    """Return what a folder holds, in the order of the model's parameters and stored buffers, tied ones once."""
    buffers = stored_buffers(model)
    shapes = {name: tuple(shape_of(own)) for name, own in (*model.named_parameters(), *buffers.items())}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if (known := getattr(model, "_weight_conversions", None)) is not None:
        # Born under zero.Init a model has all conversions that transformers knows, used by its folder or not.
        model._weight_conversions = [own for own in known if getattr(own, "_was_used", True)]
    # All at once: which names some renamings match depends on other names.
    whole = _reverted(model, tensors)
    renamed = {id(tensor): name for name, tensor in whole.items()}
    groups: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        # Joined with others where the first tensor that each becomes alone has the same name.
        stored = renamed.get(id(tensor)) or next(iter(_reverted(model, {name: tensor})))
        groups.setdefault(stored, []).append(name)
    result = []
    for stored, names in groups.items():
        made, parts = {stored: tensors[names[0]]}, None
        if id(tensors[names[0]]) not in renamed:
            made, parts = _reverted(model, {name: tensors[name] for name in names}), lambda own: _reverted(model, own)
        if any(name not in whole or whole[name].shape != part.shape for name, part in made.items()):
            raise _unknown(names[0], f"{stored} has more parts")
        dtype = buffers[names[0]].dtype if names[0] in buffers else torch.bfloat16
        matrices = all(part.dim() == 2 for part in made.values())
        result.append(Published({name: shapes[name] for name in names}, dtype, tuple(made), parts, matrices))
    return result


def why_not_in_fp8(model: nn.Module, forms: Iterable[Published]) -> str | None:
    """Return why no folder in FP8 holds a model, where folders join linear layers of it."""
    linears = {f"{name}.weight" for name in linear_layers(model)}
    form = next((form for form in forms if len(form.shapes) > 1 and not linears.isdisjoint(form.shapes)), None)
    how = "joined with others, which transformers reads in BF16 only"
    return None if form is None else f"folders hold {next(iter(form.shapes))} as {form.stored[0]}, {how}"


def _reverted(model: nn.Module, tensors: Tensors) -> Tensors:
    if not isinstance(model, PreTrainedModel):
        return tensors
    get = model.get_parameter
    # Some are transposed where their shape is another than the parameter's: under ZeRO-3 that has none by itself.
    model.get_parameter = lambda name: SimpleNamespace(shape=shape_of(get(name)))
    try:
        return revert_weight_conversion(model, tensors)
    except Exception as error:  # each conversion of transformers fails in its own way
        raise _unknown(next(iter(tensors)), first_line(error)) from None
    finally:
        del model.get_parameter


def _unknown(name: str, why: str) -> UserError:
    return UserError(f"how folders hold {name} is not known here: {why}", remedy="model.save_pretrained may know it")
