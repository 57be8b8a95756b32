"""FP8 state of an engine (`engine.fp8`), and the part of it that checkpoints hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import deepspeed

from ds_fp8.config.errors import UserError, first_line
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.health import Health
from ds_fp8.graphs.micro_steps import MicroStepGraphs
from ds_fp8.layers.convert import Conversion, casts, stop_casting
from ds_fp8.layers.head.loss import LossFusion
from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.monitor.routing import RoutingMeasurement
from ds_fp8.optim import AdamW
from ds_fp8.zero.collectives import WireMeter
from ds_fp8.zero.deepspeed.parameters import partition_all
from ds_fp8.zero.group import FP8ParamGroup
from ds_fp8.zero.hosts import Hosts, Nodes
from ds_fp8.zero.lifecycle import Lifecycle
from ds_fp8.zero.reduce import Reduction
from ds_fp8.zero.step import Step

CHECKPOINT_KEY = "ds_fp8"  # Key of the state in the client state of DeepSpeed's checkpoints


class FP8State:
    """FP8 state of an engine (`engine.fp8`), with FP8 enabled or not."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, config: FP8Config, monitor: CastMonitor):
        self.config, self.monitor = config, monitor
        # None without an "fp8" section, and below ZeRO stage 3: nothing is measured there
        self.wire: WireMeter | None = None
        # Handlers in place of DeepSpeed's methods; None where nothing is replaced
        self.lifecycle: Lifecycle | None = None
        self.conversion: Conversion | None = None
        self.loss: LossFusion | None = None
        self.health: Health | None = None
        self.weights: FP8ParamGroup | None = None
        self.gradient_reduce: Reduction | None = None
        self.hosts: Hosts | None = None  # Ranks by host; known with FP8 enabled
        self.nodes: Nodes | None = None
        self.optimizer: AdamW | None = None  # The optimizer inside DeepSpeed's, where it is this package's
        self.step: Step | None = None  # The step in place of ZeRO-3's; None where DeepSpeed's stays
        self.why_no_step: str | None = None  # Reason for which DeepSpeed's step stays
        self.graphs: MicroStepGraphs | None = None  # CUDA graphs of forward and backward, where they can be captured
        self.why_no_graphs: str | None = None  # Reason for which there are no graphs
        # Reason for a preset that the configuration leaves open; None where it names one
        self.preset_reason: str | None = None
        self.report: dict[str, Any] = {}  # The start report, ready for JSON
        self._engine = engine
        # Micro-batches of the runs that the loaded checkpoint continues: DeepSpeed counts from 0 again
        self._micro_batches_before = 0

    def saturation(self) -> dict[str, float] | None:
        """Return the shares {"saturated", "underflow"} of the casts of the last measured step; None before one."""
        return self.monitor.last

    def routing(self) -> RoutingMeasurement | None:
        """Return the router statistics of the last measured step; None before one, and without experts.

        Of each layer with experts (`layers`) and as their mean (`mean`), over the tokens of all ranks: `entropy` of the
        tokens per expert, 1 where all get as many, `largest_share` of one expert, and `experts_without_tokens`. And
        `auxiliary_loss`, where the model returns one.
        """
        routing = None if self.health is None else self.health.routing
        return None if routing is None else routing.last

    @property
    def casts(self) -> bool:
        return casts(self._engine.module)

    def stop_casting(self) -> None:
        """Let the whole model compute in BF16 from now on, for an evaluation after the last step. On all ranks.

        ZeRO-3 then gathers the weights that it gathered in FP8 in BF16, from shards that are made for each gather: it
        takes no more memory than one module's weights.
        """
        if self.graphs is not None:
            self.graphs.reset()
        if self.weights is not None:
            # Before the switch: a weight that is still gathered holds codes, and its next reader would expect BF16.
            partition_all(self._engine)  # what stayed gathered is in FP8
            self.weights.end_fp8()
        stop_casting(self._engine.module)

    def clock(self) -> int:
        """Return the number of calls of engine.step() so far, those before a resume among them."""
        return self._micro_batches_before + self._engine.micro_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a run needs besides weights and optimizer state to resume bit for bit. Collective.

        The engine's own save_checkpoint has it in every checkpoint, and load_checkpoint puts it back.

        Returns:
            Plain values and CPU tensors, which torch.load reads with weights_only=True; the same on all ranks, and for
            any number of ranks. Empty with FP8 disabled.
        """
        if self.health is None:
            return {}
        state = {"preset": self.config.preset, "micro_batches": self.clock(), **self.health.state_dict()}
        if self.gradient_reduce is not None:
            state["gradients"] = self.gradient_reduce.state_dict()
        if self.weights is not None:
            # Exports cast these from their masters, the others from BF16: which ZeRO kept whole no setting tells alone.
            parameters = self._engine.module.named_parameters()
            state["gathered_in_fp8"] = [name for name, weight in parameters if self.weights.in_fp8(weight)]
        return state

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `state`, what state_dict() returned on any number of ranks. Between steps, on all ranks.

        Layers that have moved to BF16 meanwhile stay there. None, of a checkpoint without FP8 state, starts all of it
        anew, and says so.
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
        if self.preset_reason is not None and saved != own:
            # Kept as it was: the conversion cannot be taken back now.
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
        # The engine may have counted before the load. clock() adds its count: the sum is the saved number.
        self._micro_batches_before = state.get("micro_batches", 0) - self._engine.micro_steps
        # Behind the reset of the graphs: moving layers to BF16 changes kernels that graphs have captured.
        self.health.load_state_dict(state)
        if self.gradient_reduce is not None:
            self.gradient_reduce.load_state_dict(state.get("gradients", {}))
