"""Which ranks share a host, and which of them can share memory."""

import os
from unittest.mock import patch

import pytest
from deepspeed import comm as dist

from ds_fp8.zero import collectives, hosts
from ds_fp8.zero.hosts import Hosts, find_hosts, identity
from tests.zero.gpus import Memory, gpus


def hosts_where(ids, remove=()):
    """Find hosts, each rank with its own NCCL_HOSTID and without some of the launcher's variables."""
    changed = {} if ids is None else {"NCCL_HOSTID": ids[dist.get_rank()]}
    with patch.dict(os.environ, changed):
        for name in remove:
            os.environ.pop(name, None)
        return find_hosts().of_rank


@pytest.mark.parametrize("ids", [None, ("a", "a", "b", "b"), ("a", "b", "a", "b"), ("b", "a", "a", "a")])
def test_ranks_tell_each_other_their_hosts(ranks, ids):
    """Without LOCAL_SIZE or LOCAL_WORLD_SIZE, which srun and mpirun do not set."""
    expected = {None: (0, 0, 0, 0), "b": (0, 1, 1, 1)}.get(ids and ids[0]) or tuple("ab".index(name) for name in ids)
    assert ranks(4, hosts_where, ids, ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")) == [expected] * 4


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


@pytest.mark.parametrize(
    ("visible", "index", "options", "expected"),
    [
        # torchrun: every rank sees all GPUs
        ((["A", "B"], ["A", "B"]), (0, 1), {}, ("shared", None)),
        # srun --gpus-per-task=1, Ray: every rank sees its own, which it calls 0
        ((["A"], ["B"]), (0, 0), {}, ("shared", "1")),
        # every rank sees its own first
        ((["A", "B"], ["B", "A"]), (0, 0), {}, ("shared", "1")),
        # only some ranks see others' GPUs
        ((["A"], ["A", "B"]), (0, 1), {}, ("shared", None)),
        ((["A"], ["A"]), (0, 0), {}, "several ranks share a GPU"),
        ((["A", "B"], ["A", "B"]), (0, 1), {"accessible": False}, "the GPUs cannot read each other's memory"),
        ((["A"], ["B"]), (0, 0), {"memory": Refused}, "invalid device"),
        ((["A"], ["B"]), (0, 0), {"memory": Wrong}, "wrong"),
    ],
)
def test_memory_is_shared_whatever_gpus_a_rank_sees(ranks, visible, index, options, expected):
    assert ranks(2, shared, visible, index, options) == [expected] * 2


def shared_over(ids):
    with patch.dict(os.environ, {"NCCL_HOSTID": ids[dist.get_rank()]}):
        return shared((["A", "B"], ["A", "B"]), (0, 1), {})


def test_hosts_share_no_memory(ranks):
    assert ranks(2, shared_over, ("a", "b")) == ["the ranks are on several hosts, or there is one rank only"] * 2
