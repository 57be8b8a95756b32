"""Find a stored model, read its configuration, and load its weights: BF16, FP32 or FP8, in one file or in many.

FP8 weights may be of any maker: a tensor N in float8 has its scales, to multiply by, under N_scale_inv, N_scale or
N_weight_scale: one for the tensor (or for each expert of a stack), one for each output channel, or one for each block
of the size that config.json or hf_quant_config.json states; a block at an edge may be shorter. Everything else is
refused by name: data must not be read without their scales, nor with another block size.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ds_fp8.config.errors import UserError, clipped, first_paragraph
from ds_fp8.config.files import model_of_run
from ds_fp8.export.folder import CHECKSUMS, read_checksums, sha256_of
from ds_fp8.export.plan import SCALED
from ds_fp8.train.checkpoints import step_beyond_result

COMPRESSED_TENSORS = "compressed-tensors"
Form = str | tuple[int, int]  # "tensor", "channel", or the rows and columns of a block
UNSTATED: tuple[Form, ...] = ("tensor", "channel")  # Forms that the shape of the scales alone tells
MODELOPT: dict[str, Form] = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel", "FP8_PB_WO": (128, 128)}
SCALES = ("_scale_inv", "_scale", "_weight_scale")
FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
# Scales of activations and caches, which weights do not depend on
OF_ACTIVATIONS = re.compile(r"(^|[._])(input|output|act|activation|[qkv]|kv|prob|[kv]_cache|kv_cache)_scale(_inv)?$")
ANY_SCALE = re.compile(r"scale(_inv|_\d+)?$|zero_point$|_(packed|absmax|qzeros)$")
_SHOWN = 3  # Names of missing weights that an error lists


@dataclass(frozen=True)
class ModelSource:
    """Location of a stored model: the configuration key that names it, folder or hub name, revision on the hub."""

    key: str
    path: str
    revision: str | None = None


def stored_model(path: str | None, init_from: str | None, revision: str | None = None) -> ModelSource:
    """Return the place of the model of `model.path` (folder or hub name) or `train.init_from` (folder or run_dir)."""
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
        if (step := step_beyond_result(folder)) is not None:
            raise UserError(
                f"the run in {folder} was made longer and is not finished: its model is older than step {step}",
                key="train.init_from",
                remedy=f"finish it (the same command resumes it), or give its older model: {folder / 'model'}",
            )
        return ModelSource("train.init_from", str(folder / "model"))
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(
            f"{folder} holds no finished model",
            key="train.init_from",
            remedy="finish the run that writes it (the same command resumes it), or give a Hugging Face folder",
        )
    return ModelSource("train.init_from", str(folder))


def stored_config(source: ModelSource) -> PretrainedConfig:
    """Return the configuration of a stored model, as a model in BF16 has it."""
    config = _read_config(source)
    # The weights are decoded while they are loaded; what is trained and saved is a plain model.
    config.__dict__.pop("quantization_config", None)
    # An attention that the folder names may be a kernel on the hub, which transformers would fetch and run.
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part._attn_implementation_internal = None
    return config


def munit_of(kind: Any) -> ModuleType | None:
    """Return ds_fp8.research.munit for a model type that it scales, which transformers then knows; else None."""
    if not str(kind).startswith(SCALED):
        return None
    from ds_fp8.research import munit

    munit.register()
    return munit


def _read_config(source: ModelSource) -> PretrainedConfig:
    local = Path(source.path)
    if not os.path.isdir(local) and not _is_hub_name(source.path):
        raise UserError(f"the model folder {source.path} does not exist", key=source.key, remedy="check the path")
    if (of_run := model_of_run(local)) is not None:
        raise UserError(f"{source.path} is the folder of a run", key=source.key, remedy=f"give its model: {of_run}")
    if local.is_dir() and not (local / "config.json").is_file():
        raise UserError(
            f"{source.path} has no config.json",
            key=source.key,
            remedy="give a Hugging Face model folder, or copy the missing file beside the weights",
        )
    try:
        values, _ = PretrainedConfig.get_config_dict(source.path, revision=source.revision)
        munit_of(values.get("model_type"))
        # Code from a model's folder is never run.
        return AutoConfig.from_pretrained(source.path, revision=source.revision, trust_remote_code=False)
    except Exception as error:  # transformers fails in its own way at each kind of damage
        if local.is_dir():
            raise UserError(
                f"{source.path} cannot be used: {first_paragraph(error)}",
                key=source.key,
                remedy="give a model whose class transformers has: code from a model folder is not run",
            ) from None
        raise UserError(
            f"{source.path} is neither a folder with a Hugging Face model nor a model name that can be reached: "
            f"{first_paragraph(error)}",
            key=source.key,
            remedy="check the path or name, and the network for a name; for a gated model accept its terms on its page "
            "and run `hf auth login`",
        ) from None


def check_trainable(source: ModelSource, config: PretrainedConfig) -> None:
    """Refuse a stored model that is no causal language model, or quantised to something else than FP8."""
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and munit_of(config.model_type) is None:
        problem = f'{source.path} is a "{config.model_type}", for which transformers has no causal language model'
        raise UserError(problem, key=source.key, remedy="give a model that AutoModelForCausalLM loads")
    if config.is_encoder_decoder:
        problem = f'{source.path} is a "{config.model_type}", an encoder-decoder: its decoder alone would be trained'
        raise UserError(problem, key=source.key, remedy="give a model that is a decoder alone")
    quantization = quantization_of(source)
    if forms_of(quantization) is None:
        kind = " ".join(str(quantization[key]) for key in ("quant_method", "quant_algo") if quantization.get(key))
        raise UserError(
            f'the weights in {source.path} are quantised with "{kind}", and what can be read is BF16, FP16, FP32 or '
            'FP8 ("fp8", "fbgemm_fp8", FP8 of "modelopt", or 8-bit floats of "compressed-tensors")',
            key=source.key,
            remedy="give the model in BF16, or convert it to BF16 with the tool that quantised it",
        )


def load_stored_model(
    source: ModelSource, config: PretrainedConfig, options: dict[str, Any], hashed: bool = False
) -> PreTrainedModel:
    """Load a stored model in BF16 to the CPU. Weights in BF16 are mapped from their files, not copied.

    `options` are further arguments of from_pretrained; `hashed`: another rank has called check_sums.
    """
    with ExitStack() as opened:
        return load_quantized(source, config, options, opened, hashed)[0]


def load_quantized(
    source: ModelSource, config: PretrainedConfig, options: dict[str, Any], opened: ExitStack, hashed: bool = False
) -> tuple[PreTrainedModel, dict[str, StoredWeight]]:
    """Return the same with its FP8 weights as they are stored, by name, while `opened` holds their files open."""
    options = {"dtype": torch.bfloat16, "output_loading_info": True, **options}
    try:
        files = weight_files(source)
        if not hashed:
            check_sums(source)
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
        problem = f"the weights in {source.path} are incomplete or cannot be reached: {first_paragraph(error)}"
        raise UserError(problem, key=source.key, remedy="write, copy or download all of its files again") from None
    except Exception as error:  # every reader fails in its own way at damaged files
        is_pickle = isinstance(error, pickle.UnpicklingError)
        raise UserError(
            f"the weights in {source.path} cannot be read: "
            + ("they hold more than tensors, which may be code" if is_pickle else first_paragraph(error)),
            key=source.key,
            remedy="write or copy them again: damaged files, and such with more than tensors in them, are refused",
        ) from None
    check_complete(source.path, model, found["missing_keys"], source.key)
    check_unexpected(found["unexpected_keys"], source.key)
    return model, {name: tensor for name, tensor in (tensors or {}).items() if isinstance(tensor, StoredWeight)}


def weight_files(source: ModelSource) -> list[Path]:
    """Return the safetensors files of a stored model, fetched from the hub; empty where it has other files."""
    index, single = _file(source, SAFE_WEIGHTS_INDEX_NAME), _file(source, SAFE_WEIGHTS_NAME)
    if single is not None or index is None:
        return [] if single is None else [single]
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if os.path.isdir(source.path):
        return [index.parent / name for name in names]
    return [Path(hf_hub_download(source.path, name, revision=source.revision)) for name in names]


def check_sums(source: ModelSource) -> None:
    """Refuse weights that are not as an export wrote them; nothing is read of a folder without checksums."""
    folder = Path(source.path)
    sums = read_checksums(folder) if os.path.isdir(folder) else {}
    files = [folder / name for name in sums if name.endswith(".safetensors") and (folder / name).is_file()]
    changed = [file.name for file in files if sha256_of(file) != sums[file.name]]
    if changed:
        raise UserError(
            f"{changed[0]} in {source.path} has another content than {CHECKSUMS} says",
            key=source.key,
            remedy=f"write, copy or download it again; remove {CHECKSUMS} if it was changed on purpose",
        )


def _file(source: ModelSource, name: str) -> Path | None:
    if os.path.isdir(source.path):
        file = Path(source.path, name)
        return file if file.is_file() else None
    with suppress(EntryNotFoundError):
        return Path(hf_hub_download(source.path, name, revision=source.revision))
    return None


def check_complete(folder: str | Path, model: PreTrainedModel, missing: Iterable[str], key: str = "") -> None:
    """Refuse a folder that lacks weights of its model, which transformers draws at random."""
    names = sorted(missing)
    if names:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        raise UserError(
            f"the weights in {folder} are incomplete: {shown} of {type(model).__name__} are in none of its files",
            key=key,
            remedy="write, copy or download the model again; config.json must describe the model that is stored",
        )


def quantization_of(source: ModelSource) -> dict[str, Any]:
    """Return the "quantization_config" of a stored model, ModelOpt's from its own file; {} where it has none."""
    section = getattr(_read_config(source), "quantization_config", None) or {}
    file = None if section else _file(source, "hf_quant_config.json")
    if file is not None:
        try:
            section = {"quant_method": "modelopt", **json.loads(file.read_text())["quantization"]}
        except (ValueError, LookupError, TypeError, RecursionError):  # no JSON, or of another form
            section = file.name
    section = section.to_dict() if hasattr(section, "to_dict") else section
    return section if isinstance(section, dict) else {"quant_method": clipped(str(section))}


def _is_hub_name(path: str) -> bool:
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return not path.startswith(".")


# ---------------------------------------------------------------- FP8 weights


def forms_of(quantization: Mapping[str, Any]) -> tuple[Form, ...] | None:
    """Return the forms of scales that a "quantization_config" allows; None where it describes no FP8 weights."""
    method = quantization.get("quant_method")
    if not quantization or method == "fbgemm_fp8":
        return UNSTATED
    if method == "fp8":
        block = quantization.get("weight_block_size")
        return UNSTATED if block is None else _block(block)
    if method == "modelopt":
        form = MODELOPT.get(str(quantization.get("quant_algo")))
        return None if form is None else (form,)
    if method != COMPRESSED_TENSORS or quantization.get("format") != "float-quantized":
        return None
    forms: list[Form] = []
    groups = quantization.get("config_groups") or {}
    for group in groups.values() if isinstance(groups, dict) else (groups,):
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            return None
        if (weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True)) != ("float", 8, True):
            return None
        found = {"tensor": ("tensor",), "channel": ("channel",), "block": _block(weights.get("block_structure"))}
        own = found.get(str(weights.get("strategy")))
        if own is None:
            return None
        forms += own
    return tuple(dict.fromkeys(forms)) or None


def _block(sizes: Any) -> tuple[Form, ...] | None:
    is_block = isinstance(sizes, list | tuple) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)
    return ((sizes[0], sizes[1]),) if is_block else None


@dataclass
class StoredWeight:
    """A stored FP8 weight; indexing dequantizes it, so that transformers reads it as a slice of a file."""

    data: Any  # Slice of a file, [..., N, K] float8
    scales: Any
    form: Form

    def __getitem__(self, where: Any) -> torch.Tensor:
        shape, scales = self.data.get_shape(), self.scales[...].float()
        if self.form == "tensor":
            factors = scales.view(*([1] * len(shape)) if scales.numel() == 1 else (-1, 1, 1))
        elif self.form == "channel":
            factors = scales if scales.dim() == len(shape) else scales.unsqueeze(-1)
        else:
            # The last blocks may be shorter.
            rows = scales.repeat_interleave(self.form[0], -2)[..., : shape[-2], :]
            factors = rows.repeat_interleave(self.form[1], -1)[..., : shape[-1]]
        return (self.data[...].float() * factors).bfloat16()[where]


def _fits(form: Form, shape: list[int], scales: list[int]) -> bool:
    if len(shape) not in (2, 3):
        return False
    if form == "tensor":
        return math.prod(scales) == 1 or (len(shape) == 3 and scales in ([shape[0]], [shape[0], 1, 1]))
    if form == "channel":
        stacked = len(shape) == 3 and scales == [shape[0], 1, shape[2]]  # matrices of experts as [K, N]
        return scales in (shape[:-1], [*shape[:-1], 1]) or stacked
    return scales == [*shape[:-2], -(-shape[-2] // form[0]), -(-shape[-1] // form[1])]


def stored_tensors(
    files: Iterable[Path], quantization: Mapping[str, Any], key: str, opened: ExitStack
) -> dict[str, Any] | None:
    """Return the tensors of safetensors files as slices, `StoredWeight` for FP8 weights; None without such files.

    `opened` holds the files open; `key` names the model in errors.
    """
    tensors: dict[str, Any] = {}
    for file in files:
        held = opened.enter_context(safe_open(file, framework="pt"))
        tensors |= {name: held.get_slice(name) for name in held.keys()}  # noqa: SIM118
    weights = [name for name, tensor in tensors.items() if tensor.get_dtype().startswith(FP8_DTYPES)]
    if not weights:
        return None
    forms, result, used = forms_of(quantization) or (), dict(tensors), set()
    for name in weights:
        scales = [name + end for end in SCALES if name + end in tensors]
        shape = tensors[name].get_shape()
        if len(scales) != 1:
            raise _refused(name, shape, key, f"has {' and '.join(scales) or 'no scale'} beside it")
        found = tensors[scales[0]]
        if not found.get_dtype().startswith(("F32", "F16", "BF16", "F8_E8M0", "F64")):
            raise _refused(name, shape, key, f"has scales in {found.get_dtype()}")
        fitting = [form for form in forms if _fits(form, shape, found.get_shape())]
        if not fitting or len({_sizes(form, shape) for form in fitting}) > 1:
            stated = " or ".join(f"{f[0]}x{f[1]} blocks" if isinstance(f, tuple) else f"one a {f}" for f in forms)
            raise _refused(
                name, shape, key, f"has scales {found.get_shape()}, where the folder states {stated or 'none'}"
            )
        result[name] = StoredWeight(tensors[name], found, fitting[0])
        used.add(scales[0])
    # What activations are cast by is no part of the model; vectors of such names are weights of some models.
    used |= {n for n, own in tensors.items() if OF_ACTIVATIONS.search(n) and math.prod(own.get_shape()) == 1}
    return {name: tensor for name, tensor in result.items() if name not in used}


def _sizes(form: Form, shape: list[int]) -> tuple[int, int]:
    """Return rows and columns that share a scale, as far as the weight goes: two forms may mean the same."""
    rows, columns = {"tensor": (shape[-2], shape[-1]), "channel": (1, shape[-1])}.get(form, form)
    return min(rows, shape[-2]), min(columns, shape[-1])


def check_pickled(files: Iterable[Path], key: str) -> None:
    for file in files:
        tensors = torch.load(file, map_location="meta", mmap=True, weights_only=True)
        found = next((name for name, tensor in tensors.items() if "float8" in str(getattr(tensor, "dtype", ""))), None)
        if found is not None:
            raise _refused(found, list(tensors[found].shape), key, f"lies in {file.name}, and not in safetensors")


def check_unexpected(names: Collection[str], key: str) -> None:
    """Refuse scales that met no weight: what they belong to was read as plain numbers."""
    scales = sorted(name for name in names if ANY_SCALE.search(name) and not OF_ACTIVATIONS.search(name))
    if scales:
        raise UserError(
            f"{scales[0]}{f' and {len(scales) - 1} more' if len(scales) > 1 else ''} met no FP8 weight of the model",
            key=key,
            remedy="give the model in BF16, or convert it to BF16 with the tool that quantised it",
        )


def _refused(name: str, shape: list[int], key: str, problem: str) -> UserError:
    return UserError(
        f"the FP8 weight {name} {shape} {problem}",
        key=key,
        remedy="give the model in BF16, or the block in config.json (quantization_config.weight_block_size) that its "
        "maker cast with",
    )
