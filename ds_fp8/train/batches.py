"""The rows of a step as this rank's micro-batches, and the number their losses are divided by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from deepspeed import comm as dist

from ds_fp8.data import IGNORED, PackedDataset, budgeted_micro_batches, local_micro_batches
from ds_fp8.train.stage import Stage

Batch = dict[str, torch.Tensor]
"""`input_ids`, `labels` and `position_ids`, int64 [rows, tokens]."""

LENGTH_MULTIPLE = 128
"""Micro-batches made by tokens are padded to a multiple of this many: the edge of a block of scales."""


def micro_batches(stage: Stage, dataset: PackedDataset, rows: Sequence[int], device: torch.device) -> list[Batch]:
    """This rank's share of `rows` of a dataset; as many micro-batches on every rank. Any number of rows will do.

    Without `data.tokens_per_gpu` a micro-batch is [micro-batch size, sequence_length]; rows that are missing in the
    last ones are padding without loss. With it, a micro-batch is one row of at most so many tokens, which holds several
    rows of the dataset one after the other.
    """
    rank, world, budget = dist.get_rank(), dist.get_world_size(), stage.data.tokens_per_gpu
    if budget is None:
        missing = -len(rows) % (stage.micro_batch * world)
        padded: list[int | None] = [*rows, *[None] * missing]
        rounds = len(padded) // (stage.micro_batch * world)
        chosen = local_micro_batches(padded, rank, world, stage.micro_batch, rounds)
        length = stage.data.sequence_length
        return [_stacked(dataset, [[] if row is None else [row] for row in micro], length, device) for micro in chosen]
    tokens = [dataset.row_tokens(row) for row in rows]
    batches = []
    for together in budgeted_micro_batches(rows, tokens, rank, world, budget):
        count = sum(map(dataset.row_tokens, together))
        length = max(count, min(-(-max(count, 1) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, budget))
        batches.append(_stacked(dataset, [together], length, device))
    return batches


def _stacked(dataset: PackedDataset, rows: list[list[int]], length: int, device: torch.device) -> Batch:
    """One batch of a row for each list of rows of the dataset."""
    items = [dataset.joined(together, length) for together in rows]
    return {name: torch.stack([item[name] for item in items]).to(device) for name in items[0]}


def label_tokens(labels: torch.Tensor) -> torch.Tensor:
    """How many tokens of int64 labels [rows, tokens] carry loss: the first of a row is never predicted."""
    return (labels[:, 1:] != IGNORED).sum()


def step_totals(batches: list[Batch]) -> tuple[torch.Tensor, int]:
    """Label tokens (FP32 scalar) and tokens, padding included, of a step over all ranks. Collective."""
    counts = torch.stack([label_tokens(batch["labels"]) for batch in batches]).sum().double()
    totals = torch.stack([counts, counts.new_tensor(sum(batch["labels"].numel() for batch in batches))])
    dist.all_reduce(totals)
    return totals[0].float().clamp_min(torch.finfo(torch.float32).tiny), int(totals[1].item())
