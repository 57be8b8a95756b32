"""FP8 health of an engine: measure quantization errors, report degraded layers and, on request, move them to BF16."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist

from ds_fp8.casts import QuantizedTensor, quantize, quantize_with_scale
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import BLOCK, CastSpec
from ds_fp8.config.log import logger
from ds_fp8.config.plans import StepPlan
from ds_fp8.layers.convert import layer_of, restore
from ds_fp8.layers.experts.experts import FP8Experts
from ds_fp8.layers.experts.routing import mixtures
from ds_fp8.layers.head.cross_entropy import IGNORED, pop_label_errors
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.outliers import outlier_channels_of, refresh_channels
from ds_fp8.layers.selection import is_excluded
from ds_fp8.monitor.cast_monitor import CastMonitor, Degradation, Measurement, Thresholds
from ds_fp8.monitor.routing import RoutingMeasurement, RoutingMonitor
from ds_fp8.zero.collectives import first_reason
from ds_fp8.zero.deepspeed.parameters import data_parallel_group
from ds_fp8.zero.deepspeed.patches import on_destroy
from ds_fp8.zero.group import FP8ParamGroup
from ds_fp8.zero.reduce import ReduceScatter


@dataclass(frozen=True)
class HealthReport:
    """Result of one measured step, the same on all ranks."""

    measurement: Measurement
    degraded: list[Degradation]  # thresholds crossed by this measurement
    moved: list[str]  # layers moved to BF16 for it
    routing: RoutingMeasurement | None = None  # of a model with experts


def check_labels(group: object = None) -> None:
    """Raise UserError on all ranks of a group where one has seen labels outside the vocabulary. Collective."""
    reason = first_reason(pop_label_errors(), group)
    if reason is not None:
        raise UserError(
            f"{reason} (the loss is NaN)",
            key="labels",
            remedy=f"labels are token ids, or {IGNORED} where there is no loss: compare the tokenizer with vocab_size",
        )


class Health:
    """Health of one engine: `last`, the report of the last measured step; `layers_in_bf16`, all layers moved so far."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, monitor: CastMonitor, plan: StepPlan):
        self.last: HealthReport | None = None
        self.layers_in_bf16: list[str] = []
        self.say: Callable[[str], None] = logger.info
        self.warn: Callable[[str], None] = logger.warning
        self.weights: FP8ParamGroup | None = None
        self.gradient_reduce: ReduceScatter | None = None
        self.on_move: Callable[[], None] = lambda: None  # called after each move to BF16
        self._model, self._monitor, self._plan = engine.module, monitor, plan
        self._device = engine.device
        self._thresholds = Thresholds(plan.min_snr_db)
        modules = list(engine.module.modules())
        recipes = [(module.weight, module.recipe) for module in modules if isinstance(module, FP8Linear)]
        for module in modules:
            recipes += module.recipes_of_weights() if isinstance(module, FP8Experts) else ()
        # By id: Parameters compare element by element, and the model keeps them alive.
        self._layer_names = {id(weight): recipe.name for weight, recipe in recipes}
        self._name_of = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        self._gradient_names = {self._name_of[weight]: name for weight, name in self._layer_names.items()}
        selections = list(outlier_channels_of(engine.module))
        self._outliers = {name: outliers for name, _, outliers in selections}
        self._input_widths = {name: width for name, width, _ in selections}
        self._group = data_parallel_group(engine)
        for outliers in self._outliers.values():
            outliers.add_over_ranks = self._add_over_ranks
        self.routing = _watch_routing(engine, monitor, self._add_over_ranks)
        monitor.attach(engine.module, dict.fromkeys(self._layer_names.values()), engine.device, self._over_all_ranks)

    def observe_gradient(self, gradient: torch.Tensor, name: str, scale: torch.Tensor | None) -> None:
        """Measure the quantization of a weight's gradient for the reduce-scatter, rounded to nearest."""
        if not self._monitor.active or name not in self._gradient_names:
            return
        flat, format = gradient.flatten(), self._plan.reduction.format
        groups = flat[: flat.numel() // BLOCK * BLOCK].view(-1, BLOCK)  # without a ragged last group
        if scale is None:
            quantized = quantize(groups, format, "1x128", "pow2")
        else:
            data = quantize_with_scale(groups, scale, format, "tensor").view(torch.uint8)
            quantized = QuantizedTensor.of_bytes(data, scale, CastSpec(format, "tensor", "fp32"))
        self._monitor.observe("grad_weight", groups, quantized, self._gradient_names[name])

    def end_step(self) -> None:
        """End an optimizer step; after a measured one warn of degraded layers, and move them. Collective."""
        if self._monitor.active and self.weights is not None:
            observe = self._monitor.observe
            self.weights.observe(
                lambda weight, rows, quantized, n: observe("weight", rows, quantized, self._layer_names[id(weight)], n)
            )
        measurement = self._monitor.end_step()
        if measurement is None:
            return
        routing = None if self.routing is None else self.routing.take()
        # After the measurement, of the old channels; the next forward uses the new ones.
        if refresh_channels(self._outliers.values(), self._add_over_ranks):
            self._write_residuals(but_fixed=True)
        degraded = self._thresholds.check(measurement)
        for degradation in degraded:
            self.warn(f"warning: step {self._monitor.steps}: FP8 degrades in {degradation}")
        moved = []
        if self._plan.falls_back:
            moved = list(dict.fromkeys(layer_of(self._model, degradation.name) for degradation in degraded))
            moved = [layer for layer in moved if layer not in self.layers_in_bf16]  # a fused layer has several names
            self.move_to_bf16(moved)
        self.last = HealthReport(measurement, degraded, moved, routing)

    def state_dict(self) -> dict[str, Any]:
        """Return the layers moved to BF16 and the monitor's counters, as plain values; the same on all ranks."""
        return {
            "layers_in_bf16": list(self.layers_in_bf16),
            "excluded_by_filter": [name for name, module in self._model.named_modules() if is_excluded(module)],
            "outlier_channels": {
                name: outliers.channels.tolist()
                for name, outliers in self._outliers.items()
                if outliers.channels is not None
            },
            "monitor": {**self._monitor.state_dict(), **self._thresholds.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state_dict(); missing parts are reset. Between steps, on all ranks.

        Layers moved to BF16 since then stay in BF16.
        """
        self.move_to_bf16(state.get("layers_in_bf16", ()))
        modules = dict(self._model.named_modules())
        in_fp8 = [name for name in state.get("excluded_by_filter", ()) if isinstance(modules.get(name), FP8Linear)]
        if in_fp8:
            self.warn(
                f"warning: a filter left {len(in_fp8)} layers in BF16 when the checkpoint was written, and they are in "
                f"FP8 now ({in_fp8[0]}): call ds_fp8.convert with the same filter before initialize"
            )
        saved = {name: found for name, found in state.get("outlier_channels", {}).items() if name in self._outliers}
        left = [
            name
            for name, channels in saved.items()
            if not self._outliers[name].load(channels, self._input_widths[name], self._device)
        ]
        if left:
            self.say(
                f"{len(left)} inputs had another number of outlier channels when the checkpoint was written "
                f"({left[0]}: {len(saved[left[0]])}, now {self._outliers[left[0]].count}): they are found again"
            )
        self._write_residuals()
        self._monitor.load_state_dict(state.get("monitor", {}))
        self._thresholds.load_state_dict(state.get("monitor", {}))

    def move_to_bf16(self, layers: Iterable[str]) -> None:
        """Disable FP8 (GEMM, all-gather, reduce-scatter) of layers, by name. Between steps, on all ranks.

        Layers in BF16 are unchanged; a warning names layers that the model lacks.
        """
        modules, layers = dict(self._model.named_modules()), list(layers)
        if missing := [name for name in layers if name not in modules]:
            # For example from a checkpoint before adapters were added or merged.
            self.warn(
                f"warning: {len(missing)} layers that were in BF16 are not in this model, and nothing is moved for "
                f"them: {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
            )
        for name in layers:
            weights = restore(modules[name]) if name in modules else []
            if not weights:
                continue
            if self.weights is not None:
                self.weights.leave_fp8(weights)
            if self.gradient_reduce is not None:
                self.gradient_reduce.leave_fp8(self._name_of[id(weight)] for weight in weights)
            self.layers_in_bf16.append(name)
            self.on_move()
            self.say(f"{name} now runs in BF16")

    def _add_over_ranks(self, sums: torch.Tensor) -> None:
        dist.all_reduce(sums, group=self._group)
        # An all-reduce may differ between ranks in the last bit, and each rank decides by itself.
        dist.broadcast(sums, dist.get_global_rank(self._group, 0), group=self._group)

    def _over_all_ranks(self, sums: torch.Tensor, peaks: torch.Tensor) -> None:
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=self._group)
        self._add_over_ranks(sums)

    def _write_residuals(self, but_fixed: bool = False) -> None:
        if self.weights is not None:
            self.weights.write_residuals(but_fixed=but_fixed)


def _watch_routing(
    engine: deepspeed.DeepSpeedEngine, monitor: CastMonitor, add_over_ranks: Callable[[torch.Tensor], None]
) -> RoutingMonitor | None:
    """Count the tokens of experts on measured steps, until engine.destroy(); None without experts."""
    experts = mixtures(engine.module)
    if not monitor.every or not experts:
        return None
    counts = {name: module.num_experts for name, module in experts.items()}
    routing = RoutingMonitor(monitor, counts, engine.device, add_over_ranks)
    for layer, module in enumerate(experts.values()):
        observe = functools.partial(routing.observe, layer)
        on_destroy(engine, module.register_forward_pre_hook(observe, with_kwargs=True).remove)
    on_destroy(engine, engine.module.register_forward_hook(routing.observe_output).remove)
    return routing
