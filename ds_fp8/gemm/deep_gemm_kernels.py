"""DeepGEMM's kernels, compiled before a step needs them: in processes of their own, by one rank a host.

DeepGEMM compiles a kernel when sizes are first multiplied, one after the other, for 6 to 15 s each and without a word.
It keeps them on disk, in ~/.deep_gemm or DG_JIT_CACHE_DIR. Here worker processes (deep_gemm_worker.py) multiply zeros
of those sizes, several at once, so that the compiled kernels are on disk when the product itself is launched:

    compile_for(tokens)     of all layers that `expect` was told of, at the start
    before(product)         of a product that nobody expected, with those of other layers for as many tokens

A record beside the kernels says what is compiled for this GPU, DeepGEMM and compiler: then no process is started.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils import cpp_extension

from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import BLOCK
from ds_fp8.config.log import logger
from ds_fp8.gemm.deep_gemm_processes import compile_in_process

ROWS = 16
"""The rows of a product must be a multiple of it, to which its scales are padded."""

MOST_PROCESSES = 8
"""Each takes half a GiB of the GPU, and the operands, while it compiles."""

SECONDS_BETWEEN_LINES = 15.0


class Product(NamedTuple):
    """Sizes of [rows, contraction] times [columns, contraction] transposed, which decide which kernel computes it."""

    rows: int
    columns: int
    contraction: int
    groups: int = 0
    """Matrices, each of a group of rows; 0: one matrix and no groups."""

    @property
    def possible(self) -> bool:
        """Return whether DeepGEMM multiplies such sizes."""
        return self.rows % ROWS == self.columns % BLOCK == self.contraction % BLOCK == 0

    def __str__(self) -> str:
        return " x ".join(map(str, self[:3])) + (f" of {self.groups} groups" if self.groups else "")


class Layer(NamedTuple):
    """A linear layer, whose products are known but for the number of tokens."""

    outputs: int
    inputs: int
    wgrad: bool = False
    """Whether DeepGEMM multiplies wgrad too."""
    groups: int = 0

    def products(self, tokens: int) -> set[Product]:
        """Return those of fprop, dgrad and wgrad that DeepGEMM computes."""
        found = {
            Product(tokens, self.outputs, self.inputs, self.groups),
            Product(tokens, self.inputs, self.outputs, self.groups),
        }
        if self.wgrad:
            found.add(Product(self.outputs, self.inputs, tokens))
        return {product for product in found if product.possible}


_layers: set[Layer] = set()
_ready: set[Product] = set()
"""Their kernels are on disk, or nothing can be done to get them there."""
_not_on_disk: set[Product] = set()
"""Products of `_ready` that this process has to compile."""


def expect(layers: Iterable[Layer]) -> None:
    """Note the layers whose products are going to be multiplied, for whatever number of tokens."""
    _layers.update(layers)


def compile_for(tokens: int, device: torch.device) -> None:
    """Compile the kernels of all expected layers, one product a layer and pass, for a number of tokens.

    Args:
        tokens: Of a micro-batch on one GPU.
        device: GPU of this rank.

    Raises:
        UserError: DeepGEMM cannot compile or run one of them.
    """
    _ensure({product for layer in _layers if not layer.groups for product in layer.products(tokens)}, device)


def before(product: Product, device: torch.device) -> None:
    """Return once the kernel of a product that is about to be launched is compiled.

    Raises:
        UserError: DeepGEMM cannot compile or run it.
    """
    if product in _ready:
        if product in _not_on_disk:
            _not_on_disk.discard(product)
            logger.info("DeepGEMM: this process compiles %s now, for 6 to 15 s", product)
        return
    # The first micro-batch with so many tokens: its other products follow at once.
    alike = [layer.products(product.rows) for layer in _layers if layer.groups == product.groups]
    expected = set().union(*alike)
    _ensure(expected if product in expected else {product}, device)
    before(product, device)


def cache_folder() -> Path:
    """Return the folder where DeepGEMM keeps its kernels."""
    return Path(os.environ.get("DG_JIT_CACHE_DIR") or Path.home() / ".deep_gemm")


def _ensure(products: set[Product], device: torch.device) -> None:
    if products <= _ready:
        return
    folder = cache_folder()
    record = _Record(folder, device)
    missing = products - _ready - record.products()
    if missing:
        with _alone_on_this_host(folder):
            # The process that had the lock before may have compiled them.
            missing -= record.products()
            if missing:
                compiled = _compile(sorted(missing), device, folder)
                record.add(compiled)
                _not_on_disk.update(missing - compiled)
    _ready.update(products)


def _compile(products: list[Product], device: torch.device, folder: Path) -> set[Product]:
    """Compile kernels in worker processes, and return the products whose kernels are on disk."""
    processes = min(len(products), len(os.sched_getaffinity(0)), MOST_PROCESSES)
    logger.info(
        "DeepGEMM: compiling the kernels of %d product%s in %s, %d at once, 6 to 15 s each; once for GPU and version",
        len(products),
        "s" * (len(products) > 1),
        folder,
        processes,
    )
    begin, compiled = time.monotonic(), set()
    slices = [products[first::processes] for first in range(processes)]
    with ThreadPoolExecutor(processes) as pool, contextlib.ExitStack() as ended:
        started = [pool.submit(compile_in_process, some, device, compiled.add, ended) for some in slices]
        running = set(started)
        while running and not any(map(_failed, started)):
            done, running = wait(running, SECONDS_BETWEEN_LINES, FIRST_COMPLETED)
            if not done:
                seconds = time.monotonic() - begin
                logger.info("DeepGEMM: %d of %d products after %.0f s", len(compiled), len(products), seconds)
        # Leaving ends processes that still compile, where another has failed.
    for outcome in started:
        result = outcome.result()
        if result.failed is not None:
            product, reason = result.failed
            logger.warning("DeepGEMM cannot multiply %s: %s", product, reason)
            raise UserError(
                f"DeepGEMM cannot multiply {product}: {reason}",
                key="fp8.linear.backend",
                remedy='"backend": "cublas"',
            )
        if result.died is not None:
            logger.warning("DeepGEMM: a process that compiles ended: %s", result.died)
    logger.info("DeepGEMM: %d products compiled in %.0f s", len(compiled), time.monotonic() - begin)
    return compiled


def _failed(outcome: Future) -> bool:
    return outcome.done() and outcome.result().failed is not None


class _Record:
    """Products whose kernels are on disk, in a file beside these."""

    def __init__(self, folder: Path, device: torch.device):
        key = hashlib.sha256(json.dumps(_build(device)).encode()).hexdigest()[:16]
        self._kernels = folder / "cache"
        self._file = folder / "ds_fp8" / f"{key}.json"

    def products(self) -> set[Product]:
        """Return what is compiled; nothing where a kernel was removed, for it may be any product's."""
        try:
            content = json.loads(self._file.read_text())
            if all((self._kernels / name).is_dir() for name in content["kernels"]):
                return {Product(*sizes) for sizes in content["products"]}
        except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: they are compiled or found again
            pass
        return set()

    def add(self, products: set[Product]) -> None:
        """Add what was compiled."""
        kernels = [path.name for path in self._kernels.iterdir()] if self._kernels.is_dir() else []
        content = {"products": sorted(self.products() | products), "kernels": sorted(kernels)}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # Renamed into place: ranks of other hosts may read it.
            written = self._file.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(content))
            written.replace(self._file)
        except OSError as error:
            logger.warning("DeepGEMM: what was compiled is not recorded, so the next start looks again: %s", error)


def _build(device: torch.device) -> list[str]:
    """Return all that decides, beside a product's sizes, which kernel DeepGEMM looks for."""
    import deep_gemm

    gpu = device.type
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        gpu = f"{found.name} {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors"
    options = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("DG_JIT_")]
    compiler = os.environ.get("DG_JIT_NVCC_COMPILER") or (
        f"{cpp_extension.CUDA_HOME}/bin/nvcc" if cpp_extension.CUDA_HOME else shutil.which("nvcc")
    )
    file = Path(compiler).resolve() if compiler else None
    state = file.stat() if file is not None and file.is_file() else None
    identity = [str(file), str(state.st_mtime_ns), str(state.st_size)] if state is not None else []
    version = str(getattr(deep_gemm, "__version__", ""))
    return [version, str(deep_gemm.__file__), gpu, str(torch.version.cuda), *options, *identity]


@contextlib.contextmanager
def _alone_on_this_host(folder: Path) -> Iterator[None]:
    """Wait, with lines, until no other process of this host compiles into a folder; the kernel frees dead holders'."""
    name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    # Not in the folder itself: several hosts may share it, and not every file system locks.
    path = Path(tempfile.gettempdir(), f"ds_fp8_deep_gemm_{os.getuid()}_{name}.lock")
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    begin = said = time.monotonic()
    try:
        while not _locked(descriptor):
            now = time.monotonic()
            if said == begin or now - said >= SECONDS_BETWEEN_LINES:
                said = now
                logger.info(
                    "DeepGEMM: another process of this host compiles in %s; waiting, for %.0f s now (lock: %s)",
                    folder,
                    now - begin,
                    path,
                )
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
