"""The sharpness in the logits beside a search, and of a model."""

import pytest
import torch
import torch.nn.functional as F

from ds_fp8.train.evaluation import logit_sharpness, losses_at_worst
from tests.layers.hugging_face import causal_lm, tokens


@pytest.mark.parametrize("shape", [(1, 2), (7, 5), (3, 97)])
@pytest.mark.parametrize("relative", [0.0, 0.01, 0.3])
def test_no_corner_or_gradient_ascent_finds_a_larger_loss(shape, relative):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(shape, generator=generator) * 4
    y = torch.randint(0, shape[1], shape[:1], generator=generator)
    loss, worst = losses_at_worst(z, y, relative)
    assert torch.allclose(loss, F.cross_entropy(z, y, reduction="none"))
    limit = relative * (z.abs() + 1)
    for _ in range(200):
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        assert (F.cross_entropy(z + signs * limit, y, reduction="none") <= worst + 1e-5).all()
    d = torch.zeros_like(z).requires_grad_()
    for _ in range(300):
        (gradient,) = torch.autograd.grad(F.cross_entropy(z + d, y, reduction="sum"), d)
        d = torch.minimum(torch.maximum(d + gradient.sign() * limit / 20, -limit), limit).detach().requires_grad_()
    assert torch.allclose(F.cross_entropy(z + d, y, reduction="none"), worst, atol=1e-4)
    assert (worst >= loss).all()
    assert (worst > loss).all() == (relative > 0)


def test_sharpness_of_a_model_counts_label_tokens_alone():
    model, ids = causal_lm("qwen2", torch.float32), tokens(2, 12)
    labels = ids.clone()
    labels[0, :7] = -100
    batch = {"input_ids": ids, "labels": labels}
    found = logit_sharpness(model, [batch], 0.05)
    with torch.no_grad():
        assert found["loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    assert found["worst_loss"] > found["loss"]
    assert found["sharpness"] == pytest.approx(100 * (found["worst_loss"] - found["loss"]) / (1 + found["loss"]))
