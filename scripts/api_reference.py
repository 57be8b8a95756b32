"""Write docs/api.md from the docstrings of the public names.

python scripts/api_reference.py            # after a change of a public function
python scripts/api_reference.py --check    # exit 1 if the page is out of date
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
WIDTH = 100
INTRODUCTION = """# API

Written by `python scripts/api_reference.py` from the docstrings. Names are given with the module to import them from.
The keys of the JSON are in [configuration.md](configuration.md), the `ds-fp8` commands in [training.md](training.md).
"""
PAGE: dict[str, dict[str, tuple[str, ...]]] = {
    "Training": {
        "ds_fp8.initialize": (),
        "ds_fp8.install": (),
        "ds_fp8.uninstall": (),
        "ds_fp8.FP8Config": ("from_preset",),
        "ds_fp8.convert": (),
        "ds_fp8.engine.state.FP8State": ("saturation", "routing", "stop_casting", "state_dict", "load_state_dict"),
        "ds_fp8.UserError": (),
    },
    "Routing of experts": {
        "ds_fp8.layers.experts.routing.record": (),
        "ds_fp8.layers.experts.routing.replay": (),
        "ds_fp8.layers.experts.routing.changed_tokens": (),
    },
    "Casts": {"ds_fp8.quantize": (), "ds_fp8.QuantizedTensor": ("dequantize", "t", "shape", "format", "nbytes")},
    "Optimizers": {
        "ds_fp8.AdamW": ("step", "skipped_steps", "state_bytes"),
        "ds_fp8.optim.Madam": ("step",),
    },
    "Memory": {
        "ds_fp8.estimate": (),
        "ds_fp8.memory.Estimate": ("peak_bytes", "lasting_bytes", "device_bytes", "as_json"),
    },
    "Export": {
        "ds_fp8.export.export_engine": (),
        "ds_fp8.export.export_checkpoint": (),
        "ds_fp8.export.served_weights": (),
        "ds_fp8.integrations.vllm.sync_weights": (),
        "ds_fp8.integrations.vllm.transfer_config": (),
        "ds_fp8.integrations.trl.install": (),
    },
}
"""The page: public names by section, each with its public members."""


def document() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for title, names in PAGE.items():
        parts.append(f"## {title}\n")
        for path, members in names.items():
            module, _, name = path.rpartition(".")
            value = getattr(import_module(module), name)
            parts.append(entry(f"### `{path}`", name, value))
            parts += [entry(f"#### `{name}.{member}`", member, getattr(value, member)) for member in members]
    return "\n".join(parts)


def entry(heading: str, name: str, value: Any) -> str:
    """Return a name's heading, its signature where a user calls it, and its docstring."""
    text = inspect.getdoc(value) or ""
    called = inspect.isroutine(value) or (inspect.isclass(value) and "Args:" in text)
    parts = [heading, f"```python\n{signature(name, value)}\n```"] if called else [heading]
    return "\n\n".join([*parts, markdown(text)])


def signature(name: str, value: Any) -> str:
    """Return the call of a function, method or class: in one line, or with its parameters in lines below."""
    call = inspect.signature(value)
    words = []
    for key, parameter in call.parameters.items():
        if key == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        words.append(f"{stars}{key}: {parameter.annotation}{default}")
    returns = "" if inspect.isclass(value) else f" -> {call.return_annotation}"
    line = f"{name}({', '.join(words)}){returns}"
    if len(line) <= WIDTH:
        return line
    lines = [""]
    for word in words:  # never broken within a parameter
        if lines[-1] and len(lines[-1]) + len(word) > WIDTH - len("    , "):
            lines.append("")
        lines[-1] += f"{', ' if lines[-1] else ''}{word}"
    return f"{name}(\n" + "".join(f"    {line},\n" for line in lines) + f"){returns}"


def markdown(docstring: str) -> str:
    """Return a docstring in Google's form as Markdown, with lists of arguments and errors."""
    result, block = [], ""
    for line in docstring.splitlines():
        if title := re.fullmatch(r"(Args|Raises|Returns|Yields):", line):
            block = title[1]
            result += [f"**{block}**", ""]
            continue
        if line and not line.startswith("    "):
            block = ""
        item = re.fullmatch(r"    (\w+): (.*)", line) if block in ("Args", "Raises") else None
        if item:
            line = f"- `{item[1]}`: {item[2]}"
        elif block in ("Args", "Raises") and line:
            line = "  " + line.strip()
        elif block:
            line = line.strip()
        result.append(line)
    return "\n".join(result).rstrip() + "\n"


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    written = document()
    if check:
        return int(not FILE.exists() or FILE.read_text() != written)
    FILE.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
