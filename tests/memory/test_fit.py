"""Searches, and what estimates say about sizes."""

import pytest

from ds_fp8.config.errors import UserError
from ds_fp8.memory import estimate, estimate_workload, largest_that_fits, read_workload
from ds_fp8.memory.fit import search
from tests.memory import workloads

GIB = 1 << 30


@pytest.mark.parametrize("limit", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("start", [1, 3, 40, 5000])
def test_search_finds_the_largest_and_asks_about_none_twice(limit, start):
    for largest in {0, 1, 2, 5, 63, 64, 700} | {limit}:
        asked = []

        def fits(number, largest=largest, asked=asked):
            asked.append(number)
            return number <= largest

        assert search(fits, limit, start) == min(largest, limit)
        assert len(asked) == len(set(asked))
        assert all(1 <= number <= limit for number in asked)


@pytest.mark.parametrize("what", ["micro_batch", "sequence_length"])
def test_the_largest_fits_and_one_more_does_not(what):
    w = read_workload(workloads.stage(model={"config": {"max_position_embeddings": 1 << 22}}))
    unit = 128 if what == "sequence_length" else 1
    for memory in (2 * GIB, 5 * GIB):
        largest = largest_that_fits(w, what, memory)
        assert estimate_workload(w.resized(what, largest)).device_bytes <= memory
        assert estimate_workload(w.resized(what, largest + unit)).device_bytes > memory
    assert largest_that_fits(w, what, 1000) == 0


def test_sequences_end_at_the_models_positions():
    assert largest_that_fits(read_workload(workloads.stage()), "sequence_length", 1 << 50) == 4096


def test_more_of_everything_takes_more():
    raw = workloads.stage()
    peak = estimate(raw).peak_bytes
    assert estimate(raw, gpus=4).lasting_bytes < estimate(raw).lasting_bytes
    assert estimate(workloads.stage(train_micro_batch_size_per_gpu=8)).peak_bytes > peak
    assert estimate(workloads.stage(data={"sequence_length": 1024})).peak_bytes > peak
    long = {"data": {"sequence_length": 4096}}
    sizes = [
        estimate(workloads.stage(**long, **changes)).peak_bytes
        for changes in (
            {"fp8": {"enabled": False}},
            {"fp8": {"fuse": "off"}},
            {"fp8": {}},
            {"fp8": {"activations": {"recompute": "mlp"}}},
            {"fp8": {"activations": {"mlp_tile_tokens": 512}}},
            {"model": {"activation_checkpointing": True}},
            {"model": {"activation_checkpointing": "offload"}},
            {"model": {"activation_checkpointing": "offload"}, "fp8": {"activations": {"mlp_tile_tokens": 512}}},
        )
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_parts_make_up_the_peak():
    result = estimate(workloads.stage()).as_json()
    assert sum(result["parts"].values()) == result["peak_bytes"] == max(result["phases"].values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"zero_optimization": {"stage": 0}, "fp8": {"enabled": False}}, "stage 0"),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "reduce_bucket_size"),
        ({"model": {"attn_implementation": "eager"}}, "eager"),
        ({"model": {"config": {"model_type": "gpt2"}}, "fp8": {"enabled": False}}, "GPT2"),
        ({"model": {"config": None, "path": "/nowhere/at/all"}}, "/nowhere"),
        ({"fp8": {"presett": 1}}, "presett"),
    ],
)
def test_what_there_is_no_estimate_for(changes, says):
    with pytest.raises(UserError) as error:
        estimate(workloads.stage(**changes))
    assert says in str(error.value)
    assert error.value.remedy
