"""The load balancing loss without torch.bincount: the same numbers, for every mixture of transformers."""

import pytest
import torch

from ds_fp8.layers.experts.routing import NAME, count_without_waiting, counts
from tests.layers.hugging_face import tokens
from tests.layers.moe import mixture

WITH_LOSS = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "gpt_oss")


@pytest.mark.parametrize("length", [1, 4, 129])
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_counts_are_those_of_bincount(size, length):
    indices = torch.randint(length, (size,))
    assert torch.equal(counts(indices, length), torch.bincount(indices, minlength=length))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("architecture", WITH_LOSS)
def test_the_loss_and_its_gradients_do_not_change(architecture, masked, monkeypatch):
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0

    def results():
        model = mixture(architecture, torch.float32, output_router_logits=True, router_aux_loss_coef=0.5)
        if changed:
            count_without_waiting(model)
        output = model(input_ids=ids, labels=ids, attention_mask=mask if masked else None, use_cache=False)
        output.loss.backward()
        return output.aux_loss, [p.grad for p in model.parameters() if p.grad is not None]

    module = __import__(mixture(architecture).__module__, fromlist=[NAME])
    monkeypatch.setattr(module, NAME, getattr(module, NAME))  # the file's function comes back
    changed = False
    expected, gradients = results()
    changed = True
    monkeypatch.setattr(torch.Tensor, "bincount", None)
    found, ours = results()
    assert torch.equal(found, expected)
    assert expected.item() > 0
    assert all(map(torch.equal, ours, gradients))


def test_a_function_is_replaced_once():
    model = mixture("mixtral")
    count_without_waiting(model)
    module = __import__(type(model).__module__, fromlist=[NAME])
    function = getattr(module, NAME)
    count_without_waiting(model)
    assert getattr(module, NAME) is function
