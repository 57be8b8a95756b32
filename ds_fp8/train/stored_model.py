"""Find a stored model, read its configuration, and load its weights: BF16, FP32 or FP8, in one file or in many."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ds_fp8.config.errors import UserError
from ds_fp8.research import munit
from ds_fp8.train.stored_fp8 import Codes, check_pickled, check_unexpected, forms_of, stored_tensors

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
    # An attention that the folder names may be a kernel on the hub, which transformers would fetch and run.
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part._attn_implementation_internal = None
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
    """Check that a stored model is a causal language model whose weights can be read.

    Raises:
        UserError: it is of another kind, or quantised to something else than FP8 (see `stored_fp8`).
    """
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not munit.is_munit(config):
        raise UserError(
            f'{source.path} is a "{config.model_type}", for which transformers has no causal language model',
            key=source.key,
            remedy="give a model that AutoModelForCausalLM loads",
        )
    quantization = quantization_of(source)
    if forms_of(quantization) is None:
        kind = " ".join(filter(None, (quantization.get("quant_method"), quantization.get("quant_algo"))))
        raise UserError(
            f'the weights in {source.path} are quantised with "{kind}", and what can be read is BF16, FP16, FP32 or '
            'FP8 ("fp8", "fbgemm_fp8", FP8 of "modelopt", or 8-bit floats of "compressed-tensors")',
            key=source.key,
            remedy="give the model in BF16, or convert it to BF16 with the tool that quantised it",
        )


def load_stored_model(source: ModelSource, config: PretrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
    """Load a stored model in BF16 to the CPU. Weights in BF16 are mapped from their files, not copied.

    Args:
        source: as `stored_model` found it.
        config: as `stored_config` read it.
        options: further arguments of from_pretrained.

    Raises:
        UserError: files are missing or damaged or hold code, weights of the model are in none of them, or codes have
            other scales than the folder states.
    """
    with ExitStack() as opened:
        return load_with_codes(source, config, options, opened)[0]


def load_with_codes(
    source: ModelSource, config: PretrainedConfig, options: dict[str, Any], opened: ExitStack
) -> tuple[PreTrainedModel, dict[str, Codes]]:
    """Return the same with its FP8 weights as they are stored, by name, while `opened` holds their files open."""
    options = {"dtype": torch.bfloat16, "output_loading_info": True, **options}
    try:
        files = _weight_files(source)
        tensors = stored_tensors(files, quantization_of(source), source.key, opened)
        if tensors is None:
            if not files and os.path.isdir(source.path):
                check_pickled(sorted(Path(source.path).glob("*.bin")), source.key)
            model, found = AutoModelForCausalLM.from_pretrained(
                source.path, config=config, revision=source.revision, trust_remote_code=False, **options
            )
        else:
            # The mapping is what AutoModel looks up; given tensors, from_pretrained must not be given a folder.
            model_class = AutoModelForCausalLM._model_mapping[type(config)]
            model, found = model_class.from_pretrained(None, config=config, state_dict=tensors, **options)
            with suppress(OSError):  # a folder without one
                model.generation_config = GenerationConfig.from_pretrained(source.path, revision=source.revision)
    except UserError:
        raise
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
    check_unexpected(found["unexpected_keys"], source.key)
    return model, {name: tensor for name, tensor in (tensors or {}).items() if isinstance(tensor, Codes)}


def _weight_files(source: ModelSource) -> list[Path]:
    """Return the safetensors files that transformers reads; none where weights are of another kind."""
    index, single = _file(source, SAFE_WEIGHTS_INDEX_NAME), _file(source, SAFE_WEIGHTS_NAME)
    if single is not None or index is None:
        return [] if single is None else [single]
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if os.path.isdir(source.path):
        return [index.parent / name for name in names]
    return [Path(hf_hub_download(source.path, name, revision=source.revision)) for name in names]


def _file(source: ModelSource, name: str) -> Path | None:
    """Return a file of a stored model, downloaded from the hub; None where there is none."""
    if os.path.isdir(source.path):
        file = Path(source.path, name)
        return file if file.is_file() else None
    with suppress(EntryNotFoundError):
        return Path(hf_hub_download(source.path, name, revision=source.revision))
    return None


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
    """Return the "quantization_config" of a stored model, ModelOpt's from its own file; {} where it has none."""
    section = getattr(_read_config(source), "quantization_config", None) or {}
    file = None if section else _file(source, "hf_quant_config.json")
    if file is not None:
        section = {"quant_method": "modelopt", **json.loads(file.read_text()).get("quantization", {})}
    return section if isinstance(section, dict) else section.to_dict()


def _is_hub_name(path: str) -> bool:
    """Return whether a path that is not a folder can be a name on the hub, as "gpt2" and "owner/name" are."""
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return not path.startswith(".")
