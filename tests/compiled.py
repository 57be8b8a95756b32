"""A pytest plugin: kernels are compiled for Hopper, some variants of each, and none runs.

What tests compare then is garbage. `-p tests.compiled --compiled FOLDER --variants 5`, with TRITON_INTERPRET=0, leaves
the code of each there, MODULE.KERNEL.NUMBER.ptx and .cubin, or what Triton says against it, .error.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from hypothesis import Phase, settings
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

settings.register_profile("compiled", max_examples=4, phases=[Phase.generate], database=None)


class Hopper:
    """A GPU that kernels are compiled for, and that runs none."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


def pytest_addoption(parser):
    parser.addoption("--compiled", metavar="FOLDER")
    # Of a kernel at most; each has a dtype or a compile-time argument that none before had
    parser.addoption("--variants", type=int)


def pytest_configure(config):
    folder, seen = Path(config.getoption("--compiled")), defaultdict(set)
    variants = config.getoption("--variants")
    launch = jit.JITFunction.run

    def compile(kernel: jit.JITFunction, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        if "FAST" in options:
            options["FAST"] = True  # as on a GPU; the tensors are a CPU's
        dtypes = [one.dtype if isinstance(one, torch.Tensor) else one is None for one in arguments]
        values = {repr(pair) for pair in (*enumerate(dtypes), *options.items())}
        if values <= seen[name] or len(list(folder.glob(f"{name}.*.ptx"))) == variants:
            return None
        seen[name] |= values
        file = folder / f"{name}.{len(seen[name])}"
        try:
            compiled = launch(kernel, *arguments, grid=grid, warmup=True, **options)
        except Exception as error:
            file.with_name(f"{file.name}.error").write_text(f"{error}\n{sorted(values)}")
            raise
        file.with_name(f"{file.name}.cubin").write_bytes(compiled.asm["cubin"])
        file.with_name(f"{file.name}.ptx").write_text(compiled.asm["ptx"])
        return compiled

    driver.set_active(Hopper())
    torch.testing.assert_close = lambda *arguments, **options: None
    jit.JITFunction.run = compile


def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if not {"ranks", "new_ranks"} & set(getattr(item, "fixturenames", ()))]
