"""Decoder layers and MLPs that can be fused: recognised by their parts and by a trial run on random weights.

A layer with the right parts may compute something else (scale its residual, norm after the product, rotate half of a
head). So its own forward runs, on the CPU in FP32, on a stand-in: a shallow copy with small random matrices. The layer
is fused only if the result is that of the plain formula: at small magnitudes (eps), at large ones (clamping), and at
far positions (scaled queries). A dependence on the row length, say, stays undetected.

A fused forward reads the weights of its submodules, also inside plain LoRA, and calls none of them: hooks, other
adapters and replaced forwards would silently not run. Modules with such attachments are not fused; a fused module
checks for new ones in every forward (`PartsSnapshot`), and then calls its submodules.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import warnings
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_fp8.config.errors import first_line
from ds_fp8.layers.attention.format import window_of
from ds_fp8.layers.decoder.rotary import HeadLayout, HeadNorms, HeadTransform, rotate
from ds_fp8.layers.linear.adapters import is_lora, why_not_plain
from ds_fp8.layers.linear.gated_activation import ACTIVATIONS, activate, gating_of
from ds_fp8.layers.linear.linear import FP8Linear, base_of


def attachment_of(module: nn.Module) -> str | None:
    """Return a description of what only a call of the module would run, or None."""
    if "forward" in vars(module):
        return "a forward set on the instance"
    if module._forward_hooks or module._forward_pre_hooks:
        return "forward hooks"
    if module._backward_hooks or module._backward_pre_hooks:
        return "backward hooks"
    if "parametrizations" in module._modules:
        return "a parametrization"
    return None


class PartsSnapshot:
    """The submodules of a module when its forward was fused, to find later changes."""

    def __init__(self, root: nn.Module, called: Collection[str] = ()):
        # called: children that the fused forward calls, whose attachments run
        self._parts = [
            (owner._modules, own_name, part, type(part), f"{name}.{own_name}".lstrip("."))
            for name, owner in root.named_modules()
            for own_name, part in owner.named_children()
            if f"{name}.{own_name}".lstrip(".").split(".")[0] not in called
        ]
        self._lora = [(name, part) for _, _, part, _, name in self._parts if is_lora(part)]
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        # without classes: pickle does not find those made at run time
        return vars(self) | {"_parts": [(siblings, own, part, name) for siblings, own, part, _, name in self._parts]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._parts = [(siblings, own, part, type(part), name) for siblings, own, part, name in self._parts]

    def change(self) -> str | None:
        """Return what was replaced or attached since, or None."""
        for siblings, own_name, part, kind, name in self._parts:
            # in the owner's dictionary: getattr of a module is slow, and this runs in every forward
            now = siblings.get(own_name)
            if now is not part or type(part) is not kind:
                return f"{name} was replaced by a {type(now).__module__}.{type(now).__qualname__}"
            if (found := attachment_of(part)) is not None:
                return f"{name} has {found}"
        for name, part in self._lora:
            if part.merged:
                return f"{name} has merged adapters"
            if (found := why_not_plain(part)) is not None:
                return f"{name} has an adapter beyond plain LoRA ({found})"
        return None

    def changed(self) -> bool:
        """Return whether the submodules have to be called because of a change; warn at the first."""
        found = self.change()
        if found is not None and not self._warned:
            self._warned = True
            text = f"fused layers call their modules one by one, still in FP8: {found}, which a fused forward skips"
            warnings.warn(text, stacklevel=2)
        return found is not None


TOLERANCE = 1e-4  # largest relative difference in FP32 of equal forwards

# (magnitude of the inputs, factor on the trial before, first position)
TRIALS = ((1.0, 1.0, 0), (1e3, 1e3, 10**6), (1e-3, 1e-6, 10**6))

HIDDEN, INTERMEDIATE, TOKENS = 32, 48, 6  # of the stand-in, whose heads are the layer's

ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
MLP_HALF = {"mlp", "post_attention_layernorm"}  # called if the attention half alone is fused
IN_PLACE = re.compile(r"\w\.[a-z]\w*[a-z]_\(|[-+*/]= ")  # x.add_( or x += y


class Unfusable(Exception):
    """The reason why a layer or MLP is not fused."""


def head_layout_of(attention: nn.Module) -> HeadLayout:
    """Return the heads of an attention with q_proj, k_proj, v_proj and o_proj. Raises Unfusable."""
    parts = dict(attention.named_children())
    _expect(parts, ATTENTION_PARTS, HEAD_NORMS, "attention")
    q, k, v, o = (_fp8_linear(parts[name], name) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    # not hidden size / heads: several models have heads of another size
    head_dim = getattr(attention, "head_dim", None)
    defined = all(hasattr(attention, name) for name in ("config", "scaling", "attention_dropout"))
    if not isinstance(head_dim, int) or not defined:
        raise Unfusable("its attention does not define its head_dim, scaling, attention_dropout and config")
    if k.out_features != v.out_features or o.in_features != q.out_features or q.out_features % k.out_features:
        raise Unfusable("its attention has heads of several sizes")
    if head_dim % 2 or q.out_features % head_dim or k.out_features % head_dim:
        raise Unfusable(f"its attention's projections are not a whole number of heads of {head_dim}")
    if len({part.bias is None for part in (q, k, v)}) > 1:
        raise Unfusable("some of q_proj, k_proj and v_proj have a bias and others have none")
    if parts.keys() & HEAD_NORMS and not parts.keys() >= HEAD_NORMS:
        raise Unfusable("only one of q and k has a norm")
    rope = getattr(attention.config, "rope_parameters", None) or {}
    partial = getattr(attention.config, "partial_rotary_factor", None) or rope.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise Unfusable("it rotates only a part of each head")
    return HeadLayout(q.out_features // head_dim, k.out_features // head_dim, head_dim)


def gated_activation_of(mlp: nn.Module) -> str:
    """Return the activation of an MLP with gate_proj, up_proj and down_proj without biases. Raises Unfusable."""
    parts = dict(mlp.named_children())
    function = parts.pop("act_fn", None) or parts.pop("activation_fn", None) or getattr(mlp, "act_fn", None)
    _expect(parts, MLP_PARTS, set(), "MLP")
    for name in sorted(MLP_PARTS):
        if _fp8_linear(parts[name], name).bias is not None:
            raise Unfusable(f"{name} has a bias")
    if not callable(function):
        raise Unfusable("its MLP has no act_fn")
    activation = gating_of(lambda gate, up: function(gate) * up)
    if activation is None:
        raise Unfusable(f"its activation is none of {', '.join(ACTIVATIONS)}")
    return activation


def changes_in_place(module: nn.Module) -> bool:
    """Return whether the source of a module's forward has in-place operations.

    The output of a ZeRO-3 leaf module is the view of an autograd function, which must not be changed in place.
    """
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):  # made at run time
        return False
    return IN_PLACE.search(source) is not None


def norm_eps(norm: nn.Module) -> float:
    if type(norm).__module__.startswith("peft."):
        raise Unfusable(f"a norm carries an adapter ({type(norm).__name__}), which a fused forward skips")
    for name in ("variance_epsilon", "eps"):
        if isinstance(getattr(norm, name, None), float):
            return getattr(norm, name)
    raise Unfusable(f"{type(norm).__name__} does not define its epsilon")


@torch.no_grad()
def verify_layer(layer: nn.Module, layout: HeadLayout, activation: str | None) -> bool:
    """Compare the layer's own forward with the formula; return whether it returns a tuple. Raises Unfusable.

    activation: of its gated MLP; None: the MLP is called, whatever it computes.
    """
    called = MLP_HALF if activation is None else set()
    _expect(dict(layer.named_children()), LAYER_PARTS, set(), "layer", called)
    attention = layer.self_attn
    small_attention = _stand_in(attention)
    small_attention.config = copy.copy(attention.config)
    # the model's own attention implementation may need a GPU or a mask
    small_attention.config._attn_implementation = "sdpa"
    small_attention.attention_dropout = 0.0  # an argument of the attention in the fused layer too
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        for name in ATTENTION_PARTS:
            part = getattr(attention, name)
            sizes = (part.in_features, HIDDEN) if name == "o_proj" else (HIDDEN, part.out_features)
            # small along the hidden size only: the layer's code may rely on the size and number of heads
            setattr(small_attention, name, nn.Linear(*sizes, bias=part.bias is not None))
        for name in HEAD_NORMS & dict(attention.named_children()).keys():
            setattr(small_attention, name, _small_norm(getattr(attention, name), layout.head_dim))
        small = _stand_in(layer)
        small.self_attn = small_attention
        small.mlp = nn.Linear(HIDDEN, HIDDEN) if activation is None else _small_mlp(layer.mlp)
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(small, name, _small_norm(getattr(layer, name), HIDDEN))
        x = torch.randn(2, TOKENS, HIDDEN)
        # random angles, equal for both halves of a head: shows a forward that rotates other pairs
        angle = torch.rand(1, TOKENS, layout.head_dim // 2) * 6
        rotation = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        positions = torch.arange(TOKENS)[None]
    with _plain_attention(small_attention):
        for size, factor, first in TRIALS:
            _resize(small, factor)
            options = {"position_ids": positions + first, "position_embeddings": rotation}
            result = _run(type(layer), small, x * size, attention_mask=None, **options)
            output = result[0] if isinstance(result, tuple) else result
            _compare(output, _layer_reference(small, x * size, rotation, layout, activation), "layer")
    return isinstance(result, tuple)


def _resize(layer: nn.Module, factor: float) -> None:
    # Scales the activations inside, which norms make independent of the input's magnitude. k is divided by q's factor,
    # to keep the attention scores; down_proj by one of the two factors that gate and up bring.
    up, down = ("q_proj", "q_norm", "v_proj", "post_attention_layernorm"), ("k_proj", "k_norm", "down_proj")
    factors = dict.fromkeys(up, factor) | dict.fromkeys(down, 1 / factor)
    for name, parameter in layer.named_parameters():
        parameter.mul_(factors.get(name.split(".")[-2], 1))


@torch.no_grad()
def verify_mlp(mlp: nn.Module, activation: str) -> None:
    """Compare the MLP's own forward with the formula. Raises Unfusable."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        small, x = _small_mlp(mlp), torch.randn(2, TOKENS, HIDDEN)
    for size, *_ in TRIALS:
        _compare(_run(type(mlp), small, x * size), _mlp_reference(small, x * size, activation), "MLP")


@contextlib.contextmanager
def _plain_attention(attention: nn.Module) -> Iterator[None]:
    """Register transformers' attention as "sdpa", where DeepSpeed-Ulysses has one with collectives.

    Raises Unfusable for arguments that "sdpa" ignores: another window than the module's, a cap of the scores.
    """
    registered, window = ALL_ATTENTION_FUNCTIONS["sdpa"], window_of(attention)

    def plain(*args: Any, sliding_window: int | None = window, **options: Any) -> Any:
        others = options.keys() - {"dropout", "scaling", "position_ids", "use_cache"}
        more = [key for key in others if options[key] is not None]
        if more or (sliding_window or None) != window:
            raise Unfusable(f"its attention is given {', '.join(more) or f'a window of {sliding_window}'}")
        return sdpa_attention_forward(*args, sliding_window=sliding_window, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = registered


def _layer_reference(
    layer: nn.Module,
    x: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    layout: HeadLayout,
    activation: str | None,
) -> torch.Tensor:
    attention, (batch, length, _), norms = layer.self_attn, x.shape, None
    n = _norm(x, layer.input_layernorm).flatten(0, 1)
    qkv = torch.cat([getattr(attention, name)(n) for name in ("q_proj", "k_proj", "v_proj")], -1)
    if hasattr(attention, "q_norm"):
        norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight, norm_eps(attention.q_norm))
    q, k, v = layout.split(rotate(qkv, HeadTransform(*rotation, layout, None, norms)), batch, length)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention.scaling, enable_gqa=True)
    hidden = x + attention.o_proj(o.transpose(1, 2).reshape(batch, length, -1))
    normed = _norm(hidden, layer.post_attention_layernorm)
    return hidden + (layer.mlp(normed) if activation is None else _mlp_reference(layer.mlp, normed, activation))


def _mlp_reference(mlp: nn.Module, x: torch.Tensor, activation: str) -> torch.Tensor:
    return mlp.down_proj(activate(mlp.gate_proj(x), activation) * mlp.up_proj(x))


def _norm(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm_eps(norm))


def _stand_in(module: nn.Module) -> Any:
    """Return a shallow copy without parameters, buffers and submodules; in training, to show dropout."""
    result = copy.copy(module)
    result.__dict__ = {**module.__dict__, "_parameters": {}, "_buffers": {}, "_modules": {}, "training": True}
    return result


def _small_mlp(mlp: nn.Module) -> nn.Module:
    small = _stand_in(mlp)
    for name, part in mlp.named_children():
        if name not in MLP_PARTS:
            setattr(small, name, part)
    small.gate_proj, small.up_proj = (nn.Linear(HIDDEN, INTERMEDIATE, bias=False) for _ in range(2))
    small.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
    return small


def _small_norm(norm: nn.Module, size: int) -> nn.Module:
    norm_eps(norm)  # raises for others than plain norms
    small = _stand_in(norm)
    small.weight = nn.Parameter(torch.rand(size) + 0.5)
    if hasattr(norm, "normalized_shape"):
        small.normalized_shape = (size,)
    return small


def _run(own: type, stand_in: nn.Module, *args: Any, **kwargs: Any) -> Any:
    try:
        return inspect.unwrap(own.forward)(stand_in, *args, **kwargs)
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise Unfusable(f"its forward could not be tried at a small size ({what})") from None


def _compare(result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    same_shape = isinstance(result, torch.Tensor) and result.shape == expected.shape
    if not same_shape or not (result - expected).norm() <= TOLERANCE * expected.norm():
        raise Unfusable(f"its {what} computes something else than the plain {what} of its parts")


def _expect(
    parts: dict[str, nn.Module], wanted: set[str], optional: set[str], what: str, called: Collection[str] = ()
) -> None:
    missing, other = wanted - parts.keys(), parts.keys() - wanted - optional
    if missing:
        raise Unfusable(f"its {what} has no {', '.join(sorted(missing))}")
    if other:
        raise Unfusable(f"its {what} also has {', '.join(sorted(other))}")
    for name, part in parts.items():
        for inner in part.modules() if name not in called else ():
            if (found := attachment_of(inner)) is not None:
                raise Unfusable(f"{name} of its {what} has {found}, which a fused forward skips")


def _fp8_linear(module: nn.Module, name: str) -> FP8Linear:
    """Return the FP8Linear that is a module, or inside its plain LoRA."""
    adapted = hasattr(module, "base_layer") or type(module).__module__.startswith("peft.")
    if adapted and (what := why_not_plain(module)) is not None:
        raise Unfusable(f"{name} carries an adapter beyond plain LoRA ({what}), which a fused forward skips")
    if not isinstance(base_of(module), FP8Linear):
        raise Unfusable(f"{name} is not computed in FP8")
    return base_of(module)
