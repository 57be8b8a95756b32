"""A few layers of a model, tried on the CPU before it is built: what a stage relies on, and models may not do.

A stage gives a model rows of several documents, which `position_ids` alone tell apart, and the number that the loss is
to be divided by. Models may ignore either without a word: where a mask is made without positions, or tokens are mixed
by a convolution or a state, documents see those before them; where keyword arguments are swallowed, micro-batches are
averaged with the wrong weights; encoders see what they are to predict, and so do models that take a row of one
document without a mask for one in which all is seen.
"""

from __future__ import annotations

import copy
import inspect
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from ds_fp8.config.errors import UserError, first_paragraph
from ds_fp8.config.log import logger
from ds_fp8.train import packed_attention

# Of the copy: its layers, tokens of each of two documents in a row, its vocabulary, and the width of its MLPs
LAYERS, LENGTH, VOCABULARY, WIDTH = 2, 16, 512, 256
_OWN_NAME = "ds_fp8_trial"
TOLERANCE = 1e-3  # Of relative differences in FP32, where sums may have another order


def check_rows(config: PretrainedConfig, attention: str) -> None:
    """Try a model's rows and loss; say where documents of a row see each other, or that it could not be tried.

    Args:
        config: Of the model, whose copy has its sizes but for LAYERS, VOCABULARY and WIDTH.
        attention: The attention implementation of the stage.

    Raises:
        UserError: The model computes "eager" attention alone, the loss is not divided by what it is given, or tokens
            see those behind them.
    """
    # Of "flex_attention" the same masks, and nothing to compile
    found = _try(config, "sdpa" if attention == "flex_attention" else attention)
    name = found.name
    # Others that fail may want a GPU
    if (attention == packed_attention.NAME or found.failure is None) and _needs_eager(config, found):
        raise UserError(
            f'attention "{attention}" cannot be computed in {name}: {found.failure or "it would have no causal mask"}',
            key="model.attn_implementation",
            remedy='"attn_implementation": "eager"',
        )
    if found.failure is not None:
        logger.info("note: rows of several documents could not be tried with %s: %s", name, found.failure)
    elif found.ignores_items:
        raise UserError(
            f"{name} does not divide its loss by num_items_in_batch, so it cannot be averaged per token over ranks and "
            "micro-batches",
            key="model",
            remedy="use a causal language model of transformers that passes keyword arguments to its loss",
        )
    elif not found.causal:
        raise UserError(
            f"{name} is an encoder: tokens see those behind them, which they are to predict",
            key="model",
            remedy='give a causal language model; some encoders are one with "is_decoder": true in their configuration',
        )
    elif found.sees_before:
        logger.warning("note: documents of a row see those before them: %s does not tell them apart by positions", name)


def attention_for(config: PretrainedConfig) -> str:
    """Return the attention implementation of packed rows: "packed", or "eager" for a model that cannot compute it."""
    return "eager" if _needs_eager(config, _try(config, packed_attention.NAME)) else packed_attention.NAME


class _Found(NamedTuple):
    name: str  # of the class, where it could be built
    failure: str | None = None
    ignores_items: bool = False
    causal: bool = False
    sees_before: bool = False  # a document sees that before it


def _try(config: PretrainedConfig, attention: str) -> _Found:
    name = config.model_type
    try:
        model = _copy(config, attention)
        name = type(model).__name__
        if not {"num_items_in_batch", "kwargs"} & set(inspect.signature(model.forward).parameters):
            return _Found(name, ignores_items=True, causal=True)
        row, first_changed, last_changed = _rows()
        (loss, logits), (half, _) = _forward(model, row), _forward(model, row, items=2)
        ignores = not torch.allclose(loss, 2 * half, rtol=TOLERANCE)
        sees_before = _differ(logits, _forward(model, first_changed)[1], slice(LENGTH, None))
        sees_behind = _differ(logits, _forward(model, last_changed)[1], slice(LENGTH))
        one, changed = (_forward(model, tokens, documents=1)[1] for tokens in (row, last_changed))
        sees_behind |= _differ(one, changed, slice(LENGTH))
        return _Found(name, None, ignores, not sees_behind, sees_before)
    except Exception as error:  # each model class fails in its own way
        return _Found(name, first_paragraph(error))


def _needs_eager(config: PretrainedConfig, packed: _Found) -> bool:
    return not packed.causal and _try(config, "eager").causal


def _copy(config: PretrainedConfig, attention: str) -> torch.nn.Module:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    layers = text.num_hidden_layers
    for key, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == layers:  # a kind for each layer
            setattr(text, key, value[:LAYERS])
        elif key in ("intermediate_size", "moe_intermediate_size") and not hasattr(text, "conv_kernel"):
            # Of an MLP, which mixes no tokens and is most of a layer; beside convolutions it is the width of a state.
            setattr(text, key, min(value, WIDTH))
        if key.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            setattr(text, key, 0)  # which no row has
    text.num_hidden_layers, text.vocab_size = min(layers, LAYERS), VOCABULARY
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = False  # another loss beside that of the labels
    if attention == packed_attention.NAME:
        # Under a name of its own: an engine of this process may have put an exchange with other ranks around the other.
        attention = _OWN_NAME
        packed_attention.register(attention)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()


def _rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows of two documents [1, 2 * LENGTH]: one, one with another first and one with another last document."""
    generator = torch.Generator().manual_seed(0)
    one, document, other = torch.randint(3, VOCABULARY, (3, 1, LENGTH), generator=generator)
    return torch.cat([one, document], 1), torch.cat([other, document], 1), torch.cat([one, other], 1)


def _differ(logits: torch.Tensor, others: torch.Tensor, part: slice) -> bool:
    return bool((logits - others)[:, part].norm() > TOLERANCE * logits[:, part].norm())


@torch.no_grad()
def _forward(
    model: torch.nn.Module, tokens: torch.Tensor, items: int = 1, documents: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and the logits of all tokens."""
    positions = torch.arange(2 * LENGTH // documents).repeat(documents)[None]
    given = {"input_ids": tokens, "labels": tokens, "position_ids": positions, "use_cache": False}
    output = model(**given, num_items_in_batch=torch.tensor(float(items)))
    return output.loss, output.logits
