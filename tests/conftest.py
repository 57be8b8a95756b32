import gc
import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.interpreter import count_with_tensors
from tests.ranks import RankPools
from tests.surroundings import leave

# Other tests run beside, on few cores; no examples of earlier runs are read.
settings.register_profile("ds_fp8", deadline=None, database=None)
settings.load_profile("ds_fp8")

gc.disable()  # until the first test: collections while thousands of modules are imported take seconds

FOLDER = leave()  # before the libraries that look at homes and variables as they are imported

if os.environ.get("DS_FP8_TEST_GPUS") == "2" and int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 2:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1,0"  # every second process of tests calls the second GPU its first

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined: they run on the CPU
    count_with_tensors()


@pytest.hookimpl(tryfirst=True)  # before marks are selected by
def pytest_collection_modifyitems(items):
    """Skip tests of GPUs where there is none; beside one, all tests of a module whose DEVICE it is are such."""
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    for item in items:
        if on_gpu and getattr(item.module, "DEVICE", None) == "cuda":
            item.add_marker(pytest.mark.gpu)
        elif not on_gpu and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))


@pytest.fixture
def new_ranks():
    """As `ranks`, in processes that hold nothing of the tests before."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def ranks():
    """`ranks(world, function, *args)`: run a module-level function on real gloo ranks, results by rank."""
    if torch.cuda.is_available():
        pytest.skip("beside a GPU Triton compiles its kernels, and these ranks have their tensors on the CPU")
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def gpu_ranks():
    """The same with one GPU a rank, over NCCL."""
    pools = RankPools("cuda")
    yield pools
    pools.close()


@pytest.fixture(autouse=True, scope="session")
def _elsewhere():
    """Begin in a folder that no other command writes to: names of shipped stages, such as runs/..., are relative."""
    before = Path.cwd()
    (FOLDER / "current").mkdir(exist_ok=True)
    os.chdir(FOLDER / "current")
    yield
    os.chdir(before)


@pytest.fixture(autouse=True, scope="module")
def _modules_kept_from_collection():
    """Collect garbage, which engines and benchmarks do often, not from all that was imported and collected before."""
    gc.collect()
    gc.freeze()
    gc.enable()
