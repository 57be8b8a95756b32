"""What does training a model further in FP8, or with a peer's linears, cost its loss, and that of its weights in BF16?

Answer (2026-11-24, H200, SmolLM2-135M, 300 steps): `precise` 0.20 and 0.06%, Transformer Engine and torchao 0.73 to
0.84 and 0.44 to 0.49% (docs/log/losses.md).

    python corpus.py --output corpus.jsonl --megabytes 60
    python continue_training.py FOLDER corpus.jsonl --fp8 bf16                       BF16 by this package's layers
    python continue_training.py FOLDER corpus.jsonl --fp8 precise --order 1
    python continue_training.py FOLDER corpus.jsonl --peer torchao-rowwise --in_bf16 fprop
    python continue_training.py '{"model_type": "qwen2", ...}' tokens.pt             random weights
    python continue_training.py --quick                                              seconds on a CPU

Runs of one --order see the same batches. Only such pairs tell a tenth of a percent apart: another order alone moves the
loss by 0.4% (docs/log/losses.md). Prints one line of JSON: the loss on held-out rows before the first step, after the
last as trained, and after it of the weights in BF16; means of the first 20 and the last 50 training losses. AdamW
without weight decay, warm-up over 20 steps, a cosine to a tenth. One process, or the ranks of torchrun or deepspeed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import bench_path  # noqa: F401  (for `common` and its neighbours)
import deepspeed
import torch
from byte_training import read_sources
from common import device
from deepspeed import comm as dist
from peer_linears import PRODUCTS, Autocast, use_peer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from zero_ranks import is_first, join_ranks, leave_ranks, synchronize

import ds_fp8
from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.presets import PRESETS

WARMUP = 20
BF16 = {"linear": {"overrides": {"*": "bf16"}}, "param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}
"""This package's layers, step and graphs, with every cast left out."""
QUICK = {
    "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip


def make_model(source: str, seed: int) -> PreTrainedModel:
    """Return the model of a folder, or of a configuration in JSON with random weights of a seed; in BF16."""
    if not source.lstrip().startswith("{"):
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    values = json.loads(source)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def read_tokens(file: Path, tokenizer: str) -> torch.Tensor:
    """Return token ids, int64: a tensor of torch.save, or the texts of a .jsonl by the tokenizer of a folder."""
    if file.suffix == ".pt":
        return torch.load(file).long()
    encode = AutoTokenizer.from_pretrained(tokenizer)
    texts = [json.loads(line)["text"] + (encode.eos_token or "") for line in file.open()]
    return torch.tensor([token for ids in encode(texts)["input_ids"] for token in ids])


def deepspeed_config(options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration without "fp8"."""
    schedule = {"total_num_steps": options.steps, "warmup_num_steps": WARMUP, "cos_min_ratio": 0.1}
    return {
        "train_micro_batch_size_per_gpu": options.sequences,
        "bf16": {"enabled": True},
        # Peers' weights are tensors of their own kinds, which are not partitioned.
        "zero_optimization": {"stage": 1 if options.peer else 3},
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": options.rate, "betas": [0.9, 0.95], "weight_decay": 0.0, "torch_adam": True},
        },
        "scheduler": {"type": "WarmupCosineLR", "params": {**schedule, "warmup_min_ratio": 0.0}},
    }


def fp8_section(text: str) -> dict[str, Any] | None:
    """Return the section that --fp8 stands for; None for "off"."""
    if text.lstrip().startswith("{"):
        return json.loads(text)
    if text not in ("off", "bf16", *PRESETS):
        known = ", ".join(("off", "bf16", *PRESETS))
        raise UserError(f'unknown "{text}"', key="--fp8", remedy=f"a section in JSON, or one of {known}")
    return {"off": None, "bf16": BF16}.get(text, {"preset": text})


def mean_loss(model: Any, rows: torch.Tensor, around: Autocast = contextlib.nullcontext) -> float:
    """Return the mean loss of rows, which divide over ranks in micro-batches [n, sequences, length]."""
    total = torch.zeros((), device=device())
    with torch.no_grad():
        for own in rows[dist.get_rank() :: dist.get_world_size()].to(device()):
            with around():
                total += model(input_ids=own, labels=own, use_cache=False).loss.float()
    dist.all_reduce(total)
    return total.item() / len(rows)


def train(
    engine: deepspeed.DeepSpeedEngine, rows: torch.Tensor, steps: int, order: int, around: Autocast
) -> list[float]:
    """Train steps of micro-batches of `rows` [count, length], in an order of a seed; return each step's mean loss."""
    sequences, losses = engine.train_micro_batch_size_per_gpu(), []
    shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(order))
    for step in range(steps):
        first = (step * dist.get_world_size() + dist.get_rank()) * sequences
        own = rows[shuffled[(first + torch.arange(sequences)) % len(rows)]].to(device())
        with around():
            loss = engine(input_ids=own, labels=own, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
    curve = torch.stack(losses)
    dist.all_reduce(curve)
    return (curve / dist.get_world_size()).tolist()


def in_bf16(engine: deepspeed.DeepSpeedEngine, source: str) -> PreTrainedModel:
    """Return transformers' model, without casts, of the weights that an engine has trained. Collective."""
    partitioned = engine.zero_optimization_stage() == 3
    weights = engine._zero3_consolidated_16bit_state_dict() if partitioned else engine.module.state_dict()
    model = make_model(source, 0)
    if is_first():
        # Of tied weights there is one, and peers keep entries of their own.
        missing = model.load_state_dict(weights, strict=False).missing_keys
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        if set(missing) - tied:
            raise UserError(f"the trained model has no {missing[0]}", remedy="a model that trains under its own names")
    model.to(device()).eval()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    return model


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return what is printed. Collective."""
    tokens = read_sources(400_000).long() if options.quick else read_tokens(options.tokens, options.tokenizer)
    rows = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)
    group = options.sequences * dist.get_world_size()
    held_out = max(1, options.held_out // options.length // group) * group
    if len(rows) < 2 * held_out:
        raise UserError(f"{len(tokens):,} tokens are too few", key="tokens", remedy="more text, or less --held_out")
    validation = rows[:held_out].view(-1, options.sequences, options.length)
    model = make_model(options.model, options.weights)
    around = use_peer(model.to(device()), options.peer, options.in_bf16) if options.peer else contextlib.nullcontext
    section, config = fp8_section(options.fp8), deepspeed_config(options)
    if section is not None:
        config["fp8"] = section
    initialize = ds_fp8.initialize if section is not None else deepspeed.initialize
    engine = initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    engine.eval()
    first = mean_loss(engine, validation, around)
    engine.train()
    started = time.perf_counter()
    curve = train(engine, rows[held_out:], options.steps, options.order, around)
    synchronize()
    seconds = time.perf_counter() - started
    engine.eval()
    return {
        "model": options.model,
        "fp8": options.peer or options.fp8,
        "products_in_bf16": options.in_bf16,
        "order": options.order,
        "steps": options.steps,
        "tokens_a_step": group * options.length,
        "before": first,
        "as_trained": mean_loss(engine, validation, around),
        "in_bf16": mean_loss(in_bf16(engine, options.model), validation),
        "first_20": sum(curve[:20]) / len(curve[:20]),
        "last_50": sum(curve[-50:]) / len(curve[-50:]),
        "seconds": seconds,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder of transformers, or a configuration in JSON")
    parser.add_argument("tokens", nargs="?", type=Path, help="token ids (.pt), or texts (.jsonl)")
    parser.add_argument("--tokenizer", help="folder of the tokenizer of texts (default: the model's)")
    parser.add_argument("--fp8", default="bf16", help='"off" (DeepSpeed alone), "bf16", a preset, or a section in JSON')
    parser.add_argument("--peer", default="", help="linears of a peer, by its name in peer_linears.py")
    parser.add_argument("--in_bf16", default=[], type=lambda text: text.split(","), help=f"of {','.join(PRODUCTS)}")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sequences", type=int, default=8, help="of a rank in a step (default 8)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default 2048)")
    parser.add_argument("--rate", type=float, default=3e-4, help="highest learning rate (default 3e-4)")
    parser.add_argument("--order", type=int, default=0, help="seed of the order of sequences")
    parser.add_argument("--weights", type=int, default=0, help="seed of random weights")
    parser.add_argument("--held_out", type=int, default=131072, help="tokens of validation (default 131072)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # which the launcher of DeepSpeed passes
    parser.add_argument("--quick", action="store_true", help="a small model on bytes of Python sources")
    options = parser.parse_args(arguments)
    if options.quick:
        options.model, options.steps, options.sequences, options.length = json.dumps(QUICK), 6, 2, 64
        options.held_out = 1024
    elif options.model is None or options.tokens is None:
        raise UserError("no model, or no tokens", remedy="FOLDER corpus.jsonl, or --quick")
    if unknown := [product for product in options.in_bf16 if product not in PRODUCTS]:
        raise UserError(f'unknown product "{unknown[0]}"', key="--in_bf16", remedy=f"some of {','.join(PRODUCTS)}")
    options.tokenizer = options.tokenizer or options.model
    if options.peer and options.fp8 != "bf16":
        raise UserError("a peer's linears, or ours", key="--peer", remedy="leave --fp8 out")
    if options.peer:
        options.fp8 = "off"
    join_ranks()
    result = run(options)
    if is_first():
        print(json.dumps(result))
    leave_ranks()
    return 0


if __name__ == "__main__":
    main_entry(main)
