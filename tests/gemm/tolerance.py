"""How far a product on a machine may be from the product in FP64."""

import torch

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Relative error of rounding one number to the dtype."""


def assert_is_product(product: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert that `product` [M, N] is a [M, K] @ b [N, K]ᵀ, summed in FP32 in any order and rounded once."""
    a, b = a.double(), b.double()
    expected = a @ b.t()
    summing = a.shape[1] * ROUNDING[torch.float32] * (a.abs() @ b.abs().t())
    bound = summing + ROUNDING[product.dtype] * (expected.abs() + summing)
    assert product.shape == expected.shape
    error = (product.double() - expected).abs()
    assert (error <= bound).all(), f"off by {(error / bound).max():.3g} times what rounding explains"
