"""Ranks that read each other's memory: whoever is late, at whatever point, everybody has the right bytes."""

import shutil
import tempfile
import time

import pytest
import torch
from deepspeed import comm as dist

from ds_fp8.zero import group
from ds_fp8.zero.collectives import PeerMemory
from tests.zero import models
from tests.zero.test_outlier_residuals import WHOLE_ROWS

CHOOSE = group.choose
POINTS = (
    "before write",
    "after write",
    "before written",
    "after written",
    "before gather",
    "in gather",
    "after gather",
)
DELAY = 0.03  # Seconds: a hundred times what the others need to overtake


class SharedFiles(PeerMemory):
    """The protocol of the copy engines, over files that all ranks of this machine have mapped."""

    def _map(self, numel, device):
        folder = [tempfile.mkdtemp(prefix="shards-")]
        dist.broadcast_object_list(folder, 0)
        files = [f"{folder[0]}/{rank}" for rank in range(dist.get_world_size(self.group))]
        own = torch.from_file(files[dist.get_rank(self.group)], shared=True, size=numel, dtype=torch.uint8).zero_()
        dist.barrier()
        mapped = [torch.from_file(file, shared=True, size=numel, dtype=torch.uint8) for file in files]
        mapped[dist.get_rank(self.group)] = own
        dist.barrier()
        shutil.rmtree(folder[0], ignore_errors=True)  # what is mapped stays
        return mapped

    def barrier(self):
        dist.barrier(group=self.group)


class Late(SharedFiles):
    """The same, with a rank that is late at one point: another one each time."""

    point = None

    def _map(self, numel, device):
        memory = super()._map(numel, device)
        self._passed, self._order = dict.fromkeys(POINTS, 0), _Watched(self._order, lambda: self._pass("in gather"))
        return memory

    def _pass(self, point):
        self._passed[point] += 1
        if point == self.point and self._passed[point] % dist.get_world_size() == dist.get_rank():
            time.sleep(DELAY)

    def write(self):
        self._pass("before write")
        super().write()
        self._pass("after write")

    def written(self):
        self._pass("before written")
        super().written()
        self._pass("after written")

    def gather(self, outputs, inputs, group=None):
        self._pass("before gather")
        work = super().gather(outputs, inputs, group)
        self._pass("after gather")
        return work


class _Watched(list):
    def __init__(self, items, between):
        super().__init__(items)
        self._between = between

    def __iter__(self):
        for item in super().__iter__():
            yield item
            self._between()


class WritesAtOnce(Late):
    """Wrong: writes while others may still read."""

    def write(self):
        self._pass("before write")


class ReadsAtOnce(Late):
    """Wrong: reads what others may not have written."""

    def written(self):
        self._pass("before written")


def rounds(kind, point, numel=64):
    """How many of the bytes gathered in 12 rounds of writing are not those of the round."""
    rank, world = dist.get_rank(), dist.get_world_size()
    memory, wrong = type(kind.__name__, (kind,), {"point": point})(numel, torch.device("cpu"), None), 0
    for number in range(1, 13):
        memory.write()
        for place in range(numel):  # not all at once: a reader may come upon a half
            memory.local[place] = 16 * rank + number
        memory.written()
        for _ in range(2):
            parts = memory.local.split(numel // 2)
            outputs = [torch.zeros(world * len(part), dtype=torch.uint8) for part in parts]
            memory.gather(outputs, parts)()
            expected = (16 * torch.arange(world) + number).repeat_interleave(numel // 2)
            wrong += sum(int((output != expected).sum()) for output in outputs)
    return wrong


@pytest.mark.parametrize("point", POINTS)
def test_what_is_gathered_is_what_was_written_last(ranks, point):
    assert ranks(3, rounds, Late, point) == [0] * 3


@pytest.mark.parametrize(("number", "point"), enumerate(POINTS))
def test_without_a_barrier_a_late_rank_is_found_out_at_every_point(ranks, number, point):
    """What the test above would say of a transport that lacks one of the two: each of its cases can fail."""
    kind = (WritesAtOnce, ReadsAtOnce)[number % 2]
    # On busy cores the rank that is not late may be late too, now and then for twelve rounds.
    assert any(sum(ranks(2, rounds, kind, point)) for _ in range(10))


def trained(point):
    """Losses and masters of a run whose ranks read each other's shards, one of them late; None: by collectives."""
    if point is not None:
        kind = type("Late", (Late,), {"point": point})
        group.choose = lambda numel, device, groups: kind(numel, device, groups[0])
    try:
        section = {"preset": "precise", "monitor": {"every": 0}}  # also outlier blocks, behind codes
        engine = models.build(models.config(section, stage3_prefetch_bucket_size=10**6), sizes=WHOLE_ROWS)
    finally:
        group.choose = CHOOSE
    losses = models.train(engine, 2)
    losses += models.train(engine, 1, start=2)
    by_copies = isinstance(engine.fp8.weights.transport, PeerMemory)
    return losses, [models.full_master(p) for p in engine.module.parameters()], by_copies


def test_a_run_with_late_ranks_has_the_bits_of_one_by_collectives(ranks):
    wanted = ranks(3, trained, None)
    for point in ("before write", "before written", "before gather", "in gather"):
        late = ranks(3, trained, point)
        for (losses, masters, by_copies), (expected, others, _) in zip(late, wanted, strict=True):
            assert by_copies
            assert losses == expected
            assert all(map(torch.equal, masters, others)), point
