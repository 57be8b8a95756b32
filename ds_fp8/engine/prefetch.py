"""Let ZeRO-3 fetch a whole layer with experts ahead, as it does dense ones.

DeepSpeed fetches ahead, in the order of its trace, until stage3_prefetch_bucket_size parameters are under way or
stage3_max_live_parameters are gathered. A layer with experts is larger than both are made for: its fetch would begin
when it is needed, or stop before its last weight. The order is that of modules, never of routing.
"""

from __future__ import annotations

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn

from ds_fp8.layers.experts.experts import FP8Experts
from ds_fp8.zero import seams

BUCKET, LIVE = "stage3_prefetch_bucket_size", "stage3_max_live_parameters"


def wider_prefetch(zero: DeepSpeedZeroConfig, model: nn.Module) -> tuple[dict[str, int], list[str]]:
    """Return limits of ZeRO-3's fetches that two layers fit whose experts are gathered in FP8.

    A bucket of 0, no prefetch, stays. stage3_max_live_parameters is at most doubled: gathered in FP8, twice as many
    parameters take the memory that it was set for.

    Args:
        zero: Of any stage.
        model: Converted.

    Returns:
        The keys of "zero_optimization" to be changed, and notes for the start report on them and on what is still too
        small.
    """
    layer, bucket, live = _largest_layer(model), zero.prefetch_bucket_size, zero.max_live_parameters
    if zero.stage != 3 or not layer or not bucket:
        return {}, []
    wider, notes = {}, []
    if bucket < layer:
        wider[BUCKET] = layer
        notes.append(f"{BUCKET} raised from {bucket:,} to {layer:,}, the parameters of a layer with experts")
    if live < 2 * layer:
        wider[LIVE] = min(2 * layer, 2 * live)
        notes.append(f"{LIVE} raised from {live:,} to {wider[LIVE]:,}: those gathered in FP8 take half the memory")
    # Two layers: the one that computes and the one that is fetched ahead of it.
    if wider.get(LIVE, live) < 2 * layer:
        notes.append(f"{LIVE} is too small to fetch a layer with experts ahead: {2 * layer:,} would do")
    return wider, notes


def _largest_layer(model: nn.Module) -> int:
    """Return the parameters of the largest layer with FP8Experts, or 0. Layers are the parts of a list of modules."""
    modules = dict(model.named_modules())
    layers = {_layer_of(name) for name, module in modules.items() if isinstance(module, FP8Experts)}
    sizes = [sum(seams.full_shape(parameter).numel() for parameter in modules[name].parameters()) for name in layers]
    return max(sizes, default=0)


def _layer_of(name: str) -> str:
    """Return the name up to its first number, "model.layers.3" of "model.layers.3.mlp.experts"; all of it without."""
    parts = name.split(".")
    place = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: place + 1])
