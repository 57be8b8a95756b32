"""The rows of a step as this rank's micro-batches, built ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from deepspeed import comm as dist
from torch.nn import functional as F

from ds_fp8.data import IGNORED, PackedDataset, StageData
from ds_fp8.data.rows import budgeted_micro_batches, local_micro_batches, padded_micro_batches
from ds_fp8.layers.attention import documents
from ds_fp8.train.stage import Stage

# `input_ids`, `labels` and `position_ids`, int64 [rows, tokens]. Where ranks share sequences, a rank's slice of them,
# with `labels` moved to the token before, and once more as `shift_labels`.
Batch = dict[str, torch.Tensor]

# Rows of micro-batches made by tokens, and of one example, are padded to a multiple of this many: the edge of a block
# of scales
LENGTH_MULTIPLE = 128


@dataclass(frozen=True)
class StepBatches:
    """The micro-batches of one optimizer step on this rank, and the size of the step over all ranks."""

    batches: list[Batch]
    # FP32 []: what the summed loss of each micro-batch is divided by, the step's label tokens over its micro-batches on
    # all ranks: the mean of these is the step's mean loss per token, however unevenly label tokens are spread
    items: torch.Tensor
    tokens: int  # Tokens over all ranks, padding included

    def to(self, device: torch.device) -> StepBatches:
        """Return the same on a device; the host waits only where memory is not pinned.

        Documents are counted here, without waiting for the device.
        """
        batches = [{key: x.to(device, non_blocking=True) for key, x in batch.items()} for batch in self.batches]
        for here, there in zip(self.batches, batches, strict=True):
            # Counted on the host's copy: on the device the host would have to wait for the count.
            documents.note_as(here["position_ids"], there["position_ids"])
        return StepBatches(batches, self.items.to(device, non_blocking=True), self.tokens)


class BatchesAhead:
    """Builds the batches of the next step in a thread while this one trains.

    Every rank counts the label tokens of the whole step itself, from the rows that all ranks have: no collective.
    """

    def __init__(self, stage: Stage, data: StageData, device: torch.device):
        """Begin with nothing built.

        Args:
            stage: Sizes of batches, and the seed of their order.
            data: Where rows come from; the same on all ranks.
            device: Where batches are wanted.
        """
        self._stage, self._data, self._device = stage, data, device
        # One thread: batches are built in order, and reading memory-mapped tokens releases the interpreter's lock.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[int, Future[StepBatches]] | None = None

    def take(self, data_step: int) -> StepBatches:
        """Return the batches of a step of the data, on the device, and begin to build those of the next one."""
        # Another step than the one built ahead after a rollback or a resume; what was built is dropped.
        begun = self._next if self._next is not None and self._next[0] == data_step else self._begin(data_step)
        batches = begun[1].result().to(self._device)
        self._next = self._begin(data_step + 1)
        return batches

    def _begin(self, data_step: int) -> tuple[int, Future[StepBatches]]:
        return data_step, self._thread.submit(self._build, data_step)

    def _build(self, data_step: int) -> StepBatches:
        stage, dataset = self._stage, self._data.train
        rows = self._data.rows_of_step(data_step, stage.global_batch, stage.train.seed)
        plans = _plans(stage, dataset, rows)
        # Of all rows of the step, not of this rank's: every rank divides by the same number.
        labels = torch.tensor(sum(map(dataset.label_tokens, rows)), dtype=torch.float32)
        # Without a label token the summed loss is 0; divided by the smallest number it stays 0 and not NaN.
        items = labels.clamp_min(torch.finfo(torch.float32).tiny) / (dist.get_world_size() * len(plans[0]))
        built = StepBatches(
            _own_batches(stage, dataset, plans),
            items,
            sum(len(lines) * length for plan in plans for lines, length in plan),
        )
        if self._device.type == "cpu":
            return built
        # Pinned here, in the thread: page-locking waits, and the copy to the device is asynchronous only from pinned
        # memory.
        pinned = [{key: x.pin_memory() for key, x in batch.items()} for batch in built.batches]
        return StepBatches(pinned, items.pin_memory(), built.tokens)


def micro_batches(stage: Stage, dataset: PackedDataset, rows: Sequence[int], device: torch.device) -> list[Batch]:
    """Return this rank's share of `rows` of a dataset; as many micro-batches on every rank. Any number of rows will do.

    Without `data.tokens_per_gpu` a micro-batch is [micro-batch size, sequence_length]; rows that are missing in the
    last ones are padding without loss. With it, a micro-batch is one row of at most so many tokens, which holds several
    rows of the dataset one after the other. Rows of one example stay rows, padded to the longest of their micro-batch.
    """
    batches = _own_batches(stage, dataset, _plans(stage, dataset, rows))
    return [{name: x.to(device) for name, x in batch.items()} for batch in batches]


def padding(stage: Stage, data: StageData, most: int = 64) -> tuple[float, int]:
    """Return the share of padding in the tokens of the first steps, and the tokens of a step without it."""
    filled, total, steps = 0, 0, min(most, stage.train.steps)
    for step in range(steps):
        rows = data.rows_of_step(step, stage.global_batch, stage.train.seed)
        filled += sum(map(data.train.row_tokens, rows))
        total += sum(len(lines) * length for plan in _plans(stage, data.train, rows) for lines, length in plan)
    return 1 - filled / total, filled // steps


def label_tokens(batch: Batch) -> torch.Tensor:
    """Return how many tokens of a batch carry loss: the first of a row is never predicted."""
    return (batch.get("shift_labels", batch["labels"][:, 1:]) != IGNORED).sum()


def _own_batches(stage: Stage, dataset: PackedDataset, plans: list[list[tuple[list[list[int]], int]]]) -> list[Batch]:
    """Return the micro-batches of this rank, or its slices of those of the ranks that it shares sequences with."""
    group, place = divmod(dist.get_rank(), stage.shared_by)
    batches = [_stacked(dataset, lines, length) for lines, length in plans[group]]
    if stage.shared_by == 1:
        return batches
    for batch in batches:
        # Shifted before the cut, since the target of a slice's last token lies in the next slice, on another rank.
        # Under both names: models take `shift_labels` where they know them, and `labels` tells that a loss is wanted.
        batch["labels"] = batch["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return [{name: x.chunk(stage.shared_by, 1)[place].contiguous() for name, x in batch.items()} for batch in batches]


def _plans(stage: Stage, dataset: PackedDataset, rows: Sequence[int]) -> list[list[tuple[list[list[int]], int]]]:
    """Return by group, for every micro-batch, the rows of the dataset in each of its rows, and its tokens a row.

    A group is the ranks that share sequences, or one rank.
    """
    world, budget = dist.get_world_size() // stage.shared_by, stage.data.tokens_per_gpu
    # Each rank's slice of a row is such a multiple, not only the whole row.
    multiple = LENGTH_MULTIPLE * stage.shared_by
    counts = {row: dataset.row_tokens(row) for row in rows}
    length = stage.data.sequence_length

    def length_of(micro: list[int | None]) -> int:
        longest = max((counts[row] for row in micro if row is not None), default=0)
        return _padded(longest, multiple, length) if dataset.alone else length

    if budget is None:
        if dataset.alone:  # those alike in length in one micro-batch, and at the same time on different ranks
            rows = sorted(rows, key=lambda row: -counts[row])
        # Every rank makes as many micro-batches: a rank without one would leave the others waiting in a collective.
        missing = -len(rows) % (stage.micro_batch * world)
        padded: list[int | None] = [*rows, *[None] * missing]
        rounds = len(padded) // (stage.micro_batch * world)
        chosen = [local_micro_batches(padded, rank, world, stage.micro_batch, rounds) for rank in range(world)]
        return [
            [([[] if row is None else [row] for row in micro], length_of(micro)) for micro in micros]
            for micros in chosen
        ]
    budget *= stage.shared_by
    if dataset.alone:
        shares = padded_micro_batches(rows, [length_of([row]) for row in rows], world, budget)
        return [[([[row] for row in micro] or [[]], length_of(micro)) for micro in share] for share in shares]
    shares = budgeted_micro_batches(rows, [counts[row] for row in rows], world, budget)
    return [
        [([joined], _padded(sum(counts[row] for row in joined), multiple, budget)) for joined in share]
        for share in shares
    ]


def _padded(count: int, multiple: int, budget: int) -> int:
    return max(count, min(-(-max(count, 1) // multiple) * multiple, budget))


def _stacked(dataset: PackedDataset, lines: list[list[int]], length: int) -> Batch:
    items = [dataset.joined(rows, length) for rows in lines]
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}
