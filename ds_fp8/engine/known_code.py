"""Python code of a model, which a CUDA graph runs at its capture alone: whose it is, and whether it has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules

KNOWN_PACKAGES = frozenset({"torch", "transformers", "deepspeed", "ds_fp8", "liger_kernel"})
"""Whose modules and hooks do the same in Python at every step of one shape."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_SETTINGS = ("gradient_checkpointing", "p", "dropout", "attention_dropout", "hidden_dropout", "layerdrop")
"""Attributes of modules that decide what is computed."""


def code_of_others(module: nn.Module) -> str | None:
    """Return which part of a model has Python code that nobody knows, or None.

    Known are the classes, their forward, and the hooks of KNOWN_PACKAGES.
    """
    for hook in _global_hooks():
        if _package(hook) not in KNOWN_PACKAGES:
            return f"all modules have a hook of {_module_of(hook)}"
    for name, part in module.named_modules():
        where = name or "the model"
        if _package(type(part)) not in KNOWN_PACKAGES:
            return f"{where} is a {type(part).__name__} of {type(part).__module__}"
        for forward in (type(part).forward, vars(part).get("forward")):
            if forward is not None and _package(forward) not in KNOWN_PACKAGES:
                return f"{where} has a forward of {_module_of(forward)}"
        for hook in _hooks(part, _HOOKS):
            if _package(hook) not in KNOWN_PACKAGES:
                return f"{where} has a hook of {_module_of(hook)}"
    for name, parameter in module.named_parameters():
        for hook in _hooks(parameter, _HOOKS_OF_PARAMETERS):
            if _package(hook) not in KNOWN_PACKAGES:
                return f"{name} has a hook of {_module_of(hook)}"
    return None


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
