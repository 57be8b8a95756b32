"""Router statistics of an engine's model: hooks that count the tokens of its experts on measured steps."""

from __future__ import annotations

import functools
from collections.abc import Callable

import deepspeed
import torch

from ds_fp8.layers.experts.routing import mixtures
from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.monitor.routing import RoutingMonitor
from ds_fp8.zero import seams


def watch_routing(
    engine: deepspeed.DeepSpeedEngine, monitor: CastMonitor, add_over_ranks: Callable[[torch.Tensor], None]
) -> RoutingMonitor | None:
    """Watch the routing of an engine's model until the engine is destroyed.

    Args:
        engine: Engine of any ZeRO stage.
        monitor: Says which steps are measured; these run eagerly, so that hooks see them.
        add_over_ranks: Adds up over all ranks, in place.

    Returns:
        The statistics; None, and no hook, where nothing is measured or the model has no experts.
    """
    experts = mixtures(engine.module)
    if not monitor.every or not experts:
        return None
    numbers = {name: module.num_experts for name, module in experts.items()}
    routing = RoutingMonitor(monitor, numbers, engine.device, add_over_ranks)
    for layer, module in enumerate(experts.values()):
        observe = functools.partial(routing.observe, layer)
        seams.on_destroy(engine, module.register_forward_pre_hook(observe, with_kwargs=True).remove)
    seams.on_destroy(engine, engine.module.register_forward_hook(routing.observe_output).remove)
    return routing
