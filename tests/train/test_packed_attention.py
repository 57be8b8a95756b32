"""The attention implementation "packed": as sdpa with a whole mask, in forward, backward and generation."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    masking_utils,
)
from transformers.masking_utils import create_causal_mask

from ds_fp8.graphs.capture import masks_as_outside
from ds_fp8.layers.attention import documents
from ds_fp8.train import packed_attention
from ds_fp8.train.batches import StepBatches

TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}  # FP32, sums in another order
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


def by_definition(q, k, v, ends, scale):
    """Attention [T, heads, D] of each token to the tokens of its document up to it."""
    documents = torch.bucketize(torch.arange(len(q)), ends[1:].long(), right=True)
    seen = (documents[:, None] == documents) & torch.ones(len(q), len(q)).tril().bool()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (k, v))
    options = {"attn_mask": seen, "scale": scale}
    return torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, **options).transpose(0, 1)


def versions(attention):
    """Signatures of torch's variable-length attention by version, around their definition."""

    def with_groups(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        return attention(q, k, v, cu_q, max_q, window_size == (-1, 0), scale, enable_gqa)

    def with_window(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        return attention(q, k, v, cu_q, max_q, window_size == (-1, 0), scale, False)

    def with_causality(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):
        return attention(q, k, v, cu_q, max_q, is_causal, None, False)

    return with_groups, with_window, with_causality


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("version", range(3))
def test_every_version_of_the_kernel_is_asked_for_the_same(scaling, version, monkeypatch):
    def attention(q, k, v, ends, longest, causal, scale, grouped):
        assert causal
        assert grouped or q.shape[1] == k.shape[1]
        assert longest >= ends.diff().max()
        return by_definition(q, k, v, ends, scale)

    torch.manual_seed(0)
    q, k, v = torch.randn(24, 4, 8), torch.randn(24, 2, 8), torch.randn(24, 2, 8)
    ends = torch.tensor([0, 7, 24], dtype=torch.int32)
    expected = by_definition(q, k, v, ends, scaling)
    monkeypatch.setattr(packed_attention, "varlen_attn", versions(attention)[version])
    torch.testing.assert_close(packed_attention._in_one_kernel(q, k, v, ends, 24, scaling), expected, **TOLERANCE)
    heads = (x.unflatten(0, (2, 12)).transpose(1, 2) for x in (q, k, v))
    ends = torch.tensor([0, 7, 12, 24], dtype=torch.int32)
    found, _ = packed_attention.packed_attention(torch.nn.Module(), *heads, ends, scaling=scaling)
    torch.testing.assert_close(found.flatten(0, 1), by_definition(q, k, v, ends, scaling), **TOLERANCE)


@pytest.mark.parametrize("most", [8, 9, 40])
@pytest.mark.parametrize("twins", ["llama", "qwen3"], indirect=True)
def test_documents_of_no_tokens_change_no_bit(twins, batch, most, monkeypatch):
    model, results = twins[0], []
    for padded in (0, most):
        model.zero_grad()
        with masks_as_outside(padded) if padded else contextlib.nullcontext():
            masks = masks_given(model, monkeypatch, **batch)
            assert {len(mask) for mask in masks} == {(padded or 8) + 1}
            loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("twins", ["llama"], indirect=True)
def test_rows_of_one_document_are_packed_in_a_graph_of_packed_rows(twins, batch, monkeypatch):
    plain = batch | {"position_ids": torch.arange(24).expand(3, 24)}
    with masks_as_outside(4):
        assert masks_given(twins[0], monkeypatch, **plain)[0].tolist() == [0, 24, 48, 72, 72]
    with masks_as_outside():
        assert masks_given(twins[0], monkeypatch, **plain) == [None, None]


def mask_of(batch):
    return create_causal_mask(
        config=LlamaConfig(**SIZES, attn_implementation="packed"),
        inputs_embeds=torch.empty(3, 24, 40),
        attention_mask=None,
        past_key_values=None,
        position_ids=batch["position_ids"],
    )


def test_a_mask_of_fixed_length_is_made_without_a_read(batch):
    packed_attention.register()
    assert mask_of(batch).tolist() == [0, 7, 12, 24, 48, 49, 50, 52, 72]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(x) for name, x in batch.items()}
        with pytest.raises(Exception, match=r"aten\._local_scalar_dense|aten\.nonzero"):
            mask_of(fake)
        with masks_as_outside(16):
            assert mask_of(fake).shape == (17,)


@pytest.mark.parametrize("twins", ["sliding window"], indirect=True)
def test_a_mask_that_is_more_than_documents_is_in_no_graph(twins, batch):
    """Whatever the batch: here no document is as long as the window."""
    positions = torch.arange(24).expand(3, 24) % 2
    with masks_as_outside(64), pytest.raises(ValueError, match="has a window"):
        twins[0](input_ids=batch["input_ids"], position_ids=positions, use_cache=False)


def test_batches_know_their_documents_without_a_read(batch):
    moved = StepBatches([batch], torch.ones(()), 72).to(torch.device("meta"))
    assert documents.count(moved.batches[0]["position_ids"]) == 8


def in_positions_of_documents(mask_function, positions):
    """The mask function as transformers has it since 5.23, of the positions in a document."""

    def inner_mask(row, head, query, key):
        return mask_function(row, head, positions[row, query], positions[row, key])

    return inner_mask


def test_the_masks_of_packed_rows_are_known_by_their_parts():
    documents, positions = torch.tensor([[1, 1, 2, 2]]), torch.tensor([[0, 1, 0, 1]])
    within = masking_utils.packed_sequence_mask_function(documents)
    causal, window = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(2)
    known = [[causal, within], [within, causal], [within, in_positions_of_documents(causal, positions)]]
    others = [[window, within], [within, in_positions_of_documents(window, positions)], [causal, window], [within] * 2]
    others += [[causal], [causal, within, window], [within, masking_utils.bidirectional_mask_function]]
    for parts in known:
        assert packed_attention._is_of_documents(masking_utils.and_masks(*parts))
    for parts in others:
        assert not packed_attention._is_of_documents(masking_utils.and_masks(*parts))
    assert not packed_attention._is_of_documents(causal)
