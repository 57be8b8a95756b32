"""Attention in FP8: the reference, its scales, which modules and calls of a model get it, and what is refused."""

import copy
import functools
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_fp8.casts.primitives import scale_from_amax
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.layers.attention import documents
from ds_fp8.layers.attention import format as attention_format
from ds_fp8.layers.attention.cudnn import FORWARD, HEADS_A_CALL, P_SCALE, GradientScales, factors, kv_heads_of_a_call
from ds_fp8.layers.attention.fp8_attention import (
    SMALLEST_BOUND,
    Reference,
    fp8_attention,
    gradient_scales,
    quantize_heads,
)
from ds_fp8.layers.decoder.rotary import HeadLayout
from ds_fp8.train import packed_attention
from tests.layers.hugging_face import causal_lm, tokens
from tests.layers.moe import mixture

fp8_attention_reference = functools.partial(fp8_attention, reference=True)
FP8_ERROR = {"output": 0.06, "dq": 0.13, "dk": 0.13, "dv": 0.1}
emulated = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there are kernels, for heads of 128 alone")


def operands(rows, heads, kv_heads, length, features):
    generator = torch.Generator().manual_seed(length)
    layout = HeadLayout(heads, kv_heads, features)
    qkv = torch.randn(rows * length, sum(layout.sizes), generator=generator).bfloat16()
    gradient = torch.randn(rows, length, heads, features, generator=generator).mul(1e-4).bfloat16()
    return layout.split(qkv, rows, length), gradient


def step(attention, inputs, gradient):
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = attention(*leaves)
    output.backward(gradient.to(output.dtype))
    return dict(zip(FP8_ERROR, [output.detach(), *(leaf.grad for leaf in leaves)], strict=True))


def exact(q, k, v, scaling=None):
    q, k, v = (x.float() for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scaling).transpose(1, 2)


@pytest.mark.parametrize(
    ("shape", "scaling"),
    [((2, 4, 2, 33, 64), None), ((1, 6, 1, 130, 128), None), ((1, 2, 2, 400, 128), None), ((1, 2, 1, 40, 64), 0.02)],
    ids=str,
)
def test_the_reference_is_attention_but_for_its_casts(shape, scaling):
    inputs, gradient = operands(*shape)
    ours, wanted = (
        step(lambda *qkv, f=f: f(*qkv, scaling=scaling), inputs, gradient) for f in (fp8_attention_reference, exact)
    )
    for name, bound in FP8_ERROR.items():
        assert ours[name].shape == wanted[name].shape
        assert (ours[name].float() - wanted[name]).norm() <= bound * wanted[name].norm(), name
    assert (ours["output"].float() - wanted["output"]).norm() > 0.01 * wanted["output"].norm()


def test_numbers_of_fp8_are_not_changed():
    # One token attends to itself alone: p is 1, the output is v, and dv the gradient.
    inputs, gradient = operands(1, 2, 1, 1, 64)
    v = quantize_heads(inputs[2].transpose(1, 2), FORWARD).dequantize().bfloat16().transpose(1, 2)
    ours = step(fp8_attention_reference, (*inputs[:2], v), gradient)
    assert torch.equal(ours["output"], v.transpose(1, 2).repeat_interleave(2, dim=2))
    assert not ours["dq"].any()
    assert not ours["dk"].any()


@pytest.mark.parametrize(("biased", "of"), [("k", ("output", "dq", "dk", "dv")), ("v", ("output", "dq", "dk"))])
def test_an_offset_common_to_all_tokens_costs_nothing(biased, of):
    """As of a bias of k_proj or v_proj, many times larger than what differs between tokens."""
    inputs, gradient = operands(2, 4, 2, 200, 64)
    place = "qkv".index(biased)
    # Of so few bits that BF16 holds the sums exactly.
    plain = (4 * inputs[place].float()).round().clamp(-12, 12) / 4
    offset = (30 * torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(1))).round().clamp(-60, 60)
    inputs = [x if i != place else (plain + offset).bfloat16() for i, x in enumerate(inputs)]
    assert torch.equal(inputs[place].float() - offset, plain)
    ours, wanted = step(fp8_attention_reference, inputs, gradient), step(exact, inputs, gradient)
    for name in of:
        cost = (ours[name].float() - wanted[name]).norm()
        if (biased, name) == ("v", "output"):
            in_output = offset.transpose(0, 1).repeat_interleave(2, 1)  # [1, heads, D]
            # Beside an error of FP8 in what varies, BF16 rounds the sum: by 2^-9 at most, 2^-9 / sqrt(3) in the mean.
            assert cost <= FP8_ERROR[name] * (wanted[name] - in_output).norm() + 2.0**-9 * wanted[name].norm()
        else:
            assert cost <= FP8_ERROR[name] * wanted[name].norm(), name


def test_a_large_feature_of_queries_and_keys_costs_no_more_than_others():
    (q, k, v), gradient = operands(2, 4, 2, 200, 64)
    q, k = q.clone(), k.clone()
    q[..., 5] *= 8
    k[..., 5] *= 8
    ours, wanted = step(fp8_attention_reference, (q, k, v), gradient), step(exact, (q, k, v), gradient)
    for name in ("output", "dk", "dv"):
        assert (ours[name].float() - wanted[name]).norm() <= FP8_ERROR[name] * wanted[name].norm(), name


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e4])
@pytest.mark.parametrize("outlier", ["none", "token", "key"])
def test_bounds_hold_and_are_not_far(size, outlier):
    """No cast of backward saturates, and what is typical of a tensor lies within E5M2's normal numbers."""
    (q, k, v), gradient = operands(2, 4, 2, 200, 64)
    gradient = (gradient.float() * size).bfloat16()
    if outlier == "token":
        gradient[:, 3] *= 1000
    elif outlier == "key":
        k[:, :, 0] = 3 * q[:, ::2].mean(2) / q[:, ::2].mean(2).norm(dim=-1, keepdim=True)
        q += 4 * k[:, :, :1].repeat_interleave(2, dim=1)
    q8, k8 = (quantize_heads(x.transpose(1, 2), FORWARD) for x in (q, k))
    scales = gradient_scales(gradient, q8, k8, v.float().norm(dim=-1).amax(), 0.125)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(exact(*leaves), leaves, gradient.float())
    for name, x in zip(GradientScales._fields[1:], found, strict=True):
        in_units = x.abs() / getattr(scales, name)
        assert in_units.max() < 57344, name
        if size != 1e-30:  # where bounds do not follow
            assert in_units.median() > 2.0**-14, name


def test_probabilities_are_cast_in_units_of_their_largest():
    q8, k8, v8 = (quantize_heads(x.transpose(1, 2), FORWARD) for x in operands(1, 1, 1, 8, 64)[0])
    assert P_SCALE == 448
    o, log_sums = Reference.forward(q8, k8, v8, 0.0)
    assert torch.allclose(log_sums, torch.arange(1.0, 9).log())
    mean = v8.dequantize().cumsum(1) / torch.arange(1, 9).view(1, -1, 1, 1)
    assert torch.allclose(o.float() * v8.scale, mean, rtol=2.0**-4, atol=1e-3)


def test_nothing_is_hidden():
    inputs, gradient = operands(1, 2, 1, 8, 64)
    inputs[0][0, 1, 3, 5] = torch.inf
    assert step(fp8_attention_reference, inputs, gradient)["output"].isnan().any()


def test_graphs_run_around_it():
    inputs, gradient = operands(1, 2, 1, 24, 64)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: 2 * fp8_attention(q, k, v), backend="eager")
    ours, wanted = step(compiled, inputs, gradient), step(lambda *qkv: 2 * fp8_attention(*qkv), inputs, gradient)
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


def converted(model, attention="e4m3", **section):
    model = copy.deepcopy(model)
    section = {"monitor": {"every": 0}, "linear": {"backend": "reference"}, **section}
    return model, convert(model, parse_fp8({"fp8": {**section, "attention": {"format": attention}}}))


def gradients_of(model, ids, **inputs):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.float().flatten() for p in model.parameters()])


@emulated
@pytest.mark.parametrize("fuse", ["auto", "off"])
def test_layers_fused_or_not_compute_attention_in_fp8(fuse):
    model, ids = causal_lm("qwen2"), tokens(2, 48)
    (in_bf16, nothing), (in_fp8, conversion) = (converted(model, format, fuse=fuse) for format in ("bf16", "e4m3"))
    assert nothing.attention is None
    assert conversion.attention.layers == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert not conversion.attention.left
    assert conversion.attention.emulated
    assert "_attn_implementation" not in in_fp8.config.to_dict()
    (loss, gradient), (fp8_loss, fp8_gradient) = (gradients_of(m, ids) for m in (in_bf16, in_fp8))
    assert fp8_loss == pytest.approx(loss, rel=2e-3)
    assert 0.02 < (fp8_gradient - gradient).norm() / gradient.norm() < 0.15

    in_fp8.gradient_checkpointing_enable({"use_reentrant": True})
    in_fp8.enable_input_require_grads()
    again_loss, again = gradients_of(in_fp8, ids)
    assert again_loss == fp8_loss
    assert torch.equal(again, fp8_gradient)

    back, _ = converted(in_fp8, "bf16", fuse=fuse)
    assert back.config._attn_implementation == "sdpa"


@emulated
def test_calls_that_are_not_causal_over_whole_rows_stay_in_bf16():
    model, ids = causal_lm("qwen2"), tokens(2, 32)
    (in_bf16, _), (in_fp8, _) = (converted(model, format) for format in ("bf16", "e4m3"))
    mask = torch.ones_like(ids)
    assert not torch.equal(*(m(input_ids=ids, attention_mask=mask).logits for m in (in_bf16, in_fp8)))
    mask[0, :3] = 0
    attention_format._warn.cache_clear()
    with pytest.warns(UserWarning, match="attention runs in BF16 where the mask is not causal"):
        in_fp8(input_ids=ids, attention_mask=mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        assert torch.equal(*(m(input_ids=ids, attention_mask=mask).logits for m in (in_bf16, in_fp8)))
        in_fp8.eval().generate(ids[:1, :4], max_new_tokens=2, do_sample=False)


@emulated
def test_auto_leaves_short_rows_in_bf16(monkeypatch):
    monkeypatch.setattr(documents, "LONG", 32)
    model = causal_lm("qwen2")
    (in_bf16, _), (in_fp8, _), (auto, conversion) = (converted(model, name) for name in ("bf16", "e4m3", "auto"))
    assert conversion.attention.only_long
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length, expected in ((31, in_bf16), (32, in_fp8)):
            ids = tokens(2, length)
            assert torch.equal(auto(input_ids=ids).logits, expected(input_ids=ids).logits)
            assert not torch.equal(in_bf16(input_ids=ids).logits, in_fp8(input_ids=ids).logits)


@emulated
def test_packed_rows_are_in_fp8_where_they_hold_one_document():
    packed_attention.register()
    model = causal_lm("qwen2", attn_implementation="packed")
    (in_bf16, _), (in_fp8, conversion) = (converted(model, format) for format in ("bf16", "e4m3"))
    assert conversion.attention.packed
    ids, places = tokens(2, 32), torch.arange(32).repeat(2, 1)
    assert not torch.equal(*(m(input_ids=ids, position_ids=places, use_cache=False).logits for m in (in_bf16, in_fp8)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        several = {"input_ids": ids, "position_ids": places % 20, "use_cache": False}
        assert torch.equal(*(m(**several).logits for m in (in_bf16, in_fp8)))


@emulated
@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("qwen2", {"attention_dropout": 0.1}, "dropout"),
        ("gemma2", {}, "caps its scores"),
        ("deepseek_v32", {"num_key_value_heads": 4, "index_head_dim": 64}, "indexer"),
        ("qwen2", {"attn_implementation": "eager"}, '"eager"'),
        ("mamba", {}, "none calls transformers' attention functions"),
    ],
)
def test_models_that_cannot_are_refused(architecture, changes, reason):
    with pytest.raises(UserError, match=reason) as refused:
        converted(causal_lm(architecture, **changes))
    assert refused.value.key == "fp8.attention.format"


@emulated
def test_long_documents_of_packed_rows_are_in_fp8_each_by_itself(monkeypatch):
    monkeypatch.setattr(documents, "LONG", 16)
    packed_attention.register()
    model, ids = causal_lm("qwen2", attn_implementation="packed"), tokens(1, 48)
    (in_bf16, _), (in_fp8, _) = (converted(model, format, fuse="off") for format in ("bf16", "e4m3"))
    counts = (20, 5, 7, 16)
    places = torch.cat([torch.arange(count) for count in counts])[None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said to stay in BF16
        found = in_fp8(input_ids=ids, position_ids=places, use_cache=False).logits.split(counts, 1)
    for piece, count, document in zip(ids.split(counts, 1), counts, found, strict=True):
        places = torch.arange(count)[None]
        alone, in_16_bits = (m(input_ids=piece, position_ids=places, use_cache=False).logits for m in (in_fp8, in_bf16))
        wanted, other = (alone, in_16_bits) if count >= 16 else (in_16_bits, alone)
        assert (document - wanted).norm() < 0.2 * (document - other).norm()


def test_factors_of_the_kernels_are_finite_for_all_bounds_of_gradients():
    for each in itertools.product([1e-30, 1e-12, 1.0, 1e6], repeat=3):
        bounds = torch.tensor([1.0, *each]).clamp_min(SMALLEST_BOUND)  # of zero gradients the smallest
        scales = GradientScales(*scale_from_amax(bounds, "e5m2", "pow2").unbind())
        shared, a, b = factors(scales)
        for factor, scale in ((a * shared, scales.dq), (shared / a, scales.dk), (b * shared, scales.dv)):
            assert (factor * scale).item() == pytest.approx(1, rel=1e-5), each


WINDOWS = {
    "in the last layer": (causal_lm, "qwen2", {"use_sliding_window": True, "max_window_layers": 1}, [0]),
    "in the configuration alone": (causal_lm, "mistral", {}, []),
    "none": (causal_lm, "mistral", {"sliding_window": None}, [0, 1]),
    # Qwen2-MoE: without windows its configuration has one of 0 tokens, and with some, every second layer has it.
    "not used": (mixture, "qwen2_moe", {}, [0, 1]),
    "kept by some layers alone": (mixture, "qwen2_moe", {"use_sliding_window": True}, [1]),
}


@emulated
@pytest.mark.parametrize("case", WINDOWS)
def test_windows_keep_layers_in_bf16(case):
    make, architecture, changes, in_fp8 = WINDOWS[case]
    model = make(architecture, **{"sliding_window": 16, **changes})
    if not in_fp8:
        with pytest.raises(UserError, match="sliding window"):
            converted(model)
        return
    attention = converted(model)[1].attention
    assert attention.layers == [f"model.layers.{index}.self_attn" for index in in_fp8]
    assert set(attention.left.values()) <= {"it has a sliding window"}


@pytest.mark.parametrize(("use", "told"), [(False, [None, None]), (True, [16, None])])
def test_fused_layers_tell_attention_of_the_windows_that_they_have(use, told, monkeypatch):
    seen, sdpa = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def noted(*args, sliding_window=None, **options):
        seen.append(sliding_window)
        return sdpa(*args, **options)

    model, _ = converted(mixture("qwen2_moe", use_sliding_window=use, sliding_window=16), "bf16")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", noted)
    model(input_ids=tokens(1, 8), use_cache=False)
    assert seen == told


@emulated
def test_calls_in_fp16_stay_in_bf16_and_say_so():
    model = causal_lm("qwen2").half()
    (in_16_bits, _), (in_fp8, _) = (converted(model, format) for format in ("bf16", "e4m3"))
    ids = tokens(1, 32)
    with pytest.warns(UserWarning, match="FP16"):
        found = in_fp8.train()(input_ids=ids, use_cache=False).logits
    assert torch.equal(found, in_16_bits.train()(input_ids=ids, use_cache=False).logits)


def test_a_gpu_without_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention_format.cudnn, "unavailable", lambda: "Transformer Engine is not installed")
    with pytest.raises(UserError, match="Transformer Engine is not installed"):
        attention_format.use_fp8_attention(causal_lm("qwen2"))


@pytest.mark.parametrize(("heads", "kv_heads", "expected"), [(28, 4, 4), (32, 8, 4), (32, 32, 16), (40, 1, 1)])
def test_backward_is_called_for_equal_parts_of_few_heads(heads, kv_heads, expected):
    assert kv_heads_of_a_call(heads, kv_heads) == expected
    assert kv_heads % expected == 0
    assert expected == 1 or expected * heads // kv_heads <= HEADS_A_CALL


# ---------------------------------------------------------------- documents of packed rows


ROWS = [
    [[1]],
    [[7]],
    [[3, 1, 2]],
    [[1, 1, 1, 1]],
    [[5, 8], [13], [1, 12]],
    [[64] * 3 + [65], [257]],
    [[1] * 130, [129, 1]],
]


def positions_of(rows):
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


@pytest.mark.parametrize("more", [0, 17])
@pytest.mark.parametrize("rows", ROWS)
def test_ends_repeat_the_last_one(rows, more):
    positions = positions_of(rows)
    held = sum(map(len, rows))
    expected = [0]
    for length in (length for row in rows for length in row):
        expected.append(expected[-1] + length)
    found = documents.ends(positions == 0, held + more)
    assert found.dtype == torch.int32
    assert found.tolist() == expected + [positions.numel()] * more
    assert documents.count(positions) == held


def test_ends_are_found_without_a_read():
    with FakeTensorMode():
        assert documents.ends(torch.ones(2, 8, dtype=torch.bool), 5).shape == (6,)


@pytest.mark.parametrize(
    "positions",
    [[[1, 2, 3]], [[0, 1, 3]], [[0, 1, 1]], [[0, 1, 2], [0, 2, 0]], [[0, 1, 2], [1, 2, 3]], [[0, -1, 0]], [[2, 1, 0]]],
)
def test_positions_that_tell_no_documents(positions):
    assert documents.count(torch.tensor(positions)) == 0


def test_a_noted_number_is_not_read_again_until_somebody_writes():
    positions = torch.zeros(2, 6, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError):
        documents.count(positions)
    documents.cache(positions, documents._COUNT, 3)
    assert documents.count(positions) == 3
    positions.add_(1)
    with pytest.raises(RuntimeError):
        documents.count(positions)


def test_what_is_fixed_ends_with_the_block():
    with documents.fixed(4), documents.fixed(8):
        assert documents.fixed_at() == 8
    assert documents.fixed_at() is None
    with pytest.raises(KeyError), documents.fixed(4):
        raise KeyError
    assert documents.fixed_at() is None
