"""What the ranks of a run tell each other before they train."""

import pytest
from deepspeed import comm as dist

from ds_fp8.config.errors import UserError
from ds_fp8.train.processes import check_same_everywhere


def compared(other: dict) -> str:
    """Compare facts of which the second rank has others; returns what the error says, empty without one."""
    facts = {"tokenizer": "a", "train": {"rows": 12, "tokens": 3000}}
    try:
        check_same_everywhere(
            "the data", facts | other if dist.get_rank() else facts, key="data.path", remedy="copy it"
        )
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, ""),
        ({"train": {"tokens": 3000, "rows": 12}}, ""),
        ({"train": {"rows": 11, "tokens": 3000}}, "train is {'rows': 11, 'tokens': 3000}, not {'rows': 12"),
        ({"validation": {"rows": 1}}, "validation is {'rows': 1}, not None"),
    ],
)
def test_a_rank_with_other_facts_is_named_on_all(other, words, ranks):
    for said in ranks(2, compared, other):
        assert words in said
        assert bool(said) == bool(words)
        assert ("(rank 1) the data differs from" in said) == bool(words)
