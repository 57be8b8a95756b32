"""Compile DeepGEMM's kernels for a model's products, so that no run waits for it.

    python scripts/bench/warm_deep_gemm.py --tokens 8192            7B, hybrid_fast and infir2
    python scripts/bench/warm_deep_gemm.py --size 1.5b --tokens 2048,16384

A run does the same at its start (ds_fp8/gemm/deep_gemm_kernels.py). The kernels stay in DeepGEMM's cache
(~/.deep_gemm, or DG_JIT_CACHE_DIR), for this GPU and this version.
"""

from __future__ import annotations

import argparse
import sys

from common import SIZES, device, integers

from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.gemm import unavailable
from ds_fp8.gemm.deep_gemm_kernels import Layer, compile_for, expect


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="7b")
    parser.add_argument("--tokens", type=integers, default=[8192], metavar="T,...", help="of a micro-batch")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    reason = unavailable("deep_gemm")
    if reason:
        raise UserError(reason, remedy="pip install ds-fp8[deep-gemm], with the torch that its wheel is built against")
    # wgrad is DeepGEMM's with hybrid_fast.
    expect(Layer(outputs, inputs, wgrad=True) for outputs, inputs in SIZES[options.size].linears().values())
    for tokens in options.tokens:
        compile_for(tokens, device())
    return 0


if __name__ == "__main__":
    main_entry(main)
