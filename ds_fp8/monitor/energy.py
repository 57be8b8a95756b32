"""Energy that a GPU draws, by the counter of NVML."""

from __future__ import annotations

from collections.abc import Callable

import torch


def energy_counter(device: torch.device) -> Callable[[], float] | None:
    """Return a function that reads the joules that `device` has drawn since its driver was loaded, or None.

    None: on a CPU, without nvidia-ml-py, and where the GPU has no counter (before Volta, in a MIG slice). Reading
    changes nothing on the GPU. The count moves ten times a second (H200), and a call takes 4 ms.
    """
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # By UUID: NVML numbers the GPUs of the host, not those that CUDA_VISIBLE_DEVICES leaves, and in another order.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3  # it counts mJ
