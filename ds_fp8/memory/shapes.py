"""Inputs of an estimate: the model's shapes, the tokens of a micro-batch and DeepSpeed's settings.

Shapes are read off the model built on the meta device and converted as in training. Because the very code that converts
and fuses decides here too, an estimate knows which layers will be fused, which linears stay in BF16 and whether the
loss does without logits. The converted model stays: activations.py runs its layers to see what they keep.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError, first_paragraph
from ds_fp8.config.files import read_json
from ds_fp8.config.formats import CastSpec
from ds_fp8.config.fp8 import FP8Config, section_of
from ds_fp8.config.presets import with_assumed_preset
from ds_fp8.config.schema import parse_section
from ds_fp8.config.sequence_parallel import (
    check_heads,
    check_layers,
    check_ranks,
    check_rotation,
    sequence_parallel_size,
)
from ds_fp8.data import DataConfig
from ds_fp8.engine import preflight
from ds_fp8.engine.optimizer import uses_own_optimizer
from ds_fp8.engine.plans import convert
from ds_fp8.layers.experts.experts import FP8Experts
from ds_fp8.layers.experts.selection import multiplies_experts
from ds_fp8.layers.head.loss import fuse_loss
from ds_fp8.layers.linear.linear import FP8Linear, base_of
from ds_fp8.layers.linear.recipe import LinearRecipe
from ds_fp8.memory.measure import unshard
from ds_fp8.train.adapters import add_adapters
from ds_fp8.train.stage import Lora, ModelConfig, resolve_batch
from ds_fp8.train.stored_model import stored_config, stored_model

BF16, FP32 = 2, 4  # Bytes of an element
Device = Literal["cuda", "cpu"]

_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
_VALUES = {
    "Qwen/Qwen2.5-0.5B":         ("qwen2",        896,  4864, 24, 14, 2, 151936,  32768,  True),
    "Qwen/Qwen2.5-3B":           ("qwen2",       2048, 11008, 36, 16, 2, 151936,  32768,  True),
    "Qwen/Qwen2.5-14B":          ("qwen2",       5120, 13824, 48, 40, 8, 152064, 131072, False),
    "Qwen/Qwen2.5-32B":          ("qwen2",       5120, 27648, 64, 40, 8, 152064, 131072, False),
    "Qwen/Qwen2.5-72B":          ("qwen2",       8192, 29568, 80, 64, 8, 152064, 131072, False),
    "Qwen/Qwen3-14B-Base":       ("qwen3",       5120, 17408, 40, 40, 8, 151936,  32768, False),
    "Qwen/Qwen3-32B":            ("qwen3",       5120, 25600, 64, 64, 8, 151936,  40960, False),
    "Qwen/Qwen3-30B-A3B":        ("qwen3_moe",   2048,  6144, 48, 32, 4, 151936,  40960, False),
    "Qwen/Qwen2.5-1.5B":         ("qwen2",       1536,  8960, 28, 12, 2, 151936, 131072,  True),
    "Qwen/Qwen2.5-7B":           ("qwen2",       3584, 18944, 28, 28, 4, 152064, 131072, False),
    "meta-llama/Llama-3.1-8B":   ("llama",       4096, 14336, 32, 32, 8, 128256, 131072, False),
    "meta-llama/Llama-3.1-70B":  ("llama",       8192, 28672, 80, 64, 8, 128256, 131072, False),
    "Qwen/Qwen3-8B-Base":        ("qwen3",       4096, 12288, 36, 32, 8, 151936,  32768, False),
    "Qwen/Qwen3-0.6B-Base":      ("qwen3",       1024,  3072, 28, 16, 8, 151936,  32768,  True),
    "Qwen/Qwen3-1.7B-Base":      ("qwen3",       2048,  6144, 28, 16, 8, 151936,  32768,  True),
    "Qwen/Qwen3-4B-Base":        ("qwen3",       2560,  9728, 36, 32, 8, 151936,  32768,  True),
    "meta-llama/Llama-3.2-1B":   ("llama",       2048,  8192, 16, 32, 8, 128256, 131072,  True),
    "meta-llama/Llama-3.2-3B":   ("llama",       3072,  8192, 28, 24, 8, 128256, 131072,  True),
    "mistralai/Mistral-7B-v0.3": ("mistral",     4096, 14336, 32, 32, 8,  32768,  32768, False),
    "google/gemma-3-1b-pt":      ("gemma3_text", 1152,  6912, 26,  4, 1, 262144,  32768,  True),
}  # fmt: skip
# Hugging Face name -> the configuration published under it, as far as memory depends on it
SHAPES: dict[str, dict[str, Any]] = {name: dict(zip(_KEYS, values, strict=True)) for name, values in _VALUES.items()}
for _name in _VALUES:
    if "Qwen3" in _name:
        SHAPES[_name]["head_dim"] = 128
        SHAPES[_name.removesuffix("-Base")] = {**SHAPES[_name], "max_position_embeddings": 40960}
SHAPES["Qwen/Qwen3-30B-A3B"] |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
SHAPES["mistralai/Mistral-7B-v0.3"]["sliding_window"] = None
SHAPES["google/gemma-3-1b-pt"] |= {"head_dim": 256, "sliding_window": 512}

_KNOWN: dict[Hashable, ModelShape] = {}  # Shapes of this process


@dataclass(frozen=True)
class ParameterShape:
    """One parameter of the model."""

    numel: int
    cast: CastSpec | None  # Cast of the weight of an FP8 linear, or of experts gathered in FP8
    trainable: bool
    rows: int = 0
    channels: int = 0  # Outlier channels of its input

    @property
    def in_fp8(self) -> bool:
        return self.cast is not None


@dataclass(frozen=True, eq=False)
class LayerShape:
    """A decoder layer."""

    module: nn.Module  # On the meta device, converted
    parameters: tuple[ParameterShape, ...]

    @functools.cached_property
    def attention(self) -> nn.Module | None:
        """Return its attention with q, k, v and o_proj."""
        found = getattr(self.module, "self_attn", None)
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        linear = all(isinstance(base_of(getattr(found, name, None)), nn.Linear) for name in names)
        return found if linear and hasattr(found, "head_dim") else None

    @functools.cached_property
    def has_experts(self) -> bool:
        return any(isinstance(module, FP8Experts) for module in self.module.modules())


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A causal language model: embeddings, decoder layers, final norm and head."""

    decoder: nn.Module  # All but the head, on the meta device
    container: str  # The decoder's attribute that has the layers
    layers: tuple[LayerShape, ...]
    outside: tuple[ParameterShape, ...]  # Parameters outside of the layers but for the head's: embeddings, norms
    head: ParameterShape | None  # The head's weight; None where it is the embedding's
    vocabulary: int
    hidden: int
    embedding: int  # Elements of the token embedding
    loss_without_logits: bool

    @property
    def longest(self) -> int | None:
        """Return max_position_embeddings, where there is such a limit."""
        return getattr(self.decoder.config, "max_position_embeddings", None)

    @property
    def parameters(self) -> tuple[ParameterShape, ...]:
        inside = tuple(parameter for layer in self.layers for parameter in layer.parameters)
        return (*self.outside, *inside, *([self.head] if self.head else []))

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def head_numel(self) -> int:
        return self.vocabulary * self.hidden


@dataclass(frozen=True)
class Workload:
    """Everything that memory depends on, per GPU."""

    model: ModelShape
    fp8: FP8Config
    gpus: int
    rows: int  # Rows of a micro-batch
    sequence_length: int  # Tokens of a row, all of them where GPUs share it
    zero: DeepSpeedZeroConfig
    accumulation_bytes: int  # Bytes of an element of the gradient shards
    # True if DeepSpeed was told to use torch's AdamW, which needs a second copy of exp_avg_sq while it steps
    torch_adam: bool
    activation_checkpointing: bool | Literal["offload"]
    attention: str  # attn_implementation
    own_optimizer: bool  # True where the optimizer is this package's AdamW
    device: Device = "cuda"
    shared_by: int = 1  # GPUs that share a sequence

    @property
    def own_step(self) -> bool:
        """Return whether ZeRO's step is this package's, which reduces gradients from where autograd left them."""
        return self.stage == 3 and self.own_optimizer and not self.offloads_optimizer and not self.offloads_parameters

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence_length // self.shared_by

    @property
    def stage(self) -> int:
        return int(self.zero.stage)

    @property
    def gathers_in_fp8(self) -> bool:
        return self.fp8.enabled and self.fp8.param_gather.format != "bf16"

    @property
    def reduces_in_fp8(self) -> bool:
        return self.fp8.enabled and self.fp8.grad_reduce.format != "bf16"

    @property
    def offloads_optimizer(self) -> bool:
        return self.zero.offload_optimizer is not None and self.zero.offload_optimizer.device != "none"

    @property
    def offloads_parameters(self) -> bool:
        return self.zero.offload_param is not None and self.zero.offload_param.device != "none"

    @property
    def offloads_activations(self) -> bool:
        """Return whether inputs of recomputed layers lie outside the GPU; on a CPU they go nowhere else."""
        return self.activation_checkpointing == "offload" and self.device == "cuda"

    @property
    def has_graphs(self) -> bool:
        """Return whether micro-batches are captured as CUDA graphs, where memory allows."""
        fits = self.own_step and self.device == "cuda" and not self.offloads_activations
        return fits and self.fp8.enabled and self.fp8.graph != "off"

    def resized(self, what: Literal["micro_batch", "sequence_length"], value: int) -> Workload:
        return replace(self, rows=value) if what == "micro_batch" else replace(self, sequence_length=value)


def read_workload(
    config: str | os.PathLike | Mapping[str, Any],
    *,
    gpus: int | None = None,
    model: PretrainedConfig | None = None,
    sequence_length: int | None = None,
    device: Device = "cuda",
) -> Workload:
    """Return the workload of a stage's JSON, with the arguments of `estimate`."""
    configuration = Configuration.read(config)
    try:
        return _read(configuration, gpus or int(os.environ.get("WORLD_SIZE", "1")), model, sequence_length, device)
    except UserError as error:
        raise error.located(configuration.file) from None


def _read(
    configuration: Configuration, gpus: int, model: PretrainedConfig | None, length: int | None, device: Device
) -> Workload:
    configuration = Configuration(with_assumed_preset(configuration.values), configuration.file)
    raw, fp8, zero = configuration.values, configuration.fp8, configuration.zero
    preflight.check(configuration)
    model_section = parse_section(ModelConfig, raw.get("model", {}), key="model")
    data = parse_section(DataConfig, raw.get("data", {}), key="data")
    lora = section_of(raw, "train").get("lora")
    lora = None if lora is None else parse_section(Lora, lora, key="train.lora")
    if model is None:
        model = _model_config(model_section, section_of(raw, "train"))
    if configuration.stage == 0:
        raise UserError(
            "there is no estimate for ZeRO stage 0", key="zero_optimization.stage", remedy="stage 1, 2 or 3"
        )
    if model_section.attn_implementation == "eager":
        problem = "there is no estimate for eager attention, whose scores take heads x length x length"
        raise UserError(problem, key="model.attn_implementation", remedy='"packed"')
    shared_by = sequence_parallel_size(raw)
    check_ranks(shared_by, gpus)
    for check in (check_layers, check_rotation, check_heads):
        check(model, shared_by)
    data.check_budget(shared_by)
    _, micro_batch, _ = resolve_batch(raw, gpus // shared_by)
    accumulation = configuration.deepspeed.grad_accum_dtype
    if accumulation is None:  # as initialize fills it in
        accumulation = "fp32" if fp8.enabled and fp8.grad_reduce.format != "bf16" else "bf16"
    recomputed = model_section.activation_checkpointing
    if recomputed and configuration.given("activation_checkpointing", "cpu_checkpointing"):
        recomputed = "offload"
    # Untrained and stored models alike are rows of so many tokens, unless micro-batches are made by tokens.
    rows, tokens = micro_batch, length or data.sequence_length
    if data.tokens_per_gpu is not None and length is None:
        rows, tokens = 1, data.tokens_per_gpu * shared_by
    key = model.to_json_string(use_diff=False), fp8.model_dump_json(), device, lora
    if key not in _KNOWN:
        _KNOWN[key] = model_shape(copy.deepcopy(model), fp8, device, lora)
    return Workload(
        model=_KNOWN[key],
        fp8=fp8,
        gpus=gpus,
        rows=rows,
        sequence_length=tokens,
        zero=zero,
        accumulation_bytes=FP32 if accumulation in ("fp32", "float32") else BF16,
        torch_adam=bool(configuration.optimizer_params.get("torch_adam", False)),
        own_optimizer=uses_own_optimizer(configuration),
        activation_checkpointing=recomputed,
        attention=model_section.attn_implementation,
        device=device,
        shared_by=shared_by,
    )


def _model_config(section: ModelConfig, train: Mapping[str, Any]) -> PretrainedConfig:
    if section.config is not None:
        values = dict(section.config)
        kind = values.pop("model_type", None)
        if values.get("vocab_size") is None:
            problem = "the vocabulary of the model is the tokenizer's, which an estimate does not read"
            raise UserError(problem, key="model.config.vocab_size", remedy='give "vocab_size" in model.config')
        try:
            return AutoConfig.for_model(kind, **values)
        except Exception as error:  # each configuration class validates in its own way
            problem = f"model.config is refused: {first_paragraph(error)}"
            raise UserError(problem, key="model.config", remedy="change what the message names") from None
    path, init_from = section.path, train.get("init_from")
    if path is None and init_from is None:
        raise UserError(
            "no model is given", key="model", remedy="give model.config or model.path, or pass model=... to estimate"
        )
    revision = section.revision if path is not None else None
    return stored_config(stored_model(path, init_from if path is None else None, revision))


def known_shape(name: str) -> dict[str, Any] | None:
    """Return the configuration of a model of SHAPES; tuned models keep the sizes."""
    return SHAPES.get(name.removesuffix("-Instruct"))


def with_known_model(raw: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    """Return a stage whose model can be estimated where it lies neither here nor in reach.

    A model of SHAPES is described in the place of its name. A stage that begins with the weights of a run that has not
    been made yet gets the model of that run's own stage, where its JSON lies beside `file`.
    """
    raw = with_assumed_preset(raw)  # a shape in the place of a name would look like a model that is not loaded
    model, train = section_of(raw, "model"), section_of(raw, "train")
    before = train.get("init_from")
    if before is not None and not Path(before).expanduser().exists():
        earlier = _stage_that_writes(before, file)
        if earlier is not None:
            found = section_of(with_known_model(read_json(earlier), earlier), "model")
            model = {**model, **{key: found.get(key) for key in ("path", "config")}}
            raw["train"] = {**train, "init_from": None}
    shapes = known_shape(str(model.get("path")))
    if shapes is not None:
        model = {**model, "path": None, "config": shapes}
    if model:
        raw["model"] = dict(model)
    return raw


def _stage_that_writes(run_dir: str, file: Path) -> Path | None:
    for sibling in sorted(file.parent.glob("*.json")):
        try:
            train = {} if sibling == file else section_of(read_json(sibling), "train")
        except UserError:  # data or notes, say: a folder may hold other JSON than stages
            continue
        if train.get("run_dir") == run_dir:
            return sibling
    return None


def model_shape(
    config: PretrainedConfig, fp8: FP8Config, device: Device = "cuda", lora: Lora | None = None
) -> ModelShape:
    """Return the shape of the model that `config` describes, trained with `fp8`. No weight is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        if lora is not None:
            add_adapters(model, lora)
    if fp8.enabled:
        convert(model, _anywhere(fp8, device))
    loss_without_logits = fp8.fuses_loss and fuse_loss(model).fused
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    decoder, container = _layers_of(model)
    if decoder is None or head is None or embedding is None:
        raise UserError(
            f"there is no estimate for {type(model).__name__}: its decoder has no list of layers, or it has no head",
            key="model",
            remedy="measure it: ds-fp8 sweep",
        )
    layers = getattr(decoder, container)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    own_head = head.weight is not embedding.weight
    head_ids = {id(parameter) for parameter in head.parameters()} if own_head else set()
    in_fp8 = {id(module.weight): module.recipe for module in model.modules() if isinstance(module, FP8Linear)}
    experts = [module for module in model.modules() if isinstance(module, FP8Experts)]
    in_fp8 |= {id(weight): recipe for module in experts for weight, recipe in module.recipes_of_weights()}
    outside = [p for p in model.parameters() if id(p) not in inside | head_ids]
    return ModelShape(
        decoder=decoder,
        container=container,
        layers=_layer_shapes(layers, in_fp8, fp8.enabled and fp8.param_gather.format != "bf16"),
        outside=tuple(_shape(parameter, in_fp8) for parameter in outside),
        head=_shape(head.weight, in_fp8) if own_head else None,
        vocabulary=head.weight.shape[0],
        hidden=head.weight.shape[1],
        embedding=embedding.weight.numel(),
        loss_without_logits=loss_without_logits,
    )


def _anywhere(fp8: FP8Config, device: Device) -> FP8Config:
    """Return the same for any machine: which backend multiplies does not change what is kept, but for experts in FP8.

    Without the monitor, which looks at casts now and then.
    """
    linear = fp8.linear
    backend = linear.backend
    if backend == "auto":
        backend = "cublas" if device == "cuda" else "reference"
    products = "fp8" if multiplies_experts(linear.expert_products, backend) else "bf16"
    changes = {"linear": linear.model_copy(update={"backend": "reference", "expert_products": products})}
    changes["monitor"] = fp8.monitor.model_copy(update={"every": 0})
    return fp8.model_copy(update=changes)


def _layers_of(model: nn.Module) -> tuple[nn.Module | None, str]:
    """Return the part of a model whose attribute, a list, has its decoder layers, and the attribute's name."""
    lists = [
        (part, name, child)
        for part in model.modules()
        for name, child in part.named_children()
        if isinstance(child, nn.ModuleList)
    ]
    part, name, _ = max(lists, key=lambda each: sum(p.numel() for p in each[2].parameters()), default=(None, "", None))
    return part, name


def _layer_shapes(
    layers: Sequence[nn.Module], in_fp8: Mapping[int, LinearRecipe], gathers_in_fp8: bool
) -> tuple[LayerShape, ...]:
    """Return the shapes of layers, equal ones as one object: what they keep is measured once."""
    known: list[tuple[list[Any], LayerShape]] = []
    shapes = []
    for layer in layers:
        kind = [(name, type(m), getattr(m, "recipe", None)) for name, m in layer.named_modules()]
        kind += [(tuple(p.shape), _shape(p, in_fp8)) for p in layer.parameters()]
        shape = next((shape for known_kind, shape in known if known_kind == kind), None)
        if shape is None:
            shape = LayerShape(layer, tuple(_shape(p, in_fp8) for p in layer.parameters()))
            known.append((kind, shape))
            if gathers_in_fp8:
                unshard(layer)
        shapes.append(shape)
    return tuple(shapes)


def _shape(parameter: nn.Parameter, in_fp8: Mapping[int, LinearRecipe]) -> ParameterShape:
    recipe = in_fp8.get(id(parameter))
    if recipe is None:
        return ParameterShape(parameter.numel(), None, parameter.requires_grad)
    columns = parameter.shape[-1]
    rows, channels = parameter.numel() // columns, min(recipe.outlier_channels, columns)
    return ParameterShape(parameter.numel(), recipe.weight, parameter.requires_grad, rows, channels)
