"""Whether the weights of a model are trained or random, whoever loaded them and however.

transformers notes where a configuration came from, of random models too, and nothing notes weights that a program has
loaded by itself. The weights tell: all libraries start each norm from one constant, and no norm is constant after some
steps of training. Where norms have no weights (OLMo), parameters that transformers has loaded do: it marks them.
"""

from __future__ import annotations

import os

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_fp8.zero import seams


def weights_are_trained(model: nn.Module) -> tuple[bool, str]:
    """Return whether a model's weights are trained, and how that shows; the same on all ranks. Collective.

    Args:
        model: Whole on every rank, as the first rank has it, or sharded by zero.Init.
    """
    norms = [
        parameter
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False)
    ]
    # DeepSpeed broadcasts the first rank's weights: what others hold of a whole parameter does not count.
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    first = ranks == 1 or dist.get_rank() == 0
    if norms:
        varies = any(
            _varies(seams.values_here(parameter)) for parameter in norms if first or seams.is_zero_parameter(parameter)
        )
    else:
        marked = [getattr(parameter, "_is_hf_initialized", False) for parameter in model.parameters()]
        varies = first and 2 * sum(marked) > len(marked)  # more than half: missing ones were drawn
    if ranks > 1:
        if "LOCAL_RANK" in os.environ:
            get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
        found = torch.tensor([int(varies)], device=get_accelerator().current_device_name())
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        varies = bool(found.item())
    if norms:
        shown = "trained: norms are not constant" if varies else "random: all norms are constant"
        return varies, f"the weights are {shown}"
    if varies:
        return True, "the weights are trained: transformers has loaded them"
    return False, "neither norms nor transformers show that weights are trained"


def _varies(values: torch.Tensor) -> bool:
    return values.device.type != "meta" and values.numel() > 1 and bool((values != values[0]).any())
