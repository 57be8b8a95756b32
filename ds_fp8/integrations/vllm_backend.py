"""The name of ds_fp8's weight-transfer backend in vLLM, which every process of a server registers as a plugin."""

from __future__ import annotations

import contextlib
from typing import Any

BACKEND = "ds_fp8"


def register() -> None:
    """Make vLLM know the backend "ds_fp8"; its module is imported once a server uses it."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return  # a vLLM without weight transfer, which sync_weights refuses in words
    # Registered before: vLLM may call plugins more than once.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, "ds_fp8.integrations.vllm_transfer", "WeightTransfer")


def transfer_config() -> Any:
    """Return what LLM(weight_transfer_config=...) takes, so that `sync_weights` can update it."""
    from vllm.config import WeightTransferConfig

    register()
    return WeightTransferConfig(backend=BACKEND)
