"""The only files that use DeepSpeed's private names; deepspeed_versions.py lists them.

    methods.py        the methods of the engine, its optimizer and its parameters that are replaced, each once: their
                      calls go to zero/lifecycle.py
    parameters.py     partitioned parameters: shards, masters, states of gathering
    persistent.py     parameters that stay whole between steps, gathered as one
    step.py           the ZeRO-3 optimizer as this package's step uses it
    bf16_shards.py    the BF16 shards that DeepSpeed keeps beside the masters
    micro_step.py     forward and backward of one micro-batch, as a CUDA graph captures them
    checkpoints.py    what the engine saves

What is installed (installation.py) is installed on instances (an engine, its optimizer, modules and parameters), never
on DeepSpeed's modules or classes, and engine.destroy() takes it off again.

deepspeed_versions.check, before FP8 is put to work, says whether the installed DeepSpeed is a version that these files
know and has every name.
"""

from ds_fp8.zero.seams.checkpoints import (
    CHECKPOINT_CLASSES,
    checkpoint_files,
    consolidated_state_dict,
    copy_recovery_scripts,
)
from ds_fp8.zero.seams.installation import before_load, disable_shm_build, on_destroy, on_step, replace
from ds_fp8.zero.seams.methods import has_optimizer, replace_methods
from ds_fp8.zero.seams.parameters import (
    Segment,
    Shard,
    begin_gather,
    bf16_shard,
    bytes_to_gather,
    data_parallel_group,
    end_gather,
    flat_parameters,
    full_shape,
    in_use,
    is_gathered,
    is_partitioned,
    is_trained,
    is_zero_parameter,
    leaf_module_of,
    link_moments,
    master_shard,
    on_external_parameter,
    order,
    partition_all,
    shard_group,
    shard_of,
    untrained,
    values_here,
)
from ds_fp8.zero.seams.persistent import gather_together
from ds_fp8.zero.seams.step import (
    accumulates,
    accumulates_in_fp32,
    fetch_for_backward,
    reduce_gradient,
)
