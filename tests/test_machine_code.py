"""Every kernel compiled for Hopper, without a GPU: that Triton takes it, and that ptxas makes of it what it says."""

import ast
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).parent.parent
# Those that launch kernels, all but the ones in ranks of their own; one called in an assertion is not seen. A rotation
# takes seconds to compile, and casts nothing: one of each kernel.
TESTS = """
casts/test_kernels.py both_directions_in_one_pass transposed_bytes
casts/test_outliers.py kernel_of_inputs_is_its_reference kernel_of_weights_is_its_reference
gemm/test_grouped.py each_group_has_its_matrix each_group_has_the_gradient_over_its_rows
monitor/test_statistics.py the_kernel_counts_what_torch_counts every_dtype_and_a_strided_matrix
layers/test_cross_entropy.py the_kernel_computes_the_softmax_gradient the_kernel_casts_the_softmax_gradient
layers/test_expert_layout.py kernels_lay_out_as_the_reference kernel_of_casts
layers/test_expert_products.py the_kernels_fit_together
layers/test_fused_parts.py rms_norm gated_activation_forward gated_activation_backward rotary_embedding
layers/test_fused_parts.py gated_activation_of_rows_with_factors outlier_blocks_of_gated_products
optim/test_kernels.py the_kernel_does_what_torch_does
research/test_codecs.py casts_are_the_nearest_of_all_codes
research/test_rotation.py the_kernel_rotates_to_the_same_bits_and_back[1-32-None-dtype1]
zero/test_gradient_wire.py the_kernels_send_the_same_bytes_and_sum_alike the_kernels_saturate_alike
zero/test_gradient_wire.py sums_and_their_squares
zero/test_master_step.py the_kernel_takes_the_step_of_its_reference
zero/test_one_pass.py one_pass_does_what_two_do nothing_is_written_where_the_step_is_skipped
zero/test_outlier_residuals.py the_kernel_writes_those_of_one_rank
zero/test_shard_cast.py the_kernels_cast_the_whole both_find_the_same_amax_in_any_source
"""


STACK_POINTER = r"\[R1\b|LDC R1, c\[|(IADD3|VIADD) R1, R1, |PRMT R\d+, R\d+, 0x[0-3]{1,4}, R1 ;"


def launched() -> set[str]:
    """Return the kernels of the package, without the functions that kernels call."""
    kernels, called = set(), set()
    for file in (ROOT / "ds_fp8").rglob("*_triton.py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and "triton.jit" in map(ast.unparse, _names(function)):
                kernels.add((module, function.name))
                names = {ast.unparse(one.func) for one in ast.walk(function) if isinstance(one, ast.Call)}
                # A name with "_" is one of its own file.
                called |= {(module if name.startswith("_") else None, name) for name in names}
    return {f"{module}.{name}" for module, name in kernels if not called & {(module, name), (None, name)}}


def _names(function: ast.FunctionDef) -> list[ast.expr]:
    return [getattr(decorator, "func", decorator) for decorator in function.decorator_list]


@pytest.fixture(scope="module", params=[1, pytest.param(5, marks=pytest.mark.slow)])
def compiled(tmp_path_factory, request):
    """A folder of so many variants of each kernel, at most."""
    folder = tmp_path_factory.mktemp("compiled")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    # Without assertions (-O), for nothing is computed: a test goes on to its last kernel.
    command = [sys.executable, "-O", "-m", "pytest", "-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider"]
    command += ["-p", "tests.compiled", "--compiled", str(folder), "--hypothesis-profile", "compiled"]
    command += ["--variants", str(request.param)]
    for file, *names in map(str.split, TESTS.strip().splitlines()):
        command += [f"tests/{file}::test_{name}" for name in names]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    assert ran.returncode in (0, 1), ran.stdout.decode()[-2000:] + ran.stderr.decode()[-2000:]
    return folder


def test_every_kernel_compiles(compiled):
    assert {file.name: file.read_text() for file in compiled.glob("*.error")} == {}
    names = {file.name.rsplit(".", 2)[0] for file in compiled.glob("*.cubin")}
    assert launched() <= names


def test_no_pair_of_codes_takes_in_the_stack_pointer(compiled):
    """ptxas 12.8 merged shifted pairs of codes with register 1, which nobody had written them to, and read codes
    that had just been made, the second of two pairs, out of it."""
    import triton

    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not disassembler.exists():
        pytest.skip("this Triton has no disassembler")
    kernels = [file.with_suffix(".cubin") for file in compiled.glob("*.ptx") if "satfinite.e" in file.read_text()]
    # Code alone, without an analysis of where branches lead: both take time.
    commands = [[disassembler, "-c", "-ndf", kernel] for kernel in kernels]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda words: subprocess.run(words, capture_output=True, text=True, check=True), commands)
    assert len(kernels) > 12
    for kernel, code in zip(kernels, found, strict=True):
        lines = re.findall(r"\*/ +(.*\bR1\b.*;)", code.stdout)
        # It is set, moved, an address, or the operand of which a permutation takes no byte.
        odd = [one for one in lines if not re.search(STACK_POINTER, one)]
        assert not odd, kernel.name
