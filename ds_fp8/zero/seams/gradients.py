"""The reduction of gradients: stage3 calls the module-level `reduce_scatter_coalesced(gradients, group)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import deepspeed
import torch
from deepspeed.runtime.zero import stage3

from ds_fp8.zero import deepspeed_versions
from ds_fp8.zero.seams.installation import replace

StockReduceScatter = Callable[[list[torch.Tensor], object], list[torch.Tensor]]
"""(full gradients, group) -> local slices."""
ReduceScatter = Callable[[list[torch.Tensor], object, list[str]], list[torch.Tensor]]
"""The same with the names of the gradients' parameters."""
Reduction = TypeVar("Reduction", bound=ReduceScatter)


def stock_reduce_scatter() -> StockReduceScatter:
    """Return DeepSpeed's own reduce-scatter."""
    return stage3.reduce_scatter_coalesced


def replace_reduce_scatter(
    engine: deepspeed.DeepSpeedEngine, make: Callable[[StockReduceScatter], Reduction]
) -> Reduction:
    """Let the gradients of this engine, and of no other, go through `make(DeepSpeed's reduce-scatter)`; return that.

    The result must be what DeepSpeed's own gives: for each full gradient the mean over ranks of this rank's flat slice
    of ceil(numel / world) elements, without padding.
    """
    replacement = make(stage3.reduce_scatter_coalesced)
    name_of = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    average = getattr(engine.optimizer, deepspeed_versions.AVERAGE_GRADIENTS)

    def scoped(parameters: list[torch.nn.Parameter], *args, **kwargs):
        names = [name_of[id(parameter)] for parameter in parameters]
        # DeepSpeed looks the function up in its module: it is another one only while this engine reduces.
        stock = stage3.reduce_scatter_coalesced
        stage3.reduce_scatter_coalesced = lambda tensors, group=None: replacement(tensors, group, names)
        try:
            return average(parameters, *args, **kwargs)
        finally:
            stage3.reduce_scatter_coalesced = stock

    replace(engine, engine.optimizer, deepspeed_versions.AVERAGE_GRADIENTS, scoped)
    return replacement
