"""Writing a Hugging Face folder: complete or not at all, one shard in memory at a time."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import GenerationConfig, PretrainedConfig

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import UserError
from ds_fp8.export.card import model_card
from ds_fp8.export.generation import make_savable
from ds_fp8.export.layouts import SCALE_SUFFIX, quantization_config
from ds_fp8.export.plan import Plan

SHARD_BYTES = 1 << 30
CHECKSUMS = "checksums.sha256"
WEIGHTS = "model.safetensors"
NamedWeight = tuple[str, torch.Tensor | QuantizedTensor]


def check_target(folder: Path, force: bool, source: Path | None = None) -> None:
    """Raise UserError where `folder` exists and may not be replaced, or holds the checkpoint `source`."""
    if Path.cwd().is_relative_to(folder.resolve()):
        raise UserError(f"{folder} is the folder you are in, or holds it", remedy="choose another folder")
    if folder.exists() and not (force and folder.is_dir()):
        raise UserError(f"{folder} exists", remedy="choose another folder, or replace this one with --force")
    if source is not None and source.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{folder} holds the checkpoint itself", remedy="choose another folder")


def write_folder(
    folder: Path,
    plan: Plan,
    weights: Iterable[NamedWeight],
    config: PretrainedConfig,
    *,
    generation: GenerationConfig | None = None,
    tokenizer: Callable[[Path], object] | None = None,
    source: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the folder under another name and rename it when it is complete; an existing one is replaced then.

    Args:
        folder: Where to write.
        plan: Its tensors.
        weights: Name and numbers of every entry of the plan, in its order: a QuantizedTensor for those in FP8.
        config: The model's configuration; `architectures` must name its class.
        generation: Its defaults for generate(), without settings that have no effect: transformers refuses them.
        tokenizer: Saves the tokenizer into a folder.
        source: What was trained, for the model card.
        shard_bytes: Size limit of a file of weights.
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
        # Checksums last, of all files as they lie there.
        files = sorted(path for path in part.iterdir() if path.is_file())
        (part / CHECKSUMS).write_text("".join(f"{_sha256(path)}  {path.name}\n" for path in files))
        make_readable(part)


@contextlib.contextmanager
def _complete(folder: Path) -> Iterator[Path]:
    """Yield a folder that takes the place of `folder` at the end, and that an error leaves no trace of."""
    folder = folder.resolve()
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
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
    # Between these two lines a kill leaves neither folder under its name, but the complete one as .part.
    part.rename(folder)


def make_readable(folder: Path) -> None:
    """Let everybody read the files of a folder: safetensors writes its own for their owner alone."""
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o644)


def _write_weights(folder: Path, plan: Plan, weights: Iterable[NamedWeight], shard_bytes: int) -> None:
    # On the meta device: the split into files follows from shapes, before any number is read.
    planned = {name: tensor for entry in plan.entries for name, tensor in entry.tensors(plan).items()}
    pattern = WEIGHTS.replace(".safetensors", "{suffix}.safetensors")
    split = split_torch_state_dict_into_shards(planned, filename_pattern=pattern, max_shard_size=shard_bytes)
    shard: dict[str, torch.Tensor] = {}
    done: set[str] = set()
    entries = {entry.name: entry for entry in plan.entries}
    for name, numbers in weights:
        for part, own in entries[name].stored(numbers).items():
            shard.update(_stored(part, own, plan))
        for file, names in split.filename_to_tensors.items():
            if file not in done and shard.keys() >= set(names):
                # Written as soon as a file's tensors are complete, and dropped: memory holds about one file.
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


def _stored(name: str, numbers: torch.Tensor | QuantizedTensor, plan: Plan) -> dict[str, torch.Tensor]:
    if isinstance(numbers, QuantizedTensor):
        return {name: numbers.data.cpu(), name + SCALE_SUFFIX[plan.layout]: numbers.scale.cpu().contiguous()}
    return {name: numbers.cpu().contiguous()}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
