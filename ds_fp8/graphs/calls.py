"""Classify a training call of an engine's module on one rank: eligible for a graph or not, and its signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_fp8.graphs.conditions import ITEMS, by_name, rows_in_a_graph, why_eager
from ds_fp8.graphs.known_code import code_of_others, fingerprint
from ds_fp8.zero.gradient_shards import GradientShards
from ds_fp8.zero.seams.micro_step import MicroStep


@dataclass
class Call:
    """A call of the module in training, and what this rank knows of it."""

    args: tuple
    kwargs: dict[str, Any]
    pending: bool
    """Another forward may still get its backward."""
    batch: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of a graph."""
    why: str | None = None
    """Reason for which this rank cannot run it as a graph, or None."""
    signature: object = None
    documents: int = 0
    """Documents of packed rows, 0 where every row is one."""
    max_documents: int = 0
    """Documents that a graph is captured for; known once the ranks have compared."""
    ordered: bool = True
    """On all ranks DeepSpeed knows the order of modules."""

    @property
    def tokens(self) -> int:
        """Return the tokens of the batch, 0 where that is not known."""
        return tokens_of(self.kwargs)


class Calls:
    """Looks at the calls of one engine's module."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        micro_step: MicroStep,
        gradients: GradientShards,
        on_other_code: Callable[[], None],
    ):
        """Begin with none.

        Args:
            module: Module of the engine.
            device: Its device.
            micro_step: DeepSpeed's part of a micro-step.
            gradients: Gradient shards that its reductions add to.
            on_other_code: Called when the model's hooks or settings have changed since the last call.
        """
        self._module, self._device, self._micro_step, self._gradients = module, device, micro_step, gradients
        self._on_other_code = on_other_code
        self._code = 0
        """Fingerprint of the model's code at the last micro-step that could be a graph."""
        self.code_of_others: str | None = None
        """Code that is neither this package's nor known to it."""

    def look_at(self, args: tuple, kwargs: dict[str, Any], pending: bool) -> Call:
        """Return what this rank knows of a call; `pending` as of Call."""
        args, kwargs = by_name(self._module, args, kwargs)
        if isinstance(kwargs.get(ITEMS), (int, float)):  # a number would be part of the graph
            kwargs[ITEMS] = torch.tensor(float(kwargs[ITEMS]))
        if torch.is_tensor(kwargs.get(ITEMS)):
            # As a tensor on the device it is copied into the graph's buffer at every replay: the loss divides by the
            # number of this batch, not of the captured one.
            kwargs[ITEMS] = kwargs[ITEMS].to(self._device)
        here = Call(args, kwargs, pending)
        self._inspect(here)
        return here

    def _inspect(self, here: Call) -> None:
        """Find out whether this rank could run a call as a graph, and of which signature."""
        here.why = why_eager(self._micro_step.modules, self._device, here.args, here.kwargs)
        if here.why is None:
            here.documents, here.why = rows_in_a_graph(self._module, here.kwargs)
        if here.why is None and self._micro_step.reduced_later:
            here.why = "gradients are reduced later"
        if here.why is None and here.pending:
            # A replay adds its gradients to none of another forward's, and all graphs share their memory.
            here.why = "a forward ran before the backward of another"
        if here.why is None:
            # Only for calls that could be graphs: the fingerprint walks over all modules.
            self._forget_other_code()
            # A mask is of ones only, and then transformers leaves it out as well.
            here.batch = {name: value for name, value in here.kwargs.items() if name != "attention_mask"}
            here.signature = self._signature(here.batch)

    def _signature(self, kwargs: Mapping[str, Any]) -> object:
        """Return what micro-steps that one graph can run have in common, on all ranks alike."""
        batch = tuple(
            (name, tuple(value.shape), value.dtype, value.device.type) if torch.is_tensor(value) else (name, value)
            for name, value in sorted(kwargs.items())
        )
        accumulates = self._micro_step.accumulates
        # Gradients that arrive for the first time in a step are added to zeros, which clears them before.
        arrived = sorted(self._gradients.arrived) if accumulates else None
        # Each part changes the kernels: the first micro-batch of a step overwrites gradients and later ones add, frozen
        # parameters have no wgrad, and dropout depends on the mode of its module.
        return batch, accumulates, arrived and tuple(arrived), self._micro_step.trained, self._micro_step.training

    def _forget_other_code(self) -> None:
        """Find out whether hooks or settings of the model have changed, on this rank."""
        code = fingerprint(self._micro_step.modules, self._micro_step.parameters, getattr(self._module, "config", None))
        if code != self._code:
            self._on_other_code()
            self._code, self.code_of_others = code, code_of_others(self._module)


def tokens_of(kwargs: Mapping[str, Any]) -> int:
    """Return the tokens of a batch, 0 where that is not known."""
    given = (kwargs.get(name) for name in ("input_ids", "labels", "inputs_embeds"))
    return next((value.shape[:2].numel() for value in given if torch.is_tensor(value)), 0)
