"""The model card (README.md) of an exported folder."""

from __future__ import annotations

from collections import Counter

from transformers import PretrainedConfig

import ds_fp8
from ds_fp8.export.plan import Plan

_WEIGHTS = {
    "bf16": "All weights are in BF16.",
    "fp8": "Weights of {count} linear layers are in FP8 (E4M3) with one scale a 128x128 block (`weight_scale_inv`, the "
    "factor to multiply by); activations are to be cast per 1x128 group while serving.",
    "compressed-tensors": "Weights of {count} linear layers are in FP8 (E4M3) with scales by {granularity} "
    "(`weight_scale`), in the compressed-tensors format; activations are to be cast while serving.",
}


def model_card(plan: Plan, config: PretrainedConfig, source: str) -> str:
    """Return the text of README.md: what the folder holds and how to load it."""
    kept = Counter(plan.left.values())
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [ds_fp8" + (", fp8]" if plan.layout != "bf16" else "]"),
        "---",
        "",
        f"# {config.architectures[0] if config.architectures else config.model_type}",
        "",
        f"Written by ds_fp8 {ds_fp8.__version__}" + (f" from {source}." if source else "."),
        "",
        _WEIGHTS[plan.layout].format(count=len(plan.quantized), granularity=plan.cast.granularity),
    ]
    if plan.layout != "bf16":
        lines += [
            "The codes are those that training computed with, cast from its FP32 master weights.",
            "",
            "| linear layers in BF16 | why |",
            "|---|---|",
            *(f"| {count} | {reason} |" for reason, count in kept.items()),
        ]
    lines += [
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("this folder", dtype="auto")',
        'tokenizer = AutoTokenizer.from_pretrained("this folder")',
        "```",
        "",
        "`sha256sum -c checksums.sha256` checks the files.",
        "",
    ]
    return "\n".join(lines)
