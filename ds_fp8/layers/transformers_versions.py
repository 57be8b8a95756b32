"""The tested versions of transformers, and digests of its functions that are replaced, reimplemented or relied on.

As for DeepSpeed (zero/deepspeed/versions.py).
"""

from __future__ import annotations

import functools
import os
import warnings

from packaging.specifiers import SpecifierSet

from ds_fp8.config.errors import UserError
from ds_fp8.config.other_packages import digest

# 5.24 calls decoder layers with `cache` in place of `past_key_values`: fused layers would generate wrong text
KNOWN = ">=5.0,<5.24"
TRY = "DS_FP8_TRY_TRANSFORMERS"  # environment variable: another version to try
REMEDY = f"pip install 'transformers{KNOWN}'"

_MASKS = "transformers.masking_utils"
_LOSS = "transformers.loss.loss_utils"

# digests of the sources in transformers 5.17 and 5.23
DIGESTS: dict[str, tuple[str, ...]] = {
    # closures of masks, by which packed rows in graphs are recognised
    f"{_MASKS}:and_masks": ("8ade4d2d52a8",),
    f"{_MASKS}:causal_mask_function": ("51560a9a0678",),
    f"{_MASKS}:packed_sequence_mask_function": ("d47753a10391",),
    # replaced in graphs
    f"{_MASKS}:find_packed_sequence_indices": ("f9bb5017a601",),
    "transformers.utils.import_utils:is_tracing": ("2495e8417174", "18e5b5b879df"),
    # detect packed rows by their positions, skip causal masks, pass masks on to the attention function
    f"{_MASKS}:_preprocess_mask_arguments": ("586d687837df",),
    f"{_MASKS}:_ignore_causal_mask_sdpa": ("a02f3c40653f", "1120e4a589f2"),
    f"{_MASKS}:create_causal_mask": ("d51ba6c0f562", "5d23d007d734"),
    f"{_MASKS}:sdpa_mask": ("95163a4daf10", "63b4331e700a"),
    # called by fused layers, reimplemented by the fused loss
    "transformers.integrations.sdpa_attention:sdpa_attention_forward": ("3a32ec0ef7e1", "e74e11f536d6"),
    f"{_LOSS}:ForCausalLMLoss": ("65ffc4672b59",),
    f"{_LOSS}:fixed_cross_entropy": ("ece3a9ea9440",),
}


def check_version(version: str) -> None:
    if not SpecifierSet(KNOWN).contains(version, prereleases=True) and os.environ.get(TRY) != version:
        remedy = f"{REMEDY}, or set {TRY}={version} to try it"
        raise UserError(f"transformers {version} is not supported: {KNOWN} is", remedy=remedy)


@functools.cache
def warn_of_changes(version: str) -> None:
    """Warn once of functions of the installed transformers with unknown digests."""
    found = [path.rpartition(":")[2] for path, known in DIGESTS.items() if digest(path) not in known]
    if found:
        text = f"transformers {version} has functions that differ from the tested versions: {', '.join(found)}"
        warnings.warn(f"{text}. Compare the losses with BF16's, or {REMEDY}", stacklevel=2)
