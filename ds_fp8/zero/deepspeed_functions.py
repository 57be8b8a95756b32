"""Digests of DeepSpeed functions that the seams replace, imitate or rely on, by version.

A version may keep every name and change behaviour: `changed_functions` lists the functions that differ.
"""

from __future__ import annotations

import functools

from ds_fp8.config.other_packages import KnownFunction, changed

LOOKED_AT = "0.19.8"
"""The newest version whose functions were read."""

_OPTIMIZER = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"
_PARAMETER = "deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param"
_COLLECTIVES = "deepspeed.runtime.comm.coalesced_collectives:reduce_scatter_coalesced"

FUNCTIONS: dict[str, KnownFunction] = {
    f"{_OPTIMIZER}.step": KnownFunction(
        "replaced by this package's step, which does what is around it itself", ("5578eb207dfb",)
    ),
    f"{_OPTIMIZER}._pre_step": KnownFunction("called at the beginning of this package's step", ("72aded5fd6a3",)),
    f"{_OPTIMIZER}._post_step": KnownFunction(
        "called at the end of this package's step, without timers", ("f96bf3a562af",)
    ),
    f"{_OPTIMIZER}._partition_all_parameters": KnownFunction(
        "called before this package's step writes masters", ("984f8e1a8ff5",)
    ),
    f"{_OPTIMIZER}._loss_scale_update_and_overflow_cleanup": KnownFunction(
        "called at the end of a step, taken or skipped", ("0644e716fab0",)
    ),
    f"{_OPTIMIZER}.partition_grads": KnownFunction(
        "left out: gradients are added to the flat shards as they arrive", ("b7dc0741079a",)
    ),
    f"{_OPTIMIZER}.independent_gradient_partition_epilogue": KnownFunction(
        "replaced: the next step's stream waits, and not the host", ("a211f72a6caf",)
    ),
    f"{_OPTIMIZER}.backward_epilogue": KnownFunction(
        "called when a micro-step is captured as a CUDA graph", ("6cd69f6729a9",)
    ),
    f"{_OPTIMIZER}.__add_grad_to_ipg_bucket": KnownFunction(
        "expected to leave gradients with their parameters, without a bucket's buffer", ("ab9d82f3ea09",)
    ),
    f"{_OPTIMIZER}.__reduce_and_partition_ipg_grads": KnownFunction(
        "expected to average a bucket and then to partition its gradients", ("3f07ca4a6e52",)
    ),
    f"{_OPTIMIZER}.__avg_scatter_grads": KnownFunction(
        "replaced by the FP8 reduction, or wrapped: slices are means over the ranks", ("3e1eac3d8163",)
    ),
    f"{_OPTIMIZER}._set_fp16_partitioned_groups_flat": KnownFunction(
        "called when BF16 shards are restored from the masters", ("5a81cdaa6359",)
    ),
    f"{_OPTIMIZER}.load_state_dict": KnownFunction(
        "wrapped: masters are cast to FP8 again, and BF16 shards exist meanwhile", ("f18d8c61b8ab",)
    ),
    f"{_OPTIMIZER}.refresh_fp32_params": KnownFunction(
        "wrapped: masters are cast to FP8 again, and BF16 shards exist meanwhile", ("a19261579622",)
    ),
    f"{_OPTIMIZER}.offload_states": KnownFunction("wrapped: BF16 shards exist meanwhile", ("3ee71d8002d5",)),
    f"{_OPTIMIZER}.reload_states": KnownFunction("wrapped: BF16 shards are freed afterwards", ("3cbcf5921534",)),
    f"{_OPTIMIZER}.set_full_hp_param": KnownFunction(
        "wrapped: the parameter's masters are cast to FP8 again", ("ead7f5d47e51",)
    ),
    f"{_OPTIMIZER}.set_local_hp_param": KnownFunction(
        "wrapped: the last cast may still read masters, and moments are written in FP32", ("8ae114259654",)
    ),
    f"{_COORDINATOR}.reset_step": KnownFunction(
        "expected to leave counters as a captured micro-step finds them", ("cd4438c72b57",)
    ),
    f"{_COORDINATOR}.release_sub_module": KnownFunction(
        "expected to partition what no module uses any more", ("ad20b88f698f",)
    ),
    f"{_PARAMETER}.partition": KnownFunction(
        "wrapped: FP8 bytes are freed, and gathers wait for what a user wrote", ("7b50ec63cfde",)
    ),
    f"{_PARAMETER}.all_gather": KnownFunction(
        "wrapped, and imitated for parameters that stay whole", ("8eaf6161e8ec",)
    ),
    f"{_PARAMETER}.all_gather_coalesced": KnownFunction(
        "wrapped: weights in FP8 are gathered as bytes instead", ("d04cc9dac268",)
    ),
    _COLLECTIVES: KnownFunction("replaced by the FP8 reduction where DeepSpeed's step stays", ("66b19389daae",)),
}


@functools.cache
def changed_functions() -> dict[str, str]:
    """Return which functions of the installed DeepSpeed are not those looked at, by name, and their meanings here."""
    return changed(FUNCTIONS)
