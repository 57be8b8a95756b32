"""BF16 shards of an engine whose products read FP8: most of them nobody reads, and they are freed.

DeepSpeed holds a BF16 shard of every parameter beside its FP32 master, in one flat buffer. What reads those of weights
that are gathered in FP8 (GatheredParameters, saving, loading) gets them rounded from the masters at that moment. Those
of frozen weights wait on the host, for casts after a load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import deepspeed
import torch
from torch import nn

from ds_fp8.zero.deepspeed.masters import has_fp32_master
from ds_fp8.zero.deepspeed.optimizer import FlatBf16
from ds_fp8.zero.deepspeed.parameters import is_trained, master_shard
from ds_fp8.zero.weight import ShardedWeight, Source


def move_frozen_to_host(weights: Iterable[ShardedWeight]) -> None:
    """Move the BF16 shards of frozen weights to the host, where DeepSpeed saves and loads them."""
    for weight in weights:
        if weight.in_fp8 and not is_trained(weight.parameter):
            weight.need_no_bf16()
            weight.free_bf16()
            if weight.outliers is not None:
                weight.outliers.fixed = True


class Bf16Shards:
    """DeepSpeed's flat buffer of BF16 shards: freed at once, and made again for as long as something needs it.

    For engines whose step writes only the shards that are left (`prepare`).
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, weights: Mapping[int, ShardedWeight]):
        """Free the BF16 shards of `weights`, by the id of their parameters. Casts that read them have been made."""
        self._weights, self._flat = weights, FlatBf16(engine)
        for weight in weights.values():
            if weight.in_fp8 and is_trained(weight.parameter):
                weight.need_no_bf16()
        move_frozen_to_host(weights.values())
        self.drop()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # of blocks as large as the model, which activations would leave in pieces

    def prepare(self) -> Callable[[], None]:
        """Return what rounds the new masters of a step into the BF16 shards that exist for good, and frees the others.

        Finding them takes the host longer than rounding takes the GPU: hundreds of adapters and vectors.
        """
        kept = self._trained_with(lambda weight: not weight.frees_bf16)
        coded = [weight for weight in map(self._of, kept) if weight is not None and weight.correction is not None]
        # Without those whose masters are in BF16: the step has rounded them.
        masters = {p: master_shard(p) for p in kept if has_fp32_master(p)}

        def write() -> None:
            # Masters of codes are decoded by the scales of the step, which it has now.
            self._flat.round(masters | {weight.parameter: weight.master() for weight in coded})
            for weight in self._weights.values():
                weight.free_bf16()  # what a user wrote there held until now

        return write

    def restore(self) -> None:
        """Make the flat buffer of all BF16 shards, for code of DeepSpeed that reads or writes it."""
        for weight in self._weights.values():
            if not weight.on_host:
                weight.make_bf16()
        self._flat.restore()

    def drop(self) -> None:
        """Free the flat buffer, if it exists, and keep of it only what is needed, or cast from."""
        if self._flat.exists:
            for weight in self._weights.values():
                if weight.source is Source.MASTER:
                    weight.free_bf16()
            self._flat.drop(self._trained_with(lambda weight: weight.has_bf16))

    def _of(self, parameter: nn.Parameter) -> ShardedWeight | None:
        return self._weights.get(id(parameter))

    def _trained_with(self, keeps: Callable[[ShardedWeight], bool]) -> list[nn.Parameter]:
        trained = self._flat.parameters
        return [parameter for parameter in trained if (weight := self._of(parameter)) is None or keeps(weight)]
