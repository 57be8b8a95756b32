"""The model of a stage: its configuration checked against the data, then loaded, or built from the seed."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_fp8.data import load_tokenizer
from ds_fp8.errors import UserError
from ds_fp8.schema import nearest
from ds_fp8.train import packed_attention
from ds_fp8.train.stage import Stage

# Keys that Hugging Face configurations take without having them as attributes.
_UNLISTED_KEYS = {"model_type", "architectures", "rope_theta", "rope_scaling", "dtype", "torch_dtype"}


def load_model_config(stage: Stage, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The Hugging Face configuration of the stage's model, checked against the sequence length and the tokenizer.

    Raises UserError when the model is missing, does not know a key, or does not fit the data.
    """
    if stage.model.config is not None:
        config = _inline_config(stage.model.config, tokenizer)
    else:
        config = stored_config(*_source(stage))
        _check_tokenizer(stage, tokenizer)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and stage.data.sequence_length > longest:
        raise UserError(
            f"a sequence length of {stage.data.sequence_length} is longer than the model allows "
            f"(max_position_embeddings {longest})",
            key="data.sequence_length",
            remedy=f"at most {longest}, or a model with more positions",
        )
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {config.vocab_size}",
            key="data.tokenizer" if stage.model.config is None else "model.config.vocab_size",
            remedy="use the model's own tokenizer, or a model with at least as many tokens",
        )
    return config


def build_model(stage: Stage, config: PretrainedConfig) -> torch.nn.Module:
    """The model in BF16; the same weights on every rank, untrained ones determined by train.seed.

    Stored weights are read to the CPU; untrained ones are drawn on the GPU where there is room for all of them.
    """
    torch.manual_seed(stage.train.seed)
    packed_attention.register()
    options = {"dtype": torch.bfloat16, "attn_implementation": stage.model.attn_implementation}
    try:
        if stage.model.config is not None:
            with torch.device(_where_to_draw(config)):
                model = AutoModelForCausalLM.from_config(config, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(_source(stage)[1], config=config, **options)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"the model cannot be built: {_first_line(error)}", key="model", remedy="change what the message names"
        ) from None
    forward = inspect.signature(model.forward).parameters
    if not {"num_items_in_batch", "kwargs"} & set(forward):
        raise UserError(
            f"{type(model).__name__} does not take num_items_in_batch, so its loss cannot be averaged per token over "
            "ranks and micro-batches",
            key="model",
            remedy="use a causal language model of transformers that passes keyword arguments to its loss",
        )
    if stage.model.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _where_to_draw(config: PretrainedConfig) -> torch.device:
    """Where untrained weights are made: on the GPU, which draws them faster, where a quarter of it holds them all.

    It follows from the model and the kind of GPU alone: a run and its twin begin with the same weights.
    """
    if get_accelerator().device_name() != "cuda":
        return torch.device("cpu")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device if needed < torch.cuda.get_device_properties(device).total_memory / 4 else torch.device("cpu")


def _inline_config(values: dict, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    kind = values.get("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in CONFIG_MAPPING_NAMES:
        raise UserError(
            "model.config has no model_type" if kind is None else f'unknown model_type "{kind}"',
            key="model.config.model_type",
            remedy=nearest(str(kind), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if kind else '"model_type": "qwen2", say',
        )
    known = AutoConfig.for_model(kind)
    for key in values:
        if not hasattr(known, key) and key not in _UNLISTED_KEYS:
            choices = set(known.to_dict()) | _UNLISTED_KEYS
            raise UserError(
                f'unknown key "{key}" in model.config: {kind} has none such',
                key=f"model.config.{key}",
                remedy=nearest(key, choices),
            )
    from_tokenizer = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    settings = {key: value for key, value in (from_tokenizer | values).items() if key != "model_type"}
    try:
        config = AutoConfig.for_model(kind, **settings)
    except Exception as error:  # each configuration class validates in its own way
        raise UserError(
            f"model.config is refused: {_first_line(error)}", key="model.config", remedy="change what the message names"
        ) from None
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    if hidden and heads and hidden % heads and not getattr(config, "head_dim", None):
        raise UserError(
            f"hidden_size {hidden} does not divide into {heads} attention heads",
            key="model.config.num_attention_heads",
            remedy="choose a divisor of hidden_size, or give head_dim",
        )
    if heads and groups and heads % groups:
        raise UserError(
            f"{heads} attention heads do not divide into {groups} key-value heads",
            key="model.config.num_key_value_heads",
            remedy="choose a divisor of num_attention_heads",
        )
    return config


def stored_model(path: str | None, init_from: str | None) -> tuple[str, str]:
    """(key, folder or hub name) of the model of `model.path` or `train.init_from`, one of which is given.

    A finished run_dir stands for the model it wrote. Raises UserError for a folder without one.
    """
    if init_from is None:
        return "model.path", str(Path(path).expanduser())
    folder = Path(init_from).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"{folder} does not exist",
            key="train.init_from",
            remedy="run the stage that writes it first, or give the folder of a finished run or a Hugging Face model",
        )
    if (folder / "model" / "config.json").is_file():
        return "train.init_from", str(folder / "model")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(
            f"{folder} holds no finished model",
            key="train.init_from",
            remedy="finish the run that writes it (the same command resumes it), or give a Hugging Face folder",
        )
    return "train.init_from", str(folder)


def stored_config(key: str, source: str) -> PretrainedConfig:
    """The configuration of what `stored_model` found. Raises UserError where there is none, or no way to it."""
    local = Path(source)
    if not local.is_dir() and (local.is_absolute() or source.startswith(".") or source.count("/") != 1):
        raise UserError(f"the model folder {source} does not exist", key=key, remedy="check the path")
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{source} is neither a folder with a Hugging Face model nor a model name that can be reached: "
            f"{_first_line(error)}",
            key=key,
            remedy="check the path or name, and the network for a name",
        ) from None


def _source(stage: Stage) -> tuple[str, str]:
    return stored_model(stage.model.path, stage.train.init_from)


def _check_tokenizer(stage: Stage, tokenizer: PreTrainedTokenizerBase) -> None:
    """The stored model's tokenizer, where it is stored beside it, must give every token the same id."""
    key, source = _source(stage)
    if not (Path(source) / "tokenizer.json").is_file():
        return
    stored, ours = load_tokenizer(source).get_vocab(), tokenizer.get_vocab()
    if not stored.items() <= ours.items():
        raise UserError(
            f"data.tokenizer numbers tokens otherwise than the tokenizer of {source}",
            key="data.tokenizer",
            remedy=f'set "tokenizer" (and "vocab_size") as the model of {key} has it, or to "{source}"',
        )


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n\n")[0].split())[:300] or type(error).__name__
