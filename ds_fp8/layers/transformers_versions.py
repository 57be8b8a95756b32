"""The names of transformers that this package uses beside its public ones, and the versions that were tested.

`check_names` runs before any file that imports them. Functions that this package replaces, imitates or relies on are
compared with those of the versions looked at, as DeepSpeed's are (zero/deepspeed/versions.py).
"""

from __future__ import annotations

import functools
import os
import warnings

from packaging.specifiers import SpecifierSet

from ds_fp8.config.errors import UserError
from ds_fp8.config.other_packages import KnownFunction, changed, missing, not_set

KNOWN = ">=5.0,<5.24"
"""From the oldest version that has all names to the newest that the tests pass with. 5.24 calls decoder layers with
`cache` in place of `past_key_values`: fused layers would generate wrong text."""
TRY = "DS_FP8_TRY_TRANSFORMERS"
"""Environment variable with the one version outside of them that a user wants to try."""
REMEDY = f"pip install 'transformers{KNOWN}'"

_MASKS = "transformers.masking_utils"

NAMES: dict[str, tuple[str, ...]] = {
    "transformers": ("AttentionInterface", "PreTrainedModel", "PretrainedConfig"),
    "transformers:PreTrainedModel": ("_init_weights",),
    "transformers:PretrainedConfig": ("_attn_implementation",),
    _MASKS: (
        *("ALL_MASK_ATTENTION_FUNCTIONS", "AttentionMaskInterface", "and_masks", "causal_mask_function"),
        *("find_packed_sequence_indices", "is_tracing", "packed_sequence_mask_function", "sdpa_mask"),
    ),
    "transformers.core_model_loading": ("revert_weight_conversion",),
    "transformers.integrations.sdpa_attention": ("repeat_kv", "sdpa_attention_forward"),
    "transformers.loss.loss_utils": ("ForCausalLMLoss",),
    "transformers.modeling_outputs": ("MoeModelOutputWithPast",),
    "transformers.modeling_utils": ("ALL_ATTENTION_FUNCTIONS",),
    "transformers.models.auto.configuration_auto": ("CONFIG_MAPPING", "CONFIG_MAPPING_NAMES"),
    "transformers.models.auto.modeling_auto": (*("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),),
    "transformers.models.auto.tokenization_auto": ("get_tokenizer_config",),
    "transformers.pytorch_utils": ("Conv1D",),
    "transformers.utils": ("SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME"),
    "transformers.utils.chat_template_utils": ("render_jinja_template",),
}
"""By module, or module:class: what it must have."""

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "transformers:PreTrainedModel._set_gradient_checkpointing": ("_gradient_checkpointing_func",),
    f"{_MASKS}:and_masks": ("mask_functions",),
}
"""By function: what it gives to what it works on, or keeps for the functions inside it."""

_RELIED_ON: dict[str, dict[str, str]] = {
    "a mask's closure says what it is made of, by which packed rows in graphs are known": {
        f"{_MASKS}:and_masks": "8ade4d2d52a8",
    },
    "recognised as a part of the mask of packed rows": {
        f"{_MASKS}:causal_mask_function": "51560a9a0678",
        f"{_MASKS}:packed_sequence_mask_function": "d47753a10391",
    },
    "replaced in graphs: says which document of a row a token is in": {
        f"{_MASKS}:find_packed_sequence_indices": "f9bb5017a601",
    },
    "replaced in graphs: masks are built as outside": {
        "transformers.utils.import_utils:is_tracing": "2495e8417174 18e5b5b879df",
    },
    "expected to find packed rows by their positions alone": {f"{_MASKS}:_preprocess_mask_arguments": "586d687837df"},
    "expected to leave the mask out where rows are causal": {
        f"{_MASKS}:_ignore_causal_mask_sdpa": "a02f3c40653f 1120e4a589f2",
    },
    "expected to make masks of parts, and to hand them to the attention's own function": {
        f"{_MASKS}:create_causal_mask": "d51ba6c0f562 5d23d007d734",
    },
    "called for masks that are not of packed rows": {f"{_MASKS}:sdpa_mask": "95163a4daf10 63b4331e700a"},
    "called by fused layers, as the layers' own attention": {
        "transformers.integrations.sdpa_attention:sdpa_attention_forward": "3a32ec0ef7e1 e74e11f536d6",
    },
    "imitated by the fused loss": {
        "transformers.loss.loss_utils:ForCausalLMLoss": "65ffc4672b59",
        "transformers.loss.loss_utils:fixed_cross_entropy": "ece3a9ea9440",
    },
}
FUNCTIONS = {
    function: KnownFunction(meaning, tuple(digests.split()))
    for meaning, functions in _RELIED_ON.items()
    for function, digests in functions.items()
}
"""By function: what about it is relied on, and what it was like in transformers 5.17 and 5.23."""


@functools.cache
def check_names() -> None:
    """Raise UserError for a transformers that lacks a name, or that is newer than those the tests pass with."""
    import transformers

    version = transformers.__version__
    lacking = missing(NAMES) + not_set(ATTRIBUTES)
    if lacking:
        raise UserError(f"transformers {version} lacks {', '.join(lacking)}", remedy=REMEDY)
    if not SpecifierSet(KNOWN).contains(version, prereleases=True) and os.environ.get(TRY) != version:
        remedy = f"{REMEDY}, or set {TRY}={version} to try it"
        raise UserError(f"transformers {version} is not supported: {KNOWN} is", remedy=remedy)


@functools.cache
def warn_of_changes(version: str) -> None:
    """Warn, once, of functions of the installed transformers that are not those of the versions looked at."""
    if found := changed(FUNCTIONS):
        functions = "; ".join(f"{name} ({meaning})" for name, meaning in found.items())
        text = f"transformers {version} has functions that are not those of the versions looked at: {functions}"
        warnings.warn(f"{text}. Compare the losses with BF16's, or {REMEDY}", stacklevel=2)
