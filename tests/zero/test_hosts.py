"""Which ranks share a host, which of them can share memory, and that whoever is late reads and writes it rightly."""

import os
import shutil
import tempfile
import time
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from ds_fp8.zero import collectives, group, hosts
from ds_fp8.zero.collectives import PeerMemory
from ds_fp8.zero.hosts import Hosts, find_hosts, identity
from tests.ranks import case, on_ranks
from tests.zero import models
from tests.zero.gpus import Memory, gpus


@on_ranks(4)
def test_ranks_tell_each_other_their_hosts():
    """Without LOCAL_SIZE or LOCAL_WORLD_SIZE, which srun and mpirun do not set."""
    for ids, expected in ((None, (0, 0, 0, 0)), ("aabb", (0, 0, 1, 1)), ("abab", (0, 1, 0, 1)), ("baaa", (0, 1, 1, 1))):
        with patch.dict(os.environ, {} if ids is None else {"NCCL_HOSTID": ids[dist.get_rank()]}):
            for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
                os.environ.pop(name, None)
            assert find_hosts().of_rank == expected


@pytest.mark.parametrize(
    ("of_rank", "count", "ranks_per_host", "words"),
    [
        ((0,), 1, 1, "1 x 1"),
        ((0, 0, 1, 1), 2, 2, "2 x 2"),
        ((0, 1, 0, 1), 2, None, "2 x 2"),
        ((0, 0, 0, 1), 2, None, "2 x 1 to 3"),
        ((0, 1, 2), 3, 1, "3 x 1"),
    ],
)
def test_layout_of_hosts(of_rank, count, ranks_per_host, words):
    found = Hosts(of_rank)
    assert (found.count, found.ranks_per_host, str(found)) == (count, ranks_per_host, words)


def test_hosts_of_one_name_are_told_apart(monkeypatch, tmp_path):
    """As "localhost" in a cluster of clones, and as containers with a network each."""
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    boot, network = tmp_path / "boot_id", tmp_path / "net"
    monkeypatch.setattr(hosts, "BOOT_ID", boot)
    monkeypatch.setattr(hosts, "NETWORK", network)
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "localhost")
    found = [identity()]  # neither file is there: not Linux, or hidden
    for number in ("1", "2"):
        boot.write_text(number)
        found.append(identity())
    network.symlink_to("net:[4026531840]")
    found.append(identity())
    assert found[-1] == identity()
    assert len(set(found)) == 4
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "other")
    assert identity() not in found


class Refused:
    def __init__(self, numel, device, group):
        if dist.get_rank() == 1:
            raise RuntimeError("invalid device\nand more")
        self.why_wrong = None  # nobody may wait in it for the rank that failed


class Wrong(Memory):
    problem = "wrong"


def shared(visible_of_rank, index_of_rank, options):
    rank = dist.get_rank()
    before = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    with gpus(visible_of_rank[rank], index_of_rank[rank], **options) as device:
        found = collectives.share(16, device, None)
    assert os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == before
    return found if isinstance(found, str) else ("shared", found.overlapping)


ALL, ALONE = (["A", "B"], ["A", "B"]), (["A"], ["B"])  # GPUs that the two ranks see


@on_ranks(2)
def test_memory_is_shared_whatever_gpus_a_rank_sees():
    for visible, index, options, expected in [
        (ALL, (0, 1), {}, ("shared", None)),  # torchrun
        (ALONE, (0, 0), {}, ("shared", "1")),  # srun --gpus-per-task=1, Ray: each calls its own 0
        ((["A", "B"], ["B", "A"]), (0, 0), {}, ("shared", "1")),  # every rank sees its own first
        ((["A"], ["A", "B"]), (0, 1), {}, ("shared", None)),  # only some ranks see others' GPUs
        ((["A"], ["A"]), (0, 0), {}, "several ranks share a GPU"),
        (ALL, (0, 1), {"accessible": False}, "the GPUs cannot read each other's memory"),
        (ALONE, (0, 0), {"memory": Refused}, "invalid device"),
        (ALONE, (0, 0), {"memory": Wrong}, "wrong"),
    ]:
        with case((visible, index, options)):
            assert shared(visible, index, options) == expected
    with patch.dict(os.environ, {"NCCL_HOSTID": "ab"[dist.get_rank()]}):
        assert shared(ALL, (0, 1), {}) == "the ranks are on several hosts, or there is one rank only"


# ---------------------------------------------------------------- ranks that are late


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


@on_ranks(3)
def test_what_is_gathered_is_what_was_written_last():
    for point in POINTS:
        assert rounds(Late, point) == 0, point


@on_ranks(2)
def test_without_a_barrier_a_late_rank_is_found_out_at_every_point():
    """What the test above would say of a transport that lacks one of the two: each of its cases can fail."""
    for number, point in enumerate(POINTS):
        for _ in range(10):  # on busy cores the rank that is not late may be late too, for twelve rounds
            wrong = torch.tensor(rounds((WritesAtOnce, ReadsAtOnce)[number % 2], point))
            dist.all_reduce(wrong)
            if wrong:
                break
        assert wrong, point


@on_ranks(3)
def test_a_run_with_late_ranks_has_the_bits_of_one_by_collectives():
    wanted = None
    for point in (None, "before write", "before written", "before gather", "in gather"):
        kind = type("Late", (Late,), {"point": point})
        late = patch.object(group, "choose", lambda numel, device, groups, kind=kind: kind(numel, device, groups[0]))
        late.start() if point else None
        try:  # also outlier blocks, behind codes
            engine = models.engine({"preset": "precise"}, stage3_prefetch_bucket_size=10**6, sizes=(132, 300))
        finally:
            late.stop() if point else None
        found = models.train(engine, 2), models.masters(engine)
        wanted = wanted or found
        with case(point):
            assert isinstance(engine.fp8.weights.transport, PeerMemory) == (point is not None)
            assert found[0] == wanted[0]
            models.assert_same(found[1], wanted[1])
        engine.destroy()
