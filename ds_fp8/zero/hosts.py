"""Ranks grouped by host, and process groups of a reduction of two levels.

Launchers do not name hosts in one common way, so the ranks ask each other.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from deepspeed import comm as dist

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, numbered in the order of their first ranks."""

    of_rank: tuple[int, ...]  # number of each rank's host

    @property
    def count(self) -> int:
        return len(set(self.of_rank))

    @property
    def ranks_per_host(self) -> int | None:
        """Return how many ranks every host has, numbered host by host; None where that is not so."""
        ranks = len(self.of_rank) // self.count
        return ranks if self.of_rank == tuple(rank // ranks for rank in range(self.count * ranks)) else None

    def __str__(self) -> str:
        sizes = sorted(Counter(self.of_rank).values())
        return f"{self.count} x {sizes[0]}" if sizes[0] == sizes[-1] else f"{self.count} x {sizes[0]} to {sizes[-1]}"


def identity() -> str:
    """Return the name of this process's host: no process on another host has the same.

    NCCL tells hosts apart alike: by hostname and the kernel's boot id, or by NCCL_HOSTID where that is set. Containers
    of one machine with a network each are hosts of their own, under one hostname too.
    """
    given = os.environ.get("NCCL_HOSTID")
    if given:
        return given
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:  # not Linux, or hidden in a container
        boot = ""
    try:
        # Containers with a network each reach one another as hosts do, although they share a kernel.
        network = os.readlink(NETWORK)
    except OSError:
        network = ""
    return f"{socket.gethostname()} {boot} {network}"


def find_hosts() -> Hosts:
    """Return the hosts of all ranks. Collective."""
    names: list = [None] * dist.get_world_size()
    dist.all_gather_object(names, identity())
    # Numbered by first appearance: the same on all ranks, which have the same list.
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return Hosts(tuple(numbers[name] for name in names))


@dataclass(frozen=True)
class Nodes:
    """Process groups of the two-level reduction; ranks are numbered node by node."""

    inside: object  # group of the L ranks of this rank's node
    between: object  # group of the M ranks that have this rank's place in their nodes
    ranks_per_node: int
    count: int


def why_flat(hosts: Hosts) -> str | None:
    """Return why the reduction has one level; None for two: several hosts of equal size with several ranks each."""
    if hosts.count == 1:
        return "one host"
    if hosts.ranks_per_host is None:
        return "the hosts have different numbers of ranks, or ranks are not numbered host by host"
    return "one rank a host" if hosts.ranks_per_host == 1 else None


def find_nodes(hosts: Hosts) -> Nodes | None:
    """Return the two-level groups, or None for one flat all-to-all. Collective."""
    ranks_per_node = hosts.ranks_per_host
    if ranks_per_node is None or why_flat(hosts) is not None:
        return None
    count, rank = hosts.count, dist.get_rank()
    # new_group is collective over all ranks: each makes every group, also those that it is not in, in one order.
    inside = [dist.new_group([n * ranks_per_node + i for i in range(ranks_per_node)]) for n in range(count)]
    between = [dist.new_group([n * ranks_per_node + i for n in range(count)]) for i in range(ranks_per_node)]
    return Nodes(inside[rank // ranks_per_node], between[rank % ranks_per_node], ranks_per_node, count)
