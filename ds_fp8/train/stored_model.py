"""Find a stored model, read its configuration, and load its weights: BF16, FP32 or FP8, in one file or in many."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_fp8.config.errors import UserError
from ds_fp8.layers.linear import munit

_COMPRESSED_TENSORS = "compressed-tensors"
_STRATEGIES = ("block", "channel", "tensor")
"""Granularities of FP8 weights' scales, by the names of compressed-tensors."""
_SHOWN = 3
"""Names of missing weights that an error lists."""


@dataclass(frozen=True)
class ModelSource:
    """Location of a stored model: the configuration key that names it, folder or hub name, revision on the hub."""

    key: str
    path: str
    revision: str | None = None


def stored_model(path: str | None, init_from: str | None, revision: str | None = None) -> ModelSource:
    """Return the place of the model of `model.path` or `train.init_from`, one of which is given.

    Args:
        path: a folder or hub name.
        init_from: a folder; a finished run_dir stands for the model that it wrote.
        revision: branch, tag or commit of a hub name.

    Raises:
        UserError: there is no such folder, or no model in it.
    """
    if init_from is None:
        source = ModelSource("model.path", os.path.expanduser(path), revision)
        if revision is not None and Path(source.path).is_dir():
            raise UserError(
                f"{source.path} is a folder, which has no revisions", key="model.revision", remedy="remove the key"
            )
        return source
    folder = Path(init_from).expanduser()
    if not os.path.isdir(folder):  # False for a name that no folder can have
        raise UserError(
            f"{folder} does not exist",
            key="train.init_from",
            remedy="run the stage that writes it first, or give the folder of a finished run or a Hugging Face model",
        )
    if (folder / "model" / "config.json").is_file():
        return ModelSource("train.init_from", str(folder / "model"))
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(
            f"{folder} holds no finished model",
            key="train.init_from",
            remedy="finish the run that writes it (the same command resumes it), or give a Hugging Face folder",
        )
    return ModelSource("train.init_from", str(folder))


def stored_config(source: ModelSource) -> PretrainedConfig:
    """Return the configuration of a stored model, as a model in BF16 has it.

    Raises:
        UserError: there is none, no way to it, or transformers has no class for it.
    """
    config = _read_config(source)
    # The weights are decoded while they are loaded; what is trained and saved is a plain model.
    config.__dict__.pop("quantization_config", None)
    return config


def _read_config(source: ModelSource) -> PretrainedConfig:
    """Return the same with what it says of quantised weights."""
    munit.register()
    local = Path(source.path)
    if not os.path.isdir(local) and not _is_hub_name(source.path):
        raise UserError(f"the model folder {source.path} does not exist", key=source.key, remedy="check the path")
    if local.is_dir() and not (local / "config.json").is_file():
        raise UserError(
            f"{source.path} has no config.json",
            key=source.key,
            remedy="give a Hugging Face model folder, or copy the missing file beside the weights",
        )
    try:
        # Code from a model's folder is never run.
        return AutoConfig.from_pretrained(source.path, revision=source.revision, trust_remote_code=False)
    except Exception as error:  # transformers fails in its own way at each kind of damage
        if local.is_dir():
            raise UserError(
                f"{source.path} cannot be used: {first_line(error)}",
                key=source.key,
                remedy="give a model whose class transformers has: code from a model folder is not run",
            ) from None
        raise UserError(
            f"{source.path} is neither a folder with a Hugging Face model nor a model name that can be reached: "
            f"{first_line(error)}",
            key=source.key,
            remedy="check the path or name, and the network for a name; for a gated model accept its terms on its page "
            "and run `hf auth login`",
        ) from None


def check_trainable(source: ModelSource, config: PretrainedConfig) -> None:
    """Check that a stored model is a causal language model whose weights can be had in BF16.

    Raises:
        UserError: it is of another kind, or quantised to something else than FP8: `weight_scale_inv` of blocks, or the
            8-bit floats of compressed-tensors.
    """
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not munit.is_munit(config):
        raise UserError(
            f'{source.path} is a "{config.model_type}", for which transformers has no causal language model',
            key=source.key,
            remedy="give a model that AutoModelForCausalLM loads",
        )
    quantization = quantization_of(source)
    if quantization and not is_fp8(quantization):
        raise UserError(
            f'the weights in {source.path} are quantised with "{quantization.get("quant_method")}", and training '
            'starts from BF16, FP16, FP32 or FP8 weights (quant_method "fp8", or 8-bit floats of "compressed-tensors")',
            key=source.key,
            remedy="give the model in BF16, or convert it to BF16 with the tool that quantised it",
        )


def load_stored_model(source: ModelSource, config: PretrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
    """Load a stored model in BF16 to the CPU. Weights in BF16 are mapped from their files, not copied.

    Args:
        source: as `stored_model` found it.
        config: as `stored_config` read it.
        options: further arguments of from_pretrained.

    Returns:
        The model.

    Raises:
        UserError: files are missing or damaged or hold code, or weights of the model are in none of them.
    """
    quantization = quantization_of(source)
    if quantization:
        # The caller's configuration goes into the new model's config.json, which is BF16.
        config = copy.deepcopy(config)
        config.quantization_config = {**quantization, "dequantize": True}
        if quantization["quant_method"] == _COMPRESSED_TENSORS:
            # The same numbers under another name; transformers infers the granularity from the number of scales.
            config.quantization_config = {"quant_method": "fp8", "dequantize": True}
            options = {**options, "key_mapping": {r"^(.+)\.weight_scale$": r"\1.weight_scale_inv"}}
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=config,
            revision=source.revision,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"the weights in {source.path} are incomplete or cannot be reached: {first_line(error)}",
            key=source.key,
            remedy="write, copy or download all of its files again",
        ) from None
    except Exception as error:  # every reader fails in its own way at damaged files
        raise UserError(
            f"the weights in {source.path} cannot be read: {unreadable(error)}",
            key=source.key,
            remedy="write or copy them again: damaged files, and such with more than tensors in them, are refused",
        ) from None
    check_complete(source.path, model, found["missing_keys"], source.key)
    if quantization:
        # Else save_pretrained takes these steps back, and writes FP8 weights under a BF16 configuration.
        model.__dict__.pop("_weight_conversions", None)
    return model


def check_complete(folder: str | Path, model: PreTrainedModel, missing: Iterable[str], key: str = "") -> None:
    """Raise UserError where a folder lacks weights of its model, which transformers draws at random."""
    names = sorted(missing)
    if names:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        raise UserError(
            f"the weights in {folder} are incomplete: {shown} of {type(model).__name__} are in none of its files",
            key=key,
            remedy="write, copy or download the model again; config.json must describe the model that is stored",
        )


def unreadable(error: Exception) -> str:
    """Return why weights could not be read, in one line, without torch's advice to let the file run code."""
    if isinstance(error, pickle.UnpicklingError):
        return "they hold more than tensors, which may be code"
    return first_line(error)


def first_line(error: Exception) -> str:
    """Return the first paragraph of an error's message in one line, or its type."""
    return " ".join(str(error).split("\n\n")[0].split())[:300] or type(error).__name__


def quantization_of(source: ModelSource) -> dict[str, Any]:
    """Return the "quantization_config" of a stored model, {} for plain weights."""
    section = getattr(_read_config(source), "quantization_config", None) or {}
    return section if isinstance(section, dict) else section.to_dict()


def is_fp8(quantization: dict[str, Any]) -> bool:
    """Return whether a "quantization_config" describes FP8 weights with scales to multiply by."""
    if quantization.get("quant_method") != _COMPRESSED_TENSORS:
        return quantization.get("quant_method") == "fp8"
    groups = [group.get("weights") or {} for group in (quantization.get("config_groups") or {}).values()]
    return (
        quantization.get("format") == "float-quantized"
        and bool(groups)
        and all(
            (weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True)) == ("float", 8, True)
            and weights.get("strategy") in _STRATEGIES
            for weights in groups
        )
    )


def _is_hub_name(path: str) -> bool:
    """Return whether a path that is not a folder can be a name on the hub, as "gpt2" and "owner/name" are."""
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return not path.startswith(".")
