"""Casts compiled for Hopper: that ptxas makes of them what they say, seen without a GPU in its machine code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

COMPILE = """
import sys
from pathlib import Path
import torch
from triton.runtime import driver, jit
from triton.backends.compiler import GPUTarget

class Hopper:
    \"\"\"A GPU that kernels are compiled for, and that runs none.\"\"\"

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

driver.set_active(Hopper())
launch = jit.JITFunction.run
kernels = []

def compile(kernel, *arguments, grid, warmup=False, **options):
    kernels.append(launch(kernel, *arguments, grid=grid, warmup=True, **options))

jit.JITFunction.run = compile
from ds_fp8.casts.quantization_triton import quantize_tiles
for dtype, format, scale, rowwise, columnwise in (
    (torch.float32, "e4m3", "pow2", None, "1x128"),
    (torch.float32, "e4m3", "fp32", "1x128", "1x128"),
    (torch.float32, "e5m2", "fp32", None, "128x128"),
    (torch.bfloat16, "e4m3", "pow2", "1x128", "1x128"),
    (torch.bfloat16, "e5m2", "fp32", None, "1x128"),
):
    quantize_tiles(torch.zeros(128, 128, dtype=dtype), format, scale, rowwise, columnwise)
from ds_fp8.zero import masters_triton
from tests.zero.test_master_step import stepped
arguments = masters_triton.common_arguments
masters_triton.common_arguments = lambda *states, **options: arguments(*states, **options) | {"FAST": True}
stepped(masters_triton.TileStep, 1, "pow2", "e4m3_expanded")
stepped(masters_triton.TileStep, 2, "fp32", "fp32")
for number, kernel in enumerate(kernels):
    (Path(sys.argv[1]) / f"{number}.cubin").write_bytes(kernel.asm["cubin"])
"""


def test_no_pair_of_codes_takes_in_the_stack_pointer(tmp_path):
    """ptxas 12.8 merged shifted pairs of codes with register 1, which nobody had written them to, and read codes
    that had just been made, the second of two pairs, out of it."""
    import triton

    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not disassembler.exists():
        pytest.skip("this Triton has no disassembler")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", COMPILE, str(tmp_path)], env=environment, check=True)
    compiled = sorted(tmp_path.glob("*.cubin"))
    assert len(compiled) == 12
    for kernel in compiled:
        code = subprocess.run([disassembler, kernel], capture_output=True, text=True, check=True).stdout
        lines = re.findall(r"\*/ +(.*\bR1\b.*;)", code)
        # The stack pointer is set, moved, and an address; nothing else.
        assert not [one for one in lines if not re.search(r"\[R1\b|LDC R1, c\[|IADD3 R1, R1, ", one)]
