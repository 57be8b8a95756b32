"""Ranks that each see their own GPU only, as under srun --gpus-per-task=1, Ray and torchrun --virtual-local-rank."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from ds_fp8.zero import collectives
from tests.ranks import RankPool
from tests.zero.models import bf16_weights, build, config, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2, "cuda", one_gpu=True)
    yield pool
    pool.close()


def trained(by_nccl: bool) -> tuple[int, dict, list[float], dict]:
    share = mock.Mock(return_value="for comparison") if by_nccl else collectives.share
    with mock.patch.object(collectives, "share", share):
        engine = build(config({"preset": "infir2", "linear": {"skip": []}}), sizes=(256, 512))
    losses = train(engine, 5)
    weights = bf16_weights(engine)
    report = engine.fp8.report
    engine.destroy()
    return torch.cuda.device_count(), report, losses, weights


def test_they_train_as_over_nccl_and_copy_from_gpus_that_they_do_not_see(pool):
    over_nccl = pool.run(trained, True)
    alone = pool.run(trained, False)
    for (visible, report, losses, weights), (_, _, expected, expected_weights) in zip(alone, over_nccl, strict=True):
        print(report["param_transport"])
        assert visible == 1
        assert (report["hosts"], report["ranks"]) == (1, 2)
        assert losses == expected
        assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
    assert {report["param_transport"] for _, report, *_ in alone} == {"by copy engines"}
