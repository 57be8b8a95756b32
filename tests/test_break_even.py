import pytest
from torch import nn

from ds_fp8.engine.break_even import BREAK_EVEN, tokens_needed, typical_hidden, warning


def test_larger_layers_need_fewer_tokens():
    needed = [tokens_needed(hidden) for hidden in (1024, 1536, 2048, 3584, 4096, 16384)]
    assert needed == sorted(needed, reverse=True)
    assert set(needed) == set(BREAK_EVEN.values())
    assert tokens_needed(511) is None


@pytest.mark.parametrize(
    ("hidden", "tokens", "words"),
    [
        (256, 10**6, "too small"),
        (2048, None, "from 8192 tokens"),
        (2048, 8191, "8191 tokens a GPU and micro-batch are too few"),
        (4096, 16384, None),
        (None, 16, None),
    ],
)
def test_a_warning_only_where_fp8_does_not_pay(hidden, tokens, words):
    text = warning(hidden, tokens)
    assert text is None if words is None else words in text


def test_the_typical_hidden_size_is_that_of_most_linears():
    assert typical_hidden([nn.Linear(64, 8), nn.Linear(64, 8), nn.Linear(200, 8)]) == 64
    assert typical_hidden([]) is None
