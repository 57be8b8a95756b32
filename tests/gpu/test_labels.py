"""Labels outside the vocabulary on GPUs: counted by the loss's kernel, also where a CUDA graph replays it."""

import pytest

from tests.zero.test_labels import CASES, IGNORED, steps_until_refused

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", ["on", *(case for case in CASES if "offload_optimizer" not in CASES[case][1])])
def test_labels_outside_the_vocabulary_are_refused(gpu_ranks, case):
    good = 12 if case == "on" else 2
    ((step, said, in_graph),) = gpu_ranks(1, steps_until_refused, case, 97, good)
    assert step == good
    assert "2 labels are outside the vocabulary of 97 tokens, 97 for one" in said
    assert in_graph or case != "on"


def test_labels_without_loss_are_none_of_them(gpu_ranks):
    assert gpu_ranks(1, steps_until_refused, "on", IGNORED, 12)[0][:2] == (14, None)
