"""ds_fp8.initialize stands in for deepspeed.initialize."""

import contextlib
import inspect
import io

import deepspeed
import pytest
import torch

from ds_fp8.engine.initialize import initialize
from tests.zero import models


def test_the_arguments_are_deepspeeds_in_their_order():
    ours, theirs = inspect.signature(initialize).parameters, inspect.signature(deepspeed.initialize).parameters
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


def printed(section):
    """What making an engine prints, with the configuration as eleventh positional argument."""
    torch.manual_seed(0)
    model = models.Net().bfloat16()
    config = models.config(section)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        engine = initialize(None, model, None, model.parameters(), None, None, 29500, None, None, None, config)[0]
    return out.getvalue(), engine.fp8.config.enabled, engine.fp8.wire is not None


@pytest.mark.parametrize(
    ("section", "expected", "enabled", "measures"),
    [
        (None, "", False, False),
        ({"enabled": False}, "FP8 is off", False, True),
        ({"monitor": {"every": 0}}, "linears in FP8", True, True),
    ],
    ids=["no section", "disabled", "enabled"],
)
def test_only_a_configuration_with_a_section_is_spoken_of(ranks, section, expected, enabled, measures):
    (first, *state), (second, *_) = ranks(2, printed, section)
    assert state == [enabled, measures]
    assert second == ""
    assert (first == "") == (expected == "")
    assert expected in first
