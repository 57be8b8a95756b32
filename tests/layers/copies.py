"""Copies of modules by every way that users take."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn


def copied(module: nn.Module, how: str) -> nn.Module:
    """Return a copy of a module, made by "pickle", "deepcopy" or "torch.save"."""
    if how == "pickle":
        return pickle.loads(pickle.dumps(module))
    if how == "deepcopy":
        return copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assert_independent_copy(module: nn.Module, other: nn.Module) -> None:
    """Check that two modules have the same classes and numbers, and no parameter in common."""
    assert [type(m) for m in other.modules()] == [type(m) for m in module.modules()]
    parameters, others = dict(module.named_parameters()), dict(other.named_parameters())
    assert parameters.keys() == others.keys()
    assert all(torch.equal(others[name], parameter) for name, parameter in parameters.items())
    assert not {id(p) for p in parameters.values()} & {id(p) for p in others.values()}
