"""Small Llamas that learn bytes of Python sources, for optimizer_parity.py.

Text, model and batches follow from a scale and a seed alone, so that runs of one seed differ by what is compared.
"""

from __future__ import annotations

import contextlib
import math
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import bench_path  # noqa: F401  (for `common` and its neighbours)
import torch
from common import device
from transformers import LlamaConfig, LlamaForCausalLM

from ds_fp8.config.errors import UserError
from ds_fp8.optim import AdamW

PERTURBED = "perturbed"
VALIDATION_BATCHES = 8


class Scale(NamedTuple):
    """Model and batch."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    length: int
    rows: int
    steps: int
    text: int
    """Bytes of text."""


def read_sources(length: int) -> torch.Tensor:
    """Read the first `length` bytes of the Python sources of this environment, uint8. Raise UserError for too few."""
    text, found = bytearray(), 0
    for folder in ("stdlib", "purelib"):
        for file in sorted(Path(sysconfig.get_path(folder)).rglob("*.py")):
            if folder == "stdlib" and "site-packages" in file.parts:
                continue
            text += file.read_bytes()
            found += 1
            if len(text) >= length:
                return torch.frombuffer(text[:length], dtype=torch.uint8)
    if len(text) < 100_000:
        raise UserError(f"only {found} Python files are installed here", remedy="run in an environment with packages")
    return torch.frombuffer(text, dtype=torch.uint8)


def batch(text: torch.Tensor, scale: Scale, seed: int) -> torch.Tensor:
    """Return rows of bytes [rows, length] from places that depend on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - scale.length, (scale.rows, 1), generator=generator)
    return text[starts + torch.arange(scale.length)].long().to(device())


def build_model(scale: Scale, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=scale.hidden, intermediate_size=scale.intermediate,
        num_hidden_layers=scale.layers, num_attention_heads=scale.heads, max_position_embeddings=scale.length,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device(), torch.bfloat16)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return a step's learning rate: warm-up over a twentieth of the steps, then a cosine to a tenth of the peak."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Run torch's deterministic kernels within this context.

    Without them two runs of one seed end 0.2% apart on a GPU, nearly as far as any state may be from FP32's.
    """
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # every number is written before it is read
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Trunk(NamedTuple):
    """The first steps, shared by runs of one seed."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    state: dict[str, Any]
    """The optimizer's state_dict."""


def perturb(model: LlamaForCausalLM, optimizer: AdamW) -> None:
    """Flip the last bit of one weight, and set its master to it."""
    weight = model.lm_head.weight
    weight.data.view(torch.int16)[0, 0] ^= 1
    if "master" in optimizer.state[weight]:
        optimizer.state[weight]["master"][0, 0] = weight.data[0, 0]


def train_bytes(
    model: LlamaForCausalLM,
    optimizer: AdamW,
    scale: Scale,
    text: torch.Tensor,
    seed: int,
    peak: float,
    steps: range,
    forward: Callable[..., Any],
) -> tuple[list[float], float]:
    """Train `steps` of a run on all but the last hundredth of the text; return (the losses, seconds a step).

    forward: the model or its compiled form.
    """
    training = text[: len(text) * 99 // 100]
    losses, started = [], time.perf_counter()
    for step in steps:
        tokens = batch(training, scale, seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, scale.steps, peak)
        loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    curve = torch.stack(losses).tolist() if losses else []  # waits for the GPU
    return curve, (time.perf_counter() - started) / max(1, len(losses))


def final_loss(curve: list[float]) -> float:
    """Return the mean loss of the last tenth of the steps."""
    last = curve[-max(1, len(curve) // 10) :]
    return sum(last) / len(last)


def figures(
    seed: int, curve: list[float], optimizer: AdamW, model: LlamaForCausalLM, seconds: float, scale: Scale,
    text: torch.Tensor,
) -> dict[str, Any]:  # fmt: skip
    """Return the row of one run."""
    model.eval()
    held_out = text[len(text) * 99 // 100 :]
    with torch.no_grad():
        batches = [batch(held_out, scale, number) for number in range(VALIDATION_BATCHES)]
        validation = sum(model(input_ids=rows, labels=rows).loss.item() for rows in batches) / len(batches)
    return {
        "seed": seed,
        "final_loss": final_loss(curve),
        "validation_loss": validation,
        "milliseconds_a_step": 1e3 * seconds,
        "state_bytes": optimizer.state_bytes() / sum(p.numel() for p in model.parameters()),
        "skipped_steps": optimizer.skipped_steps,
        "losses": curve,
    }
