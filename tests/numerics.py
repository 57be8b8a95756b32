"""Errors of tensors, as tests compare them with their limits."""

import torch


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error in the Frobenius norm, in FP64; of expected zeros the norm itself."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return ((found - expected).norm() / (expected.norm() or 1)).item()
