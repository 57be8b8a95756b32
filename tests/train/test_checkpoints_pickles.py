"""Nothing in a checkpoint or a model folder is executed, whoever wrote it and whatever its hashes say."""

from __future__ import annotations

import pickle
from unittest import mock

import pytest
import torch
from transformers import AutoConfig

from ds_fp8.config.errors import UserError
from ds_fp8.data import build_tokenizer
from ds_fp8.export.checkpoints import export_checkpoint
from ds_fp8.train import load_stage, resume, train
from ds_fp8.train.model import build_model, load_model_config
from tests.refusals import refused
from tests.train.damage import Crafted, craft, step

STEPS = ["train.steps=1", "train.schedule.warmup=0", "train.eval_batches=1"]
ON_ONE_RANK = "gradient_accumulation_steps=2"  # The batch of two ranks on one


def test_the_crafted_file_would_run_code(tmp_path):
    torch.save({"extra": Crafted(tmp_path / "trace")}, tmp_path / "file.pt")
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert (tmp_path / "trace").is_dir()


def run(file: str, overrides: list[str], checked: bool = True) -> str:
    """Train on this rank; returns the error it ended in. Where not `checked` the checkpoint is loaded as it is."""
    stage = load_stage(file, overrides)
    unchecked = mock.patch.object(resume, "settle", lambda stage, say: resume.inspect_run(stage))
    try:
        if checked:
            train(stage)
        else:
            with unchecked:
                train(stage)
    except UserError as error:
        return str(error)
    return ""


def test_deepspeeds_own_loading_reads_tensors_alone(tiny, write, ranks, tmp_path):
    """On as many ranks, in resharding and in an export, for whatever slips through the check before."""
    tiny["fp8"] = {"enabled": False}
    tiny["train"] |= {"run_dir": str(tmp_path / "run")}
    file = str(write(tiny))
    assert ranks(2, run, file, STEPS) == ["", ""]
    for crafted in step(tmp_path / "run", 1).glob("*optim_states.pt"):
        craft(crafted, tmp_path / "trace")
    longer = [*STEPS, "train.steps=2"]
    for world, more in ((2, []), (1, [ON_ONE_RANK])):
        errors = ranks(world, run, file, [*longer, *more], False)
        assert all("more than tensors and plain values: it names posix.mkdir" in error for error in errors), errors
    checkpoint, config = step(tmp_path / "run", 1), AutoConfig.from_pretrained(tmp_path / "run" / "model")
    with refused(r"it names posix\.mkdir"):
        export_checkpoint(checkpoint, tmp_path / "exported", config, load_stage(file).fp8, layout="bf16")
    craft(min(checkpoint.glob("*model_states.pt")), tmp_path / "trace")
    with refused(r"it names posix\.mkdir"):
        export_checkpoint(checkpoint, tmp_path / "exported", config, load_stage(file).fp8, layout="bf16")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_model_folder_with_code_is_refused(name, tiny, write, tmp_path):
    stage = load_stage(write(tiny))
    tokenizer = build_tokenizer(stage.data)
    model = build_model(stage, load_model_config(stage, tokenizer))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Crafted(tmp_path / "trace")}, tmp_path / "model" / name)
    for never_read in ("optimizer.pt", "training_args.bin", "tokenizer.pkl", "rng_state.pth"):
        (tmp_path / "model" / never_read).write_bytes(pickle.dumps(Crafted(tmp_path / "trace")))
    del tiny["model"]
    tiny["train"]["init_from"] = str(tmp_path / "model")
    stage = load_stage(write(tiny))
    with refused("cannot be read"):
        build_model(stage, load_model_config(stage, tokenizer))
    assert not (tmp_path / "trace").exists()
