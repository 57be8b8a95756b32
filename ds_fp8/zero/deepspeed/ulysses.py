"""DeepSpeed's groups of ranks that share sequences, and its exchange of heads around an attention function.

What runs inside of the exchange is layers/attention/sequence_parallel.py, whose names of DeepSpeed are checked, too.
"""

from __future__ import annotations

import deepspeed.runtime.sequence_parallel.parallel_state_sp as groups_of_ranks
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import nn

MPU = groups_of_ranks  # what deepspeed.initialize takes as `mpu`: one set of groups a process, for all models


def register(model: nn.Module, attention: str, size: int, rows: int) -> object:
    """Make the groups, put the exchange around an attention function of transformers, and return the `mpu`.

    Raises:
        ValueError: DeepSpeed cannot exchange this attention.
    """
    return UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation=attention, sequence_parallel_size=size, micro_batch_size=rows
    )


def has_groups() -> bool:
    """Return whether DeepSpeed has made its groups of ranks, which it does once a process."""
    try:
        groups_of_ranks.get_sequence_parallel_group()
    except AssertionError:
        return False
    return True


def ranks_of(exchange: UlyssesSPAttentionHF) -> int:
    """Return how many ranks share a sequence."""
    return exchange.world_size


def shape_of(exchange: UlyssesSPAttentionHF) -> tuple[int, int, int]:
    """Return (ranks, rows, heads) that an exchange was made for."""
    return exchange.world_size, exchange.batch_size, exchange.attn_head_count
