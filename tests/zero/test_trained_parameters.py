"""What learns is what the optimizer was given: a part of a model, several groups, all but a forgotten bias."""

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state

import ds_fp8
from tests.zero import models

SECTION = {"monitor": {"every": 0}}


def a_layer(model):
    return [parameter for name, parameter in model.named_parameters() if "layers.1" in name]


def all_but_a_bias(model):
    return [parameter for name, parameter in model.named_parameters() if name != "layers.1.up.bias"]


def all_but_a_weight(model):
    return [parameter for name, parameter in model.named_parameters() if name != "layers.1.up.weight"]


def groups(model):
    """Vectors without weight decay, and one group of what is frozen."""
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    rest = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": list(model.layers[0].parameters()), "weight_decay": 0.1},
        {"params": [parameter for parameter in rest if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in rest if parameter.dim() == 1], "weight_decay": 0.0},
    ]


LISTS = {"a layer": a_layer, "all but a bias": all_but_a_bias, "all but a weight": all_but_a_weight, "groups": groups}
# What the start report says of the others
FORGOTTEN = {
    "a layer": "8 parameters that require",
    "all but a bias": "1 parameter that requires",
    "all but a weight": "1 parameter that requires",
}
COMPRESSED = {"optimizer": {"exp_avg": "e4m3", "exp_avg_sq": "e5m2"}}


def build(section, case, prepare=None):
    torch.manual_seed(0)
    model = models.Net().bfloat16()
    if prepare is not None:
        prepare(model)
    return ds_fp8.initialize(model=model, model_parameters=LISTS[case](model), config=models.config(section))[0]


def trained(section, case):
    """Losses of four steps, the names of what they changed and of what has moments, the report, bytes of gradients."""
    engine = build(section, case)
    before = models.bf16_weights(engine)
    losses = models.train(engine, 4)
    after = models.bf16_weights(engine)
    moments = {
        name
        for name, parameter in engine.module.named_parameters()
        if parameter in {p for group in engine.optimizer.fp16_groups for p in group}
        and safe_get_full_optimizer_state(parameter, "exp_avg").any()
    }
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    return losses, changed, moments, engine.fp8.report, engine.fp8.step is not None


@pytest.mark.parametrize(
    ("case", "moments"), [*((case, {}) for case in LISTS), ("a layer", COMPRESSED), ("groups", COMPRESSED)]
)
def test_the_parameters_of_the_optimizer_learn_and_no_others(ranks, baseline, case, moments):
    ours = ranks(2, trained, {**SECTION, **moments}, case)
    bf16 = baseline(2, trained, {"enabled": False}, case)
    for (losses, changed, moved, report, own), (expected, stock, moved_there, *_) in zip(ours, bf16, strict=True):
        assert own
        assert losses == pytest.approx(expected, rel=0.02)
        assert changed == stock
        assert moved == moved_there
        notes = [note for note in report["notes"] if "optimizer" in note]
        assert [FORGOTTEN[case] in note for note in notes] == [True] * (case in FORGOTTEN)


def unfrozen(section):
    """Losses and changes of a run in which what was frozen at the start requires gradients after two steps."""
    engine = build(section, "groups")
    losses = models.train(engine, 2)
    for parameter in engine.module.layers[0].parameters():
        parameter.requires_grad_(True)
    before = models.bf16_weights(engine)
    losses += models.train(engine, 2, start=2)
    after = models.bf16_weights(engine)
    return losses, {name for name in before if not torch.equal(before[name], after[name])}


def test_what_the_optimizer_lacks_cannot_be_unfrozen(ranks):
    """As in DeepSpeed, which takes frozen parameters out of the groups for good."""
    for (losses, changed), (expected, stock) in zip(
        ranks(2, unfrozen, SECTION), ranks(2, unfrozen, {"enabled": False}), strict=True
    ):
        assert losses == pytest.approx(expected, rel=0.02)
        assert changed == stock
        assert not any("layers.0" in name for name in changed)
