"""ds_fp8's weight-transfer backend of vLLM, registered as a plugin in every process of a server."""

from __future__ import annotations

import contextlib
from typing import Any

BACKEND = "ds_fp8"


def register() -> None:
    """Register the backend "ds_fp8" with vLLM; its module is imported at the first use."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return  # a vLLM without weight transfer, refused by sync_weights
    with contextlib.suppress(ValueError):  # registered before: vLLM may call plugins more than once
        WeightTransferEngineFactory.register_engine(BACKEND, "ds_fp8.integrations.vllm_transfer", "WeightTransfer")


def transfer_config() -> Any:
    """Return the argument of LLM(weight_transfer_config=...) for `sync_weights`."""
    from vllm.config import WeightTransferConfig

    register()
    return WeightTransferConfig(backend=BACKEND)
