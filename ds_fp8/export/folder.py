"""Write a Hugging Face folder: all of it or nothing, with one file of weights in memory at a time."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import GenerationConfig, PretrainedConfig

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.config.log import logger
from ds_fp8.export.plan import Entry, Plan, Tensors, named_tensors, quantization_config

SHARD_BYTES = 1 << 30
CHECKSUMS = "checksums.sha256"
WEIGHTS = "model.safetensors"


class Progress:
    """Logs the progress of a task every EVERY seconds."""

    EVERY = 5

    def __init__(self, task: str, total: int, log: Callable[[str], None] = logger.info):
        self._task, self._total, self._log = task, total, log
        self._done, self._logged = 0, time.monotonic()

    def add(self, number: int) -> None:
        self._done += number
        if time.monotonic() - self._logged > self.EVERY:
            self._logged = time.monotonic()
            self._log(f"{self._task}: {self._done} of {self._total}")


def check_target(folder: Path, force: bool, source: Path | None = None) -> None:
    """Raise UserError if `folder` exists and is no export to be replaced, or holds the checkpoint `source`."""
    if Path.cwd().is_relative_to(folder.resolve()):
        raise UserError(f"{folder} is the folder you are in, or holds it", remedy="choose another folder")
    if folder.exists() and not (force and folder.is_dir()):
        raise UserError(f"{folder} exists", remedy="choose another folder, or replace an export with --force")
    if source is not None and source.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{folder} holds the checkpoint itself", remedy="choose another folder")
    foreign = _foreign(folder)
    if foreign is not None:
        raise UserError(f"{folder} {foreign}, and --force replaces exports alone", remedy="choose another folder")


def _foreign(folder: Path) -> str | None:
    """Return the reason that a folder is no unchanged export; None for an export, an empty or an absent folder."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    written = read_checksums(folder)
    if "config.json" not in written:
        return f"holds no export ({CHECKSUMS} does not name a config.json)"
    files = sorted(path for path in folder.iterdir() if path.name != CHECKSUMS)
    other = next((path.name for path in files if path.name not in written), None)
    if other is not None:
        return f"holds {other} next to an export"
    changed = next((path.name for path in files if sha256_of(path) != written[path.name]), None)
    return None if changed is None else f"holds {changed}, which is not as an export wrote it"


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 sums of an export's files by name; {} without a list."""
    file = folder / CHECKSUMS
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ()
    return {name: own for own, _, name in (line.partition("  ") for line in lines)}


def write_folder(
    folder: Path,
    plan: Plan,
    weights: Iterable[tuple[Entry, Tensors]],
    config: PretrainedConfig,
    generation: GenerationConfig | None = None,
    tokenizer: Callable[[Path], object] | None = None,
    source: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the folder under another name and rename it when complete; an existing one is replaced.

    weights: entries of the plan, in order, each with its tensors by their names in the model. The configuration's
    `architectures` must name the model's class.
    """
    if generation is not None:
        generation = copy.deepcopy(generation)
        if left_out := make_savable(generation):
            warnings.warn(left_out, stacklevel=2)
    with _complete(folder) as part:
        _write_weights(part, plan, weights, shard_bytes)
        values = config.to_dict() | {"dtype": "bfloat16"}
        for key in ("quantization_config", "_name_or_path"):
            values.pop(key, None)
        if plan.layout != "bf16":
            values["quantization_config"] = quantization_config(plan.layout, plan.cast, plan.left)
        (part / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        if generation is not None:
            generation.save_pretrained(part)
        if tokenizer is not None:
            tokenizer(part)
        (part / "README.md").write_text(model_card(plan, config, source))
        files = sorted(path for path in part.iterdir() if path.is_file())
        (part / CHECKSUMS).write_text("".join(f"{sha256_of(path)}  {path.name}\n" for path in files))
        make_readable(part)


@contextlib.contextmanager
def _complete(folder: Path) -> Iterator[Path]:
    """Yield a folder that replaces `folder` at the end, or is removed after an error."""
    folder = folder.resolve()
    # A free name: NAME.part may be the user's.
    part = next(p for n in count() if not (p := folder.with_name(f"{folder.name}.part{n or ''}")).exists())
    part.mkdir(parents=True)
    try:
        yield part
    except SafetensorError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(f"{folder} cannot be written: {error}", remedy="make room, or choose another folder") from None
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)  # a kill before it leaves the complete folder as .part


def make_readable(folder: Path) -> None:
    """Make the files of a folder readable to all: safetensors makes its own readable to the owner."""
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o644)


def _write_weights(folder: Path, plan: Plan, weights: Iterable[tuple[Entry, Tensors]], shard_bytes: int) -> None:
    # Meta tensors: the split into files follows from shapes.
    planned = {name: tensor for entry in plan.entries for name, tensor in entry.tensors(plan).items()}
    pattern = WEIGHTS.replace(".safetensors", "{suffix}.safetensors")
    split = split_torch_state_dict_into_shards(planned, filename_pattern=pattern, max_shard_size=shard_bytes)
    shard: dict[str, torch.Tensor] = {}
    done: set[str] = set()
    for entry, tensors in weights:
        for part, own in entry.stored(tensors).items():
            shard |= {n: tensor.cpu() for n, tensor in named_tensors(part, own, plan.layout).items()}
        for file, names in split.filename_to_tensors.items():
            if file not in done and shard.keys() >= set(names):
                # As soon as its tensors are complete: memory holds about one file.
                save_file({name: shard.pop(name) for name in names}, folder / file, metadata={"format": "pt"})
                done.add(file)
    missing = [name for file, names in split.filename_to_tensors.items() if file not in done for name in names]
    if missing:
        raise UserError(
            f"the trained weights lack {len(missing)} tensors of the model ({', '.join(missing[:3])})",
            remedy="give the configuration of the model that was trained",
        )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def sha256_of(path: Path) -> str | None:
    if not path.is_file():
        return None
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


_WEIGHTS = {
    "bf16": "All weights are in BF16.",
    "fp8": "Weights of {count} linear layers are in FP8 (E4M3) with one scale a 128x128 block (`weight_scale_inv`, the "
    "factor to multiply by); servers quantize activations per 1x128 group.",
    "compressed-tensors": "Weights of {count} linear layers are in FP8 (E4M3) with scales by {granularity} "
    "(`weight_scale`) in the compressed-tensors format; servers quantize activations. transformers reads "
    "it with `pip install compressed-tensors`, vLLM and SGLang without.",
}
_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [ds_fp8{tag}]
---

# {model}

Written by ds_fp8 {version}{source}.

{weights}{casts}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("this folder", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("this folder")
```

`sha256sum -c checksums.sha256` checks the files.
"""


def model_card(plan: Plan, config: PretrainedConfig, source: str) -> str:
    """Return the text of README.md: what the folder holds and how to load it."""
    casts = ""
    if plan.layout != "bf16":
        rows = "".join(f"| {count} | {reason} |\n" for reason, count in Counter(plan.left.values()).items())
        casts = f"\n\n{plan.origin}.\n"
        casts += f"\n| linear layers in BF16 | why |\n|---|---|\n{rows}"
    return _CARD.format(
        tag="" if plan.layout == "bf16" else ", fp8",
        model=config.architectures[0] if config.architectures else config.model_type,
        version=ds_fp8.__version__,
        source=f" from {source}" if source else "",
        weights=_WEIGHTS[plan.layout].format(count=len(plan.quantized), granularity=plan.cast.granularity),
        casts=casts.rstrip("\n"),
    )


_MODES = ("do_sample", "num_beams", "return_dict_in_generate", "use_cache")  # other settings depend on these


def make_savable(generation: GenerationConfig) -> str | None:
    """Reset settings without effect, such as temperature without do_sample, in place; return a message or None.

    transformers loads such settings with a warning, and save_pretrained refuses them.
    """
    modes = {name: getattr(generation, name) for name in _MODES if hasattr(generation, name)}
    settings = generation.to_diff_dict()
    unused = [name for name in settings if hasattr(generation, name) and _refused(modes | {name: settings[name]})]
    if not unused:
        return None
    for name in unused:
        setattr(generation, name, getattr(GenerationConfig(), name, None))
    names = ", ".join(f"{name} {settings[name]}" for name in unused)
    return f"generation_config: {names} had no effect, and is left out"


def _refused(settings: dict[str, Any]) -> bool:
    """Return whether transformers refuses to save these settings with its defaults."""
    config = GenerationConfig()
    vars(config).update(settings)
    try:
        config.validate(strict=True)
    except ValueError:
        return True
    return False
