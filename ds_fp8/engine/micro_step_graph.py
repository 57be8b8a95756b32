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

import contextlib
import os
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import deepspeed
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.health import Health
from ds_fp8.layers.linear import FP8Linear
from ds_fp8.layers.loss import LossFusion
from ds_fp8.monitor.cast_monitor import CastMonitor
from ds_fp8.zero import seams, streams
from ds_fp8.zero.gradient_shards import GradientShards
from ds_fp8.zero.parameter_gather import ParameterGather
from ds_fp8.zero.seams.micro_step import MicroStep
from ds_fp8.zero.wire import WireMeter

EAGER_STEPS = 2
"""Micro-steps of a kind that run eagerly before one is captured: kernels are compiled, memory is allocated in them."""

MOST_GRAPHS = 8
"""Kinds of micro-steps that are captured: every graph keeps buffers of its own."""

ITEMS = "num_items_in_batch"
COPIED = frozenset({"input_ids", "labels", "shift_labels", "inputs_embeds", "position_ids", ITEMS})
"""Tensors of a batch whose values decide nothing but numbers, once every row is known to be one whole sequence."""

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def why_no_graphs(
    engine: deepspeed.DeepSpeedEngine, fp8: FP8Config, loss: LossFusion | None, why_no_step: str | None
) -> str | None:
    """Return what keeps this engine from capturing any micro-step, or None.

    Args:
        engine: Of any ZeRO stage.
        fp8: Its "fp8" section.
        loss: How its loss was fused.
        why_no_step: Why DeepSpeed's optimizer step stays, or None.
    """
    recipes = [module.recipe for module in engine.module.modules() if isinstance(module, FP8Linear)]
    casts = [cast for recipe in recipes for cast in (recipe.input, recipe.weight, recipe.grad_output)]
    reasons = {
        '"graph" is "off"': fp8.graph == "off",
        "there is no CUDA device": engine.device.type != "cuda",
        f"DeepSpeed's step stays: {why_no_step}": why_no_step is not None,
        "the loss is not fused: logits may have gradients of their own": loss is None or not loss.fused,
        "gradients are rounded at random, with a key of every micro-batch": fp8.grad_reduce.rounding == "stochastic",
        "gradients have one scale each, which adapts over time": fp8.grad_reduce.scale == "tensor",
        "casts are emulated, operation by operation": any(cast.by_torch for cast in casts),
        "ranks share sequences": engine.sequence_parallel_size > 1,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class _Token:
    """Lives as long as the autograd graph of a replayed forward."""


class _Replay(torch.autograd.Function):
    """The forward that has been replayed, as autograd sees it: one loss, whose backward replays the other graph."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, graph: _Graph, token: _Token) -> torch.Tensor:
        ctx.graph, ctx.token = graph, token
        return graph.loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        ctx.graph.replay_backward(gradient)
        return None, None, None


class _Graph:
    """Both graphs of one kind of micro-step, and the memory that connects them to the world."""

    def __init__(self, owner: MicroStepGraphs, batch: Mapping[str, Any]):
        self._owner = owner
        self._batch = {name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()}
        self._persistent = [(p, p.data.clone()) for p in owner.micro_step.persistent]
        self.addresses = owner.addresses()
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.pending: weakref.ref[_Token] | None = None
        self._anchor = torch.zeros((), device=owner.device, requires_grad=True)
        self._capture()

    def _capture(self) -> None:
        owner, wire = self._owner, self._owner.wire
        arrived, sent = owner.gradients.arrived, wire.sent()
        state, outside = owner.micro_step.remember(), [p.data for p, _ in self._persistent]
        try:
            for parameter, static in self._persistent:
                parameter.data = static
            with owner.capturing(self._forward):
                output = owner.stock(**self._batch)
                leaves, self._structure = tree_flatten(output)
                self._place, loss = _only_differentiable(leaves)
                self._leaves = [leaf.detach() if torch.is_tensor(leaf) else leaf for leaf in leaves]
                owner.micro_step.finish_gathers()
            self.loss, self._gradient = self._leaves[self._place], torch.ones_like(loss)
            del output, leaves
            with owner.capturing(self._backward):
                torch.autograd.backward([loss], [self._gradient])
                owner.micro_step.finish_backward()
        finally:
            for (parameter, _), data in zip(self._persistent, outside, strict=True):
                parameter.data = data
            # Nothing has been computed yet.
            self._arrives, self._sends = owner.gradients.arrived, wire.sent() - sent
            owner.gradients.arrived = arrived
            wire.subtract(self._sends)
            owner.micro_step.restore(state)

    def replay(self, batch: Mapping[str, Any]) -> Any:
        """Return what the model returns for a batch of this kind."""
        pairs = [(mine, batch[name]) for name, mine in self._batch.items() if torch.is_tensor(mine)]
        for mine, given in pairs:
            mine.copy_(given, non_blocking=True)
        if self._persistent:
            torch._foreach_copy_([mine for _, mine in self._persistent], [p.data for p, _ in self._persistent])
        self._forward.replay()
        token = _Token()
        self.pending = weakref.ref(token)
        leaves = [leaf.clone() if torch.is_tensor(leaf) else leaf for leaf in self._leaves]
        leaves[self._place] = _Replay.apply(self._anchor, self, token)
        return tree_unflatten(leaves, self._structure)

    def replay_backward(self, gradient: torch.Tensor) -> None:
        """Add the gradients of the last replayed forward to the shards."""
        self.pending = None
        self._gradient.copy_(gradient)
        self._backward.replay()
        owner = self._owner
        owner.gradients.arrived |= self._arrives
        owner.wire.add(self._sends)


class MicroStepGraphs:
    """Takes the place of calling an engine's module: eager at first, and replayed where a micro-step repeats."""

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        gradients: GradientShards,
        gather: ParameterGather | None,
        wire: WireMeter,
        health: Health,
        monitor: CastMonitor,
    ):
        """Install the graphs; `why_no_graphs` must have returned None.

        Args:
            engine: Of ZeRO stage 3.
            gradients: What its reductions add to.
            gather: What gathers its weights in FP8, if anything does.
            wire: Counts the bytes.
            health: Says what there is to say.
            monitor: Measured steps run eagerly.
        """
        self._engine, self._gather, self._health, self._monitor = engine, gather, health, monitor
        self.device = engine.device
        self.micro_step = MicroStep(engine)
        self.gradients, self.wire = gradients, wire
        self.stock: Callable[..., Any] = engine.module._call_impl
        self.off: str | None = None
        """Why nothing is captured any more."""
        self._graphs: dict[object, _Graph] = {}
        self._seen: dict[object, int] = {}
        self._said: set[str] = set()
        self._pool: object | None = None
        self._stream = torch.cuda.Stream(engine.device)
        seams.replace(engine, engine.module, "_call_impl", self)
        seams.on_destroy(engine, self.reset)

    def __reduce__(self) -> tuple:
        # A copy of a model under training has no engine, and computes by itself.
        return types.MethodType, (torch.nn.Module._call_impl, self._engine.module)

    @property
    def captured(self) -> int:
        """Return how many kinds of micro-steps are captured."""
        return len(self._graphs)

    def reset(self) -> None:
        """Forget all graphs: what they were captured from has changed."""
        self._graphs.clear()
        self._seen.clear()
        self._pool = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns: computed by a graph, or eagerly where there is none for this call."""
        if isinstance(kwargs.get(ITEMS), (int, float)) and not self.off:  # a number would be part of the graph
            kwargs[ITEMS] = torch.tensor(float(kwargs[ITEMS]), device=self.device)
        why = self.off or self._why_eager(args, kwargs)
        if why is None and not _one_sequence_a_row(kwargs):
            why = "rows are padded, or hold several documents: what attention computes differs from batch to batch"
        if why is not None:
            return self._eager(why, args, kwargs)
        # Of ones only; transformers leaves such a mask out as well.
        kwargs = {name: value for name, value in kwargs.items() if name != "attention_mask"}
        kind = self._kind(kwargs)
        graph = self._graphs.get(kind)
        if graph is None:
            self._seen[kind] = self._seen.get(kind, 0) + 1
            if self._seen[kind] <= EAGER_STEPS or not self.micro_step.ready:
                return self._aside(args, kwargs)
            if len(self._graphs) == MOST_GRAPHS:
                return self._eager(f"batches of {MOST_GRAPHS} shapes are captured already", args, kwargs)
        self._settle()
        if graph is None or graph.addresses != self.addresses():
            if graph is not None:  # a checkpoint was loaded, or the like: all of them read elsewhere now
                self.reset()
            graph = self._captured(kind, kwargs)
            if graph is None:
                return self._eager(self.off, args, kwargs)
        if graph.pending is not None and graph.pending() is not None:
            return self._eager("a forward ran before the backward of another", args, kwargs)
        return graph.replay(kwargs)

    def addresses(self) -> tuple[int, ...]:
        """Return where all lies that a graph reads and writes besides its own memory."""
        gather = self._gather
        if gather is None:
            return self.micro_step.addresses(lambda parameter: False)
        return (*self.micro_step.addresses(gather.gathers), *gather.addresses())

    @contextlib.contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture what is enqueued inside, on DeepSpeed's streams too."""
        sides = self.micro_step.side_streams()
        # Other threads (NCCL's watchdog, the loader of batches) may go on calling CUDA.
        captured = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with captured, streams.capture(), self.micro_step.unthrottled(), _masks_as_outside():
            for side in sides:
                side.wait_stream(self._stream)
            yield
            for side in sides:
                self._stream.wait_stream(side)

    def _settle(self) -> None:
        """Bring parameters and shards to the state in which graphs begin, on the current stream."""
        self.micro_step.settle()
        gather = self._gather
        if gather is not None:
            gather.settle()

    def _captured(self, kind: object, batch: Mapping[str, Any]) -> _Graph | None:
        gather, memory = self._gather, torch.cuda.memory_reserved(self.device)
        if gather is not None:
            gather.pin_scales()
        state = self.micro_step.remember()
        try:
            if not self._graphs:
                # Once in vain: with memory reused, torch ends the process where a capture of backward fails.
                self._pool = torch.cuda.graph_pool_handle()
                with _streams_unrecorded():
                    _Graph(self, batch)
                self._pool = torch.cuda.graph_pool_handle()
            with _memory_of_other_streams_reused():
                graph = self._graphs[kind] = _Graph(self, batch)
        except Exception as error:  # whatever a model does that no graph can hold; it is said, and runs eagerly
            while error.__context__ is not None:  # what ended the capture, and not that it had ended
                error = error.__context__
            torch.cuda.synchronize(self.device)
            # torch leaves its random numbers in the state of a capture that never ends.
            generator = torch.cuda.default_generators[self.device.index]
            generator.graphsafe_set_state(generator.clone_state())
            if gather is not None:
                gather.forget_gathered()
            self.micro_step.abandon()
            self.micro_step.restore(state)
            self.reset()
            self.off = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._health.say(f"CUDA graphs are off: {self.off}")
            return None
        more = torch.cuda.memory_reserved(self.device) - memory
        self._say(f"forward and backward run as CUDA graphs from here on ({more / 2**30:+.2f} GiB reserved)")
        return graph

    def _why_eager(self, args: tuple, kwargs: Mapping[str, Any]) -> str | None:
        module = self._engine.module
        if not (module.training and torch.is_grad_enabled()):
            return ""  # evaluation, of which nothing need be said
        if self._monitor.active:
            return ""
        if args:
            return "the batch is passed by position"
        if getattr(module, "is_gradient_checkpointing", False):
            return "activations are recomputed, with the state of random numbers saved on the host"
        for name, value in kwargs.items():
            if torch.is_tensor(value):
                if name not in COPIED and not (name == "attention_mask" and value.dim() == 2):
                    return f'the values of "{name}" may decide what is computed'
            elif value is not None and not isinstance(value, (bool, int, float, str)):
                return f'"{name}" is a {type(value).__name__}'
        if torch.is_autocast_enabled(self.device.type):
            return "autocast is on"
        return None

    def _kind(self, kwargs: Mapping[str, Any]) -> object:
        """Return what two micro-steps have in common that one graph can run."""
        batch = tuple(
            (name, tuple(value.shape), value.dtype, value.device.type) if torch.is_tensor(value) else (name, value)
            for name, value in kwargs.items()
        )
        accumulates = self.micro_step.accumulates
        # Gradients that arrive for the first time in a step are added to zeros, which clears them before.
        return batch, accumulates, self.gradients.arrived if accumulates else None, self.micro_step.trained()

    def _eager(self, why: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        if why and why != self.off:
            self._say(f"without CUDA graphs: {why}")
        trains = self.off is None and torch.is_grad_enabled()
        return self._aside(args, kwargs) if trains else self.stock(*args, **kwargs)

    def _aside(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Call the module on the stream that graphs are captured on.

        Autograd adds a gradient up on the stream that its parameter was first used on, and remembers that for as long
        as somebody holds the loss of an earlier step. A capture must not come upon another stream there.
        """
        outside = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            output = self.stock(*args, **kwargs)
        outside.wait_stream(self._stream)
        return output

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._health.say(line)


def _only_differentiable(leaves: list[Any]) -> tuple[int, torch.Tensor]:
    """Return the one output that has a gradient, and its place. Raises ValueError for several, or none."""
    places = [place for place, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.requires_grad]
    if len(places) != 1:
        raise ValueError(f"the model returns {len(places)} tensors with a gradient, and a graph knows one loss")
    return places[0], leaves[places[0]]


def _one_sequence_a_row(batch: Mapping[str, Any]) -> bool:
    """Return whether no token of a batch is masked, and its positions count from 0; the host waits for the answer.

    transformers waits as well when it builds the mask of such a batch.
    """
    mask, positions = (batch.get(name) for name in ("attention_mask", "position_ids"))
    plain = [] if mask is None else [mask.all()]
    if positions is not None:
        plain.append((positions == torch.arange(positions.shape[-1], device=positions.device)).all())
    return not plain or bool(torch.stack(plain).all())


@contextlib.contextmanager
def _streams_unrecorded() -> Iterator[None]:
    """Let memory be reused at once, for a capture that is never replayed."""
    record_stream = torch.Tensor.record_stream
    torch.Tensor.record_stream = lambda tensor, stream: None
    try:
        yield
    finally:
        torch.Tensor.record_stream = record_stream


@contextlib.contextmanager
def _masks_as_outside() -> Iterator[None]:
    """Let transformers build the attention mask that it builds without a graph.

    It would make masks of all tokens by all tokens, lest a graph bake in what it reads of a batch. Here every row is
    known to be one causal sequence.
    """
    from transformers import masking_utils

    names = {"is_tracing": lambda *_: False, "find_packed_sequence_indices": lambda *_, **__: None}
    before = {name: getattr(masking_utils, name) for name in names}
    for name, value in names.items():
        setattr(masking_utils, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(masking_utils, name, value)


@contextlib.contextmanager
def _memory_of_other_streams_reused() -> Iterator[None]:
    """Let a capture use memory again that another stream has read meanwhile, which it otherwise keeps to its end."""
    given = next((os.environ[name] for name in _SETTINGS if os.environ.get(name)), "")
    setting = "graph_capture_record_stream_reuse"
    if setting in given or not hasattr(torch.cuda.memory, "_set_allocator_settings"):
        yield
        return
    before = f"{given}," * bool(given)
    try:
        torch.cuda.memory._set_allocator_settings(f"{before}{setting}:True")
    except (RuntimeError, ValueError) as error:
        warnings.warn(f"CUDA graphs take more memory with this torch: {error}", stacklevel=2)
        yield
        return
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(f"{before}{setting}:False")
