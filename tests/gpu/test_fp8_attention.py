"""Attention in FP8 on a GPU: cuDNN's kernels against the reference that rounds where they do, and in whole models."""

import copy
import functools
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.layers.attention import cudnn as fp8_attention_cudnn
from ds_fp8.layers.attention.fp8_attention import SEED, dequantize_heads, fp8_attention
from ds_fp8.layers.attention.hadamard import Rotation, unrotate
from ds_fp8.layers.decoder.rotary import HeadLayout
from ds_fp8.train import packed_attention
from tests.layers.hugging_face import causal_lm

UNAVAILABLE = fp8_attention_cudnn.unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))]

fp8_attention_reference = functools.partial(fp8_attention, reference=True)
NAMES = ("output", "dq", "dk", "dv")
# Relative errors of output, dq, dk and dv against FP32: one and a half times the reference's
FP8_ERROR = (0.08, 0.16, 0.16, 0.13)


def operands(heads, kv_heads, rows, length, seed=0):
    """q, k and v as views of one matrix, and the output's gradient, whose spread differs by token."""
    torch.manual_seed(seed)
    layout = HeadLayout(heads, kv_heads, 128)
    qkv = torch.randn(rows * length, sum(layout.sizes), device="cuda", dtype=torch.bfloat16)
    spread = torch.randn(rows, length, 1, 1, device="cuda").exp()
    gradient = 1e-4 * spread * torch.randn(rows, length, heads, 128, device="cuda")
    return list(layout.split(qkv, rows, length)), gradient.bfloat16()


def exact(q, k, v, scaling=None):
    q, k, v = (x.float() for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scaling).transpose(1, 2)


def step(attention, inputs, gradient, **options):
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = attention(*leaves, **options)
    output.backward(gradient.to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def relative(found, expected):
    return [
        ((one.float() - other.float()).norm() / other.float().norm()).item()
        for one, other in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 1), (14, 2), (32, 8), (40, 1)])
@pytest.mark.parametrize(("rows", "length"), [(1, 128), (2, 257), (3, 1000), (1, 2048)])
def test_the_kernels_are_the_reference(heads, kv_heads, rows, length):
    inputs, gradient = operands(heads, kv_heads, rows, length)
    ours, reference, wanted = (step(f, inputs, gradient) for f in (fp8_attention, fp8_attention_reference, exact))
    apart, costs, reference_costs = relative(ours, reference), relative(ours, wanted), relative(reference, wanted)
    print(f"{heads}/{kv_heads} {rows}x{length}", *(f"{x:.4f}" for x in (*apart, *costs, *reference_costs)))
    for name, distance, cost, reference_cost in zip(NAMES, apart, costs, reference_costs, strict=True):
        assert distance < 0.7 * reference_cost, name
        assert cost < 1.15 * reference_cost, name


@pytest.mark.parametrize("case", ["no gradient", "equal values", "a gradient of one token"])
def test_gradients_that_are_zero_in_part_or_whole(case):
    """As those of padding, which is a document, and of labels of -100."""
    inputs, gradient = operands(4, 2, 1, 512)
    if case == "equal values":
        inputs[2] = torch.ones_like(inputs[2])
    else:
        gradient[:, 0 if case == "no gradient" else 1 :] = 0
    ours, wanted = (step(f, inputs, gradient) for f in (fp8_attention, exact))
    assert all(x.isfinite().all() for x in ours)
    for found, other, bound in zip(ours, wanted, FP8_ERROR, strict=True):
        assert (found.float() - other.float()).norm() <= bound * other.float().norm() + 1e-6


@pytest.mark.parametrize("outlier", ["q", "k", "v", "gradient", "one token's gradient", "one key for all"])
def test_outliers_cost_what_they_cost_the_reference(outlier):
    inputs, gradient = operands(4, 2, 2, 512)
    q, k, v = inputs
    if outlier in "qkv":
        {"q": q, "k": k, "v": v}[outlier][..., 3] *= 30
    elif outlier == "gradient":
        gradient[..., 5] *= 300
    elif outlier == "one token's gradient":
        gradient[:, 7] *= 3000
    else:
        k[:, :, 0] = 4 * q[:, ::2].mean(2)
        q += 3 * k[:, :, :1].repeat_interleave(2, dim=1) / k[:, :, :1].norm(dim=-1, keepdim=True).amax()
    ours, reference, wanted = (step(f, inputs, gradient) for f in (fp8_attention, fp8_attention_reference, exact))
    costs, reference_costs = relative(ours, wanted), relative(reference, wanted)
    print(outlier, *(f"{x:.4f}" for x in (*costs, *reference_costs)))
    for name, cost, reference_cost in zip(NAMES, costs, reference_costs, strict=True):
        assert cost < 1.2 * reference_cost + 0.005, name


def test_long_rows_keep_their_small_gradients():
    inputs, gradient = operands(7, 1, 1, 16384)
    ours, wanted = step(fp8_attention, inputs, gradient), step(_efficient, inputs, gradient)
    costs = relative(ours, wanted)
    print(*(f"{x:.4f}" for x in costs))
    for name, one, other, cost, bound in zip(NAMES, ours, wanted, costs, FP8_ERROR, strict=True):
        assert cost < bound, name
        if name != "output":
            by_token = (one.float() - other).norm(dim=-1) / other.norm(dim=-1)
            flushed = (other * (one == 0)).norm() / other.norm()
            print(name, f"{by_token.nanmedian():.4f}", f"{flushed:.6f}")
            assert by_token.nanmedian() < bound, name
            assert flushed < 0.01, name  # a tenth of what rounding costs


def _efficient(q, k, v):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        groups = q.shape[1] // k.shape[1]
        k, v = (x.float().repeat_interleave(groups, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q.float(), k, v, is_causal=True).transpose(1, 2)


def test_strides_and_scaling():
    inputs, gradient = operands(4, 2, 2, 384)
    views = step(fp8_attention, inputs, gradient, scaling=0.03)
    contiguous = step(fp8_attention, [x.contiguous() for x in inputs], gradient, scaling=0.03)
    assert torch.equal(views[0], contiguous[0])
    wanted = step(exact, inputs, gradient, scaling=0.03)
    for found in (views, contiguous):
        assert all(cost < bound for cost, bound in zip(relative(found, wanted), FP8_ERROR, strict=True))


def test_infinite_numbers_are_not_hidden():
    inputs, gradient = operands(2, 2, 1, 128)
    gradient[0, 5, 1, 3] = torch.inf
    assert not all(x.isfinite().all() for x in step(fp8_attention, inputs, gradient))


def model_of(**changes):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 512}
    return causal_lm("qwen3", **{**sizes, "_attn_implementation": "sdpa", **changes}).cuda()


def converted(model, attention, fuse="auto"):
    model = copy.deepcopy(model)
    section = {"monitor": {"every": 0}, "fuse": fuse, "attention": {"format": attention}}
    return model, convert(model, parse_fp8({"fp8": section}))


def gradients_of(model, ids, **inputs):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.float().flatten() for p in model.parameters()])


@pytest.mark.parametrize("fuse", ["auto", "off"])
def test_a_model_with_attention_in_fp8(fuse):
    model = model_of()
    ids = torch.randint(1, 97, (2, 256), device="cuda")
    (in_bf16, _), (in_fp8, conversion) = (converted(model, format, fuse) for format in ("bf16", "e4m3"))
    assert len(conversion.attention.layers) == 2
    assert not conversion.attention.emulated
    (loss, gradient), (fp8_loss, fp8_gradient) = (gradients_of(m, ids) for m in (in_bf16, in_fp8))
    assert fp8_loss == pytest.approx(loss, rel=2e-3)
    assert 0 < (fp8_gradient - gradient).norm() < 0.15 * gradient.norm()
    in_fp8.gradient_checkpointing_enable({"use_reentrant": False})
    again_loss, again = gradients_of(in_fp8, ids)
    assert again_loss == fp8_loss
    assert (again - fp8_gradient).norm() < 0.02 * gradient.norm()  # dq is summed in another order


def test_rows_of_several_documents_are_in_bf16():
    packed_attention.register()
    model = model_of(_attn_implementation="packed")
    (in_bf16, _), (in_fp8, conversion) = (converted(model, format) for format in ("bf16", "e4m3"))
    assert conversion.attention.packed
    ids = torch.randint(1, 97, (1, 256), device="cuda")
    whole, parts = torch.arange(256, device="cuda")[None], torch.arange(256, device="cuda")[None] % 100
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of_whole, of_parts = (
            [m(input_ids=ids, position_ids=p, use_cache=False).logits for m in (in_bf16, in_fp8)]
            for p in (whole, parts)
        )
    assert not torch.equal(*of_whole)
    assert torch.equal(*of_parts)


def test_heads_of_64_features_are_refused():
    with pytest.raises(UserError, match="have 64 features"):
        converted(model_of(head_dim=64), "e4m3")


AFTER_TORCH = """
import torch
torch.nn.functional.conv2d(torch.ones(1, 8, 8, 8, device="cuda").half(), torch.ones(8, 8, 3, 3, device="cuda").half())
from ds_fp8.layers.attention.cudnn import unavailable
from ds_fp8.layers.attention.fp8_attention import fp8_attention
assert unavailable() is None, unavailable()
q = torch.randn(1, 2, 256, 128, device="cuda").bfloat16()
print(fp8_attention(q, q, q).shape)
"""


def test_torchs_own_cudnn_may_be_loaded_first():
    run = subprocess.run([sys.executable, "-c", AFTER_TORCH], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize(("heads", "kv_heads", "rows", "length"), [(2, 2, 1, 128), (14, 2, 2, 257), (28, 4, 3, 1000)])
def test_codes_become_numbers_in_one_pass_to_the_bit(heads, kv_heads, rows, length):
    codes = torch.randn(rows, length, heads, 128, device="cuda").to(torch.float8_e5m2)
    mean = torch.randn(rows, kv_heads, 1, 128, device="cuda").bfloat16()
    scale = torch.tensor(2.0**-7, device="cuda")
    exact = dequantize_heads(codes.cpu(), scale.cpu(), torch.bfloat16).cuda()
    assert torch.equal(dequantize_heads(codes, scale, torch.bfloat16), exact)
    rotated = dequantize_heads(codes, scale, torch.bfloat16, rotated=True)
    assert torch.equal(rotated, unrotate(exact.flatten(0, 2), Rotation(128, SEED)).view(exact.shape))
    with_mean = dequantize_heads(codes.cpu(), scale.cpu(), torch.bfloat16, mean.cpu()).cuda()
    assert torch.equal(dequantize_heads(codes, scale, torch.bfloat16, mean), with_mean)
