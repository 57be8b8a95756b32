"""Program of a worker process: multiply zeros of the given sizes by DeepGEMM, and write an outcome a line.

    python -m ds_fp8.gemm.deep_gemm_worker cuda:0 '[[8192, 3584, 18944, 0], ...]'

A line is null, or the text of DeepGEMM's error, behind which nothing more is multiplied.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from ds_fp8.gemm.deep_gemm import launch, zeros
from ds_fp8.gemm.deep_gemm_kernels import Product


def main() -> int:
    """Run the program."""
    device, products = torch.device(sys.argv[1]), [Product(*sizes) for sizes in json.loads(sys.argv[2])]
    # DeepGEMM prints what nvcc says, which belongs to the messages and not to the outcomes.
    outcomes = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for product in products:
        operands = zeros(product, device)  # an error here is this process's, and not DeepGEMM's
        reason = None
        try:
            launch(*operands)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        # Whatever DeepGEMM raises: its assertions are RuntimeErrors, those of its Python parts AssertionErrors.
        except Exception as error:
            reason = str(error).strip() or type(error).__name__
        print(json.dumps(reason), file=outcomes)
        if reason is not None:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
