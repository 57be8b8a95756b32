"""Peak memory of a training step per GPU: every term by itself, in every phase that may be the peak.

    the loss          everything that lasts, all activations, the head and its loss
    backward of a     everything that lasts, the activations of the layers up to it, its workspace, what is gathered
      layer             for it, and, where the bucket is full then, a reduction of gradients
    the step          everything that lasts, and what the optimizer allocates

What lasts are weights, moments and gradients (states.py). The figure is what torch's allocator hands out
(torch.cuda.max_memory_allocated); what it holds back besides, and what CUDA takes, is `slack` and `context`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from ds_fp8.memory import activations, gathering, loss, optimizer_step, reduction, states
from ds_fp8.memory.workload import Device, Workload, read_workload

LASTING = {
    "master weights": states.master_weights,
    "moments": states.moments,
    "gradient shards": states.gradient_shards,
    "gradient bucket": states.gradient_bucket,
    "BF16 weights": states.bf16_weights,
    "FP8 weights": states.fp8_weights,
    "error feedback": states.error_feedback,
}
GATHERED, LOSS, WORKSPACE, REDUCTION, STEP = (
    "gathered weights",
    "loss",
    "backward workspace",
    "gradient reduction",
    "optimizer step",
)
INPUTS = "batch and positions"
KINDS = (
    *LASTING,
    activations.ATTENTION,
    activations.MLP,
    activations.NORMS,
    INPUTS,
    LOSS,
    GATHERED,
    WORKSPACE,
    REDUCTION,
    STEP,
)
"""Every kind of memory, in the order of tables and pictures."""

SLACK = 0.08
"""Share of the transient memory: what the caching allocator holds in pieces that fit nothing. An assumption; sweeps
measure it (reserved_bytes beside peak_bytes)."""
CONTEXT = 1 << 30
"""CUDA's context, its loaded kernels, and NCCL's buffers, which are not torch's. An assumption too."""


@dataclass(frozen=True)
class Phase:
    """A time of the step, and what is there then, in bytes by kind."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Return the bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Estimate:
    """The memory of a training step, per GPU, in bytes."""

    workload: Workload
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        """Return the phase in which the most is there."""
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
        """Return the bytes that the allocator holds beyond tensors: a share of those that come and go."""
        return round(SLACK * (self.peak_bytes - self.lasting_bytes))

    @property
    def device_bytes(self) -> int:
        """Return the memory that the GPU must have: the peak, the allocator's slack, and CUDA's context."""
        return self.peak_bytes + self.slack_bytes + CONTEXT

    @property
    def host_bytes(self) -> int:
        """Return the pinned host memory of activations, for each GPU."""
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
            "pinned_host_bytes": self.host_bytes,
            "phases": {phase.name: phase.total for phase in self.phases},
        }


def estimate(
    config: str | os.PathLike | Mapping[str, Any],
    *,
    gpus: int | None = None,
    model: PretrainedConfig | None = None,
    sequence_length: int | None = None,
    device: Device = "cuda",
) -> Estimate:
    """Return the memory that the stage in `config` takes on each of `gpus` GPUs.

    It comes from the JSON and the model's configuration alone.

    Args:
        config: A stage, as a file or a mapping; any DeepSpeed configuration if `model` and `sequence_length` are given.
        gpus: Number of ranks; WORLD_SIZE or 1 by default.
        model: A Hugging Face configuration, in place of the stage's.
        sequence_length: Tokens of a row, in place of the stage's.
        device: What the ranks compute on, "cuda" or "cpu".

    Returns:
        Bytes by kind in every phase of a step.

    Raises:
        UserError: For a mistake in the configuration, and for a model or setting that cannot be estimated.
    """
    return estimate_workload(
        read_workload(config, gpus=gpus, model=model, sequence_length=sequence_length, device=device)
    )


def estimate_workload(w: Workload) -> Estimate:
    """Return the same of a workload that has been read."""
    lasting = Counter({kind: size for kind, term in LASTING.items() if (size := term(w))})
    phases = [*_passes(w, lasting), Phase("the optimizer step", _step(w, lasting))]
    return Estimate(w, tuple(phases))


def _step(w: Workload, lasting: Counter[str]) -> dict[str, int]:
    return dict(lasting + Counter({STEP: optimizer_step.optimizer_step(w)}))


def _passes(w: Workload, lasting: Counter[str]) -> Iterator[Phase]:
    """Return the loss, and backward of every layer from the last to the first."""
    layers = w.model.layers
    present = lasting + Counter({INPUTS: activations.batch(w) + activations.rotary(w, layers[0])})
    # The first layer's input is counted with that layer, the last one's output with the final norm.
    kept = [activations.kept(layer, w) for layer in layers]
    present += activations.input_on_device(w)
    for amounts in kept:
        present += amounts
    head = Counter({GATHERED: gathering.at_the_loss(w), LOSS: loss.loss(w)})
    yield Phase("the loss", dict(present + head + Counter({activations.NORMS: activations.final_norm(w)})))

    reductions = reduction.reductions(w)
    waiting = Counter({LOSS: loss.head_gradient(w)})
    for index in reversed(range(len(layers))):
        workspace = activations.workspace(layers[index], w)
        of_layer = Counter({WORKSPACE: workspace, GATHERED: gathering.in_backward(w, index)})
        transient = max((reduction.transient(r, w) for r in reductions if r.layer == index), default=0)
        parts = present + of_layer + waiting + Counter({REDUCTION: transient})
        yield Phase(f"backward of layer {index + 1} of {len(layers)}", dict(parts))
        present = present - kept[index]
    present = present - activations.input_on_device(w)
    last = max((reduction.transient(r, w) for r in reductions if r.layer < 0), default=0)
    embedding = Counter({LOSS: loss.head_gradient(w) + 2 * w.model.embedding, REDUCTION: last})
    yield Phase("backward of the embedding", dict(present + embedding))
