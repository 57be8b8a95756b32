"""Munit scaling: Llama-like models in which tensors keep variance 1, so that casts to FP8 need no scales.

    weights      variance 1 at the start; embeddings too; biases 0, norms 1
    linear       y = (x · wᵀ + b) / sqrt(fan_in), in backward the same factor
    residual     h <- sqrt(1 - tau) h + sqrt(tau) RMSNorm(branch(h)): normed at the end of the branch, not before it
    logits       RMSNorm(h) · wᵀ / hidden size
    Adam         learning rate of the layers' matrices times sqrt(base width / fan_in), of all else as it is

After Narayan et al. (arXiv 2502.05967), who build on unit scaling (arXiv 2303.11257): from there come variance 1, 1 /
sqrt(fan_in) in forward and backward, norms at the end of the branches, the residual with one fixed tau, and the
learning rate of hidden layers with 1 / sqrt(width), so that what is tuned at one width holds at others. The formulas
have not been compared with the paper's own, line by line. Ours: the factor 1 / fan_in of the head, the default of
tau, the learning rate by each matrix's own fan_in, and SwiGLU as it is (the paper's models have GELU). Weight decay
acts through each group's learning rate, as in AdamW; the paper decays independently of it. Gradients are small, about
1 / (tokens · hidden size), so that Adam's epsilon should be too.

    "model": {"config": {"model_type": "munit_llama", ...}}        munit_mistral, munit_qwen2, munit_qwen3

These are classes of transformers beside its own: what a run saves says so in its config.json, and a program that does
not know them (`register`) refuses it. The package unit-scaling has other modules, whose products are not the
nn.Linear that FP8, ZeRO-3's gather and Hugging Face folders rest on. Here modules stay what they are: linears and the
last norm get a forward hook, decoder layers another forward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import sqrt
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

PREFIX = "munit_"
MODEL_TYPES = tuple(f"{PREFIX}{base}" for base in ("llama", "mistral", "qwen2", "qwen3"))


@functools.cache
def register() -> None:
    """Let AutoConfig and AutoModelForCausalLM know MODEL_TYPES."""
    for model_type in MODEL_TYPES:
        base = CONFIG_MAPPING[model_type.removeprefix(PREFIX)]
        config = _configuration(base, model_type)
        AutoConfig.register(model_type, config)
        AutoModelForCausalLM.register(config, _model(MODEL_FOR_CAUSAL_LM_MAPPING[base], config))


def parameter_groups(model: PreTrainedModel, learning_rate: float) -> list[dict[str, Any]]:
    """Return groups for an Adam: the layers' matrices by their fan_in, all other parameters at `learning_rate`."""
    base = model.config.munit_base_width
    rates = {
        id(linear.weight): learning_rate * sqrt(base / linear.in_features)
        for layer in model.model.layers
        for linear in _linears(layer)
    }
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault(rates.get(id(parameter), learning_rate), []).append(parameter)
    return [{"params": parameters, "lr": rate} for rate, parameters in groups.items()]


def _configuration(base: type[PretrainedConfig], name: str) -> type[PretrainedConfig]:

    class Configuration(base):
        model_type = name
        initializer_range: float = 1.0
        # Share of a branch in the variance of the residual sum; null: one over the number of branches, which leaves the
        # embedding 1/e of the variance behind the last
        munit_tau: float | None = None
        # Hidden size at which the optimizer's learning rate is meant; null: the model's own
        munit_base_width: int | None = None

        def __post_init__(self, **kwargs: Any) -> None:
            super().__post_init__(**kwargs)
            if self.tie_word_embeddings:
                raise ValueError(
                    "munit scaling multiplies embedding and head differently: set tie_word_embeddings false"
                )
            if self.munit_tau is None:
                self.munit_tau = 1 / (2 * self.num_hidden_layers)
            if not 0 < self.munit_tau < 1:
                raise ValueError(f"munit_tau {self.munit_tau} does not lie between 0 and 1")
            self.munit_base_width = self.munit_base_width or self.hidden_size

    Configuration.__name__ = Configuration.__qualname__ = f"Munit{base.__name__}"
    return Configuration


def _model(base: type[PreTrainedModel], config: type[PretrainedConfig]) -> type[PreTrainedModel]:

    def __init__(self: PreTrainedModel, config: PretrainedConfig) -> None:
        base.__init__(self, config)
        _parametrize(self)

    name = f"Munit{base.__name__}"
    return type(name, (base,), {"__init__": __init__, "config_class": config, "__qualname__": name})


def _parametrize(model: PreTrainedModel) -> None:
    tau = model.config.munit_tau
    for layer in model.model.layers:
        # The class is swapped under the live module, so that parameters and their names stay what they are.
        layer.__class__ = _res_post_norm(type(layer))
        layer.residual_factor, layer.branch_factor = sqrt(1 - tau), sqrt(tau)
        for linear in _linears(layer):
            # Autograd multiplies the gradient by the same factor: forward and backward stay those of one function.
            linear.register_forward_hook(functools.partial(_times, factor=linear.in_features**-0.5))
    # Before the head rather than behind it: fused losses read the head's weight and call nothing.
    model.model.norm.register_forward_hook(functools.partial(_times, factor=1 / model.config.hidden_size))


def _linears(layer: nn.Module) -> Iterator[nn.Linear]:
    return (module for module in layer.modules() if isinstance(module, nn.Linear))


def _times(module: nn.Module, inputs: tuple, output: torch.Tensor, *, factor: float) -> torch.Tensor:
    return output * factor


class _ResPostNorm:
    """Forward of a decoder layer whose norms lie at the end of its branches."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        branch = self.self_attn(hidden_states, *args, **kwargs)[0]
        hidden_states = self._sum(hidden_states, self.input_layernorm(branch))
        return self._sum(hidden_states, self.post_attention_layernorm(self.mlp(hidden_states)))

    def _sum(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        return residual * self.residual_factor + branch * self.branch_factor


@functools.cache
def _res_post_norm(layer: type[nn.Module]) -> type[nn.Module]:
    """Return a class of decoder layers under the same name, by which DeepSpeed's leaf modules are found."""
    names = {"__module__": layer.__module__, "__qualname__": layer.__qualname__}
    return type(layer.__name__, (_ResPostNorm, layer), names)
