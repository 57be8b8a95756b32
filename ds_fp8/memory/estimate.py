"""Peak memory of a training step per GPU, what fits on it, and what would.

    the loss          everything that lasts, all activations, the head and its loss
    backward of a     everything that lasts, the activations of the layers up to it, its workspace, what is gathered
      layer             for it, and, where the bucket is full then, a reduction of gradients
    the step          everything that lasts, and what the optimizer allocates

What lasts are weights, moments and gradients (states.py). The figure is what torch's allocator hands out
(torch.cuda.max_memory_allocated); what it holds back besides, what CUDA and what graphs take, is `slack_bytes`, CONTEXT
and `graph_bytes`.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from transformers import PretrainedConfig

from ds_fp8.config.deepspeed_json import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from ds_fp8.config.errors import UserError
from ds_fp8.config.files import apply_override
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.schema import nearest
from ds_fp8.config.sequence_parallel import check_heads, check_layers, sequence_parallel_size
from ds_fp8.memory import activations, states
from ds_fp8.memory.shapes import Device, Workload, read_workload
from ds_fp8.train.stage import resolve_batch

LASTING = (
    "master weights", "moments", "gradient shards", "gradient bucket", "BF16 weights", "FP8 weights",
)  # fmt: skip
ACTIVATIONS, INPUTS, LOSS, GATHERED, WORKSPACE, REDUCTION, STEP = (
    "activations",
    "batch and positions",
    "loss",
    "gathered weights",
    "backward workspace",
    "gradient reduction",
    "optimizer step",
)
# Every kind of memory, in the order of tables
KINDS = (*LASTING, ACTIVATIONS, INPUTS, LOSS, GATHERED, WORKSPACE, REDUCTION, STEP)

# Share of the transient memory: what the caching allocator holds in pieces that fit nothing. An assumption; sweeps
# measure it (reserved_bytes beside peak_bytes).
SLACK = 0.08
CONTEXT = 1 << 30  # CUDA's context, its loaded kernels, and NCCL's buffers, which are not torch's. An assumption too.
# Share of a micro-step's memory, which graphs hold, that a forward beside them takes: a check, an evaluation
BESIDE_GRAPHS = 0.25

Size = Literal["micro_batch", "sequence_length"]
LARGEST = {"micro_batch": 1 << 16, "sequence_length": 1 << 24}
MULTIPLE = {"micro_batch": 1, "sequence_length": 128}  # Sizes that are asked about: sequences in whole groups of a cast
MAX_GPUS = 1024
TILE_TOKENS = 8192  # Tokens of an MLP's tile: enough for its products to fill a GPU

_AMPERE = "no FP8 products: a configuration with FP8 on is refused there"
_ADA = "FP8 products with scales per row and tensor (presets rowwise, tensorwise), not with block scales"
_BLACKWELL = "FP8 products through Transformer Engine's MXFP8 (power-of-two scales)"


class GPU(NamedTuple):
    """A GPU as a training run finds it."""

    gib: float  # Memory that CUDA reports in total, GiB: less than the name says
    limits: str | None = None  # FP8 products that it lacks, in words; None for Hopper, which has all

    @property
    def bytes(self) -> int:
        return round(self.gib * 2**30)


# Name -> GPU, on a machine where nothing else uses it
GPUS = {
    "h100": GPU(79.1),
    "h200": GPU(139.7),
    "h20": GPU(95.0),
    "b200": GPU(178.3, _BLACKWELL),
    "a100-40": GPU(39.4, _AMPERE),
    "a100-80": GPU(79.1, _AMPERE),
    "l40s": GPU(44.4, _ADA),
    "rtx4090": GPU(23.5, _ADA),
    "rtx5090": GPU(31.3, _BLACKWELL),
    "rtx6000-ada": GPU(47.4, _ADA),
}


def gpu_of(name: str) -> GPU:
    """Return the GPU of this name."""
    found = GPUS.get(name.lower())
    if found is None:
        remedy = nearest(name.lower(), GPUS, "there are").rstrip(".?")
        remedy += "? Or" if remedy.startswith("Did") else ". Or"
        raise UserError(f'no GPU is known as "{name}"', key="--gpu", remedy=f"{remedy} give its memory: --memory GIB")
    return found


class Phase(NamedTuple):
    """A time of the step, and what is there then, in bytes by kind."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Estimate:
    """The memory of a training step, per GPU, in bytes."""

    workload: Workload
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak_bytes(self) -> int:
        """Return the expected torch.cuda.max_memory_allocated."""
        return self.peak.total

    @property
    def lasting_bytes(self) -> int:
        """Return the bytes held between steps."""
        return sum(self.peak.parts.get(kind, 0) for kind in LASTING)

    @property
    def slack_bytes(self) -> int:
        """Return what the allocator holds beyond tensors: a share of those that come and go."""
        return round(SLACK * (self.peak_bytes - self.lasting_bytes))

    @property
    def device_bytes(self) -> int:
        """Return the memory that the GPU must have: the peak, the allocator's slack, and CUDA's context."""
        return self.peak_bytes + self.slack_bytes + CONTEXT

    @property
    def graph_bytes(self) -> int:
        """Return the memory that CUDA graphs want besides: where it is not there, they are freed now and then, or end.

        They hold that of one micro-step. Measured ones (`monitor.every`), which Python launches, take as much again.
        """
        share = 1 + SLACK if self.workload.fp8.monitor.every else BESIDE_GRAPHS
        return round(share * (self.peak_bytes - self.lasting_bytes)) if self.workload.has_graphs else 0

    @property
    def required_bytes(self) -> int:
        """Return the memory without which the stage does not run: that of graphs too where they are asked for."""
        return self.device_bytes + (self.graph_bytes if self.workload.fp8.graph == "on" else 0)

    @property
    def host_bytes(self) -> int:
        return activations.inputs_on_host(self.workload)

    def as_json(self) -> dict[str, Any]:
        """Return figures ready for JSON; every value in bytes but for names and counts."""
        w = self.workload
        return {
            "gpus": w.gpus,
            "zero_stage": w.stage,
            "parameters": w.model.numel,
            "micro_batch": w.rows,
            "sequence_length": w.sequence_length,
            "sequence_parallel_size": w.shared_by,
            "peak": self.peak.name,
            "peak_bytes": self.peak_bytes,
            "parts": {kind: self.peak.parts[kind] for kind in KINDS if self.peak.parts.get(kind)},
            "slack_bytes": self.slack_bytes,
            "context_bytes": CONTEXT,
            "device_bytes": self.device_bytes,
            "graph_bytes": self.graph_bytes,
            "pinned_host_bytes": self.host_bytes,
        }


def estimate(
    config: str | os.PathLike | Mapping[str, Any],
    *,
    gpus: int | None = None,
    model: PretrainedConfig | None = None,
    sequence_length: int | None = None,
    device: Device = "cuda",
) -> Estimate:
    """Return the memory that the stage in `config` takes on each of `gpus` GPUs, from the JSON and the model's shape.

    config: a stage, or any DeepSpeed configuration if `model` (a Hugging Face configuration) and `sequence_length`
    (tokens of a row) are given, which take the place of the stage's. gpus: WORLD_SIZE or 1 by default.
    """
    return estimate_workload(
        read_workload(config, gpus=gpus, model=model, sequence_length=sequence_length, device=device)
    )


def estimate_workload(w: Workload) -> Estimate:
    """Return the same of a workload that has been read."""
    lasting = Counter(states.lasting(w))
    step = Phase("the optimizer step", dict(lasting + Counter({STEP: states.optimizer_step(w)})))
    return Estimate(w, (*_passes(w, lasting), step))


def _passes(w: Workload, lasting: Counter[str]) -> Iterator[Phase]:
    """Return the loss, and backward of every layer from the last to the first."""
    layers = w.model.layers
    # The first layer's input is counted with that layer, the last one's output with the final norm.
    kept = [activations.kept(layer, w) for layer in layers]
    waiting, present, inputs = activations.input_on_device(w), sum(kept), activations.inputs(w)

    def phase(name: str, parts: dict[str, int]) -> Phase:
        return Phase(name, dict(lasting + Counter({ACTIVATIONS: present + waiting, INPUTS: inputs}) + Counter(parts)))

    head = {GATHERED: states.gathered_at_the_loss(w), LOSS: activations.loss(w)}
    yield phase("the loss", {ACTIVATIONS: activations.final_norm(w), **head})
    reductions, gradient = states.reductions(w), activations.head_gradient(w)
    for index in reversed(range(len(layers))):
        reduction = states.reduction_bytes(reductions, index, w)
        workspace = activations.workspace(layers[index], w, reduces=bool(reduction) and w.own_step)
        parts = {WORKSPACE: workspace, GATHERED: states.gathered_in_backward(w, index)}
        parts |= {LOSS: gradient, REDUCTION: reduction}
        yield phase(f"backward of layer {index + 1} of {len(layers)}", parts)
        present -= kept[index]
    waiting = 0
    parts = {LOSS: gradient + 2 * w.model.embedding, REDUCTION: states.reduction_bytes(reductions, -1, w)}
    yield phase("backward of the embedding", parts)


def bf16_stages(raw: Mapping[str, Any], fp8: FP8Config) -> dict[str, dict[str, Any]]:
    """Return the stage in BF16 by name: with the loss that it has with FP8, as Liger's, and with the model's own."""
    sections = {"BF16, its own loss": {"enabled": False}}
    if fp8.fuses_loss:
        sections = {"BF16, fused loss": {"enabled": False, "loss": {"mode": "fused"}}, **sections}
    return {name: {**raw, "fp8": section} for name, section in sections.items()}


# ---------------------------------------------------------------- what fits


def largest_that_fits(w: Workload, what: Size, memory_bytes: int) -> int:
    """Return the largest micro-batch (rows) or sequence (tokens) with which `w` needs at most `memory_bytes`.

    0 where nothing fits. A sequence is no longer than the model's max_position_embeddings.
    """
    limit = LARGEST[what]
    if what == "sequence_length" and w.model.longest is not None:
        limit = w.model.longest
    return _largest(w, what, memory_bytes, limit)


def longest_contexts(w: Workload, memory_bytes: int) -> dict[int, int]:
    """Return the longest rows that fit where so many of the GPUs share each: tokens by `sequence_parallel_size`.

    Only memory bounds them: for more positions than the model has, its rotary embedding must be scaled. A size counts
    if it divides the GPUs and the model's heads.
    """
    sizes = [size for size in range(1, w.gpus + 1) if w.gpus % size == 0 and _can_share(w.model.decoder.config, size)]
    limit = LARGEST["sequence_length"]
    return {size: _largest(replace(w, shared_by=size), "sequence_length", memory_bytes, limit) for size in sizes}


def _can_share(config: PretrainedConfig, size: int) -> bool:
    try:
        check_heads(config, size)
        check_layers(config, size)
    except UserError:
        return False
    return True


def _largest(w: Workload, what: Size, memory_bytes: int, limit: int) -> int:
    unit = MULTIPLE[what] * (w.shared_by if what == "sequence_length" else 1)

    def needed(units: int) -> int:
        return estimate_workload(w.resized(what, units * unit)).device_bytes

    return unit * search(needed, memory_bytes, limit // unit)


def search(needed: Callable[[int], int], most: int, limit: int) -> int:
    """Return the largest number from 1 to `limit` that needs at most `most`, 0 for none; more must not need less."""
    known, low, high, number = {}, 0, limit + 1, 1
    while high - low > 1:
        known[number] = needed(number)
        low, high = (number, high) if known[number] <= most else (low, number)
        # Nearly linear: next is where the line through two of them reaches `most`, every third time the middle.
        start, end = (low, high) if high in known else (max((n for n in known if n < low), default=0), low)
        if start in known and known[end] > known[start] and len(known) % 3:
            number = start + (most - known[start]) * (end - start) // (known[end] - known[start])
        else:
            number = (low + high) // 2 if high in known else 2 * low
        number = max(low + 1, min(number, high - 1))
    return low


# ---------------------------------------------------------------- what would fit


class Remedy(NamedTuple):
    """A change that makes a stage fit."""

    change: str  # Arguments to add to the command
    device_bytes: int  # Memory that a GPU needs then


def settings_that_fit(raw: Mapping[str, Any], gpus: int, memory_bytes: int) -> Remedy | None:
    """Return the first change of settings with which the stage fits on as many GPUs, or None.

    Recomputed layers, smaller micro-batches, activations on the host and MLPs in tiles keep the result of a step;
    compressed state and an optimizer on the host, which are tried after them, do not, or take time.
    """
    recompute = ("model.activation_checkpointing=true",)
    rows = _one_row(raw, gpus)
    offload = ("model.activation_checkpointing=offload", *rows)
    tiles = f"fp8.activations.mlp_tile_tokens={TILE_TOKENS}"
    moments = ("fp8.optimizer.exp_avg=e4m3_expanded", "fp8.optimizer.exp_avg_sq=e4m3_expanded")
    changes = [recompute, *([rows, (*recompute, *rows)] if rows else []), offload]
    if read_workload(raw, gpus=gpus).fp8.enabled:
        masters = "fp8.optimizer.master=fp8_plus16"
        changes += [(*offload, tiles), moments, (*offload, *moments), (*offload, *moments, masters)]
    for change in (*changes, (*offload, 'zero_optimization.offload_optimizer.device="cpu"')):
        needed = _needed(raw, gpus, change)
        if needed is not None and needed <= memory_bytes:
            return Remedy(" ".join(f"--set {each}" for each in change), needed)
    return None


def gpus_that_fit(raw: Mapping[str, Any], gpus: int, memory_bytes: int) -> Remedy | None:
    """Return the fewest GPUs, a power of two times as many, over which the stage fits as it is, or None."""
    least = None
    while (gpus := 2 * gpus) <= MAX_GPUS:
        needed = _needed(raw, gpus, ())
        if needed is None:
            continue
        if needed <= memory_bytes:
            return Remedy(f"--gpus {gpus}", needed)
        if least is not None and needed > 0.99 * least:
            return None  # what is left is not sharded
        least = needed
    return None


def _one_row(raw: Mapping[str, Any], gpus: int) -> tuple[str, ...]:
    """Return changes for micro-batches of one row, with as many rows in a step."""
    _, micro_batch, accumulation = resolve_batch(dict(raw), gpus // sequence_parallel_size(raw))
    if micro_batch == 1:
        return ()
    changes = (f"{MICRO_BATCH}=1",)
    if ACCUMULATION in raw or TRAIN_BATCH not in raw:
        changes += (f"{ACCUMULATION}={micro_batch * accumulation}",)
    return changes


def _needed(raw: Mapping[str, Any], gpus: int, changes: tuple[str, ...]) -> int | None:
    """Return the memory that a GPU needs after the changes, None if the stage refuses them."""
    changed = copy.deepcopy(dict(raw))
    try:
        for change in changes:
            apply_override(changed, change)
        return estimate(changed, gpus=gpus).required_bytes
    except UserError:
        return None
