"""Models and process groups that are refused with FP8."""

from types import SimpleNamespace

import pytest
from torch import nn

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.engine.compatibility import check_parallelism

LINEAR = nn.Linear(4, 4)


@pytest.mark.parametrize(
    "name", ["get_tensor_model_parallel_world_size", "get_slice_parallel_world_size", "get_model_parallel_world_size"]
)
def test_tensors_split_over_ranks_are_refused(name):
    with pytest.raises(UserError, match="tensor parallelism"):
        check_parallelism(LINEAR, SimpleNamespace(**{name: lambda: 2}), FP8Config())
    check_parallelism(LINEAR, SimpleNamespace(**{name: lambda: 1}), FP8Config())
    check_parallelism(LINEAR, SimpleNamespace(**{name: lambda: 2}), FP8Config(enabled=False))


def test_sequences_split_over_ranks_are_not():
    """As DeepSpeed-Ulysses' own mpu, which calls the ranks of a sequence model-parallel."""
    groups = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2, get_model_parallel_world_size=lambda: 2)
    check_parallelism(LINEAR, groups, FP8Config())


def pipeline_and_experts():
    from deepspeed.moe.layer import MoE
    from deepspeed.pipe import PipelineModule

    refusals = []
    for model in (
        PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1),
        nn.Sequential(MoE(4, nn.Linear(4, 4), num_experts=2)),
    ):
        try:
            check_parallelism(model, None, FP8Config())
        except UserError as error:
            refusals.append(str(error))
    return refusals


def test_pipelines_and_deepspeeds_experts_are_refused(ranks):
    for pipeline, experts in ranks(2, pipeline_and_experts):
        assert "pipeline parallelism" in pipeline
        assert "MoE" in experts
