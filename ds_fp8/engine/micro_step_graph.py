"""Forward and backward of a micro-batch as two CUDA graphs, gathers and reductions included.

Launched one by one, the kernels of a small model take the GPU less time than Python needs to launch them. A graph is
launched at once. What it reads and writes must stay where it was captured:

    batch                    copied into buffers of the graph
    FP8 shards, gradients    where they always are; their addresses are compared before every replay
    scales                   pinned (FP8Shards.pin_scales)
    persistent parameters    copied into buffers of the graph, for every step gathers them elsewhere
    gathered weights,
    activations              memory of the graph

DeepSpeed's hooks run at the capture alone. So does everything else that Python does: a micro-step that Python would do
in another way the next time (a measured one, another shape, a layer that has moved to BF16) runs as always, or is
captured anew. The kernels are the same, and so are their results bit for bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_fp8.zero.gradient_shards import GradientShards
from ds_fp8.zero.seams.micro_step import MicroStep
from ds_fp8.zero.wire import WireMeter

OFF = 'a CUDA graph keeps the activations of one forward; set "graph": "off"'


class _Token:
    """Lives as long as the autograd graph of a replayed forward."""


class _Replay(torch.autograd.Function):
    """The forward that has been replayed, as autograd sees it: one loss, whose backward replays the other graph."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, graph: MicroStepGraph, token: _Token) -> torch.Tensor:
        ctx.graph, ctx.token = graph, token
        return graph.loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        ctx.graph.replay_backward(gradient, ctx.token)
        return None, None, None


class MicroStepGraph:
    """Both graphs of one kind of micro-step, and the memory that connects them to the world."""

    def __init__(
        self,
        call: Callable[..., Any],
        batch: Mapping[str, Any],
        most: int,
        micro_step: MicroStep,
        gradients: GradientShards,
        wire: WireMeter,
        addresses: tuple[int, ...],
        capturing: Callable[[torch.cuda.CUDAGraph], AbstractContextManager],
    ):
        """Capture both graphs; nothing is computed.

        Args:
            call: The module, to be called with `batch` by name.
            batch: Tensors, whose values are copied at every replay, and plain values, which are part of the graph.
            most: Documents that packed rows may hold; 0 where every row is one sequence.
            micro_step: DeepSpeed's part of it.
            gradients: What its reductions add to.
            wire: Counts the bytes.
            addresses: Where all lies now that the graphs do not own.
            capturing: Captures what is enqueued inside of it.
        """
        self._gradients, self._wire, self.addresses, self._micro_step = gradients, wire, addresses, micro_step
        self.most = most
        self._batch = {
            name: value.detach().clone() if torch.is_tensor(value) else value for name, value in batch.items()
        }
        self._persistent = [(p, p.data.clone()) for p in micro_step.persistent]
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._token: weakref.ref[_Token] | None = None
        self._anchor = torch.zeros((), device=gradients.device, requires_grad=True)
        arrived, sent = gradients.arrived, wire.sent()
        state, outside = micro_step.remember(), [p.data for p, _ in self._persistent]
        try:
            for parameter, static in self._persistent:
                parameter.data = static
            with capturing(self._forward):
                output = call(**self._batch)
                leaves, self._structure = tree_flatten(output)
                self._place, loss = only_differentiable(leaves)
                self._leaves = [leaf.detach() if torch.is_tensor(leaf) else leaf for leaf in leaves]
                micro_step.finish_gathers()
            self.loss, self._gradient = self._leaves[self._place], torch.ones_like(loss)
            del output, leaves
            with capturing(self._backward):
                torch.autograd.backward([loss], [self._gradient])
                micro_step.finish_backward()
        finally:
            for (parameter, _), data in zip(self._persistent, outside, strict=True):
                parameter.data = data
            # Nothing has been computed yet.
            self._arrives, self._sends = gradients.arrived, wire.sent() - sent
            gradients.arrived = arrived
            wire.subtract(self._sends)
            micro_step.restore(state)

    def close(self) -> None:
        """Free the graphs; NCCL ends no communicator while one that it is captured in exists."""
        self._token = None
        self._forward.reset()
        self._backward.reset()
        self.loss = self._gradient = None
        self._leaves.clear()
        self._batch.clear()
        self._persistent.clear()

    @property
    def pending(self) -> bool:
        """Return whether the last forward may still get its backward: its activations must stay."""
        return self._token is not None and self._token() is not None

    def replay(self, batch: Mapping[str, Any]) -> Any:
        """Return what the model returns for a batch of this kind."""
        pairs = [(mine, batch[name]) for name, mine in self._batch.items() if torch.is_tensor(mine)]
        for mine, given in pairs:
            mine.copy_(given, non_blocking=True)
        if self._persistent:
            torch._foreach_copy_([mine for _, mine in self._persistent], [p.data for p, _ in self._persistent])
        self._forward.replay()
        token = _Token()
        self._token = weakref.ref(token)
        self._before = self._micro_step.accumulates, self._gradients.arrived
        leaves = [leaf.clone() if torch.is_tensor(leaf) else leaf for leaf in self._leaves]
        leaves[self._place] = _Replay.apply(self._anchor, self, token)
        return tree_unflatten(leaves, self._structure)

    def replay_backward(self, gradient: torch.Tensor, token: _Token) -> None:
        """Add the gradients of a replayed forward to the shards.

        Raises:
            RuntimeError: The forward is not the last one, or has had its backward; or another one came in between.
        """
        if self._token is None or self._token() is not token:
            raise RuntimeError(f"this forward has had its backward, or another forward has followed it: {OFF}")
        if self._before != (self._micro_step.accumulates, self._gradients.arrived) or self._micro_step.reducing:
            raise RuntimeError(
                f"gradients of another forward came between this one and its backward, as where one backward has the "
                f"losses of several forwards: {OFF}"
            )
        self._token = None
        self._gradient.copy_(gradient)
        self._backward.replay()
        self._gradients.arrived |= self._arrives
        self._wire.add(self._sends)


def only_differentiable(leaves: list[Any]) -> tuple[int, torch.Tensor]:
    """Return the one output that has a gradient, and its place.

    Raises:
        ValueError: There are several, or none.
    """
    for leaf in leaves:
        if not (leaf is None or torch.is_tensor(leaf) or isinstance(leaf, (bool, int, float, str))):
            raise ValueError(f'the model returns a {type(leaf).__name__}: pass "use_cache": False, if it is a cache')
    places = [place for place, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.requires_grad]
    if len(places) != 1:
        raise ValueError(f"the model returns {len(places)} tensors with a gradient, and a graph knows one loss")
    if leaves[places[0]].numel() != 1:
        raise ValueError("the model returns no loss, but what the caller makes one of: its gradient would be kept")
    return places[0], leaves[places[0]]
