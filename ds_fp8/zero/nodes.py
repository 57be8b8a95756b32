"""Process groups of a two-level reduction: the ranks of a node, and the ranks at one position in all nodes."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed import comm as dist

from ds_fp8.zero.hosts import Hosts


@dataclass(frozen=True)
class Nodes:
    """Process groups of the two-level reduction; ranks are numbered node by node."""

    inside: object
    """Group of the L ranks of this rank's node."""
    between: object
    """Group of the M ranks that have this rank's place in their nodes."""
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
