"""Accelerate with DeepSpeed on the CPU ranks of tests/ranks.py, where Accelerate itself knows DeepSpeed on accelerators
only: for tests alone."""

from __future__ import annotations

import functools
import os


@functools.cache
def enable() -> None:
    """Let this process's Accelerate, and everything built on it, use DeepSpeed over gloo on CPUs."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from transformers import training_args

    def prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = prepare_backend
    training_args.is_torch_bf16_gpu_available = lambda: True  # the CPU has BF16, and no argument says so
