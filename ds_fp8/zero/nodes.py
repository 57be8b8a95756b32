"""Process groups of a reduction in two levels: the ranks of a node, and those at the same position in every node."""

from __future__ import annotations

import os
from dataclasses import dataclass

from deepspeed import comm as dist


@dataclass(frozen=True)
class Nodes:
    """Process groups of the two-level reduction; ranks are numbered node by node."""

    inside: object
    """Group of the L ranks of this rank's node."""
    between: object
    """Group of the M ranks that have this rank's place in their nodes."""
    ranks_per_node: int
    count: int


def ranks_of_this_host() -> int:
    """Return how many ranks the launcher started on this host; all of them where it does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or dist.get_world_size())


def find_nodes(hierarchy: str, ranks_per_node: int | None = None) -> Nodes | None:
    """Return the two-level groups, or None for one flat all-to-all. Collective.

    Args:
        hierarchy: "flat", or "auto": two levels if there are several nodes of equal size with several ranks each.
        ranks_per_node: Read from the launcher's LOCAL_WORLD_SIZE or LOCAL_SIZE when None.
    """
    world = dist.get_world_size()
    if ranks_per_node is None:
        ranks_per_node = ranks_of_this_host()
    sizes: list = [None] * world
    dist.all_gather_object(sizes, ranks_per_node)
    if hierarchy == "flat" or len(set(sizes)) > 1 or ranks_per_node in (1, world) or world % ranks_per_node:
        return None
    count, rank = world // ranks_per_node, dist.get_rank()
    inside = [dist.new_group([n * ranks_per_node + i for i in range(ranks_per_node)]) for n in range(count)]
    between = [dist.new_group([n * ranks_per_node + i for n in range(count)]) for i in range(ranks_per_node)]
    return Nodes(inside[rank // ranks_per_node], between[rank % ranks_per_node], ranks_per_node, count)
