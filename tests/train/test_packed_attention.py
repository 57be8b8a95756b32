"""The attention implementation "packed": as sdpa with a whole mask, in forward, backward and generation."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ds_fp8.train import packed_attention

TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}
"""FP32, sums in another order."""
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"num_key_value_heads": 2, "head_dim": 12}),
    "sliding window": (MistralForCausalLM, MistralConfig, {"num_key_value_heads": 4, "sliding_window": 5}),
}
SIZES = {"vocab_size": 64, "hidden_size": 40, "num_hidden_layers": 2, "intermediate_size": 72, "num_attention_heads": 4}
ROWS = ((7, 5, 12), (24,), (1, 1, 2, 20))


@pytest.fixture(params=MODELS)
def twins(request):
    """The same model with attention of either kind, and the one dimension of the masks the packed one was given."""
    packed_attention.register()
    kind, config, more = MODELS[request.param]

    def make(implementation):
        torch.manual_seed(0)
        return kind._from_config(config(**SIZES, **more), attn_implementation=implementation)

    return make("packed"), make("sdpa")


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ROWS])
    return {"input_ids": torch.randint(0, 64, (3, 24), generator=generator), "position_ids": positions}


def test_loss_and_gradients_are_those_of_a_whole_mask(twins, batch):
    packed, sdpa = twins
    assert (packed.config._attn_implementation, sdpa.config._attn_implementation) == ("packed", "sdpa")
    results = []
    for model in twins:
        loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    # The test would mean nothing if the mask made no difference.
    unpacked = sdpa(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss
    assert abs(unpacked - results[1][0]) > 1e-3


def test_padded_generation_is_as_with_sdpa(twins):
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    torch.testing.assert_close(*(model.eval().generate(ids, **options) for model in twins), rtol=0, atol=0)


def masks_given(model, monkeypatch, **batch):
    """The masks that the attention layers of a packed model are handed."""
    masks = []

    def spy(module, query, key, value, attention_mask, **more):
        masks.append(attention_mask)
        return packed_attention.packed_attention(module, query, key, value, attention_mask, **more)

    monkeypatch.setitem(packed_attention.AttentionInterface._global_mapping, "packed", spy)
    model(**batch, use_cache=False)
    return masks


@pytest.mark.parametrize("twins", ["llama"], indirect=True)
def test_the_mask_is_where_documents_end_and_nothing_is_of_quadratic_size(twins, batch, monkeypatch):
    for mask in masks_given(twins[0], monkeypatch, **batch):
        assert mask.dtype == torch.int32
        assert mask.tolist() == [0, 7, 12, 24, 48, 49, 50, 52, 72]


@pytest.mark.parametrize("twins", ["llama"], indirect=True)
def test_rows_of_one_document_need_no_mask(twins, batch, monkeypatch):
    assert masks_given(twins[0], monkeypatch, input_ids=batch["input_ids"]) == [None, None]


@pytest.mark.parametrize("twins", ["sliding window"], indirect=True)
def test_a_mask_that_is_more_than_documents_stays_whole(twins, batch, monkeypatch):
    assert {mask.shape for mask in masks_given(twins[0], monkeypatch, **batch)} == {(3, 1, 24, 24)}


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("gqa", [True, False])
def test_every_version_of_the_kernel_is_asked_for_the_same(scaling, window, gqa, monkeypatch):
    """The signature of torch's variable-length attention differs by version; here stands its definition."""

    def attention(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, grouped):
        assert grouped or q.shape[1] == k.shape[1]
        assert max_q >= cu_q.diff().max()
        return packed_attention._document_by_document(q, k, v, cu_q, 0.0, scale)

    if window and gqa:

        def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
            return attention(q, k, v, cu_q, cu_k, max_q, max_k, window_size == (-1, 0), scale, enable_gqa)
    elif window:

        def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
            return attention(q, k, v, cu_q, cu_k, max_q, max_k, window_size == (-1, 0), scale, False)
    else:

        def varlen(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):
            assert is_causal
            return attention(q, k, v, cu_q, cu_k, max_q, max_k, is_causal, None, False)

    torch.manual_seed(0)
    q, k, v = torch.randn(24, 4, 8), torch.randn(24, 2, 8), torch.randn(24, 2, 8)
    ends = torch.tensor([0, 7, 24], dtype=torch.int32)
    expected = packed_attention._document_by_document(q, k, v, ends, 0.0, scaling)
    monkeypatch.setattr(packed_attention, "varlen_attn", varlen)
    torch.testing.assert_close(packed_attention._in_one_kernel(q, k, v, ends, 24, scaling), expected, **TOLERANCE)
