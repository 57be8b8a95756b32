"""torch.compile of a converted model: FP8 layers run as they are between the graphs, and say why."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.layers.hugging_face import causal_lm, fp8, tokens


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(model, forward):
    model.zero_grad()
    hidden = forward(input_ids=tokens(), use_cache=False).last_hidden_state
    hidden.float().square().sum().backward()
    return [hidden.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_a_compiled_model_computes_the_same_with_one_break_a_layer():
    model = causal_lm("llama").model
    fp8(model)
    expected = trained(model, model)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    for _ in range(2):
        results = trained(model, compiled)
        assert torch.equal(results[0], expected[0])
        assert len(results) == len(expected)
        for gradient, other in zip(results[1:], expected[1:], strict=True):
            # Compiling sums gradients in another order, in BF16 too, which a cast then rounds otherwise.
            assert (gradient - other).float().norm() < 0.06 * other.float().norm()
    assert 1 <= counter.frame_count <= len(model.layers) + 1


def test_a_single_graph_is_refused_with_the_reason():
    model = causal_lm("llama").model
    fp8(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="FP8 layers of ds_fp8"):
        compiled(input_ids=tokens())
