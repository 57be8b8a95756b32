"""FP8 state of an engine (`engine.fp8`), and its part in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import deepspeed

from ds_fp8.config.errors import UserError, first_line
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.health import Health
from ds_fp8.engine.plans import Plans
from ds_fp8.graphs.driver import GraphDriver
from ds_fp8.layers.convert import Conversion, casts, drop_outlier_channels, stop_casting
from ds_fp8.layers.head.loss import LossFusion
from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.monitor.routing import RoutingMeasurement
from ds_fp8.optim import AdamW
from ds_fp8.zero.collectives import WireMeter
from ds_fp8.zero.deepspeed.hooks import Hooks
from ds_fp8.zero.deepspeed.parameters import partition_all
from ds_fp8.zero.group import FP8ParamGroup
from ds_fp8.zero.hosts import Hosts, Nodes
from ds_fp8.zero.reduce import ReduceScatter
from ds_fp8.zero.step import Step

CHECKPOINT_KEY = "ds_fp8"  # in the client state of DeepSpeed's checkpoints


class FP8State:
    """FP8 state of an engine (`engine.fp8`); parts that do not exist are None, most with FP8 disabled."""

    def __init__(self, config: FP8Config, monitor: CastMonitor, preset_reason: str | None = None):
        self.config, self.monitor = config, monitor
        self.plans: Plans | None = None  # None where FP8 is disabled
        self.wire: WireMeter | None = None  # None without an "fp8" section, and below ZeRO stage 3
        self.hooks: Hooks | None = None  # called in place of DeepSpeed's methods; None where nothing is replaced
        self.conversion: Conversion | None = None
        self.loss: LossFusion | None = None
        self.health: Health | None = None
        self.weights: FP8ParamGroup | None = None
        self.gradient_reduce: ReduceScatter | None = None
        self.hosts: Hosts | None = None  # ranks by host
        self.nodes: Nodes | None = None
        self.optimizer: AdamW | None = None  # this package's, inside DeepSpeed's
        self.step: Step | None = None  # replaces ZeRO-3's; otherwise the reason is in why_no_step
        self.why_no_step: str | None = None
        self.graphs: GraphDriver | None = None  # of forward and backward; otherwise the reason is in why_no_graphs
        self.why_no_graphs: str | None = None
        self.preset_reason = preset_reason  # of a preset that the configuration leaves open
        self.notes: list[str] = []  # of the conversion, for the start report
        self.report: dict[str, Any] = {}  # the start report, ready for JSON
        self.engine: deepspeed.DeepSpeedEngine | None = None  # set by attach
        self._micro_batches_before = 0  # of the runs before a resume: DeepSpeed counts from 0 again

    def saturation(self) -> dict[str, float] | None:
        """Return the shares {"saturated", "underflow"} of quantized values in the last measured step, or None."""
        return self.monitor.last

    def routing(self) -> RoutingMeasurement | None:
        """Return the router statistics of the last measured step, or None.

        Over the tokens of all ranks, by layer with experts (`layers`) and as their mean (`mean`): `entropy` of the
        tokens per expert (1 if uniform), `largest_share` of one expert, `experts_without_tokens`; and `auxiliary_loss`
        of a model that returns one.
        """
        routing = None if self.health is None else self.health.routing
        return None if routing is None else routing.last

    @property
    def casts(self) -> bool:
        return casts(self.engine.module)

    def stop_casting(self) -> None:
        """Compute in BF16 from now on, for an evaluation after the last step. On all ranks.

        ZeRO-3 then all-gathers in BF16, from shards made for each all-gather: no more memory than one module's weights.
        """
        if self.graphs is not None:
            self.graphs.reset()
        if self.weights is not None:
            partition_all(self.engine)  # first: unsharded weights are in FP8, and their readers would expect BF16
            self.weights.end_fp8()
        stop_casting(self.engine.module)

    def compute_as_served(self, in_bf16: Iterable[str]) -> None:
        """Compute as a server of the FP8 export from now on, for an evaluation after the last step. On all ranks.

        in_bf16: names of the layers that the export holds in BF16.
        """
        if self.graphs is not None:
            self.graphs.reset()
        if self.weights is not None:
            partition_all(self.engine)  # first, as above
        weights = drop_outlier_channels(self.engine.module, in_bf16)
        if self.weights is not None:
            self.weights.leave_fp8(weights)

    def clock(self) -> int:
        """Return the number of calls of engine.step(), with those before a resume."""
        return self._micro_batches_before + self.engine.micro_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state, besides weights and optimizer state, for a resume bit for bit. Collective.

        The engine's save_checkpoint saves it, load_checkpoint loads it.

        Returns:
            Plain values and CPU tensors, for torch.load with weights_only=True; equal on all ranks, for any number of
            ranks. Empty with FP8 disabled.
        """
        if self.health is None:
            return {}
        state = {"preset": self.config.preset, "micro_batches": self.clock(), **self.health.state_dict()}
        if self.gradient_reduce is not None:
            state["gradients"] = self.gradient_reduce.state_dict()
        if self.weights is not None:
            # Exports quantize these from their masters, the others from BF16.
            parameters = self.engine.module.named_parameters()
            state["gathered_in_fp8"] = [name for name, weight in parameters if self.weights.in_fp8(weight)]
        return state

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load the state_dict() of any number of ranks. Between steps, on all ranks.

        Layers moved to BF16 since then stay in BF16. None, of a checkpoint without FP8 state, resets the state with a
        log message.
        """
        if self.health is None:
            return
        try:
            self._load(state)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise UserError(
                f"the FP8 state of the checkpoint is damaged: {first_line(error)}",
                remedy='use another checkpoint, or load this one without the key "ds_fp8" of its client state',
            ) from error

    def _load(self, state: Mapping[str, Any] | None) -> None:
        saved, own = (state or {}).get("preset", self.config.preset), self.config.preset
        there, here = json.dumps(saved), json.dumps(own)
        if self.preset_reason is not None and saved != own:  # the conversion cannot be undone now
            raise UserError(
                f"the checkpoint was trained with preset {there}, and this engine has {here}, because its "
                f"configuration names none and {self.preset_reason}",
                key="fp8.preset",
                remedy=f'"fp8": {{"preset": {there}}}',
            )
        if saved != own:
            self.health.say(f"the checkpoint was trained with preset {there}, and goes on with {here}")
        if not state:
            self.health.say("the checkpoint has no FP8 state: gradient scales and counters are reset")
            state = {}
        if self.graphs is not None:
            self.graphs.reset()
        # clock() adds the engine's count, which may not be 0: the sum is the saved number.
        self._micro_batches_before = state.get("micro_batches", 0) - self.engine.micro_steps
        # After the reset of the graphs: layers that move to BF16 change captured kernels.
        self.health.load_state_dict(state)
        if self.gradient_reduce is not None:
            self.gradient_reduce.load_state_dict(state.get("gradients", {}))
