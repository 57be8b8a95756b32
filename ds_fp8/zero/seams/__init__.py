"""The only files that use DeepSpeed's private names; deepspeed_versions.py lists them.

ZeRO-3 (`deepspeed.runtime.zero`) is entered at these places:

    parameters.py     every partitioned Parameter carries the closures `all_gather_coalesced`, `all_gather` and
                      `partition`, set in partition_parameters.Init; the parameter coordinator calls nothing else
    gradients.py      stage3 calls the module-level `reduce_scatter_coalesced(gradients, group) -> local slices`
    updates.py        methods of the ZeRO-3 optimizer after which the FP32 master shards may differ
    checkpoints.py    save_checkpoint and load_checkpoint of the engine
    persistent.py     DeepSpeed's step gathers what stays whole by the closure of the first of its persistent parameters
    step.py           DeepSpeed's ZeRO-3 optimizer as this package's step uses it
    micro_step.py     forward and backward of one micro-batch, as a CUDA graph captures them
    bf16_shards.py    the BF16 shards that DeepSpeed keeps beside the masters

What is installed (installation.py) is installed on instances (an engine, its optimizer, modules and parameters), never
on DeepSpeed's modules or classes, and engine.destroy() takes it off again.

deepspeed_versions.check, before FP8 is put to work, says whether the installed DeepSpeed is a version that these files
know and has every name.
"""

from ds_fp8.zero.seams.checkpoints import (
    CHECKPOINT_CLASSES,
    before_load,
    checkpoint_files,
    consolidated_state_dict,
    copy_recovery_scripts,
    in_checkpoints,
)
from ds_fp8.zero.seams.gradients import ReduceScatter, StockReduceScatter, replace_reduce_scatter, stock_reduce_scatter
from ds_fp8.zero.seams.installation import disable_shm_build, on_destroy, replace
from ds_fp8.zero.seams.parameters import (
    Segment,
    Shard,
    begin_gather,
    bf16_shard,
    data_parallel_group,
    end_gather,
    flat_parameters,
    full_shape,
    gather_behind_writes,
    in_use,
    is_partitioned,
    is_trained,
    is_zero_parameter,
    leaf_module_of,
    master_shard,
    on_external_parameter,
    on_gather,
    order,
    partition_all,
    shard_of,
    wrap_closure,
)
from ds_fp8.zero.seams.persistent import gather_persistent_together
from ds_fp8.zero.seams.updates import (
    around_master_update,
    before_moment_write,
    call_around,
    has_optimizer,
    on_step,
    refuse_state_offload,
)

__all__ = [
    "CHECKPOINT_CLASSES",
    "ReduceScatter",
    "Segment",
    "Shard",
    "StockReduceScatter",
    "around_master_update",
    "before_load",
    "before_moment_write",
    "begin_gather",
    "bf16_shard",
    "call_around",
    "checkpoint_files",
    "consolidated_state_dict",
    "copy_recovery_scripts",
    "data_parallel_group",
    "disable_shm_build",
    "end_gather",
    "flat_parameters",
    "full_shape",
    "gather_behind_writes",
    "gather_persistent_together",
    "has_optimizer",
    "in_checkpoints",
    "in_use",
    "is_partitioned",
    "is_trained",
    "is_zero_parameter",
    "leaf_module_of",
    "master_shard",
    "on_destroy",
    "on_external_parameter",
    "on_gather",
    "on_step",
    "order",
    "partition_all",
    "refuse_state_offload",
    "replace",
    "replace_reduce_scatter",
    "shard_of",
    "stock_reduce_scatter",
    "wrap_closure",
]
