"""Triton's interpreter with the installed NumPy."""

import importlib.util
from typing import Any


def count_with_tensors() -> None:
    """Let kernels in the interpreter loop up to a number that they have loaded.

    Triton 3.6 makes an index of an array of one element by int(), which NumPy refuses from 2.4 on.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def with_indices(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_indices
