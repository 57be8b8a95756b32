"""Models of which a part is frozen: only the rest learns, and a resumed run has the frozen weights again."""

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_grad

from tests.layers.hugging_face import causal_lm
from tests.ranks import on_ranks
from tests.zero import models

FROZEN = {"q of fused layers": lambda name: "q_proj" in name}
LEARNS = {
    "norms and o_proj": lambda name: "norm" in name or "o_proj" in name,
    "embeddings": lambda name: "embed" in name,
    "lm_head": lambda name: "lm_head" in name,
    "last layer": lambda name: "layers.1." in name,
    "MLP of the first layer": lambda name: "layers.0.mlp" in name,
}
FROZEN |= {case: lambda name, learns=learns: not learns(name) for case, learns in LEARNS.items()}


def build(section, case, scale=1.0, recompute=False):
    model = causal_lm("qwen2")
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[case](name))
        parameter.data.mul_(scale)
    return models.engine(section, model)


def losses_and_gradients(section, case, recompute=False):
    """Losses and whole gradients by name of two steps."""
    engine = build(section, case, recompute=recompute)
    losses, gradients = [], {}
    for step in range(2):
        loss = models.loss_of(engine, models.batch(step, dist.get_rank()))
        engine.backward(loss)
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                gradients[step, name] = safe_get_full_grad(parameter).float()
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, gradients


@pytest.mark.parametrize("case", LEARNS)
@on_ranks(2)
def test_what_learns_has_the_gradients_of_bf16_and_those_of_recomputed_layers(case):
    losses, gradients = losses_and_gradients({}, case)
    twin, expected = losses_and_gradients(None, case)
    assert losses == pytest.approx(twin, rel=0.02)
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        assert (gradient - expected[key]).norm() < 0.2 * expected[key].norm(), key
    if case == "norms and o_proj":
        again, same = losses_and_gradients({}, case, recompute=True)
        assert again == losses
        assert [key for key, gradient in gradients.items() if not torch.equal(gradient, same[key])] == []


def stopped_and_resumed(section, case, folder):
    """Names of what changed in two steps, losses before and after a checkpoint, and those of a resumed run."""
    engine = build(section, case)
    before = models.bf16_weights(engine)
    first = models.train(engine, 2)
    after = models.bf16_weights(engine)
    engine.save_checkpoint(folder)
    rest = models.train(engine, 2, start=2)
    resumed = build(section, case, scale=0.5)
    resumed.load_checkpoint(folder)
    assert models.train(resumed, 2, start=2) == rest
    return {name for name in before if not torch.equal(before[name], after[name])}, set(before), first + rest


@pytest.mark.parametrize(("world", "case"), [(2, "q of fused layers"), (1, "norms and o_proj")])
@on_ranks()
def test_the_rest_learns_and_a_resumed_run_goes_on(tmp_path, case):
    changed, names, losses = stopped_and_resumed({}, case, tmp_path / "fp8")
    twin_changed, _, twin = stopped_and_resumed(None, case, tmp_path / "bf16")
    # Norms begin at 1, which one step does not move in BF16.
    matrices = {name for name in names if name.endswith("weight") and "norm" not in name}
    assert not any(FROZEN[case](name) for name in changed | twin_changed)
    assert {name for name in matrices if not FROZEN[case](name)} <= changed & twin_changed
    assert losses == pytest.approx(twin, rel=0.02)
    assert losses != twin
