"""Supported DeepSpeed versions, and the private names that the seams use in each.

An untested version may keep a name and change its meaning. A version outside the table is refused unless the user
asks to try it, and so is any that lacks a name; a warning lists functions that differ (deepspeed_functions.py).
"""

from __future__ import annotations

import os
import warnings

from packaging.specifiers import SpecifierSet

from ds_fp8.config.errors import UserError
from ds_fp8.config.other_packages import missing, not_set
from ds_fp8.zero.deepspeed_functions import LOOKED_AT, changed_functions

TRY = "DS_FP8_TRY_DEEPSPEED"
"""Environment variable with the one version outside the table that a user wants to try."""
OPTIMIZER = "DeepSpeedZeroOptimizer_Stage3"
AVERAGE_GRADIENTS = f"_{OPTIMIZER}__avg_scatter_grads"
FLUSH_BUCKET = f"_{OPTIMIZER}__reduce_and_partition_ipg_grads"
GRADIENT_PARTITIONS = f"_{OPTIMIZER}__param_id_to_grad_partition"
_COORDINATOR = "PartitionedParameterCoordinator"
FETCH_EVENTS = f"_{_COORDINATOR}__ongoing_fetch_events"
IN_FLIGHT = f"_{_COORDINATOR}__inflight_param_registry"
GATHER_STREAM = f"_{_COORDINATOR}__allgather_stream"
ACTIVE_BACKWARD = f"_{_COORDINATOR}__active_backward_submodules"
AVAILABLE_PARAMETERS = f"_{_COORDINATOR}__n_available_params"
GRADIENT_WRITES = ("set_fp32_grad_for_param", "set_local_grad_for_param", "update_fp32_grad_for_param_vectorized")
STEP_METHODS = (
    *("_pre_step", "_partition_all_parameters", "_post_step", "_loss_scale_update_and_overflow_cleanup"),
    *("step", "load_state_dict", "_restore_from_bit16_weights", "set_full_hp_param", "set_local_hp_param"),
    *("partition_grads", "independent_gradient_partition_epilogue", "zero_grad"),
    "reduce_ready_partitions_and_remove_grads",
)

_STAGE3 = "deepspeed.runtime.zero.stage3"
_PARTITIONS = "deepspeed.runtime.zero.partition_parameters"
_COORDINATOR_MODULE = "deepspeed.runtime.zero.partitioned_param_coordinator"

NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    ">=0.19.8,<0.20": {
        _PARTITIONS: ("ZeroParamStatus", "Init"),
        f"{_PARTITIONS}:Init": ("_all_gather", "_partition"),
        f"{_PARTITIONS}:ZeroParamStatus": ("NOT_AVAILABLE", "INFLIGHT", "AVAILABLE"),
        _STAGE3: (OPTIMIZER,),
        f"{_STAGE3}:{OPTIMIZER}": (
            *(AVERAGE_GRADIENTS, FLUSH_BUCKET, "get_param_id"),
            *(*GRADIENT_WRITES, *STEP_METHODS),
            *("offload_states", "reload_states", "_set_fp16_partitioned_groups_flat", "backward_epilogue"),
            "loss_scale",
        ),
        f"{_STAGE3}:IPGBucketZ3": ("clear_params",),
        f"{_COORDINATOR_MODULE}:{_COORDINATOR}": (
            *("is_complete_trace", "is_invalid_trace", "is_record_trace", "_invalidate_trace", "reset_step"),
        ),
        "deepspeed.runtime.zero.parameter_offload": ("FWD_MODULE_STACK",),
        "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload": (
            *("get_param_coordinator", "pre_sub_module_backward_function"),
        ),
        "deepspeed.ops": ("__compatible_ops__",),
        "deepspeed.constants": ("TORCH_DISTRIBUTED_DEFAULT_PORT",),
        "deepspeed.moe.layer": ("MoE",),
        "deepspeed.pipe": ("PipelineModule",),
        "deepspeed.runtime.checkpoint_engine.checkpoint_engine": ("CheckpointEngine",),
        "deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine": (
            *("create", "makedirs", "save", "load", "commit", "is_data_parallel_writer"),
        ),
        "deepspeed.runtime.config": (
            "DeepSpeedConfig",
            "ADAM_W_MODE",
            "DEEPSPEED_OPTIMIZERS",
            "TORCH_ADAM_PARAM",
            "get_bfloat16_config",
        ),
        "deepspeed.runtime.config_utils": ("DeepSpeedConfigModel",),
        "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
        "deepspeed.runtime.sequence_parallel.parallel_state_sp": ("get_sequence_parallel_world_size",),
        "deepspeed.runtime.sequence_parallel.ulysses_sp": ("UlyssesSPAttentionHF",),
        "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF": ("register_with_transformers",),
        "deepspeed.runtime": ("lr_schedules",),
        "deepspeed.runtime.zero": ("parameter_offload", "partition_parameters"),
        "deepspeed.runtime.zero.config": ("DeepSpeedZeroConfig", "ZeroStageEnum"),
        "deepspeed.runtime.zero.utils": ("get_norm_dtype", "ZERO_SUPPORTED_OPTIMIZERS"),
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": ("param_groups", "_link_all_hp_params"),
        "deepspeed.utils.tensor_fragment:tensor_fragment": ("get_hp_fragment_address",),
        "deepspeed.utils": ("set_z3_leaf_modules",),
        "deepspeed.utils.tensor_fragment": ("fragment_address",),
        "deepspeed.utils.zero_to_fp32": ("get_fp32_state_dict_from_zero_checkpoint",),
        "deepspeed.utils.logging": ("set_log_level_from_string",),
        "deepspeed.checkpoint.ds_to_universal": ("main",),
        "deepspeed.runtime.engine:DeepSpeedEngine": (
            *("_zero3_consolidated_16bit_state_dict", "save_checkpoint", "load_checkpoint", "destroy"),
            *("_copy_recovery_script", "zero_optimization_partition_weights", "zero_optimization_stage"),
        ),
    }
}
"""By range of versions: a module, or module:class, and what it must have."""

ATTRIBUTES: dict[str, dict[str, tuple[str, ...]]] = {
    ">=0.19.8,<0.20": {
        f"{_STAGE3}:{OPTIMIZER}.__init__": (
            *("grad_position", "overflow", "fp32_partitioned_groups_flat"),
            *("fp16_groups", "fp16_partitioned_groups_flat"),
            *("sub_group_process_groups", "sub_group_to_group_id", "ipg_buckets", "micro_step_id", "clip_grad"),
            *("reduce_and_partition_stream", "averaged_gradients", "params_already_reduced", "dp_process_group"),
            *("offload_optimizer", "offload_param", "use_muon", "model_parallel_group", "torch_autocast_gradscaler"),
            *("contiguous_gradients", "_global_grad_norm", "zenflow", "parameter_offload", "param_reduce_events"),
            *("persistent_parameters", "optimizer", "dtype", "device", "module", "gradient_accumulation_dtype"),
        ),
        f"{_STAGE3}:IPGBucketZ3.__init__": ("buffer", "params"),
        f"{_STAGE3}:{OPTIMIZER}._create_fp16_partitions_with_defragmentation": ("lp_param_buffer",),
        f"{_STAGE3}:{OPTIMIZER}._setup_for_real_optimizer": (GRADIENT_PARTITIONS, "grad_partitions_flat_buffer"),
        f"{_COORDINATOR_MODULE}:{_COORDINATOR}.__init__": (
            *(FETCH_EVENTS, IN_FLIGHT, GATHER_STREAM, ACTIVE_BACKWARD, AVAILABLE_PARAMETERS),
        ),
        "deepspeed.runtime.base_optimizer:ZeROOptimizer.__init__": ("_backward_hook_state",),
        f"{_STAGE3}:{OPTIMIZER}.clear_backward_seen_flag": ("_epilogue_ran_this_backward",),
        f"{_STAGE3}:{OPTIMIZER}._link_all_hp_params": ("_z3_optimizer",),
        "deepspeed.utils.mixed_precision_linkage:_init_lp_to_hp_mapping": (
            *("_hp_mapping", "get_full_hp_param", "set_full_hp_param"),
        ),
        "deepspeed.utils.tensor_fragment:tensor_fragment.set_optim_state_fragment": ("optim_fragment",),
        "deepspeed.utils.tensor_fragment:tensor_fragment.get_lp_grad_fragment": ("param_group_index",),
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.__init__": ("_param_slice_mappings",),
        "deepspeed.runtime.engine:DeepSpeedEngine.__init__": (
            *("inside_no_sync_ctxt", "tput_timer", "training_dataloader", "checkpoint_engine", "optimizer"),
        ),
        "deepspeed.runtime.engine:DeepSpeedEngine._configure_distributed_model": ("seq_data_parallel_group",),
        "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload._register_deepspeed_module": (
            *("ds_z3_leaf_module", "ds_grads_remaining", "applied_pre_backward_ref_cnt"),
        ),
        "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF.__init__": ("attn", "process_group"),
        f"{_PARTITIONS}:_init_external_params": ("_external_params",),
        f"{_PARTITIONS}:Init._partition_param": ("ds_quant_scale",),
        f"{_PARTITIONS}:Init._convert_to_deepspeed_param": (
            *("all_gather_coalesced", "all_gather", "partition"),
            *("ds_id", "ds_persist", "ds_tensor", "ds_numel", "ds_shape", "ds_status", "ds_process_group"),
            "partition_numel",
            *("ds_active_sub_modules", "ds_summary", "ds_secondary_tensor"),
        ),
    }
}
"""By range of versions: a function, and the attributes that it must give to what it works on."""


def supported_range(version: str) -> str | None:
    """Return the range of the table that `version` is in, or None."""
    return next((ranges for ranges in NAMES if SpecifierSet(ranges).contains(version, prereleases=True)), None)


def missing_names(ranges: str) -> list[str]:
    """Return the names of a range of versions that the installed DeepSpeed lacks."""
    return missing(NAMES[ranges]) + not_set(ATTRIBUTES[ranges])


def check(version: str) -> None:
    """Refuse a DeepSpeed that the seams do not know.

    The environment variable DS_FP8_TRY_DEEPSPEED, set to its version, lets an unknown one through with a warning.

    Raises:
        UserError: the installed DeepSpeed, of this version, is outside the table or lacks a name.
    """
    remedy = f"pip install 'deepspeed{' or '.join(NAMES)}'"
    ranges = supported_range(version)
    if ranges is None:
        unknown = f"DeepSpeed {version} is not supported: FP8 in ZeRO-3 knows {' or '.join(NAMES)}"
        if os.environ.get(TRY) != version:
            raise UserError(unknown, remedy=f"{remedy}, or try it: {TRY}={version}")
        warnings.warn(f"{unknown}, and {TRY} lets it try: compare the losses with BF16's", stacklevel=2)
        ranges = next(reversed(NAMES))
    lacking = missing_names(ranges)
    if lacking:
        raise UserError(
            f"DeepSpeed {version} lacks {', '.join(lacking)}, which the FP8 path of ZeRO-3 needs", remedy=remedy
        )
    changed = changed_functions()
    if changed:
        functions = "; ".join(f"{name} ({meaning})" for name, meaning in changed.items())
        warnings.warn(
            f"DeepSpeed {version} has functions that are not those of {LOOKED_AT}, for which FP8 in ZeRO-3 was "
            f"written: {functions}. Compare the losses with BF16's, or pip install 'deepspeed=={LOOKED_AT}'",
            stacklevel=2,
        )
