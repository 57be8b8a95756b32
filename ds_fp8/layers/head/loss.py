"""The loss of a live Hugging Face model without its logits, through ds_fp8.layers.head.cross_entropy.

The model's own forward still runs. When it is given labels in training its head returns `WithheldLogits`, which hold
the summed loss and can do nothing else, and its `loss_function` takes the loss out of them. In evaluation the logits
are there for metrics computed from them, except with `skip_logits=True`, as in Liger's forwards and Trainer. A
model that works on its logits before the loss (scaling, capping) cannot do so with withheld ones, which `fuse_loss`
finds by running the model's forward on a few tokens; such a model is left as it is.
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

PROBE_TOLERANCE = 1e-4
"""Relative difference in FP32 up to which a model with and without logits counts as the same."""


class WithheldLogits(dict):
    """The fused head's stand-in for logits: {"loss": summed loss, FP32 scalar}. Arithmetic on it is a TypeError."""


class NoLogitsError(UserError, AttributeError):
    """Logits are used that were not made; for hasattr and copying an AttributeError like others."""


class NoLogits:
    """What outputs hold as `logits` where the loss was computed without them: any use says how to get them."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NoLogitsError(
            "the loss was computed without logits, and so this output has none",
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
    """nn.Linear without bias that, while `targets` (int64 [T]) are set, returns WithheldLogits of its T tokens."""

    targets: torch.Tensor | None = None
    recipe: LinearRecipe | None = None
    """Casts of the operands of the loss's products; None: not cast. Logits that are asked for stay BF16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor | WithheldLogits:
        if self.targets is None:
            return super().forward(input)
        # Within the call of this module, because here is where ZeRO-3 has its weight gathered.
        hidden = input.reshape(-1, input.shape[-1])
        targets = self.targets.to(hidden.device)
        return WithheldLogits(loss=linear_cross_entropy(hidden, self.weight, targets, self.recipe))


@dataclass(frozen=True)
class LossFusion:
    fused: bool
    description: str
    """One line for the start report: how the loss is computed, or why it was left as it is."""


def fuse_loss(model: nn.Module, recipe: LinearRecipe | None = None) -> LossFusion:
    """Make a model, or what PEFT wraps in it, compute its loss without logits, in place, where that changes nothing.

    Given labels the model then returns `loss` and NO_LOGITS, in training by default and with `skip_logits=True`; with
    `skip_logits=False` and without labels nothing changes. The loss is Hugging Face's for causal language models, with
    `num_items_in_batch` and `shift_labels`. Parameters, their names, the names of classes and isinstance stay what they
    were. With a recipe the head's products of the loss are in FP8.
    """
    if any(adapter.peft_type == "CPT" for adapter in getattr(model, "peft_config", {}).values()):
        return LossFusion(False, "that of PEFT's CPT, which reads logits")
    model = _unwrapped(model)
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    # A forward on the instance hides that of the class, so that a swapped class would change nothing.
    if "forward" in vars(model) or (head is not None and "forward" in vars(head)):
        return LossFusion(False, "the model's own forward, which has been replaced on the instance")
    if type(head) is not FusedHead:
        reason = _structural_objection(model, head) or _behavioural_objection(model, head)
        if reason:
            return LossFusion(False, f"Hugging Face's own, over all logits: {reason}")
        _swap_classes(model, head)
    # Also where it is fused already: a second call changes only how the products are cast.
    head.recipe = recipe
    return LossFusion(True, f"without logits, {implementation(recipe)}")


def withholds_logits(model: nn.Module) -> bool:
    """Return whether `model`, or what PEFT wraps in it, takes `skip_logits=True`."""
    model = _unwrapped(model)
    return isinstance(model, PreTrainedModel) and type(model.get_output_embeddings()) is FusedHead


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _structural_objection(model: nn.Module, head: nn.Module | None) -> str | None:
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        return f"{kind} is not a model of transformers"
    if type(head) is not nn.Linear or head.bias is not None:
        return f"its head is no plain linear without bias ({type(head).__module__}.{type(head).__name__})"
    if model.loss_function is not ForCausalLMLoss:
        return "it has a custom loss function"
    # Both must be children of the model itself: the trial below puts stand-ins in their places.
    children = list(model.children())
    if not any(child is head for child in children) or not any(child is model.base_model for child in children):
        return f"{kind} has no separate modules for its decoder and its head"
    return None


class _FixedDecoder(nn.Module):
    """Stands in for a decoder: the same hidden states [B, T, H] for any arguments."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


def _behavioural_objection(model: PreTrainedModel, head: nn.Linear) -> str | None:
    """Return how the fused loss would change this model's result, or None.

    Between decoder and loss nothing depends on the hidden size, so a shallow copy of the model with a narrow head and
    fixed hidden states runs the very code in question in no time, wherever the parameters are.
    """
    # More than one row, so that labels shifted across rows would show.
    rows, tokens, width = 2, 5, 4
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        hidden = torch.randn(rows, tokens, width, device="cpu", dtype=torch.float32, requires_grad=True)
        narrow = nn.Linear(width, head.out_features, bias=False, device="cpu", dtype=torch.float32)
        nn.init.normal_(narrow.weight)
        ids, shifted = torch.randint(0, head.out_features, (2, rows, tokens), device="cpu")
        labels = ids.clone()
        # A token without loss in each: models that average over all tokens give another loss.
        labels[0, 2] = shifted[1, 1] = IGNORED

        twin = copy.copy(model)
        stand_ins = {id(head): narrow, id(model.base_model): _FixedDecoder(hidden)}
        twin._modules = {name: stand_ins.get(id(child), child) for name, child in model._modules.items()}

        def loss_and_gradients(**more: Any) -> list[torch.Tensor]:
            # Not through __call__: hooks of the model are not meant for this copy.
            loss = twin.forward(input_ids=ids, labels=labels, **more)[0]
            return [loss.detach(), *torch.autograd.grad(loss, (hidden, narrow.weight))]

        # The auxiliary loss of a mixture of experts is added to the head's loss, and needs a real decoder.
        if "output_router_logits" in inspect.signature(twin.forward).parameters:
            loss_and_gradients = functools.partial(loss_and_gradients, output_router_logits=False)
        # The three ways in which callers of transformers reduce the loss; 3.5 is no count of tokens here.
        variants = [{}, {"num_items_in_batch": torch.tensor(3.5)}, {"shift_labels": shifted}]
        try:
            expected = [loss_and_gradients(**more) for more in variants]
        except Exception as error:  # a foreign forward fails in its own way
            return f"{type(model).__name__} cannot be tried out on hidden states alone ({first_line(error)})"
        _swap_classes(twin, narrow)
        try:
            got = [loss_and_gradients(**more, skip_logits=True) for more in variants]
        except (TypeError, AttributeError, KeyError) as error:  # what using WithheldLogits raises
            return f"{type(model).__name__} works on its logits before the loss ({first_line(error)})"
    pairs = zip(chain(*got), chain(*expected), strict=True)
    # Gradients too: an equal loss may come from a head that is also trained by something else.
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
    """Return a subclass of `base` that withholds logits if it is given labels and the caller does not ask for them."""
    parameters = list(inspect.signature(base.forward).parameters)[1:]

    @functools.wraps(base.forward)
    def forward(self: PreTrainedModel, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        skip_logits = self.training if skip_logits is None else skip_logits
        # By name, however the caller passes them: the forward of the base still gets the arguments as they came.
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
            # Also after an error: a head that keeps targets would withhold logits from the next caller.
            head.targets = None

    def loss_function(self: PreTrainedModel) -> Callable[..., torch.Tensor]:
        targets = _fused_head(self).targets
        own = base.loss_function.fget(self)
        return own if targets is None else functools.partial(_reduced_loss, targets=targets)

    # Named as its base, because saved configurations and messages name the class of the model.
    members = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    # Made at run time, so that pickle would not find it by its name.
    members["__reduce_ex__"] = lambda self, protocol: (_empty, (base,), self.__getstate__())
    members |= {"forward": forward, "loss_function": property(loss_function, base.loss_function.fset)}
    return type(base.__name__, (base,), members)


def _empty(base: type[PreTrainedModel]) -> PreTrainedModel:
    kind = _fused_class(base)
    return kind.__new__(kind)


def _targets(labels: torch.Tensor, shift_labels: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """Return int64 [B·T]: for each token the one to predict, or IGNORED, from labels [B, T]."""
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
    """Return the withheld loss per item, or per counted token when the number of items is not given."""
    loss = logits["loss"]
    if num_items_in_batch is None:
        count = (targets != IGNORED).sum().to(loss.device)
        # The mean over no token is NaN, and has no gradient, as in torch.
        return (loss / count.clamp_min(1)).masked_fill(count == 0, math.nan)
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def _without_logits(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(part for part in output if not isinstance(part, WithheldLogits))
    output = replace(output, logits=None)
    # Of the attribute alone: as a mapping and as a tuple the output has no logits.
    object.__setattr__(output, "logits", NO_LOGITS)
    return output
