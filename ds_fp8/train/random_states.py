"""The state of every random number generator of a rank, as tensors and plain values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator


def random_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's and the accelerator's generators of this process."""
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if get_accelerator().device_name() != "cpu":
        states["accelerator"] = get_accelerator().get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the generators of this process to what `random_states` returned."""
    kind, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"].clone())
    if "accelerator" in states and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(states["accelerator"].clone())
