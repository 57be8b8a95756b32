"""The rows of a step as tensors, and the number its loss is divided by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from deepspeed import comm as dist

from ds_fp8.data import IGNORED, PackedDataset

Batch = dict[str, torch.Tensor]


def collate(rows: Sequence[Batch], device: torch.device) -> Batch:
    """Rows of int64 [sequence_length] as one batch of int64 [rows, sequence_length] on `device`."""
    return {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}


def load_micro_batches(rows: PackedDataset, indices: list[list[int]], device: torch.device) -> list[Batch]:
    """One batch per list of row indices."""
    return [collate([rows[index] for index in micro], device) for micro in indices]


def label_tokens(labels: torch.Tensor) -> torch.Tensor:
    """How many tokens of int64 labels [rows, sequence_length] carry loss: the first of a row is never predicted."""
    return (labels[:, 1:] != IGNORED).sum()


def tokens_per_micro_batch(batches: list[Batch]) -> torch.Tensor:
    """Label tokens of the step, over all ranks and micro-batches, per micro-batch: a FP32 scalar. Collective.

    A micro-batch's summed loss divided by this number, averaged over ranks and micro-batches as DeepSpeed does, is the
    mean loss per token of the whole step, however unevenly the label tokens are spread.
    """
    total = torch.stack([label_tokens(batch["labels"]) for batch in batches]).sum().float()
    dist.all_reduce(total)
    return (total / (dist.get_world_size() * len(batches))).clamp_min(torch.finfo(torch.float32).tiny)
