"""How far a product on a machine may be from the product in FP64."""

import torch

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # Relative error of rounding one number to the dtype

# Relative error of a chain of products and casts in the dtype, beside the same chain whose sums are in another order:
# where a sum falls on the other side of a rounding, one code of many changes
CHAIN = {torch.float32: 2e-4, torch.bfloat16: 5e-3}


# Roundings to FP32 of a term whose scales are applied after the sum of a block, beside one of decoded operands: of both
# decoded operands, the scales' product, the block's product with it, and its addition
OF_SCALES = 5


def assert_is_product(product: torch.Tensor, a: torch.Tensor, b: torch.Tensor, roundings: int = 0) -> None:
    """Assert that `product` [M, N] is a [M, K] @ b [N, K]ᵀ, summed in FP32 in any order and rounded once.

    Each term may have been rounded to FP32 `roundings` times before.
    """
    a, b = a.double(), b.double()
    expected = a @ b.t()
    summing = (a.shape[1] + roundings) * ROUNDING[torch.float32] * (a.abs() @ b.abs().t())
    bound = summing + ROUNDING[product.dtype] * (expected.abs() + summing)
    assert product.shape == expected.shape
    error = (product.double() - expected).abs()
    assert (error <= bound).all(), f"off by {(error / bound).max():.3g} times what rounding explains"
