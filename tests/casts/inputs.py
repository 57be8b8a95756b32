"""Tensors that casts get wrong: ragged shapes, and numbers at the edges of FP32 and FP8."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies

SIZES = [1, 2, 127, 128, 129, 200, 300]
FP32_MAX = float(np.finfo(np.float32).max)
EDGES = [
    0.0,
    -0.0,
    1e-45,  # FP32's smallest subnormal
    -1e-40,
    2.0**-126,
    448.0,
    -463.9,
    464.0,  # half-way between E4M3's maximum and what would be its next value
    57344.0,
    -61440.0,
    1e38,
]
TOO_LARGE = [3.38e38, -3e38]  # Finite in FP32 and BF16, but the nearest FP8 number times its scale may be beyond them
NOT_FINITE = [np.inf, -np.inf, np.nan]

matrix_shapes = strategies.tuples(strategies.sampled_from(SIZES), strategies.sampled_from(SIZES))
shapes = strategies.one_of(
    matrix_shapes,
    strategies.tuples(strategies.sampled_from(SIZES)),
    strategies.tuples(strategies.integers(1, 3), strategies.integers(1, 3), strategies.sampled_from(SIZES)),
)


@strategies.composite
def tensors(draw, shapes=shapes, edges=EDGES, dtypes=(torch.float32, torch.bfloat16)) -> torch.Tensor:
    """Random numbers of a random magnitude, rows of their own magnitude, exact zeros, and a few of `edges`."""
    shape, dtype = draw(shapes), draw(strategies.sampled_from(dtypes))
    generator = np.random.default_rng(draw(strategies.integers(0, 2**32 - 1)))
    exponent = draw(strategies.sampled_from([-149, -126, -60, -8, 0, 3, 40, 110]))
    spread = 2.0 ** generator.uniform(-6, 6, (*shape[:-1], 1))
    numbers = generator.standard_normal(shape) * spread * 2.0**exponent
    numbers[generator.random(shape) < draw(strategies.sampled_from([0, 0.1, 1]))] = 0
    for edge in draw(strategies.lists(strategies.sampled_from(edges), max_size=4)):
        numbers[tuple(generator.integers(0, size) for size in shape)] = edge
    return torch.from_numpy(numbers.astype(np.float32)).to(dtype)
