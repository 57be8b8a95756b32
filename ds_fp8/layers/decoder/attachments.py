"""Detect hooks, adapters and other forwards on modules that a fused forward replaces.

A fused forward computes with the weights of its submodules and calls none of them, so what others attach to one of
these would silently not run, and an adapter would get no gradient. Conversion refuses to fuse what carries an
attachment already; a fused module looks again at every forward, and calls its modules where something has come.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

from torch import nn


def attachment_of(module: nn.Module) -> str | None:
    """Return the module's attachment that only calling it would run (hooks, an own forward), in words, or None."""
    if "forward" in vars(module):
        return "a forward set on the instance"
    if module._forward_hooks or module._forward_pre_hooks:
        return "forward hooks"
    if module._backward_hooks or module._backward_pre_hooks:
        return "backward hooks"
    if "parametrizations" in module._modules:
        return "a parametrization"
    return None


class Parts:
    """The submodules of a module, as they were when its forward was fused."""

    def __init__(self, root: nn.Module, called: Collection[str] = ()):
        """Remember them.

        Args:
            root: The module.
            called: Names of children that its fused forward calls, as its own does: whatever they carry runs.
        """
        self._parts = [
            (owner._modules, own_name, part, type(part), f"{name}.{own_name}".lstrip("."))
            for name, owner in root.named_modules()
            for own_name, part in owner.named_children()
            if f"{name}.{own_name}".lstrip(".").split(".")[0] not in called
        ]
        self._said = False

    def attachment(self) -> str | None:
        """Return the attachment added since, with the name of the submodule, or None."""
        for siblings, own_name, part, kind, name in self._parts:
            # Looked up in the owner's dictionary: getattr of a module is slow, and this runs in every forward.
            now = siblings.get(own_name)
            if now is not part or type(part) is not kind:
                return f"{name} was replaced by a {type(now).__module__}.{type(now).__qualname__}"
            # The same questions as attachment_of asks, but this runs in every forward.
            if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or "forward" in vars(part):
                return f"{name} has {attachment_of(part)}"
            if part._backward_pre_hooks:
                return f"{name} has {attachment_of(part)}"
        return None

    def must_be_called(self) -> bool:
        """Return whether the modules have to be called, because of an attachment; warn when that is seen first."""
        found = self.attachment()
        if found is None:
            return False
        if not self._said:
            self._said = True
            # Python shows a text once: not for every layer that has the same attachment.
            warnings.warn(
                f"fused layers call their modules one by one, in FP8 still: {found}, which they would not call",
                stacklevel=2,
            )
        return True
