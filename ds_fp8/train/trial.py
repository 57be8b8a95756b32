"""A few layers of a model, tried on the CPU before it is built: what a stage relies on, and models may not do.

A stage gives a model rows of several documents, which `position_ids` alone separate, and the number that the loss is
to be divided by. Models may ignore either without a word: where a mask is made without positions, or tokens are mixed
by a convolution or a state, documents see those before them, so that rows must hold one document each; where keyword
arguments are swallowed, micro-batches are averaged with the wrong weights; encoders see what they are to predict, and
so do models that take a row of one document without a mask for one in which all is seen.
"""

from __future__ import annotations

import copy
import inspect
from typing import NamedTuple

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PretrainedConfig

from ds_fp8.config.errors import UserError, first_paragraph
from ds_fp8.train import packed_attention

# Of the copy: its layers at least, tokens of each of two documents in a row, its vocabulary, and the width of its MLPs
LAYERS, LENGTH, VOCABULARY, WIDTH = 2, 16, 512, 256
_OWN_NAME = "ds_fp8_trial"
# Of relative differences of a token in FP32, where sums may have another order: at most 5e-7 was seen. A convolution
# behind two layers mixes documents by 8e-4.
TOLERANCE = 1e-4


def check_rows(config: PretrainedConfig, attention: str) -> str | None:
    """Try a model's rows and loss; return why rows must hold one document each, or None.

    Args:
        config: Of the model, whose copy has its sizes but for LAYERS, VOCABULARY and WIDTH.
        attention: The attention implementation of the stage.

    Raises:
        UserError: The model computes "eager" attention alone, the loss is not divided by what it is given, or tokens
            see those behind them, padding among them.
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
        return f"rows of several documents could not be tried with {name}: {found.failure}"
    if found.ignores_items:
        raise UserError(
            f"{name} does not divide its loss by num_items_in_batch, so it cannot be averaged per token over ranks and "
            "micro-batches",
            key="model",
            remedy="use a causal language model of transformers that passes keyword arguments to its loss",
        )
    if not found.causal:
        raise UserError(
            f"{name} is an encoder: tokens see those behind them, which they are to predict",
            key="model",
            remedy='give a causal language model; some encoders are one with "is_decoder": true in their configuration',
        )
    if found.separates:
        return None
    if found.sees_padding:
        raise UserError(
            f"{name} computes other logits for a document where padding is behind it",
            key="model",
            remedy="a model whose tokens depend on those before them alone",
        )
    return f"{name} does not separate documents of a row"


def attention_for(config: PretrainedConfig) -> str:
    """Return the attention implementation of packed rows: "packed", or "eager" for a model that cannot compute it."""
    return "eager" if _needs_eager(config, _try(config, packed_attention.NAME)) else packed_attention.NAME


class _Found(NamedTuple):
    name: str  # of the class, where it could be built
    failure: str | None = None
    ignores_items: bool = False
    causal: bool = False
    separates: bool = False  # documents of a row have the logits that they have alone
    sees_padding: bool = False  # one document a row, padding behind it, has not


def _try(config: PretrainedConfig, attention: str) -> _Found:
    name = config.model_type
    try:
        model = _copy(config, attention)
        name = type(model).__name__
        if not {"num_items_in_batch", "kwargs"} & set(inspect.signature(model.forward).parameters):
            return _Found(name, ignores_items=True, causal=True)
        row, last_changed = _rows()
        (loss, logits), (half, _) = _forward(model, row), _forward(model, row, items=2)
        if not logits.isfinite().all():  # as of weights that a class leaves uninitialized; nothing would differ
            return _Found(name, "its random weights have logits that are not finite")
        ignores = not torch.allclose(loss, 2 * half, rtol=TOLERANCE)
        sees_behind = _differ(logits[:, :LENGTH], _forward(model, last_changed)[1][:, :LENGTH])
        one, changed = (_forward(model, x, length=2 * LENGTH)[1][:, :LENGTH] for x in (row, last_changed))
        sees_behind |= _differ(one, changed)
        documents = row.view(2, LENGTH)
        alone = torch.cat([_forward(model, document[None])[1] for document in documents])
        separates = not any(map(_differ, logits.view_as(alone), alone))
        rows = documents if separates else F.pad(documents, (0, LENGTH), value=VOCABULARY - 1)
        padded = _forward(model, rows, length=rows.shape[1])[1][:, :LENGTH]
        return _Found(name, None, ignores, not sees_behind, separates, any(map(_differ, padded, alone)))
    except Exception as error:  # each model class fails in its own way
        return _Found(name, first_paragraph(error))


def _needs_eager(config: PretrainedConfig, packed: _Found) -> bool:
    return not packed.causal and _try(config, "eager").causal


def _copy(config: PretrainedConfig, attention: str) -> torch.nn.Module:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    layers = text.num_hidden_layers
    kinds = vars(text).get("layer_types") or ()
    # The first layer of each kind at least, for a later one may be the first that mixes documents
    chosen = sorted({*range(min(layers, LAYERS)), *(map(kinds.index, kinds) if len(kinds) == layers else ())})
    for key, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == layers:  # a kind for each layer
            setattr(text, key, [value[layer] for layer in chosen])
        elif key in ("intermediate_size", "moe_intermediate_size") and not hasattr(text, "conv_kernel"):
            # Of an MLP, which mixes no tokens and is most of a layer; beside convolutions it is the width of a state.
            setattr(text, key, min(value, WIDTH))
        if key.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            setattr(text, key, 0)  # which no row has
    text.num_hidden_layers, text.vocab_size = len(chosen), VOCABULARY
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = False  # another loss beside that of the labels
    if attention == packed_attention.NAME:
        # Under a name of its own: an engine of this process may have put an exchange with other ranks around the other.
        attention = _OWN_NAME
        packed_attention.register(attention)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()


def _rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of two documents [1, 2 * LENGTH]: one, and one with another last document."""
    generator = torch.Generator().manual_seed(0)
    one, document, other = torch.randint(3, VOCABULARY, (3, 1, LENGTH), generator=generator)
    return torch.cat([one, document], 1), torch.cat([one, other], 1)


def _differ(logits: torch.Tensor, others: torch.Tensor) -> bool:
    return bool(((logits - others).norm(dim=-1) > TOLERANCE * logits.norm(dim=-1)).any())


@torch.no_grad()
def _forward(
    model: torch.nn.Module, tokens: torch.Tensor, items: int = 1, length: int = LENGTH
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of rows of documents of so many tokens, and the logits of all tokens."""
    positions = (torch.arange(tokens.shape[1]) % length).expand_as(tokens)
    given = {"input_ids": tokens, "labels": tokens, "position_ids": positions, "use_cache": False}
    output = model(**given, num_items_in_batch=torch.tensor(float(items)))
    return output.loss, output.logits
