"""Write the tables of keys and presets in docs/, and the JSON schema, from the sections' types and docstrings.

python scripts/configuration_reference.py            # after a change of a section
python scripts/configuration_reference.py --check    # exit 1 if a page is out of date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_fp8.config.fp8 import FP8Config, OptimizerStateConfig
from ds_fp8.config.presets import PRESETS
from ds_fp8.data import DataConfig
from ds_fp8.research.config import ResearchConfig
from ds_fp8.research.presets import PRESETS as RESEARCH_PRESETS
from ds_fp8.train.stage import ModelConfig, TrainConfig

DOCS = Path(__file__).resolve().parent.parent / "docs"
FILES = (DOCS / "configuration.md", DOCS / "research_formats.md")
SCHEMA = DOCS / "fp8.schema.json"
WORDS = 30  # Of a cell
# The linears of every preset in words, with the source; the other columns of the table follow from its values
LINEARS = {
    "infir2": "E4M3, 128x128 weights, 1x128 activations and gradients, power-of-two scales (arXiv 2509.22536)",
    "hybrid_fast": "as `infir2`, wgrad's input in 128x128 blocks: a faster product on Hopper",
    "precise": "as `hybrid_fast`, with FP32 scales for inputs and weights, and fprop corrected in 128 [outlier "
    "channels](#outlier-channels)",
    "rowwise": "E4M3, one scale per token and per output channel",
    "tensorwise": "one scale per tensor, E5M2 output gradients (arXiv 2209.05433)",
    "fp8lm_o1": "as `tensorwise` (arXiv 2310.18313)",
    "fp8lm_o2": "as `tensorwise`",
    "fp8lm_o3": "as `tensorwise`",
    "compact": "as `infir2`",
    "coat": "as `tensorwise` (arXiv 2410.19313)",
    "fishman": "as `tensorwise`, with Smooth-SwiGLU (arXiv 2409.12517)",
    "munit": "per tensor with static scales: E4M3 in units of 1, E5M2 output gradients in units of 2^-24 "
    "(arXiv 2502.05967)",
    "mxfp8": "emulated: E4M3 in groups of 32 with power-of-two scales",
    "halo": "emulated: INT8 with one scale per tensor, Hadamard rotations of level 2 (arXiv 2501.02625)",
    "nvfp4": "emulated: E2M1 in groups of 16 with E4M3 scales, weights in 16x16 blocks, stochastic output gradients, "
    "random Hadamard transforms in wgrad (arXiv 2509.25149)",
    "quartet": "emulated: E2M1 in groups of 32 with power-of-two scales, Hadamard transforms of 32 everywhere, "
    "backward from forward's quantized tensors (arXiv 2505.14669)",
}
SECTIONS: dict[str, type[BaseModel]] = {
    "fp8": FP8Config,
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
}
NAMES = {int: "integer", float: "number", str: "text", tuple: "list", list: "list", dict: "object"}


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted keys of a section and of the sections in it, in their order, each with its field."""
    for name, field in section.model_fields.items():
        of_either = (one for one in get_args(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel))
        inner = next(of_either, field.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def values(annotation: Any) -> list[str]:
    """Return what a key takes, null left out: only defaults are."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return [f"`{json.dumps(value)}`" for value in inner]
    if origin in (Union, UnionType):
        return [value for one in inner if one is not NoneType for value in values(one)]
    if annotation is bool:
        return ["`true`", "`false`"]
    name = NAMES.get(origin or annotation)
    return [name] if name else values(inner[0])  # Annotated


def row(names: list[str], field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    shown = "required" if field.is_required() else f"`{json.dumps(default, default=lambda value: value.model_dump())}`"
    others = (value for value in values(field.annotation) if value != shown)
    taken = ", ".join([shown, *(value for value in others if default is None or value not in NAMES.values())])
    meaning = first_paragraph(field.description or "")
    return f"| {', '.join(f'`{name}`' for name in names)} | {taken} | {meaning.replace('|', chr(92) + '|')} |"


def first_paragraph(text: str) -> str:
    """Return what a cell shows of a description; the schema has all of it."""
    found = re.sub(r"\s+", " ", text.split("\n\n")[0])
    if len(found.split()) > WORDS:
        raise ValueError(f"more than {WORDS} words for a cell; begin a new paragraph after the most important: {found}")
    return found


def tables() -> str:
    parts = []
    for name, section in SECTIONS.items():
        about = re.sub(r"\s+", " ", (section.__doc__ or "").split("\n\n")[0])
        parts.append(f"## `{name}`\n\n{about}\n\n{key_table(section)}")
    return "\n".join(parts)


def key_table(section: type[BaseModel]) -> str:
    return _table(keys(section))


def research_table() -> str:
    """Return the table of the keys that only extensions of the "fp8" section's parts have."""
    found: list[tuple[str, FieldInfo]] = []
    for name, field in FP8Config.model_fields.items():
        core, extension = field.annotation, ResearchConfig.model_fields[name].annotation
        if extension is not core:
            known = dict(keys(core, f"{name}."))
            found += [(key, field) for key, field in keys(extension, f"{name}.") if key not in known]
    return _table(found)


def _table(found: Iterable[tuple[str, FieldInfo]]) -> str:
    alike: dict[str, tuple[list[str], FieldInfo]] = {}
    for key, field in found:
        alike.setdefault(row([key.rpartition(".")[2]], field), ([], field))[0].append(key)
    lines = "".join(f"{row(names, field)}\n" for names, field in alike.values())
    return f"| key | default, other values | meaning |\n|---|---|---|\n{lines}"


def schema() -> str:
    """Return the JSON schema of a stage: DeepSpeed's keys are left to DeepSpeed."""
    sections = {
        name: section.model_json_schema(ref_template=f"#/$defs/{name}/$defs/{{model}}")
        for name, section in SECTIONS.items()
    }
    found = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A DeepSpeed configuration with the sections of ds_fp8",
        "type": "object",
        "properties": {name: {"$ref": f"#/$defs/{name}"} for name in sections},
        "$defs": sections,
    }
    return json.dumps(found, indent=1) + "\n"


def preset_table(names: Iterable[str]) -> str:
    rows = ["| `fp8.preset` | linears | all-gather, reduce-scatter; optimizer state |", "|---|---|---|"]
    for name in names:
        config = FP8Config.from_preset(name)
        gathered, reduced = config.param_gather.format.upper(), config.grad_reduce.format.upper()
        if config.grad_reduce.format != "bf16" and config.grad_reduce.scale == "tensor":
            reduced += " (one adaptive scale a gradient)"
        state = _state_in_words(config.optimizer)
        rows.append(f"| `{name}` | {LINEARS[name]} | {gathered}, {reduced}; {state} |")
    return "".join(f"{row}\n" for row in rows)


def _state_in_words(state: OptimizerStateConfig) -> str:
    first, second = (
        name.upper().replace("_EXPANDED", " with its range expanded") for name in (state.exp_avg, state.exp_avg_sq)
    )
    moments = first if first == second else f"{first} and {second}"
    return moments if state.master == "fp32" else f"{moments}, masters E4M3 and 16 bits"


# The written parts of the pages, by the name in the comments around them
BLOCKS: dict[str, Callable[[], str]] = {
    "presets": lambda: preset_table(PRESETS),
    "emulated presets": lambda: preset_table(RESEARCH_PRESETS),
    "keys": tables,
    "research keys": research_table,
}


def document(text: str) -> str:
    for name, table in BLOCKS.items():
        begin, end = f"<!-- {name}: written by scripts/configuration_reference.py -->", f"<!-- end of {name} -->"
        if begin in text:
            before, rest = text.split(begin)
            text = f"{before}{begin}\n\n{table()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    written = {file: document(file.read_text()) for file in FILES} | {SCHEMA: schema()}
    if check:
        return int(any(not file.exists() or file.read_text() != text for file, text in written.items()))
    for file, text in written.items():
        file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
