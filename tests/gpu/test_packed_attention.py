"""Packed attention on a GPU: the variable-length kernel against document by document, and through whole models."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ds_fp8.train import packed_attention

pytestmark = pytest.mark.gpu

BF16 = {"atol": 2e-2, "rtol": 2e-2}  # Outputs and gradients of order one, rounded once or twice to BF16
DOCUMENTS = ((1,), (300,), (1, 2, 127, 128, 129), (5, 1000, 19), (64,) * 16)


def operands(lengths, heads, kv_heads, features):
    """Return q, k and v of packed documents, the output's gradient, and where the documents end."""
    torch.manual_seed(0)
    count = sum(lengths)
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    shapes = (heads, kv_heads, kv_heads)
    inputs = [torch.randn(count, h, features, device="cuda", dtype=torch.bfloat16) for h in shapes]
    gradient = torch.randn(count, heads, features, device="cuda", dtype=torch.bfloat16)
    return inputs, gradient, ends


@pytest.mark.parametrize("lengths", DOCUMENTS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("features", [64, 128, 256])
@pytest.mark.parametrize("scaling", [None, 0.05])
def test_the_kernel_is_attention_within_each_document(lengths, heads, kv_heads, features, scaling):
    inputs, gradient, ends = operands(lengths, heads, kv_heads, features)
    count = sum(lengths)
    found = []
    for attention, dtype in (
        (lambda q, k, v: packed_attention._in_one_kernel(q, k, v, ends, count, scaling), torch.bfloat16),
        (lambda q, k, v: packed_attention._document_by_document(q, k, v, ends, 0.0, scaling), torch.float32),
    ):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        output = attention(*leaves)
        output.backward(gradient.to(dtype))
        found.append([output, *(leaf.grad for leaf in leaves)])
    for name, ours, exact in zip(("output", "dq", "dk", "dv"), *found, strict=True):
        # Gradients of k and v are sums over the heads of a group, each of which the kernel has rounded to BF16.
        rounded = heads // kv_heads if name in ("dk", "dv") else 1
        bounds = {bound: value * rounded**0.5 for bound, value in BF16.items()}
        torch.testing.assert_close(ours.float(), exact, **bounds, msg=lambda found, name=name: f"{name}: {found}")


@pytest.mark.parametrize("more", [1, 50])
@pytest.mark.parametrize("lengths", DOCUMENTS)
@pytest.mark.parametrize(("heads", "kv_heads", "features"), [(4, 4, 64), (8, 2, 128)])
def test_documents_of_no_tokens_change_no_bit(lengths, heads, kv_heads, features, more):
    inputs, gradient, ends = operands(lengths, heads, kv_heads, features)
    count = sum(lengths)
    found = []
    for these in (ends, torch.cat([ends, ends[-1:].expand(more)])):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = packed_attention._in_one_kernel(*leaves, these, count, None)
        output.backward(gradient)
        found.append([output, *(leaf.grad for leaf in leaves)])
    for name, ours, expected in zip(("output", "dq", "dk", "dv"), *found, strict=True):
        # The kernel adds up dq in the order in which blocks of keys come, and within one of at least 64 there is none.
        exact = name != "dq" or max(lengths) <= 64
        torch.testing.assert_close(ours, expected, **({"rtol": 0, "atol": 0} if exact else BF16), msg=f"{name} differs")


def test_what_no_kernel_computes_is_in_no_graph():
    rows = torch.randn(1, 2, 8, 64, device="cuda")
    ends = torch.tensor([0, 3, 8], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="document by document"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        packed_attention.packed_attention(None, rows, rows, rows, ends)


def test_a_packed_row_has_the_logits_of_its_documents_alone():
    packed_attention.register()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=256, num_hidden_layers=2, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="packed", dtype=torch.bfloat16).cuda().eval()
    lengths = (7, 130, 1, 54)
    tokens = torch.randint(0, 64, (1, sum(lengths)), device="cuda")
    positions = torch.cat([torch.arange(length, device="cuda") for length in lengths])[None]
    with torch.no_grad():
        packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
        alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in tokens[0].split(lengths)]
    torch.testing.assert_close(packed, torch.cat(alone), **BF16)
