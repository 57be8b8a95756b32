"""The model of a stage: its configuration checked against the data, then loaded, or built from the seed."""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import psutil
import torch
from accelerate import init_empty_weights
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch.func import functional_call
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_fp8.config.errors import UserError, first_paragraph
from ds_fp8.config.log import logger
from ds_fp8.config.schema import nearest
from ds_fp8.data import check_embeddings, load_tokenizer
from ds_fp8.data.tokenizer import embeddings_needed
from ds_fp8.export.folder import make_savable
from ds_fp8.graphs.host_checkpoints import keep_on_host
from ds_fp8.train import packed_attention
from ds_fp8.train.adapters import add_adapters
from ds_fp8.train.checkpoints import hashes_of
from ds_fp8.train.processes import on_first_rank
from ds_fp8.train.stage import Stage
from ds_fp8.train.stored_model import (
    ModelSource,
    check_sums,
    check_trainable,
    load_stored_model,
    munit_of,
    stored_config,
    stored_model,
    weight_files,
)

# Keys that Hugging Face configurations take without having them as attributes
_UNLISTED_KEYS = {"model_type", "architectures", "head_dim", "rope_theta", "rope_scaling", "dtype", "torch_dtype"}


def load_model_config(stage: Stage, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Return the Hugging Face configuration of the stage's model, checked against sequence length and tokenizer."""
    if stage.model.config is not None:
        config = untrained_config(stage.model.config, tokenizer)
    else:
        source = _source(stage)
        config = stored_config(source)
        check_trainable(source, config)
        _check_tokenizer(source, tokenizer)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and stage.data.sequence_length > longest:
        raise UserError(
            f"a sequence length of {stage.data.sequence_length} is longer than the model allows "
            f"(max_position_embeddings {longest})",
            key="data.sequence_length",
            remedy=f"at most {longest}, or a model with more positions",
        )
    key = "data.tokenizer" if stage.model.config is None else "model.config.vocab_size"
    check_embeddings(tokenizer, config.vocab_size, key)
    return config


def files_of_base(stage: Stage) -> dict[str, str]:
    """Return the hashes of the files that a stage with adapters reads its frozen weights from, by name."""
    return hashes_of(weight_files(_source(stage))) if stage.train.lora and stage.model.config is None else {}


def parameters_to_train(stage: Stage, model: torch.nn.Module) -> list[Any]:
    munit = munit_of(model.config.model_type)
    if munit is None:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate = stage.configuration.optimizer_params.get("lr")
    if rate is None:
        raise UserError(
            "munit scaling multiplies the learning rate, but the stage has none",
            key="optimizer.params.lr",
            remedy='"optimizer": {"type": "AdamW", "params": {"lr": 0.06, "eps": 1e-12}}',
        )
    return munit.parameter_groups(model, rate)


def build_sharded_model(stage: Stage, config: PretrainedConfig) -> torch.nn.Module:
    """Build the model, under ZeRO stage 3 with its weights sharded over the ranks. Collective.

    The first rank alone reads or draws the weights, and sends one parameter after the other. Together the ranks hold
    the weights once, beside the parameter on its way: in BF16, those of `build_model`.
    """
    if stage.configuration.stage != 3:
        if stage.model.config is None:
            on_first_rank(lambda: check_sums(_source(stage)))
        return build_model(stage, config, hashed=True)
    model = None

    def build() -> tuple[GenerationConfig, dict[str, torch.dtype], bool]:
        nonlocal model
        model = build_model(stage, config)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        named = parameters | dict(model.named_buffers(remove_duplicate=False))
        dtypes = {name: tensor.dtype for name, tensor in named.items()}
        return model.generation_config, dtypes, len(list(model.parameters())) < len(parameters)

    # Stored weights may be untied, or kept in FP32 in part, where the configuration alone does not say so.
    # Small facts only: weights follow one parameter at a time.
    generation_config, dtypes, tied = on_first_rank(build)
    received = model is None
    if received:
        # On the meta device: a rank that receives never holds the whole model.
        with init_empty_weights():
            model = _prepare(stage, AutoModelForCausalLM.from_config(config, **_options(stage)))
        if tied:
            model.tie_weights()  # each has become a parameter of its own
        model.generation_config = generation_config
    device = get_accelerator().current_device_name()
    for prefix, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            # Buffers are not sharded; every rank keeps them whole, with the first rank's numbers.
            setattr(module, name, buffer.to(device, dtypes[f"{prefix}.{name}".lstrip(".")]))
            dist.broadcast(getattr(module, name), 0)

    def memory(name: str, empty: torch.nn.Parameter) -> torch.Tensor:
        # Uninitialised: zero.Init broadcasts the first rank's numbers into it.
        return torch.empty_like(empty, device=device, dtype=dtypes[name])

    fp8 = stage.fp8
    on_host = stage.train.lora is not None and fp8.enabled and fp8.param_gather.format != "bf16"
    shard_one_by_one(model, stage.raw, on_host, memory if received else None)
    return model


class Alone(torch.nn.Module):
    """A model that is whole on this rank, with what evaluation asks of an engine."""

    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor] | None = None):
        """`tensors`: parameters and buffers by name, in place of the model's own."""
        super().__init__()
        self.module, self.tensors = model, tensors or {}
        self.device = next(iter(tensors.values())).device if tensors else model.device

    def forward(self, **batch: torch.Tensor) -> Any:
        return functional_call(self.module, self.tensors, (), batch)


@torch.no_grad()
def without_casts(stage: Stage, engine: deepspeed.DeepSpeedEngine) -> Alone:
    """Return the engine's model as transformers computes it, with a copy of all its weights in BF16. Collective."""
    whole: dict[torch.nn.Parameter, torch.Tensor] = {}
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            whole[parameter] = parameter.to(engine.device, copy=True)
    tensors = dict(engine.module.named_buffers(remove_duplicate=False))
    tensors |= {name: whole[p] for name, p in engine.module.named_parameters(remove_duplicate=False)}
    with init_empty_weights(include_buffers=True):
        model = _prepare(stage, AutoModelForCausalLM.from_config(engine.module.config, **_options(stage)))
    return Alone(model, tensors)


def shard_one_by_one(
    model: torch.nn.Module,
    raw: Mapping[str, Any],
    frozen_on_host: bool,
    memory: Callable[[str, torch.nn.Parameter], torch.Tensor] | None = None,
) -> None:
    """Shard the parameters of a model over the ranks, each before there is memory for the next. Collective.

    Args:
        model: Has its parameters, or empty ones.
        raw: DeepSpeed's configuration.
        frozen_on_host: Where quantized weights replace frozen weights on the device. `ds_fp8.initialize` fetches
            those that stay in BF16.
        memory: Makes the data of an empty parameter, given its name; all ranks get the first one's numbers.
    """
    embeddings = [m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None]
    in_order = dict.fromkeys([*embeddings, *model.parameters()])  # the largest first
    for trained in (False, True):
        chosen = [parameter for parameter in in_order if parameter.requires_grad is trained]
        if chosen:
            deepspeed.zero.Init(
                module=_OneByOne(iter(chosen) if memory is None else _with_memory(model, chosen, memory)),
                # Two of them: the optimizer takes what it trains from where it finds it.
                remote_device="cpu" if frozen_on_host and not trained else None,
                # A copy: DeepSpeed changes the dictionary that it is given.
                config_dict_or_path=copy.deepcopy(raw),
            )


class _OneByOne(torch.nn.Module):
    """A module for zero.Init, which broadcasts and shards the parameters of a module one after the other."""

    def __init__(self, parameters: Iterator[torch.nn.Parameter]):
        super().__init__()
        self._one_by_one = parameters

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return self._one_by_one


def _with_memory(
    model: torch.nn.Module,
    parameters: list[torch.nn.Parameter],
    memory: Callable[[str, torch.nn.Parameter], torch.Tensor],
) -> Iterator[torch.nn.Parameter]:
    """Give parameters of an empty model memory, each when its turn comes, wherever the model uses it."""
    places = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places[parameter].append((module, name))
    names = {parameter: name for name, parameter in model.named_parameters()}
    for empty in parameters:
        parameter = torch.nn.Parameter(memory(names[empty], empty), empty.requires_grad)
        for module, name in places[empty]:
            module.register_parameter(name, parameter)
        yield parameter


def build_model(stage: Stage, config: PretrainedConfig, hashed: bool = False) -> torch.nn.Module:
    """Build the whole model on this rank, in BF16: the same weights on every rank, untrained ones from train.seed.

    Stored weights are read to the CPU, `hashed` where another rank has checked an export's sums; untrained ones are
    drawn on the GPU where there is room for all of them.
    """
    # Right before the weights are drawn, whatever random numbers were used until here.
    torch.manual_seed(stage.train.seed)
    try:
        if stage.model.config is not None:
            with torch.device(_where_to_draw(config)):
                model = AutoModelForCausalLM.from_config(config, **_options(stage))
        else:
            model = load_stored_model(_source(stage), config, _options(stage), hashed)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"the model cannot be built: {first_paragraph(error)}", key="model", remedy="change what the message names"
        ) from None
    # Now, for at the end save_pretrained would refuse it.
    if left_out := make_savable(model.generation_config):
        logger.info("note: %s", left_out)
    return _prepare(stage, model)


def _options(stage: Stage) -> dict[str, Any]:
    packed_attention.register()
    return {"dtype": torch.bfloat16, "attn_implementation": stage.model.attn_implementation}


def _prepare(stage: Stage, model: torch.nn.Module) -> torch.nn.Module:
    if stage.train.lora is not None:
        if munit_of(model.config.model_type) is not None:
            problem = "munit scaling trains all weights, and adapters have no scaling of its kind"
            raise UserError(problem, key="train.lora", remedy="remove train.lora")
        torch.manual_seed(stage.train.seed)
        add_adapters(model, stage.train.lora)
    if stage.model.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if stage.model.activation_checkpointing == "offload":
        if not keep_on_host(model):
            problem = f"{type(model).__name__} recomputes its layers by a function of its own, which keeps their inputs"
            raise UserError(problem, key="model.activation_checkpointing", remedy="true")
        if get_accelerator().is_synchronized_device():
            logger.info('note: on a CPU model.activation_checkpointing "offload" saves no memory')
    return model.train()


def _where_to_draw(config: PretrainedConfig) -> torch.device:
    """Return where to make untrained weights: on the GPU, which is faster, if they fit into a quarter of it.

    It follows from the model and the kind of GPU alone: an FP8 run and its BF16 run begin with the same weights.
    """
    if get_accelerator().device_name() != "cuda":
        return torch.device("cpu")
    # Shapes only, to learn the bytes without allocating them.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device if needed < torch.cuda.get_device_properties(device).total_memory / 4 else torch.device("cpu")


def _source(stage: Stage) -> ModelSource:
    return stored_model(stage.model.path, stage.train.init_from, stage.model.revision)


def _check_tokenizer(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
    if Path(source.path).is_dir() and not Path(source.path, "tokenizer.json").is_file():
        return
    try:
        stored, ours = load_tokenizer(source.path, source.revision).get_vocab(), tokenizer.get_vocab()
    except UserError:
        if Path(source.path).is_dir():
            raise
        return  # the hub has models without one
    if not stored.items() <= ours.items():
        raise UserError(
            f"data.tokenizer assigns other token ids than the tokenizer of {source.path}",
            key="data.tokenizer",
            remedy=f'set "tokenizer" (and "vocab_size") as the model of {source.key} has it, or to "{source.path}"',
        )


# ---------------------------------------------------------------- model.config


def untrained_config(values: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    kind = values.get("model_type")
    munit = munit_of(kind)
    known_types = [*(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & CONFIG_MAPPING_NAMES.keys())]
    known_types += munit.MODEL_TYPES if munit is not None else ()
    if kind not in known_types:
        raise UserError(
            "model.config has no model_type" if kind is None else f'unknown model_type "{kind}"',
            key="model.config.model_type",
            remedy=nearest(str(kind), known_types) if kind else '"model_type": "qwen2", say',
        )
    known = AutoConfig.for_model(kind)
    for key in values:
        if not hasattr(known, key) and key not in _UNLISTED_KEYS:
            choices = set(known.to_dict()) | _UNLISTED_KEYS
            problem = f'unknown key "{key}" in model.config of type {kind}'
            raise UserError(problem, key=f"model.config.{key}", remedy=nearest(key, choices))
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings = {"vocab_size": embeddings_needed(tokenizer), **ids, **values}
    del settings["model_type"]
    try:
        config = AutoConfig.for_model(kind, **settings)
    except Exception as error:  # each configuration class validates in its own way
        raise UserError(
            f"model.config is refused: {first_paragraph(error)}",
            key="model.config",
            remedy="change what the message names",
        ) from None
    _check_sizes(config)
    return config


def _check_sizes(config: PretrainedConfig) -> None:
    """Refuse an untrained model whose sizes do not go together, by making it without its weights."""

    def refuse(problem: str) -> NoReturn:
        raise UserError(problem, key="model.config", remedy="change the sizes in model.config")

    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    if heads and groups and heads % groups:  # which nothing notices before the first forward
        refuse(f"{heads} attention heads do not divide into num_key_value_heads {groups}")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # each model class fails at a wrong size in its own way
        refuse(f"model.config does not describe a valid model: {type(error).__name__}: {first_paragraph(error)}")
    needed, there = sum(tensor.nbytes for tensor in model.parameters()), psutil.virtual_memory().total
    if needed > there:
        refuse(f"the model needs {needed / 2**30:,.0f} GiB, but this machine has {there / 2**30:,.0f}")
