"""The DeepSpeed versions that are supported, and the names of theirs that seams.py uses.

Most of them are private: a version that nobody has looked at may have kept a name and changed what it does. So a
version outside the table is refused, and so is one inside it that lacks a name.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from ds_fp8.errors import UserError

OPTIMIZER = "DeepSpeedZeroOptimizer_Stage3"
AVERAGE_GRADIENTS = f"_{OPTIMIZER}__avg_scatter_grads"
MASTER_UPDATES = ("step", "load_state_dict", "refresh_fp32_params", "set_full_hp_param", "set_local_hp_param")

_STAGE3 = "deepspeed.runtime.zero.stage3"
_PARTITIONS = "deepspeed.runtime.zero.partition_parameters"

NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    ">=0.19.8,<0.20": {
        _PARTITIONS: ("ZeroParamStatus", "Init"),
        f"{_PARTITIONS}:ZeroParamStatus": ("NOT_AVAILABLE", "INFLIGHT", "AVAILABLE"),
        _STAGE3: (OPTIMIZER, "reduce_scatter_coalesced"),
        f"{_STAGE3}:{OPTIMIZER}": (AVERAGE_GRADIENTS, "get_param_id", *MASTER_UPDATES),
        "deepspeed.comm.comm": ("cdb",),
        "deepspeed.ops": ("__compatible_ops__",),
        "deepspeed.runtime.engine:DeepSpeedEngine": ("_zero3_consolidated_16bit_state_dict",),
    }
}
"""By range of versions: a module, or module:class, and what it must have."""

ATTRIBUTES: dict[str, dict[str, tuple[str, ...]]] = {
    ">=0.19.8,<0.20": {
        f"{_STAGE3}:{OPTIMIZER}.__init__": ("grad_position", "fp32_partitioned_groups_flat", "overflow"),
        f"{_STAGE3}:{OPTIMIZER}._link_all_hp_params": ("_z3_optimizer",),
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.__init__": ("_param_slice_mappings",),
        f"{_PARTITIONS}:Init._convert_to_deepspeed_param": (
            *("all_gather_coalesced", "all_gather", "partition"),
            *("ds_id", "ds_persist", "ds_tensor", "ds_numel", "ds_shape", "ds_status", "ds_process_group"),
            *("ds_active_sub_modules", "ds_summary"),
        ),
    }
}
"""By range of versions: a function, and the attributes that it must give to what it works on."""


def supported_range(version: str) -> str | None:
    """The range of the table that `version` is in; None outside of all."""
    return next((ranges for ranges in NAMES if SpecifierSet(ranges).contains(version, prereleases=True)), None)


def missing_names(ranges: str) -> list[str]:
    """Names of a range of versions that the installed DeepSpeed lacks."""
    missing = []
    for owner, names in NAMES[ranges].items():
        found = _find(owner)
        missing += [f"{owner.rpartition(':')[2]}.{name}" for name in names if not hasattr(found, name)]
    for function, names in ATTRIBUTES[ranges].items():
        code = getattr(_find(function), "__code__", None)
        given = getattr(code, "co_names", ())
        missing += [f"{name} (set by {function.rpartition(':')[2]})" for name in names if name not in given]
    return missing


def check(version: str) -> None:
    """Raise UserError where the installed DeepSpeed, of this version, is not one that seams.py knows."""
    remedy = f"pip install 'deepspeed{' or '.join(NAMES)}'"
    ranges = supported_range(version)
    if ranges is None:
        raise UserError(
            f"DeepSpeed {version} is not supported: FP8 in ZeRO-3 knows {' or '.join(NAMES)}", remedy=remedy
        )
    missing = missing_names(ranges)
    if missing:
        raise UserError(
            f"DeepSpeed {version} lacks {', '.join(missing)}, which the FP8 path of ZeRO-3 needs", remedy=remedy
        )


def _find(path: str) -> object | None:
    """The module, class or function at module:name.name; None where it is not there."""
    module, _, attributes = path.partition(":")
    found: object | None = importlib.import_module(module)
    for name in _parts(attributes):
        found = getattr(found, name, None)
    return found


def _parts(attributes: str) -> Iterator[str]:
    return (name for name in attributes.split(".") if name)
