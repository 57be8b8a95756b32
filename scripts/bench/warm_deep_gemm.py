"""Compile DeepGEMM's kernels for a model's products, several at once: in training they are compiled one by one.

    python scripts/bench/warm_deep_gemm.py --tokens 8192            7B, hybrid_fast and infir2
    python scripts/bench/warm_deep_gemm.py --size 1.5b --tokens 2048,16384

The kernels stay in DeepGEMM's cache (~/.deep_gemm, or DG_JIT_CACHE_DIR), for this GPU and this version.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from common import SIZES, integers, normal

from ds_fp8.casts import quantize
from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.gemm import scaled_matmul, unavailable

Product = tuple[int, int, int]


def products(size: str, tokens: int) -> set[Product]:
    """Return the (M, N, K) of all 1x128 by 128x128 products of a layer: fprop, dgrad, and wgrad of hybrid_fast."""
    found = set()
    for n, k in SIZES[size].linears().values():
        found |= {(tokens, n, k), (tokens, k, n), (n, k, tokens)}
    return found


def compile_product(shape: Product) -> tuple[Product, float]:
    """Multiply once, and return the seconds that took."""
    m, n, k = shape
    begin = time.perf_counter()
    a, b = quantize(normal(m, k)), quantize(normal(n, k), granularity="128x128")
    scaled_matmul(a, b, backend="deep_gemm")[0, 0].item()
    return shape, time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("7b", "1.5b"), default="7b")
    parser.add_argument("--tokens", type=integers, default=[8192], metavar="T,...", help="of a micro-batch")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    reason = unavailable("deep_gemm")
    if reason:
        raise UserError(reason, remedy="pip install ds-fp8[deep-gemm], with the torch that its wheel is built against")
    shapes = sorted(set().union(*(products(options.size, tokens) for tokens in options.tokens)))
    begin = time.perf_counter()
    workers = min(len(shapes), os.cpu_count() or 1, 16)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for shape, seconds in pool.map(compile_product, shapes):
            print(f"{shape}: {seconds:.1f} s", flush=True)
    print(f"{len(shapes)} products in {time.perf_counter() - begin:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    main_entry(main)
