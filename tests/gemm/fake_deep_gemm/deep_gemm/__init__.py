"""DeepGEMM as far as ds_fp8 uses it, on a CPU: "compiles" kernels slowly, and keeps them as the library does.

A kernel's source has N, K, the number of groups and tiles that depend on M; a compiled one is a folder
cache/kernel.NAME.HASH below DG_JIT_CACHE_DIR, made elsewhere and renamed; a process loads it once.

    FAKE_DEEP_GEMM_SECONDS   a compilation takes so long
    FAKE_DEEP_GEMM_LOG       file that gets a line for each, with the process and the sizes
    FAKE_DEEP_GEMM_FAILS     nvcc refuses kernels of this N
"""

import hashlib
import os
import time
import uuid
from pathlib import Path

__version__ = "2.6.1"
BLOCK = 128
_loaded = set()


def _load(name, m, n, k, groups):
    tile = 64 if m <= 64 else 128
    text = f"{name} {n} {k} {groups} {tile}"
    if text in _loaded:
        return
    folder = Path(os.environ.get("DG_JIT_CACHE_DIR") or Path.home() / ".deep_gemm")
    place = folder / "cache" / f"kernel.{name}.{hashlib.md5(text.encode()).hexdigest()}"
    if not (place / "kernel.cubin").is_file():
        _compile(text, n, folder / "tmp" / str(uuid.uuid4()), place)
    _loaded.add(text)


def _compile(text, n, temporary, place):
    with open(os.environ["FAKE_DEEP_GEMM_LOG"], "a") as log:
        log.write(f"{os.getpid()} {text}\n")
    time.sleep(float(os.environ.get("FAKE_DEEP_GEMM_SECONDS", "0")))
    if os.environ.get("FAKE_DEEP_GEMM_FAILS") == str(n):
        os.write(1, b"NVCC compilation failed: kernel.cu(3): error: this is a test\n")
        raise RuntimeError('Assertion error (csrc/jit/compiler.hpp:210): false and "NVCC compilation failed"')
    temporary.mkdir(parents=True)
    (temporary / "kernel.cubin").write_text(text)
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary.rename(place)


def _check(a, sfa, b, sfb, d, recipe):
    assert recipe == (1, BLOCK, BLOCK)
    (m, k), n = a.shape, b.shape[-2]
    assert b.shape[-1] == k
    assert tuple(d.shape) == (m, n)
    assert tuple(sfa.shape) == (m, -(-k // BLOCK))
    assert sfa.stride() == (1, m)
    assert tuple(sfb.shape[-2:]) == (-(-n // BLOCK), k // BLOCK)
    assert sfb.stride(-1) == 1
    return m, n, k


def _decode(codes, scale, rows):
    return codes.float() * scale.repeat_interleave(rows, -2)[..., : codes.shape[-2], :].repeat_interleave(BLOCK, -1)


def fp8_gemm_nt(a, b, d, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
    """Multiply a by b transposed into d."""
    m, n, k = _check(*a, *b, d, recipe)
    assert c is None
    assert compiled_dims == "nk"
    _load("sm90_fp8_gemm_1d2d", m, n, k, 1)
    d.copy_(_decode(*a, 1) @ _decode(*b, BLOCK).t())
