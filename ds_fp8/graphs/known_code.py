"""Find Python code of a model that a CUDA graph would run at its capture only, and detect changes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules

KNOWN_PACKAGES = frozenset({"torch", "transformers", "deepspeed", "ds_fp8", "liger_kernel", "peft"})
"""Packages whose modules and hooks do the same in Python at every step of one shape."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_SETTINGS = (
    *("gradient_checkpointing", "p", "dropout", "attention_dropout", "hidden_dropout", "layerdrop"),
    *("scaling", "_disable_adapters", "_active_adapter", "merged_adapters"),  # of PEFT's layers
)
"""Attributes of modules that decide what is computed."""

_KEPT_BY_OTHERS = frozenset({*vars(nn.Module()), "_external_params", "applied_pre_backward_ref_cnt"})
"""Attributes of modules that torch and DeepSpeed write; DeepSpeed's others begin with ds_."""


def hook_of_others(module: nn.Module) -> str | None:
    """Return which hook of a model is of an unknown package, or None.

    Hooks are there to be called at every step: they read activations, or change gradients, which no check sees.
    """
    for hook in _global_hooks():
        if _package(hook) not in KNOWN_PACKAGES:
            return f"all modules have a hook of {_module_of(hook)}"
    for name, part in module.named_modules():
        for hook in _hooks(part, _HOOKS):
            if _package(hook) not in KNOWN_PACKAGES:
                return f"{name or 'the model'} has a hook of {_module_of(hook)}"
    for name, parameter in module.named_parameters():
        for hook in _hooks(parameter, _HOOKS_OF_PARAMETERS):
            if _package(hook) not in KNOWN_PACKAGES:
                return f"{name} has a hook of {_module_of(hook)}"
    return None


def code_of_others(module: nn.Module) -> str | None:
    """Return which class, forward or attention function of a model is of an unknown package, or None."""
    for name, part in module.named_modules():
        where = name or "the model"
        if not _is_known(part):
            return f"{where} is a {type(part).__name__} of {type(part).__module__}"
        forward = vars(part).get("forward")
        if forward is not None and _package(forward) not in KNOWN_PACKAGES:
            return f"{where} has a forward of {_module_of(forward)}"
    attention = _attention_function(text_config(getattr(module, "config", None)))
    if attention is not None and _package(attention) not in KNOWN_PACKAGES:
        return f"attention is a function of {_module_of(attention)}"
    return None


def _attention_function(config: Any) -> object | None:
    """Return the function that transformers has for the attention of a configuration, or None."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = getattr(config, "_attn_implementation", None)
    return ALL_ATTENTION_FUNCTIONS.get(name) if isinstance(name, str) else None


class PythonState:
    """Attributes of the modules of unknown packages, to find those that a forward changes.

    A graph leaves them as they are: a counter stands still, a tensor that is kept for others is that of an old step.
    """

    def __init__(self, module: nn.Module):
        """Remember the attributes."""
        self._before = [
            (name, part, self._attributes(part)) for name, part in module.named_modules() if not _is_known(part)
        ]

    def changed(self) -> str | None:
        """Return which attribute has been given another object or length since, or None."""
        for name, part, before in self._before:
            now = self._attributes(part)
            for attribute in sorted(before.keys() | now.keys()):
                if not _is_unchanged(before.get(attribute), now.get(attribute)):
                    return f'the forward of {name or "the model"} changes its attribute "{attribute}"'
        return None

    @staticmethod
    def _attributes(part: nn.Module) -> dict[str, tuple[object, int]]:
        return {
            name: (value, len(value) if isinstance(value, (list, dict, set)) else 0)
            for name, value in vars(part).items()
            if name not in _KEPT_BY_OTHERS and not name.startswith("ds_")
        }


def _is_unchanged(before: tuple[object, int] | None, now: tuple[object, int] | None) -> bool:
    if before is None or now is None:
        return False
    # Python may keep equal small values as one object or not, so these are compared by value. A tensor is compared by
    # identity: its contents may change in place, which a graph does as well.
    plain = isinstance(now[0], (bool, int, float, str)) and type(before[0]) is type(now[0])
    return before[1] == now[1] and (before[0] is now[0] or (plain and before[0] == now[0]))


def _is_known(part: nn.Module) -> bool:
    return all(_package(code) in KNOWN_PACKAGES for code in (type(part), type(part).forward))


def fingerprint(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter], config: Any) -> int:
    """Return a number that changes where a model's hooks, its code or settings of its modules have been changed.

    Hooks are counted and not told apart: some programs remove DeepSpeed's for generation, and put the same ones back.

    Args:
        modules: All of the model.
        parameters: All of them.
        config: Configuration of a Hugging Face model, or None: which outputs and which attention.
    """
    seen: list[object] = [len(list(_global_hooks()))]
    for part in modules:
        own = vars(part)
        for name in _HOOKS:
            seen.append(len(own[name]))
        # By identity: a forward that was replaced on the class or on the instance is another object. Its code is not
        # read.
        seen += (id(type(part).forward), id(own.get("forward")))
        for name in _SETTINGS:
            if name in own:
                seen.append(repr(own[name]))
    for parameter in parameters:
        for name in _HOOKS_OF_PARAMETERS:
            seen.append(len(getattr(parameter, name, None) or ()))
    config = text_config(config)
    names = ("_attn_implementation", "output_hidden_states", "output_attentions", "use_cache", "return_dict")
    seen += (repr(getattr(config, name, None)) for name in names)
    return hash(tuple(seen))


def text_config(config: Any) -> Any:
    """Return the part of a Hugging Face model's configuration that is about text; None of None."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _global_hooks() -> Iterator[object]:
    for name in _HOOKS:
        yield from getattr(of_all_modules, f"_global{name}", {}).values()


def _hooks(owner: object, names: tuple[str, ...]) -> Iterator[object]:
    for name in names:
        yield from (getattr(owner, name, None) or {}).values()


def _package(code: object) -> str:
    return _module_of(code).partition(".")[0]


def _module_of(code: object) -> str:
    """Return the Python module that a class, a function or a callable object comes from."""
    code = getattr(code, "func", code)  # of a functools.partial
    return getattr(code, "__module__", None) or type(code).__module__
