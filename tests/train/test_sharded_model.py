"""The model of a stage, born in shards: the weights of a whole one, and host memory of one model for all ranks."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2ForCausalLM

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.export.folder import CHECKSUMS, sha256_of
from ds_fp8.train import load_stage, stored_model
from ds_fp8.train.model import build_model, build_sharded_model
from ds_fp8.zero.deepspeed.parameters import full_shape
from tests.ranks import RankPool
from tests.zero.models import take_step

LARGER = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10, "num_attention_heads": 8}
FUSED = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 2, "num_key_value_heads": 1}
M_MMAP_THRESHOLD = -3  # malloc.h


def _build(file: Path) -> list[tuple[str, bool, str, bool]]:
    """(name, whether it is what build_model makes, dtype, whether it is sharded) of each parameter and buffer."""
    stage = load_stage(file)
    config = _config(stage)
    model, whole = build_sharded_model(stage, config), build_model(stage, config)
    found = []
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        sharded = parameter.numel() == 0
        with deepspeed.zero.GatheredParameters([parameter]):
            found.append((name, torch.equal(parameter, expected), str(parameter.dtype), sharded))
    for (name, buffer), expected in zip(model.named_buffers(), whole.buffers(), strict=True):
        found.append((name, torch.equal(buffer, expected), str(buffer.dtype), False))
    assert model.generation_config.to_dict() == whole.generation_config.to_dict()
    assert model.training
    assert model.is_gradient_checkpointing == whole.is_gradient_checkpointing
    return found


def _config(stage):
    if stage.model.path is not None:
        return AutoConfig.from_pretrained(stage.model.path)
    return AutoConfig.for_model(**stage.model.config, vocab_size=640)


def _store(raw: dict, folder: Path) -> Path:
    """Write a model of the stage's shape, whose end of text is not the default."""
    config = AutoConfig.for_model(**raw["model"]["config"], vocab_size=640)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = [3, 5]
    model.save_pretrained(folder, max_shard_size="100KB")
    raw["model"] = {"path": str(folder), "activation_checkpointing": True}
    return folder


@pytest.mark.parametrize("weights", ["stored", "drawn"])
@pytest.mark.parametrize("tied", [True, False])
def test_shards_are_those_of_the_whole_model(weights, tied, ranks, tiny, write, tmp_path):
    tiny["model"]["config"]["tie_word_embeddings"] = tied
    if weights == "stored":
        assert len(list(_store(tiny, tmp_path / "model").glob("*.safetensors"))) > 1
    for found in ranks(2, _build, write(tiny)):
        assert all(equal for _, equal, _, _ in found), found
        dtypes = {name: dtype for name, _, dtype, _ in found}
        assert dtypes.pop("model.rotary_emb.inv_freq") == "torch.float32"
        assert all(sharded for name, _, _, sharded in found if name.endswith("weight"))


def test_a_head_of_its_own_beside_a_configuration_that_ties_it(ranks, tiny, write, tmp_path):
    """transformers takes the stored head: every rank must know, or they send each other different parameters."""
    tiny["model"]["config"]["tie_word_embeddings"] = False
    config = _store(tiny, tmp_path / "model") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    for found in ranks(2, _build, write(tiny)):
        assert all(equal for _, equal, _, _ in found), found
        assert {"model.embed_tokens.weight", "lm_head.weight"} <= {name for name, *_ in found}


def _build_mixed(file: Path) -> list[tuple[str, str, str]]:
    """Names and dtypes of what is not BF16, and on the other side, of a model that stays in FP32 in part."""
    with mock.patch.object(Qwen2ForCausalLM, "_keep_in_fp32_modules_strict", {"input_layernorm"}):
        stage = load_stage(file)
        model, whole = build_sharded_model(stage, _config(stage)), build_model(stage, _config(stage))
        pairs = zip(model.named_parameters(), whole.parameters(), strict=True)
        return [(name, str(ours.dtype), str(theirs.dtype)) for (name, ours), theirs in pairs if "layernorm" in name]


def test_stored_weights_that_stay_in_fp32_do_so_on_all_ranks(ranks, tiny, write, tmp_path):
    _store(tiny, tmp_path / "model")
    for found in ranks(2, _build_mixed, write(tiny)):
        assert all(ours == theirs for _, ours, theirs in found)
        assert {ours for _, ours, _ in found} == {"torch.float32", "torch.bfloat16"}


def test_stages_without_shards_have_the_whole_model(ranks, tiny, write):
    tiny["fp8"]["enabled"] = False
    tiny["zero_optimization"] = {"stage": 2}
    (found,) = ranks(1, _build, write(tiny))
    assert all(equal and not sharded for _, equal, _, sharded in found)


def _train(file: Path, build: Callable) -> tuple[list[str], dict[str, str], list[str], list[float]]:
    """Names of the layers in FP8, of those in BF16 with the reason, and of fused classes; losses of three steps."""
    stage = load_stage(file)
    model = build(stage, _config(stage))
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=stage.raw)[0]
    rows, losses = torch.arange(2 * 64).view(2, 64) + dist.get_rank(), []
    for _ in range(3):
        losses.append(take_step(engine, engine(input_ids=rows, labels=rows).loss))
    conversion = engine.fp8.conversion
    engine.destroy()
    return conversion.converted, conversion.left, sorted(c.__name__ for c in conversion.fusion.classes), losses


def test_a_model_born_in_shards_is_converted_and_trained_as_a_whole_one(ranks, tiny, write):
    tiny["model"]["config"] |= FUSED
    file = write(tiny)
    born_in_shards, whole = (ranks(2, _train, file, build) for build in (build_sharded_model, build_model))
    assert born_in_shards == whole
    assert whole[0][2], "decoder layers are fused"
    assert whole[0][3][-1] < whole[0][3][0]


def _own_bytes(processes: list[int]) -> int:
    """Memory that processes hold together, less mapped files; pages that several of them share count once."""
    maps = "".join(Path(f"/proc/{process}/smaps_rollup").read_text() for process in processes)
    return sum(1024 * int(kilobytes) for kilobytes in re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", maps, re.M))


def _peak_of_all_ranks(work: Callable[[], nn.Module]) -> tuple[nn.Module, int]:
    """(Result of `work` on all ranks, how far the bytes that they hold together rose, on rank 0)."""
    processes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    before, peak, done = _own_bytes(processes), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, _own_bytes(processes) - before)

    thread = threading.Thread(target=sample, daemon=True)
    dist.barrier()  # all have measured what was before
    if dist.get_rank() == 0:
        thread.start()
    result = work()
    dist.barrier()
    done.set()
    if dist.get_rank() == 0:
        thread.join()
    return result, max(peak, _own_bytes(processes) - before)


def _peak(warm_up: Path, file: Path) -> tuple[int, int]:
    """(Bytes of the model, peak bytes of one load), after all that it imports has been imported."""
    # Else the C library keeps small blocks that are freed, of models this small nearly all.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    for stage in map(load_stage, (warm_up, file)):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what reading sources has left free would take a part of the model
        model, peak = _peak_of_all_ranks(functools.partial(build_sharded_model, stage, _config(stage)))
        model_bytes = 2 * sum(full_shape(parameter).numel() for parameter in model.parameters())
        del model
    return model_bytes, peak


@pytest.mark.parametrize("weights", ["stored", "drawn"])
def test_all_ranks_together_hold_one_model(weights, tiny, write, tmp_path):
    """Each of four ranks used to hold one."""
    files = []
    for name, shape in (("small", {}), ("large", LARGER)):
        raw = {**tiny, "model": {"config": tiny["model"]["config"] | shape}}
        if weights == "stored":
            _store(raw, tmp_path / name)
        files.append(write(raw, f"{name}.json"))
    pool = RankPool(4)  # processes that did other work have freed memory, which would be used first
    model_bytes, peak = pool.run(_peak, *files)[0]
    pool.close()
    assert model_bytes > 50 * 2**20
    assert 0.9 < peak / model_bytes <= 1.3


def _refused(file: Path) -> tuple[list[str], str]:
    """Names of the files that this rank hashed, and why it is refused the model, "" where it is not."""
    stage, hashed = load_stage(file), []
    noted = mock.patch.object(stored_model, "sha256_of", lambda path: hashed.append(path.name) or sha256_of(path))
    why = ""
    with noted:
        try:
            build_sharded_model(stage, _config(stage))
        except UserError as error:
            why = str(error)
    dist.barrier()  # nobody is left behind in a collective
    return hashed, why


def test_all_ranks_hear_of_weights_that_are_missing(ranks, tiny, write, tmp_path):
    folder = _store(tiny, tmp_path / "model")
    sorted(folder.glob("*.safetensors"))[1].unlink()
    (_, error), other = ranks(2, _refused, write(tiny))
    assert other == ([], error)
    assert "incomplete" in error
    assert "model.path" in error


@pytest.mark.parametrize("zero", [3, 2])
def test_one_rank_hashes_an_export_and_all_hear_of_what_changed(zero, ranks, tiny, write, tmp_path):
    tiny["zero_optimization"] = {"stage": zero}
    tiny["fp8"]["enabled"] = False
    folder = _store(tiny, tmp_path / "model")
    files = sorted(folder.glob("*.safetensors"))
    (folder / CHECKSUMS).write_text("".join(f"{sha256_of(file)}  {file.name}\n" for file in files))
    (hashed, why), other = ranks(2, _refused, write(tiny))
    assert sorted(hashed) == [file.name for file in files]
    assert (why, other) == ("", ([], ""))
    files[1].write_bytes(files[1].read_bytes()[:-1] + b"\1")
    (_, error), other = ranks(2, _refused, write(tiny))
    assert other == ([], error)
    assert f"{files[1].name} in {folder} has another content than {CHECKSUMS} says" in error
