"""Reasons against a CUDA graph of a micro-batch: of the engine, of the model's Python code, of one call.

All functions are pure; the driver compares their answers over the ranks and acts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_fp8.config.plans import StepPlan
from ds_fp8.graphs.host_checkpoints import HostCheckpoints, recomputed_by
from ds_fp8.layers.attention import documents
from ds_fp8.layers.attention.format import PREFIX, rows_stay_in_bf16
from ds_fp8.layers.attention.sequence_parallel import place_of_slices
from ds_fp8.layers.experts.routing import is_routed
from ds_fp8.layers.linear.linear import FP8Linear

COMPILED = "the module is compiled"
SAVED_ELSEWHERE = "hooks of the caller change the tensors saved for backward"
SHARED = 'ranks share sequences, and graphs over two NCCL communicators have not run yet; "graph": "on" captures them'
ITEMS = "num_items_in_batch"
# The attention implementation that reads the ends of documents on the device. "fp8_packed" computes rows of one
# document in FP8 and others in BF16: a graph cannot branch on that.
PACKED = "packed"

# Packages whose modules and hooks do the same in Python at every step of one shape.
KNOWN_PACKAGES = frozenset({"torch", "transformers", "deepspeed", "ds_fp8", "liger_kernel", "peft"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_SETTINGS = (  # attributes of modules that decide which kernels run
    *("gradient_checkpointing", "p", "dropout", "attention_dropout", "hidden_dropout", "layerdrop"),
    *("scaling", "_disable_adapters", "_active_adapter", "merged_adapters"),  # of PEFT's layers
)
_SETTINGS_OF_CONFIG = ("_attn_implementation", "output_hidden_states", "output_attentions", "use_cache", "return_dict")
# Attributes of modules that torch and DeepSpeed write; DeepSpeed's others begin with ds_.
_WRITTEN_BY_OTHERS = frozenset({*vars(nn.Module()), "_external_params", "applied_pre_backward_ref_cnt"})


# ---------------------------------------------------------------- the engine


def why_no_graphs(engine: deepspeed.DeepSpeedEngine, plan: StepPlan, why_no_step: str | None) -> str | None:
    """Return what keeps this engine from capturing any micro-batch, or None."""
    recipes = [module.recipe for module in engine.module.modules() if isinstance(module, FP8Linear)]
    casts = [cast for recipe in recipes for cast in (recipe.input, recipe.weight, recipe.grad_output)]
    reasons = {
        '"graph" is "off"': plan.graph == "off",
        "there is no CUDA device": engine.device.type != "cuda",
        f"DeepSpeed's step stays: {why_no_step}": why_no_step is not None,
        "gradients have one scale each, which adapts over time": plan.reduction is not None
        and plan.reduction.scale == "tensor",
        "casts are emulated, operation by operation": any(cast.by_torch for cast in casts),
        "ranks share sequences by other code than transformers' attention functions": (
            engine.sequence_parallel_size > 1 and place_of_slices(_attention_of(engine.module)) is None
        ),
        "DeepSpeed times or profiles forward": engine.wall_clock_breakdown() or engine.flops_profiler_enabled(),
        # Reductions then run on the default stream, which CUDA does not capture.
        "overlap_comm is false": engine.zero_optimization_stage() == 3 and not engine.zero_overlap_comm(),
        "layers are dropped at random": (getattr(getattr(engine.module, "config", None), "layerdrop", None) or 0) > 0,
        COMPILED: engine.module._compiled_call_impl is not None,
    }
    found = next((reason for reason, applies in reasons.items() if applies), None)
    if found is None and plan.graph == "auto":
        # A hang is the one fault that graphs do not find by checking themselves.
        found = SHARED if engine.sequence_parallel_size > 1 else why_auto_disabled(engine.module)
    return found


# ---------------------------------------------------------------- the model's Python code


def why_auto_disabled(module: nn.Module) -> str | None:
    """Return which hook of a model is of an unknown package, so that "auto" captures nothing of it, or None.

    Hooks are there to be called at every step: they read activations or change gradients, which no check sees.
    """

    def hooks() -> Iterator[tuple[str, object]]:
        yield from (("all modules have", hook) for hook in _global_hooks())
        for owners, names in (
            (module.named_modules(), _HOOKS),
            (module.named_parameters(), _HOOKS_OF_PARAMETERS),
        ):
            for where, owner in owners:
                for name in names:
                    for hook in (getattr(owner, name, None) or {}).values():
                        yield f"{where or 'the model'} has", hook

    remedy = 'which graphs would not call; if it need not be called at every step, set "graph": "on"'
    unknown = ((where, hook) for where, hook in hooks() if not _is_known(hook))
    return next((f"{where} a hook of {_module_of(hook)}, {remedy}" for where, hook in unknown), None)


def unknown_code(module: nn.Module) -> str | None:
    """Return which class, forward or attention function of a model is of an unknown package, or None."""
    for name, part in module.named_modules():
        where = name or "the model"
        if not (_is_known(type(part)) and _is_known(type(part).forward)):
            return f"{where} is a {type(part).__name__} of {type(part).__module__}"
        forward = vars(part).get("forward")
        if forward is not None and not _is_known(forward):
            return f"{where} has a forward of {_module_of(forward)}"
    attention = ALL_ATTENTION_FUNCTIONS.get(_attention_of(module))
    if attention is not None and not _is_known(attention):
        return f"attention is a function of {_module_of(attention)}"
    return None


def attributes_of_unknown(module: nn.Module) -> dict[tuple[str, str], tuple[object, object]]:
    """Return the attributes of the modules of unknown packages, for `changed_attribute`.

    A replay writes none: a counter stands still, a tensor that is kept for others is that of an old step.
    """
    found = {}
    for where, part in module.named_modules():
        attributes = {} if _is_known(type(part)) and _is_known(type(part).forward) else vars(part)
        for name, value in attributes.items():
            if name in _WRITTEN_BY_OTHERS or name.startswith("ds_"):
                continue
            size = len(value) if isinstance(value, (list, dict, set)) else 0
            # By value where Python may keep equal values as one object or not. Others by identity, which is unique as
            # long as the value is held: contents of a tensor may change in place, as a replay changes them as well.
            plain = isinstance(value, (bool, int, float, str))
            found[where, name] = ((type(value), value) if plain else (id(value), size)), value
    return found


def changed_attribute(before: dict, now: dict) -> str | None:
    """Return which attribute has been given another object or length, or None."""
    for where, name in sorted(before.keys() | now.keys()):
        if before.get((where, name), (None,))[0] != now.get((where, name), (None,))[0]:
            return f'the forward of {where or "the model"} changes its attribute "{name}"'
    return None


def fingerprint(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter], config: Any) -> int:
    """Return a number that changes where a model's hooks, its code or settings of its modules have been changed.

    Hooks are counted, not identified: some programs remove DeepSpeed's for generation, and put the same ones back.
    """
    seen: list[object] = [len(list(_global_hooks()))]
    for part in modules:
        own = vars(part)
        for name in _HOOKS:
            seen.append(len(own[name]))
        # By identity: a forward that was replaced on the class or on the instance is another object.
        seen += (id(type(part).forward), id(own.get("forward")))
        for name in _SETTINGS:
            if name in own:
                seen.append(repr(own[name]))
    for parameter in parameters:
        for name in _HOOKS_OF_PARAMETERS:
            seen.append(len(getattr(parameter, name, None) or ()))
    seen += (repr(getattr(text_config(config), name, None)) for name in _SETTINGS_OF_CONFIG)
    return hash(tuple(seen))


def text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _attention_of(module: nn.Module) -> str | None:
    return getattr(text_config(getattr(module, "config", None)), "_attn_implementation", None)


def _global_hooks() -> Iterator[object]:
    for name in _HOOKS:
        yield from getattr(of_all_modules, f"_global{name}", {}).values()


def _is_known(code: object) -> bool:
    return _module_of(code).partition(".")[0] in KNOWN_PACKAGES


def _module_of(code: object) -> str:
    code = getattr(code, "func", code)  # of a functools.partial
    return getattr(code, "__module__", None) or type(code).__module__


# ---------------------------------------------------------------- one call


def why_eager(modules: Sequence[nn.Module], device: torch.device, args: tuple, kwargs: Mapping[str, Any]) -> str | None:
    """Return why a call of a model in training cannot be a graph, with any rows, or None."""
    if args:
        return "the batch is passed by position"
    why = why_not_recomputed(modules)
    if why is not None:
        return why
    if any(map(is_routed, modules)):
        return "routing of experts is recorded or replayed"
    for name, value in kwargs.items():
        if torch.is_tensor(value):
            if value.requires_grad:
                return f'"{name}" requires a gradient'
            if value.device.type != device.type:
                return f'"{name}" is on the host, where its values may decide what is computed'
            if name == "attention_mask" and value.dim() != 2:
                return "the attention mask is not of shape [rows, tokens]"
        elif value is not None and not isinstance(value, (bool, int, float, str)):
            return f'"{name}" is a {type(value).__name__}'
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    # Such hooks (offload of activations, for one) run in Python at every save; a replay would not call them.
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return SAVED_ELSEWHERE
    return None


def by_name(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of a call with those passed by position given their names, where forward has names."""
    parameters = list(inspect.signature(module.forward).parameters.values()) if args else []
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(named) or kwargs.keys() & set(named[: len(args)]):
        return args, kwargs
    return (), dict(zip(named, args, strict=False)) | kwargs


def why_not_recomputed(modules: Sequence[nn.Module]) -> str | None:
    """Return why a graph cannot recompute the activations of a model as Python does, or None; None where none are."""
    functions = [function for part in modules if (function := recomputed_by(part)) is not None]
    if not functions:
        return None
    if any(isinstance(function, HostCheckpoints) for function in functions):
        return "inputs of recomputed layers are kept on the host"
    if any(function is not checkpoint for function in functions):
        return "activations are recomputed by the model's own code, or kept on the host"
    for part in modules:
        dropout = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "attention_dropout", 0)
        if part.training and dropout:
            return "activations are recomputed with dropout, whose random numbers the host repeats"
    return None


def rows_in_a_graph(module: nn.Module, batch: Mapping[str, Any]) -> tuple[int, str | None]:
    """Return the number of documents of packed rows, 0 where every row is one sequence, and why there is no graph.

    The host waits for the device, unless mask and positions have been noted (layers/attention/documents.py).
    transformers waits as well when it builds the mask of such a batch.
    """
    mask, positions = (batch.get(name) for name in ("attention_mask", "position_ids"))
    implementation = _attention_of(module)
    place = place_of_slices(implementation)
    if mask is not None and not documents.is_full(mask):
        # These two take a mask of tokens x tokens, which a graph makes of any padding, as Python does.
        if place is None and implementation in ("sdpa", "eager"):
            return 0, None
        return 0, "rows are padded, so that attention's work differs from batch to batch"
    if positions is None:
        return 0, None
    if place is not None:
        # Documents of whole rows are not known here: they decide between kernels, on the host.
        if documents.first_of_run(positions) != place * positions.shape[-1]:
            return 0, "rows that ranks share hold several documents"
        return 0, None
    found = documents.count(positions)
    if found == positions.shape[:-1].numel():
        return 0, None
    if not found:
        return 0, "positions do not count from 0 in every document"
    if positions.dim() != 2:
        return 0, "rows hold several documents, and tokens several positions"
    if mask is not None:
        return 0, "rows hold several documents, and a mask says that they are one"
    if rows_stay_in_bf16(module, positions.shape[-1]):
        implementation = (implementation or "").removeprefix(PREFIX)
    if implementation != PACKED:
        return 0, f'rows hold several documents, and attention is "{implementation}", not "{PACKED}"'
    given = next(value for name in ("input_ids", "inputs_embeds") if (value := batch.get(name)) is not None)
    return found * (len(given) // len(positions)), None
