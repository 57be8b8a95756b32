import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch

from tests.ranks import RankPools


def pytest_collection_modifyitems(items):
    missing = pytest.mark.skip(reason="needs a Hopper GPU")
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(missing)


@pytest.fixture(scope="session")
def ranks():
    """`ranks(world, function, *args)`: run a module-level function on real gloo ranks, results by rank."""
    pools = RankPools()
    yield pools
    pools.close()
