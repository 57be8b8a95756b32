"""Classes put before a live module's own class: the module keeps its parameters and names, and gets another forward."""

from __future__ import annotations

import functools

from torch import nn


class Swapped(nn.Module):
    """A class to be put before a module's own class by `swapped_class`; its objects can be copied and pickled."""

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Return what pickle makes the object of again."""
        # The class was made at run time, so that pickle would not find it by its name.
        return _empty, type(self).__bases__, self.__getstate__()


@functools.cache
def swapped_class(first: type[Swapped], own: type[nn.Module]) -> type[Swapped]:
    """Return the class of modules of class `own` whose forward is that of `first`."""
    # The name is kept within it: Hugging Face finds layers that must not be split by the names of their classes.
    return type(f"FP8{own.__name__}", (first, own), {"__module__": own.__module__})


def _empty(first: type[Swapped], own: type[nn.Module]) -> Swapped:
    """Return an object of a swapped class without any state, for pickle to fill."""
    kind = swapped_class(first, own)
    return kind.__new__(kind)
