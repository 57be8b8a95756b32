"""The loss of a Hugging Face model without logits in memory (cross_entropy.py), in the model's own forward.

With labels in training the head returns `WithheldLogits`, which hold the summed loss alone, and `loss_function` reads
the loss from them. In evaluation the logits exist, for metrics, except with `skip_logits=True`, as in Liger's forwards
and Trainer. A model that changes its logits before the loss (scaling, capping) keeps its loss: `fuse_loss` finds out by
a trial run on a few tokens.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import MoeModelOutputWithPast

from ds_fp8.config.errors import UserError, first_line
from ds_fp8.layers.head.cross_entropy import IGNORED, implementation, linear_cross_entropy
from ds_fp8.layers.linear.recipe import LinearRecipe

PROBE_TOLERANCE = 1e-4  # largest relative difference in FP32 of equal losses and gradients


class WithheldLogits(dict):
    """{"loss": summed loss, FP32 scalar}, in place of logits. Arithmetic on it is a TypeError."""


class NoLogitsError(UserError, AttributeError):
    """Use of logits that do not exist; an AttributeError for hasattr and copying."""


class NoLogits:
    """`logits` of an output without logits: any use raises NoLogitsError."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NoLogitsError(
            "the loss was computed without logits: this output has none",
            key="fp8.loss.mode",
            remedy='"loss": {"mode": "off"}, or for one call skip_logits=False or no labels',
        )

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        NO_LOGITS._refuse()

    __getitem__ = __len__ = __iter__ = __bool__ = __float__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __neg__ = _refuse

    def __repr__(self) -> str:
        return "<no logits: the loss was computed without them>"

    def __reduce__(self) -> str:
        return "NO_LOGITS"


NO_LOGITS = NoLogits()


class FusedHead(nn.Linear):
    """nn.Linear without bias; returns WithheldLogits while `targets` are set."""

    targets: torch.Tensor | None = None  # int64 [T]
    recipe: LinearRecipe | None = None  # of the loss's products; None: BF16, as returned logits always are

    def forward(self, input: torch.Tensor) -> torch.Tensor | WithheldLogits:
        if self.targets is None:
            return super().forward(input)
        # in this module's forward, where ZeRO-3 has its weight unsharded
        hidden = input.reshape(-1, input.shape[-1])
        targets = self.targets.to(hidden.device)
        return WithheldLogits(loss=linear_cross_entropy(hidden, self.weight, targets, self.recipe))


@dataclass(frozen=True)
class LossFusion:
    fused: bool
    description: str  # for the start report


def fuse_loss(model: nn.Module, recipe: LinearRecipe | None = None) -> LossFusion:
    """Fuse the head and the loss of a model (also inside PEFT) in place, if the loss stays Hugging Face's.

    With labels the model returns `loss` and NO_LOGITS, in training by default, in evaluation with `skip_logits=True`;
    without labels or with `skip_logits=False` nothing changes. The loss is that of causal language models, with
    `num_items_in_batch` and `shift_labels`. Parameters, their names, class names and isinstance stay the same. With a
    recipe the loss's products are in FP8.
    """
    if any(adapter.peft_type == "CPT" for adapter in getattr(model, "peft_config", {}).values()):
        return LossFusion(False, "that of PEFT's CPT, which reads logits")
    model = _unwrapped(model)
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    # a forward on the instance hides that of another class
    if "forward" in vars(model) or (head is not None and "forward" in vars(head)):
        return LossFusion(
            False,
            "the model's own forward, which was replaced on the instance (by TRL, say): whether logits are in memory "
            "is up to it (TRL's chunked loss has none), and fp8.loss has no effect",
        )
    if type(head) is not FusedHead:
        reason = _structural_objection(model, head) or _behavioural_objection(model, head)
        if reason:
            return LossFusion(False, f"Hugging Face's own, over all logits: {reason}")
        _swap_classes(model, head)
    # a second call changes the recipe alone
    head.recipe = recipe
    return LossFusion(True, f"without logits, {implementation(recipe)}")


def withholds_logits(model: nn.Module) -> bool:
    """Return whether a model, also inside PEFT, takes `skip_logits=True`."""
    model = _unwrapped(model)
    return isinstance(model, PreTrainedModel) and type(model.get_output_embeddings()) is FusedHead


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _structural_objection(model: nn.Module, head: nn.Module | None) -> str | None:
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        return f"{kind} is not a model of transformers"
    if type(head) is not nn.Linear or head.bias is not None:
        return f"its head is not nn.Linear without bias ({type(head).__module__}.{type(head).__name__})"
    if model.loss_function is not ForCausalLMLoss:
        return "it has a custom loss function"
    # both must be children of the model: the trial replaces them by stand-ins
    children = list(model.children())
    if not any(child is head for child in children) or not any(child is model.base_model for child in children):
        return f"{kind} has no separate modules for its decoder and its head"
    return None


class _FixedDecoder(nn.Module):
    """A decoder that returns fixed hidden states [B, T, H]."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


def _behavioural_objection(model: PreTrainedModel, head: nn.Linear) -> str | None:
    """Return how the fused loss would differ from this model's, or None.

    Runs the model's forward on a shallow copy with a narrow head and fixed hidden states: nothing between decoder and
    loss depends on the hidden size.
    """
    # two rows, to show labels shifted across rows
    rows, tokens, width = 2, 5, 4
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        hidden = torch.randn(rows, tokens, width, device="cpu", dtype=torch.float32, requires_grad=True)
        narrow = nn.Linear(width, head.out_features, bias=False, device="cpu", dtype=torch.float32)
        nn.init.normal_(narrow.weight)
        ids, shifted = torch.randint(0, head.out_features, (2, rows, tokens), device="cpu")
        labels = ids.clone()
        # a token without loss in each, to show averages over all tokens
        labels[0, 2] = shifted[1, 1] = IGNORED

        trial = copy.copy(model)
        stand_ins = {id(head): narrow, id(model.base_model): _FixedDecoder(hidden)}
        trial._modules = {name: stand_ins.get(id(child), child) for name, child in model._modules.items()}

        def loss_and_gradients(**more: Any) -> list[torch.Tensor]:
            # not __call__: hooks belong to the model itself
            loss = trial.forward(input_ids=ids, labels=labels, **more)[0]
            return [loss.detach(), *torch.autograd.grad(loss, (hidden, narrow.weight))]

        # the auxiliary loss of a mixture of experts needs a real decoder
        if "output_router_logits" in inspect.signature(trial.forward).parameters:
            loss_and_gradients = functools.partial(loss_and_gradients, output_router_logits=False)
        # the three reductions of callers of transformers; 3.5 is not a count of tokens here
        variants = [{}, {"num_items_in_batch": torch.tensor(3.5)}, {"shift_labels": shifted}]
        try:
            expected = [loss_and_gradients(**more) for more in variants]
        except Exception as error:  # a foreign forward fails in its own way
            return f"a trial run of {type(model).__name__} on hidden states failed ({first_line(error)})"
        _swap_classes(trial, narrow)
        try:
            got = [loss_and_gradients(**more, skip_logits=True) for more in variants]
        except (TypeError, AttributeError, KeyError) as error:  # what using WithheldLogits raises
            return f"{type(model).__name__} changes its logits before the loss ({first_line(error)})"
    pairs = zip(chain(*got), chain(*expected), strict=True)
    # gradients too: something else than the loss may train the head
    if any((ours - theirs).norm() > PROBE_TOLERANCE * theirs.norm() for ours, theirs in pairs):
        return f"{type(model).__name__} computes another loss than the cross entropy of its head's logits"
    return None


def _swap_classes(model: PreTrainedModel, head: nn.Linear) -> None:
    head.__class__ = FusedHead
    model.__class__ = _fused_class(type(model))


def _fused_head(model: nn.Module) -> FusedHead:
    return next(child for child in model.children() if isinstance(child, FusedHead))


@functools.cache
def _fused_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass of `base` without logits in outputs with a loss, unless the caller asks for logits."""
    parameters = list(inspect.signature(base.forward).parameters)[1:]

    @functools.wraps(base.forward)
    def forward(self: PreTrainedModel, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        skip_logits = self.training if skip_logits is None else skip_logits
        given = dict(zip(parameters, args, strict=False)) | kwargs
        labels, logits_to_keep = given.get("labels"), given.get("logits_to_keep")
        asks_for_logits = logits_to_keep is not None and (torch.is_tensor(logits_to_keep) or logits_to_keep != 0)
        wants_logits = labels is None or asks_for_logits or not skip_logits
        if wants_logits or base.loss_function.fget(self) is not ForCausalLMLoss:
            return base.forward(self, *args, **kwargs)
        head = _fused_head(self)
        head.targets = _targets(labels, given.get("shift_labels"), given.get("ignore_index", IGNORED))
        try:
            return _without_logits(base.forward(self, *args, **kwargs))
        finally:
            # also after an error: the next caller may want logits
            head.targets = None

    def loss_function(self: PreTrainedModel) -> Callable[..., torch.Tensor]:
        targets = _fused_head(self).targets
        own = base.loss_function.fget(self)
        return own if targets is None else functools.partial(_reduced_loss, targets=targets)

    # the base's name, which saved configurations hold
    members = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    # pickle does not find a class made at run time
    members["__reduce_ex__"] = lambda self, protocol: (_empty, (base,), self.__getstate__())
    members |= {"forward": forward, "loss_function": property(loss_function, base.loss_function.fset)}
    return type(base.__name__, (base,), members)


def _empty(base: type[PreTrainedModel]) -> PreTrainedModel:
    kind = _fused_class(base)
    return kind.__new__(kind)


def _targets(labels: torch.Tensor, shift_labels: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """Return the token to predict for each token, or IGNORED, int64 [B·T], from labels [B, T]."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1)
    return targets if ignore_index == IGNORED else targets.masked_fill(targets == ignore_index, IGNORED)


def _reduced_loss(
    logits: WithheldLogits,
    *_: Any,
    targets: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None = None,
    **__: Any,
) -> torch.Tensor:
    """Return the mean of the withheld loss, over `num_items_in_batch` or the tokens with loss."""
    loss = logits["loss"]
    if num_items_in_batch is None:
        count = (targets != IGNORED).sum().to(loss.device)
        # the mean over no token is NaN without a gradient, as in torch
        return (loss / count.clamp_min(1)).masked_fill(count == 0, math.nan)
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def _without_logits(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(part for part in output if not isinstance(part, WithheldLogits))
    output = replace(output, logits=None)
    # the attribute alone: as a mapping and as a tuple the output has no logits
    object.__setattr__(output, "logits", NO_LOGITS)
    return output
