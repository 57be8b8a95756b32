"""Supported versions of DeepSpeed, and whether the installed one has what the files of this folder use.

The names are collected from the code beside this file, and that inside of Ulysses' exchange: those that are read of
DeepSpeed's objects, in variables that are named after them, and those of the methods that are replaced. Each must be
defined, or set on some object, in the modules of DeepSpeed that make such objects. A version may keep every name and
change behaviour: functions that are replaced, imitated or relied on are compared by digests.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from packaging.specifiers import SpecifierSet

from ds_fp8.config.errors import UserError
from ds_fp8.config.other_packages import digest
from ds_fp8.zero.deepspeed import micro_step

SUPPORTED = ">=0.19.8,<0.20"
LOOKED_AT = "0.19.8"
"""The newest version whose functions were read."""
TRY = "DS_FP8_TRY_DEEPSPEED"
"""Environment variable with the one version beyond SUPPORTED that a user wants to try."""

_ZERO = "deepspeed.runtime.zero"
_OF_OPTIMIZER = (f"{_ZERO}.stage3", "deepspeed.runtime.base_optimizer", "deepspeed.runtime.zenflow.engine_stage3")
_OF_PARAMETER = (f"{_ZERO}.partition_parameters", f"{_ZERO}.stage3", "deepspeed.utils.mixed_precision_linkage")
_ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"
OBJECTS: dict[str, tuple[str, ...]] = {
    "engine": ("deepspeed.runtime.engine",),
    "zero": _OF_OPTIMIZER,
    "optimizer": (*_OF_OPTIMIZER, f"{_ZERO}.stage_1_and_2"),
    "bucket": (f"{_ZERO}.stage3",),
    "parameter_offload": (f"{_ZERO}.parameter_offload",),
    "coordinator": (f"{_ZERO}.partitioned_param_coordinator",),
    "parameter": (*_OF_PARAMETER, f"{_ZERO}.parameter_offload"),
    "shard": (f"{_ZERO}.partition_parameters",),
    "ZeroParamStatus": (f"{_ZERO}.partition_parameters",),
    "Init": (f"{_ZERO}.partition_parameters",),
    "module": (f"{_ZERO}.parameter_offload", f"{_ZERO}.partition_parameters"),
    "part": ("deepspeed.utils.tensor_fragment",),
    "stock": ("deepspeed.runtime.checkpoint_engine.checkpoint_engine",),
    "exchange": (_ULYSSES,),
    "UlyssesSPAttentionHF": (_ULYSSES,),
    "groups_of_ranks": ("deepspeed.runtime.sequence_parallel.parallel_state_sp",),
}
"""Names of variables, and the modules that make what they hold."""
_TORCH = {
    "parameter": torch.nn.Parameter(),
    "shard": torch.nn.Parameter(),
    "module": torch.nn.Module(),
    "engine": torch.nn.Module(),
    "optimizer": torch.optim.Optimizer,
}
"""What has other names, too, by the same names of variables."""
_BY_TEXT = {"getattr": 0, "hasattr": 0, "setattr": 0, "replace": 1, "hook": 1}
"""Functions that take the name of an attribute as text behind the object, and the place of the object."""

_STAGE3 = f"{_ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3"
_CLOSURES = f"{_ZERO}.partition_parameters:Init._convert_to_deepspeed_param"
DIGESTS = {
    f"{_STAGE3}.step": "5578eb207dfb",
    f"{_STAGE3}._pre_step": "72aded5fd6a3",
    f"{_STAGE3}._post_step": "f96bf3a562af",
    f"{_STAGE3}._partition_all_parameters": "984f8e1a8ff5",
    f"{_STAGE3}._loss_scale_update_and_overflow_cleanup": "0644e716fab0",
    f"{_STAGE3}.partition_grads": "b7dc0741079a",
    f"{_STAGE3}.independent_gradient_partition_epilogue": "a211f72a6caf",
    f"{_STAGE3}.backward_epilogue": "6cd69f6729a9",
    f"{_STAGE3}.__add_grad_to_ipg_bucket": "ab9d82f3ea09",
    f"{_STAGE3}.__reduce_and_partition_ipg_grads": "3f07ca4a6e52",
    f"{_STAGE3}.__avg_scatter_grads": "3e1eac3d8163",
    f"{_STAGE3}._set_fp16_partitioned_groups_flat": "5a81cdaa6359",
    f"{_STAGE3}._create_fp16_sub_groups": "3dc9d6e4b2e7",
    f"{_STAGE3}._create_fp32_partitions": "17e27a859309",
    f"{_STAGE3}.initialize_optimizer_states": "c4f8d8cdf103",
    f"{_STAGE3}._rigid_state_dict": "e0639324a1a1",
    f"{_STAGE3}._rigid_load_state_dict": "fd5f7c71ce1f",
    f"{_STAGE3}._get_fp32_opt_state_partition": "86e9d01d8350",
    f"{_STAGE3}.load_state_dict": "f18d8c61b8ab",
    f"{_STAGE3}.refresh_fp32_params": "a19261579622",
    f"{_STAGE3}.offload_states": "3ee71d8002d5",
    f"{_STAGE3}.reload_states": "3cbcf5921534",
    f"{_STAGE3}.set_full_hp_param": "ead7f5d47e51",
    f"{_STAGE3}.set_local_hp_param": "8ae114259654",
    f"{_ZERO}.partitioned_param_coordinator:PartitionedParameterCoordinator.reset_step": "cd4438c72b57",
    f"{_ZERO}.partitioned_param_coordinator:PartitionedParameterCoordinator.release_sub_module": "ad20b88f698f",
    f"{_CLOSURES}.partition": "7b50ec63cfde",
    f"{_CLOSURES}.all_gather": "8eaf6161e8ec",
    f"{_CLOSURES}.all_gather_coalesced": "d04cc9dac268",
    "deepspeed.runtime.comm.coalesced_collectives:reduce_scatter_coalesced": "66b19389daae",
}
"""By the path of a function, a digest of its source in LOOKED_AT."""


def used_names(trees: Iterable[ast.Module]) -> dict[str, set[str]]:
    """Return the names that are read of DeepSpeed's objects, by the names of the variables that hold these."""
    trees = list(trees)
    constants = {
        target.id: node.value.value
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
    }
    found: defaultdict[str, set[str]] = defaultdict(set)
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute):
            found[_holder(node.value, node.attr)].add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_TEXT:
            owner, name = node.args[_BY_TEXT[node.func.id] :][:2]
            text = name.value if isinstance(name, ast.Constant) else constants.get(getattr(name, "id", None))
            if isinstance(text, str):
                found[_holder(owner, text)].add(text)
    return {
        holder: {name for name in found[holder] if not hasattr(_TORCH.get(holder), name)}
        for holder in found.keys() & OBJECTS.keys()
    }


def _holder(expression: ast.expr, name: str) -> str:
    """Return the last name of an expression: "zero" of `self._zero`. Names in ds_ are parameters' or modules'."""
    while isinstance(expression, (ast.Subscript, ast.Call)):
        expression = expression.value if isinstance(expression, ast.Subscript) else expression.func
    last = (getattr(expression, "attr", None) or getattr(expression, "id", "")).lstrip("_")
    return last if last in OBJECTS or not name.startswith("ds_") else "parameter"


@functools.cache
def missing_names() -> list[str]:
    """Return what the installed DeepSpeed lacks, as "object.name"."""
    files = [file for file in sorted(Path(__file__).parent.glob("*.py")) if file != Path(__file__)]
    used = used_names(ast.parse(file.read_text(encoding="utf-8")) for file in files)
    inside = Path(__file__).parents[2] / "layers" / "attention" / "sequence_parallel.py"
    used["exchange"] |= used_names([ast.parse(inside.read_text(encoding="utf-8"))])["exchange"]
    used["module"] |= set(micro_step.COUNTERS)
    defined = {holder: set().union(*map(_defined_names, modules)) for holder, modules in OBJECTS.items()}
    return [
        f"{holder}.{name}"
        for holder in OBJECTS
        for name in sorted(used.get(holder, ()))
        # Python gives private names of classes the class's name: _Class__name.
        if re.sub(r"^_[A-Za-z]\w*?(?=__\w)", "", name) not in defined[holder] and not name.startswith("_ds_fp8")
    ]


@functools.cache
def _defined_names(module: str) -> frozenset[str]:
    """Return what a module defines, or sets on whatever object: `x.name = ...`, not `f(name=...)`."""
    try:
        with tokenize.open(importlib.util.find_spec(module).origin) as file:
            source = file.read()
    except (ImportError, AttributeError, OSError):
        return frozenset()
    found = re.findall(
        r"^\s*(?:(?:async )?def |class )(\w+)"
        r"|^\s*(?:[\w.]+, )?(?:[\w.]+\.)?(\w+)(?:: [^=\n]+)? = "
        r"|^\s*(\w+): \w[^=\n,]*$",
        source,
        re.MULTILINE,
    )
    return frozenset(name for names in found for name in names if name)


@functools.cache
def changed_functions() -> list[str]:
    """Return which functions of the installed DeepSpeed are not those looked at."""
    return [path.rpartition(".")[2] for path, known in DIGESTS.items() if digest(path) != known]


def check(version: str) -> None:
    """Refuse a DeepSpeed, of this version, that is unsupported or lacks a name; warn of changed functions.

    The environment variable DS_FP8_TRY_DEEPSPEED, set to its version, lets an unsupported one through with a warning.
    """
    remedy = f"pip install 'deepspeed{SUPPORTED}'"
    if not SpecifierSet(SUPPORTED).contains(version, prereleases=True):
        unknown = f"DeepSpeed {version} is not supported: FP8 in ZeRO-3 knows {SUPPORTED}"
        if os.environ.get(TRY) != version:
            raise UserError(unknown, remedy=f"{remedy}, or try it: {TRY}={version}")
        warnings.warn(f"{unknown}, and {TRY} lets it try: compare the losses with BF16's", stacklevel=2)
    if lacking := missing_names():
        raise UserError(
            f"DeepSpeed {version} lacks {', '.join(lacking)}, which the FP8 path of ZeRO-3 needs", remedy=remedy
        )
    if changed := changed_functions():
        warnings.warn(
            f"DeepSpeed {version} has functions that are not those of {LOOKED_AT}, for which FP8 in ZeRO-3 was "
            f"written: {', '.join(changed)}. Compare the losses with BF16's, or pip install 'deepspeed=={LOOKED_AT}'",
            stacklevel=2,
        )
