"""Names and shapes of a model's tensors in a folder: those of its first release, which inference servers read.

transformers renames, stacks and fuses tensors when it loads a model; its own conversions are reverted here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn
from transformers import FineGrainedFP8Config, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers import AutoHfQuantizer

from ds_fp8.config.errors import UserError, first_line
from ds_fp8.layers.experts.selection import shape_of

Tensors = dict[str, torch.Tensor]
IN_PARTS = "folders hold it in parts or in another order, in BF16"
IN_3D = "folders hold them in one 3-D tensor, which no FP8 layout has"


class Published(NamedTuple):
    """One or several parameters or buffers of a model, and their form in a folder."""

    shapes: dict[str, tuple[int, ...]]  # by name in the model; several if the folder joins them
    dtype: torch.dtype  # in the folder: BF16, or of a buffer its own
    stored: tuple[str, ...]  # names in the folder
    # converts the model's tensors by name to the folder's; None: the same tensor
    parts: Callable[[Tensors], Tensors] | None
    matrices: bool  # whether the folder's tensors are matrices


def stored_buffers(model: nn.Module) -> Tensors:
    """Return the buffers in the state dict; the others follow from the configuration."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def published(model: nn.Module) -> list[Published]:
    """Return the form of all parameters and stored buffers in a folder, in the model's order, tied ones once.

    Raises:
        UserError: transformers' conversions of the model cannot be reverted.
    """
    buffers = stored_buffers(model)
    shapes = {name: tuple(shape_of(own)) for name, own in (*model.named_parameters(), *buffers.items())}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if (known := getattr(model, "_weight_conversions", None)) is not None:
        # a model created under zero.Init lists conversions that its folder did not use
        model._weight_conversions = [own for own in known if getattr(own, "_was_used", True)]
    # all at once: some renamings depend on the other names
    in_folder = _reverted(model, tensors)
    renamed = {id(tensor): name for name, tensor in in_folder.items()}
    groups: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        # tensors are joined if their own conversions begin with the same name
        stored = renamed.get(id(tensor)) or next(iter(_reverted(model, {name: tensor})))
        groups.setdefault(stored, []).append(name)
    result = []
    for stored, names in groups.items():
        made, parts = {stored: tensors[names[0]]}, None
        if id(tensors[names[0]]) not in renamed:
            made, parts = _reverted(model, {name: tensors[name] for name in names}), lambda own: _reverted(model, own)
        if any(name not in in_folder or in_folder[name].shape != part.shape for name, part in made.items()):
            raise _unknown(names[0], f"{stored} has more parts")
        dtype = buffers[names[0]].dtype if names[0] in buffers else torch.bfloat16
        matrices = all(part.dim() == 2 for part in made.values())
        result.append(Published({name: shapes[name] for name in names}, dtype, tuple(made), parts, matrices))
    return result


def why_not_in_fp8(model: nn.Module) -> str | None:
    """Return why transformers cannot read a folder of a model in FP8, or None."""
    quantizer = AutoHfQuantizer.from_config(FineGrainedFP8Config(dequantize=True), pre_quantized=True)
    try:
        if isinstance(model, PreTrainedModel):
            get_model_conversion_mapping(model, hf_quantizer=quantizer)
    except ValueError as error:  # of weights that folders join
        return f"transformers cannot read it in FP8: {first_line(error)}"
    return None


def _reverted(model: nn.Module, tensors: Tensors) -> Tensors:
    if not isinstance(model, PreTrainedModel):
        return tensors
    get, tied = model.get_parameter, getattr(model, "all_tied_weights_keys", {})
    # of tied weights folders have that which transformers ties the others to, not the model's first
    tensors = {tied[n] if n in tied and get(tied[n]) is get(n) else n: own for n, own in tensors.items()}
    # some conversions compare with the parameter's shape, which ZeRO-3 shards
    model.get_parameter = lambda name: SimpleNamespace(shape=shape_of(get(name)))
    try:
        return revert_weight_conversion(model, tensors)
    except Exception as error:  # each conversion of transformers fails in its own way
        raise _unknown(next(iter(tensors)), first_line(error)) from None
    finally:
        del model.get_parameter


def _unknown(name: str, why: str) -> UserError:
    return UserError(f"the form of {name} in a folder is unknown: {why}", remedy="try model.save_pretrained")
