"""A small model trained for three steps on each rank, and what is exported of it there."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import deepspeed
import torch
from deepspeed import comm as dist
from safetensors.torch import load_file

import ds_fp8
from ds_fp8.export import export_engine, served_weights
from tests.integrations.programs import counting, small_model
from tests.zero.models import config

ROWS = torch.stack([row["input_ids"] for row in counting(2)])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all that a folder's files hold."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ROWS).logits.float()


def shape(**changes) -> dict:
    """Sides that are multiples of 128, the rows of k and v too."""
    return {"hidden_size": 256, "head_dim": 128, "num_hidden_layers": 2, **changes}


def train_and_export(folder, fp8: dict, layouts: list[str], shard_bytes: int, changes: dict):
    """Train, save a checkpoint, export each layout; return the trained logits and the weights as served."""
    model = small_model(**shape(**changes))
    engine = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=config(fp8))[0]
    for _ in range(3):
        loss = engine(input_ids=ROWS, labels=ROWS).loss
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(folder / "checkpoints"), tag="step_3")
    for layout in layouts:
        export_engine(engine, folder / layout, layout=layout, shard_bytes=shard_bytes)
    served = {name: (codes.float().sum().item(), scales is not None) for name, codes, scales in served_weights(engine)}
    engine.eval()
    return logits(engine), served


def gather_failing(engine, where: str):
    """Let the second rank fail in its third gather of weights, before or after it has taken part in the collective."""
    owner, name = deepspeed.zero.GatheredParameters, "__enter__" if "before" in where else "__exit__"
    if "codes" in where:
        owner, name = type(engine.fp8.weights), "unsharded"
    gather, calls = getattr(owner, name), []

    def failing(*arguments):
        calls.append(1)
        fails = len(calls) == 3 and dist.get_rank() == 1
        if fails and "before" in where:
            raise torch.OutOfMemoryError("out of memory in a gather")
        result = gather(*arguments)
        if fails:
            raise torch.OutOfMemoryError("out of memory in a gather")
        return result

    return mock.patch.object(owner, name, failing)
