"""Sources of DeepSpeed and transformers, at the pinned versions, that this package replaces, imitates or relies on.

A version may keep every name and change behaviour. Whoever raises a pin reads the functions that fail here, and writes
their new digests down.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import textwrap
from importlib import metadata

import pytest

_ZERO = "deepspeed.runtime.zero"
_STAGE3 = f"{_ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3"
_COORDINATOR = f"{_ZERO}.partitioned_param_coordinator:PartitionedParameterCoordinator"
_CLOSURES = f"{_ZERO}.partition_parameters:Init._convert_to_deepspeed_param"
_MASKS = "transformers.masking_utils"
_LOSS = "transformers.loss.loss_utils"

PINNED = {"deepspeed": "0.19.8", "transformers": "5.17"}
# By the path of a function, a digest of its source in the pinned version
DIGESTS = {
    f"{_STAGE3}.step": "588aaf2c337d",
    f"{_STAGE3}._pre_step": "0c1a34ee0d5a",
    f"{_STAGE3}._post_step": "d32eb3074137",
    f"{_STAGE3}._partition_all_parameters": "6a228b8ffd8d",
    f"{_STAGE3}._loss_scale_update_and_overflow_cleanup": "a1ab8e3aaf59",
    f"{_STAGE3}.partition_grads": "ef0ab1c41f74",
    f"{_STAGE3}.independent_gradient_partition_epilogue": "9c0c44e4909c",
    f"{_STAGE3}.backward_epilogue": "397edbcb0c47",
    f"{_STAGE3}.__add_grad_to_ipg_bucket": "37f91bb25aa2",
    f"{_STAGE3}.__reduce_and_partition_ipg_grads": "84d08310e73d",
    f"{_STAGE3}.__avg_scatter_grads": "039f10e607c5",
    f"{_STAGE3}._set_fp16_partitioned_groups_flat": "0c5fe417f756",
    f"{_STAGE3}._create_fp16_sub_groups": "cc968c892505",
    f"{_STAGE3}._create_fp32_partitions": "8f0c20d2a040",
    f"{_STAGE3}.initialize_optimizer_states": "7c4649dc4a9b",
    f"{_STAGE3}._rigid_state_dict": "48159e8608c0",
    f"{_STAGE3}._rigid_load_state_dict": "2b97ce59ae02",
    f"{_STAGE3}._get_fp32_opt_state_partition": "d5834f46b354",
    f"{_STAGE3}.load_state_dict": "4bc41cc0016a",
    f"{_STAGE3}.refresh_fp32_params": "bcf65c4db2f4",
    f"{_STAGE3}.offload_states": "af6ca5a1a3c2",
    f"{_STAGE3}.reload_states": "85f04a613c59",
    f"{_STAGE3}.set_full_hp_param": "fe22f137100f",
    f"{_STAGE3}.set_local_hp_param": "869b05d1c345",
    f"{_COORDINATOR}.reset_step": "c5327bb7f221",
    f"{_COORDINATOR}.release_sub_module": "b072218e295b",
    f"{_CLOSURES}.partition": "b623e4aa0219",
    f"{_CLOSURES}.all_gather": "55661cae7d4c",
    f"{_CLOSURES}.all_gather_coalesced": "e57944126f76",
    "deepspeed.runtime.comm.coalesced_collectives:reduce_scatter_coalesced": "d49fb6b733d0",
    # A mask's closure says what it is made of, by which packed rows in graphs are known.
    f"{_MASKS}:and_masks": "cc8ea5001eae",
    f"{_MASKS}:causal_mask_function": "52d5897d62ca",
    f"{_MASKS}:packed_sequence_mask_function": "e4d3048bdbc2",
    # Replaced in graphs.
    f"{_MASKS}:find_packed_sequence_indices": "5f1fd2329e26",
    "transformers.utils.import_utils:is_tracing": "50d2b35aad88",
    # Find packed rows by their positions alone, leave out causal masks, hand parts to the attention's own function.
    f"{_MASKS}:_preprocess_mask_arguments": "e63dcd220bb4",
    f"{_MASKS}:_ignore_causal_mask_sdpa": "70001907ad3b",
    f"{_MASKS}:create_causal_mask": "513f2b23e1ef",
    f"{_MASKS}:sdpa_mask": "bb28f415aadd",
    # Called by fused layers, and imitated by the fused loss.
    "transformers.integrations.sdpa_attention:sdpa_attention_forward": "f9b367115a75",
    f"{_LOSS}:ForCausalLMLoss": "daa131c9d340",
    f"{_LOSS}:fixed_cross_entropy": "648bfdc187fa",
}


@functools.cache
def _parsed(module: str) -> tuple[list[str], ast.Module]:
    with open(importlib.util.find_spec(module).origin, encoding="utf-8") as file:
        source = file.read()
    return source.splitlines(), ast.parse(source)


def digest(path: str) -> str | None:
    """A digest of a function's lines, decorators among them; None where there is no such function."""
    module, _, names = path.partition(":")
    lines, found = _parsed(module)
    for name in names.split("."):
        # Decorators hide what they wrap: the definition is looked up in the source.
        inside = [node for node in ast.walk(found) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        found = next((node for node in inside if node.name == name and node is not found), None)
        if found is None:
            return None
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    text = textwrap.dedent("\n".join(lines[first - 1 : found.end_lineno]))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@pytest.mark.parametrize("path", DIGESTS)
def test_a_function_is_the_one_that_was_read(path):
    package = path.partition(".")[0]
    tried = f"DS_FP8_TRY_{package.upper()}" in os.environ  # scripts/newest_releases.py
    if not tried and not metadata.version(package).startswith(PINNED[package]):
        pytest.skip(f"{package} {metadata.version(package)} is not the pinned {PINNED[package]}")
    assert digest(path) == DIGESTS[path], f"{path} is another: read it, then write its digest down"
