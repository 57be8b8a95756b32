"""What estimates say where GPUs share sequences, beside what two ranks really keep."""

import pytest

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.layers.convert import convert
from ds_fp8.memory import activations, estimate, estimate_workload, read_workload
from ds_fp8.memory.fit import longest_contexts
from tests.layers.test_sequence_parallel import shared
from tests.memory import workloads

GIB = 1 << 30
SECTIONS = {
    "bf16": {"enabled": False},
    "fused": {},
    "fused, activations in BF16": {"activations": {"save": "bf16"}},
    "linear by linear": {"fuse": "off"},
    "linear by linear, inputs in BF16": {"fuse": "off", "activations": {"save": "bf16"}},
}


def stage(size, **changes):
    return workloads.stage(sequence_parallel_size=size, **changes)


def kept(raw, rows, length):
    model, fp8 = workloads.model_of(raw), parse_fp8(raw)
    with shared(model, rows):
        if fp8.enabled:
            convert(model, fp8)
        return workloads.kept_bytes(model, rows, length // 2)


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_layers_keep_what_the_formulas_say(ranks, section):
    raw = stage(2, fp8=section, zero_optimization={"stage": 3}, data={"sequence_length": 256})
    w = read_workload(raw, gpus=2)
    assert w.tokens == 2 * 128
    of_layers = sum(sum(activations.everything(layer, w).values()) for layer in w.model.layers)
    norm = activations.final_norm(w) - 2 * w.tokens * w.model.hidden
    expected = of_layers + norm + 8 * w.tokens + activations.rotary(w, w.model.layers[0])
    assert ranks(2, kept, raw, 2, 256) == [expected, expected]


def test_longest_contexts_grow_with_the_gpus_that_share_them():
    raw = stage(2, model={"attn_implementation": "packed", "config": {"num_key_value_heads": 2}})
    w = read_workload(raw, gpus=8)
    found = longest_contexts(w, 2 * GIB)
    assert list(found) == [1, 2, 4]  # of 8 GPUs and 4 heads
    assert 1.8 * found[1] < found[2] < 2.2 * found[1]
    assert found[2] < found[4] < 2 * found[2]  # 4 GPUs keep heads of k and v twice
    for size, length in found.items():
        sized = read_workload(stage(size, model=raw["model"]), gpus=8).resized("sequence_length", length)
        assert estimate_workload(sized).device_bytes <= 2 * GIB
        longer = sized.resized("sequence_length", length + 128 * size)
        assert estimate_workload(longer).device_bytes > 2 * GIB


def test_tokens_per_gpu_are_those_of_a_gpu():
    data = {"sequence_length": 512, "tokens_per_gpu": 256}
    w = read_workload(stage(2, data=data, train_micro_batch_size_per_gpu=1), gpus=2)
    assert (w.rows, w.sequence_length, w.tokens) == (1, 512, 256)
    assert w.tokens == estimate(stage(2, data=data, train_micro_batch_size_per_gpu=1), gpus=2).workload.tokens


@pytest.mark.parametrize(
    ("size", "gpus", "message"),
    [(2, 3, "2 ranks share a sequence, but there are 3 ranks"), (3, 3, "cannot be spread over 3")],
)
def test_what_cannot_be_shared_is_refused(size, gpus, message):
    with pytest.raises(UserError, match=message) as error:
        estimate(stage(size), gpus=gpus)
    assert error.value.key == "sequence_parallel_size"
