"""Small models trained in FP8 whose codes go to a vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_fp8.config.errors import UserError
from tests.zero.models import config

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 500,
    "max_position_embeddings": 512,
}
TIED = {"llama": False, "qwen2": True, "qwen3": False, "qwen3_moe": False, "mixtral": False}
EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
STACKS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Of an expert: gate, up and down, as folders name them
MATRICES = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}


def engine_of(kind: str, fp8: dict, device: str = "cpu", **changes: Any):
    """Return an engine around a random model of this kind, trained for a step."""
    import ds_fp8

    torch.manual_seed(0)
    shape = SHAPE | {"tie_word_embeddings": TIED[kind]} | EXPERTS.get(kind, {}) | changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape), dtype=torch.bfloat16).to(device)
    engine = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=config(fp8))[0]
    step(engine, device)
    return engine


def step(engine, device: str = "cpu") -> None:
    rows = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(1)).to(device)
    loss = engine(input_ids=rows, labels=rows).loss
    engine.backward(loss)
    engine.step()


def refusal(call: Callable, *arguments: Any, errors: type = UserError, **options: Any) -> str:
    """Return what a call says that is refused, and "accepted" of one that is not."""
    try:
        call(*arguments, **options)
    except errors as error:
        return str(error)
    return "accepted"


def unequal(held: dict[str, torch.Tensor], sent: dict[str, torch.Tensor], rank: int = 0, ranks: int = 1) -> list[str]:
    """Return the names of a server's tensors that are not, byte for byte, those that were sent, stacked layers too.

    Args:
        held: By vLLM's names; of a rank of tensor parallelism its share.
        sent: By the names of training.
        rank: Of tensor parallelism.
        ranks: Over which it spreads the server's model.
    """
    found = []
    for name, own in held.items():
        *_, layer, last = name.split(".")
        if ".attn." in name:
            continue  # scales of the cache
        if layer == "routed_experts":
            own, shares = own.flatten(0, 1), shares_of_experts(name, sent, rank, ranks)
        elif layer in ("embed_tokens", "lm_head"):
            # vLLM pads the vocabulary, and the last ranks hold the padding.
            shares = [sent[name][rank * len(own) : (rank + 1) * len(own)]]
            own = own[: len(shares[0])]
        else:
            parts = [name.replace(f".{layer}.{last}", f".{part}.{last}") for part in STACKS.get(layer, (layer,))]
            shares = [share(layer, sent[part], rank, ranks) for part in parts]
        whole = torch.cat(shares).to(own.device)
        # Some kernels hold codes transposed.
        if not any(_same(turned, whole) for turned in ([own, own.t()] if own.dim() == 2 else [own])):
            found.append(name)
    return found


def shares_of_experts(name: str, sent: dict[str, torch.Tensor], rank: int, ranks: int) -> list[torch.Tensor]:
    """Return a rank's parts of a tensor of all experts of a layer, in the order in which vLLM stacks them."""
    layer, _, own = name.rpartition("routed_experts.")
    stacked, _, last = own.partition("_")  # w13 or w2, weight or weight_scale_inv
    gate, up, down = next(names for names in MATRICES.values() if f"{layer}0.{names[0]}.{last}" in sent)
    if stacked == "w2":
        return [sent[f"{layer}{e}.{down}.{last}"].chunk(ranks, 1)[rank] for e in range(4)]
    return [sent[f"{layer}{e}.{part}.{last}"].chunk(ranks)[rank] for e in range(4) for part in (gate, up)]


def share(layer: str, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return a rank's part of a tensor: inputs of the products that end a half of a layer, outputs of the others."""
    if "norm" in layer or layer == "gate" or ranks == 1:
        return whole
    if layer in ("o_proj", "down_proj"):
        # Scales by row belong to outputs, which every rank has all of.
        return whole if whole.shape[1] == 1 else whole.chunk(ranks, 1)[rank]
    return whole.chunk(ranks)[rank]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
