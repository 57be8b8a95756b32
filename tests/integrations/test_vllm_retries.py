"""Updates of vLLM's own models that fail on the way or are refused, and the next one: on a CPU too, by its loader."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ds_fp8.config.errors import UserError
from ds_fp8.export import export_engine
from ds_fp8.export.engines import served_plan, served_tensors
from ds_fp8.integrations import vllm
from tests.integrations import vllm_loader
from tests.integrations.vllm_models import engine_of, refusal, step, unequal

pytest.importorskip("vllm")


def tried_again(kind: str, folder: str, broken: str, tied: bool) -> tuple[str, int, list[str], list[str], bool]:
    """Sync, fail on the way, sync again.

    Returns:
        What was said, the number of tensors with old numbers after it, those with neither old nor new ones, those that
        are not training's after the second sync, and whether all stayed where they were in memory.
    """
    vllm_loader.prepare()
    engine = engine_of(kind, {}, tie_word_embeddings=tied)
    export_engine(engine, folder)
    transfer = vllm.transfer_config()
    llm = vllm_loader.loaded(folder, weight_transfer_config=transfer, linear_backend="triton")
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    for _ in range(3):
        step(engine)
    old = vllm_loader.held(llm)
    original = type(model).load_weights
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    calls = 0

    def load_weights(weights):
        nonlocal calls
        calls += 1
        weights = list(weights)
        if calls == 3:
            # A stacked layer has a part of its tensors, as where memory runs out.
            original(model, weights[:1])
            raise torch.OutOfMemoryError("no memory")
        return original(model, weights)

    gathered = vllm.gathered

    def trainer_fails(*args):
        for number, (entry, numbers) in enumerate(gathered(*args)):
            yield entry, UserError("the trainer has no memory") if number == 7 else numbers

    if broken == "worker":
        model.load_weights = load_weights
    elif broken == "start":
        start = llm.start_weight_update
        llm.start_weight_update = lambda **options: (start(**options), 1 / 0)
    elif broken in ("trainer", "trainer killed"):
        vllm.gathered = trainer_fails
    if broken == "trainer killed":
        llm.finish_weight_update, llm.update_weights = (lambda: 1 / 0), (lambda *_: None)
    said = refusal(vllm.sync_weights, engine, llm, chunk_bytes=70_000)
    for name in ("start_weight_update", "finish_weight_update", "update_weights"):
        vars(llm).pop(name, None)
    vars(model).pop("load_weights", None)
    vllm.gathered = gathered
    weights = dict(served_tensors(engine, served_plan(engine)))
    between, neither = [], []
    if broken != "trainer killed":
        held = vllm_loader.held(llm)
        between = unequal(held, weights)
        neither = [
            name for name in between if held[name].is_meta or not torch.equal(held[name].float(), old[name].float())
        ]
    vllm.sync_weights(engine, llm, chunk_bytes=70_000)
    same = addresses == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    return said, len(between), neither, unequal(vllm_loader.held(llm), weights), same


@pytest.mark.parametrize(
    ("kind", "tied", "broken", "words"),
    [
        ("qwen3", False, "worker", "no memory"),
        ("llama", True, "worker", "no memory"),
        ("qwen3", False, "trainer", "the trainer has no memory"),
        ("llama", True, "trainer killed", "the trainer has no memory"),
        ("qwen2", True, "start", "division by zero"),
    ],
)
def test_a_second_sync_brings_every_byte_after_one_that_failed(new_ranks, tmp_path, kind, tied, broken, words):
    said, old, neither, after, same_memory = new_ranks(1, tried_again, kind, str(tmp_path / "served"), broken, tied)[0]
    assert words in said
    assert "call sync_weights again before it generates" in said
    assert old or broken == "trainer killed"
    assert neither == []
    assert after == []
    assert same_memory


def elsewhere(folder: str) -> list[str]:
    """Return what is said to a trainer on other GPUs, and by a server with pipeline parallelism; nothing was begun."""
    vllm_loader.prepare()
    from ds_fp8.integrations import vllm_transfer

    engine = engine_of("qwen3", {})
    export_engine(engine, folder)
    llm = vllm_loader.loaded(folder, weight_transfer_config=vllm.transfer_config(), linear_backend="triton")
    worker = llm.llm_engine.model_executor.driver_worker
    said = []
    vllm_transfer._own_gpu = lambda: "GPU-1"
    for gpus, stages in ((["GPU-2", "GPU-3"], 1), ([], 2)):
        vllm.announcement = lambda plan: {"tensors": []}
        vllm._gpu = lambda gpus=gpus: gpus[0] if gpus else None
        llm.llm_engine.model_executor = SimpleNamespace()  # of another process, which opens buffers
        worker.weight_transfer_engine.parallel_config = SimpleNamespace(
            pipeline_parallel_size=stages, tensor_parallel_size=1
        )
        said.append(refusal(vllm.sync_weights, engine, llm))
    assert not worker._weight_update_active
    assert not any(parameter.is_meta for parameter in worker.model_runner.model.parameters())
    return said


def test_other_gpus_and_pipelines_are_refused_before_the_first_tensor(new_ranks, tmp_path):
    gpus, stages = new_ranks(1, elsewhere, str(tmp_path / "served"))[0]
    assert "lie on the GPUs GPU-2, a worker of the server on GPU-1" in gpus
    assert "--pipeline-parallel-size" in stages
    assert "sync_weights again" not in gpus + stages


def told_by_workers() -> list[str]:
    """Return what two workers of a server with tensor parallelism raise, where the first, none or both have failed."""
    vllm_loader.prepare(deep_gemm=True)
    import vllm.distributed as workers

    from ds_fp8.integrations.vllm_transfer import _raise_on_last_worker

    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    workers.get_tp_group = lambda: SimpleNamespace(world_size=2, cpu_group=group, is_last_rank=rank == 1)
    raised = []
    for failures in (("first", None), (None, None), ("first", "second")):
        raised.append(refusal(_raise_on_last_worker, failures[rank], errors=ValueError))
    return raised


def test_of_several_workers_the_last_alone_raises(new_ranks):
    assert new_ranks(2, told_by_workers) == [["accepted"] * 3, ["first", "accepted", "first"]]
