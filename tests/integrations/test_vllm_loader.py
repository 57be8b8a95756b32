"""Codes of a live engine in vLLM's own models, by its own loader: on a CPU too, wherever vLLM is installed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.export import export_engine
from ds_fp8.export.engines import served_plan, served_tensors
from ds_fp8.integrations import trl, vllm
from ds_fp8.integrations.vllm import sync_weights, transfer_config
from tests.integrations import vllm_loader
from tests.integrations.vllm_models import engine_of, refusal, step, unequal

pytest.importorskip("vllm")

FP32 = {"linear": {"weight": {"scale": "fp32"}}}


def synced(
    kind: str, fp8: dict, layout: str, folder: str, parallel: bool = False
) -> tuple[list[str], list[str], list[str], int]:
    """Return a vLLM's tensors that differ from training's, and how many chunks an update took.

    Those that differ are three lists: of the folder's as they were loaded, and of training's a few steps later, before
    and after the update. parallel: each rank's vLLM holds its share of the model.
    """
    vllm_loader.prepare()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    assert parallel == (ranks > 1)
    # Shares of all matrices are whole blocks.
    engine = engine_of(kind, fp8, **({"head_dim": 128} if parallel else {}))
    export_engine(engine, folder, layout=layout)
    arguments = {"linear_backend": "triton"} if layout == "fp8" else {}
    llm = vllm_loader.loaded(folder, weight_transfer_config=transfer_config(), tensor_parallel_size=ranks, **arguments)
    weights = dict(served_tensors(engine, served_plan(engine)))
    loaded = unequal(vllm_loader.held(llm), weights, rank, ranks)
    for _ in range(3):
        step(engine)
    weights = dict(served_tensors(engine, served_plan(engine)))
    before = unequal(vllm_loader.held(llm), weights, rank, ranks)
    sent = sync_weights(engine, llm, chunk_bytes=100_000)
    assert sent.bytes == sum(tensor.nbytes for tensor in weights.values())
    return loaded, before, unequal(vllm_loader.held(llm), weights, rank, ranks), sent.chunks


@pytest.mark.parametrize(
    ("kind", "fp8", "layout"),
    [
        ("llama", FP32, "fp8"),
        ("qwen2", {}, "fp8"),
        ("qwen3", {}, "fp8"),
        ("qwen3", {"preset": "rowwise"}, "compressed-tensors"),
        ("qwen3_moe", {}, "fp8"),
        ("qwen3_moe", {"preset": "rowwise"}, "compressed-tensors"),
        ("qwen3_moe", {"linear": {"overrides": {"*": "bf16"}}}, "bf16"),
        ("mixtral", FP32, "fp8"),
        ("mixtral", {"linear": {"overrides": {"experts": "bf16"}}}, "fp8"),
        ("mixtral", {"preset": "rowwise"}, "compressed-tensors"),
    ],
)
def test_every_byte_in_vllm_is_that_of_training(new_ranks, tmp_path, kind, fp8, layout):
    loaded, before, after, chunks = new_ranks(1, synced, kind, fp8, layout, str(tmp_path / "served"))[0]
    assert loaded == []
    assert before
    assert after == []
    assert chunks > 5


@pytest.mark.parametrize(
    ("kind", "fp8", "layout"),
    [
        ("llama", FP32, "fp8"),
        ("qwen3", {}, "fp8"),
        ("qwen3", {"preset": "rowwise"}, "compressed-tensors"),
        ("qwen3_moe", {}, "fp8"),
    ],
)
def test_every_byte_of_a_share_is_that_of_training(new_ranks, tmp_path, kind, fp8, layout):
    for loaded, before, after, _ in new_ranks(2, synced, kind, fp8, layout, str(tmp_path / "served"), True):
        assert loaded == []
        assert before
        assert after == []


def refused(folder: str) -> list[str]:
    """Return what is said to other models, to another layout, and where a generation runs; the model stays as it is."""
    vllm_loader.prepare()
    engine = engine_of("qwen3", {})
    export_engine(engine, f"{folder}/fp8")
    export_engine(engine, f"{folder}/bf16", layout="bf16")
    others = [
        engine_of("qwen3", {}, num_hidden_layers=3),
        engine_of("qwen3", {}, num_hidden_layers=1),
        engine_of("qwen3", {}, intermediate_size=768),
        engine_of("qwen2", {}),
    ]
    weights = transfer_config()
    llm = vllm_loader.loaded(f"{folder}/fp8", weight_transfer_config=weights, linear_backend="triton")
    in_bf16 = vllm_loader.loaded(f"{folder}/bf16", weight_transfer_config=weights)
    without = vllm_loader.loaded(f"{folder}/fp8", linear_backend="triton")
    before = vllm_loader.held(llm)
    pairs = [*((other, llm) for other in others), (engine, in_bf16), (engine, without)]
    said = [refusal(sync_weights, trained, server) for trained, server in pairs]
    llm.llm_engine.has_unfinished_requests = lambda: True
    said.append(refusal(sync_weights, engine, llm))
    after = vllm_loader.held(llm)
    assert all(torch.equal(own.float(), after[name].float()) for name, own in before.items())
    return said


def test_what_does_not_fit_is_refused_before_the_first_tensor(new_ranks, tmp_path):
    said = new_ranks(1, refused, str(tmp_path))[0]
    expected = [
        "training sends model.layers.2.",
        "the server's model has model.layers.1.",
        "in the server and [1536, 256] in training",
        "layers.0.self_attn.q_norm.weight, which training does not send",
        "is bfloat16 in the server and float8_e4m3fn in training",
        "without weight transfer",
        "a generation runs",
    ]
    for text, part in zip(said, expected, strict=True):
        assert part in text
        assert "remedy:" in text


def spread_experts(folder: str) -> str:
    """Return what is said to a server whose ranks hold other experts each."""
    vllm_loader.prepare()
    engine = engine_of("qwen3_moe", {}, head_dim=128)
    export_engine(engine, folder)
    spread = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "moe_backend": "triton"}
    llm = vllm_loader.loaded(folder, weight_transfer_config=transfer_config(), linear_backend="triton", **spread)
    return refusal(sync_weights, engine, llm)


def test_expert_parallelism_is_refused(new_ranks, tmp_path):
    for said in new_ranks(2, spread_experts, str(tmp_path / "served")):
        assert "expert parallelism" in said
        assert "--enable-expert-parallel" in said


def cast_again() -> dict[str, str]:
    """Return what is said to FP32 scales by every kernel of vLLM for blocks on Hopper that casts weights again."""
    vllm_loader.prepare(deep_gemm=True)
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass, deep_gemm, flashinfer
    from vllm.utils import deep_gemm as settings

    from ds_fp8.integrations.vllm_model import check_scales

    settings.is_deep_gemm_e8m0_used = lambda: True
    kernels = (
        deep_gemm.DeepGemmFp8BlockScaledMMKernel,
        flashinfer.FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
        cutlass.CutlassFp8BlockScaledMMKernel,
    )
    said = {}
    for kernel in kernels:
        layer = torch.nn.Module()
        layer.quant_method = SimpleNamespace(fp8_linear=object.__new__(kernel))
        said[kernel.__name__] = refusal(check_scales, layer, "128x128", "fp32", errors=ValueError)
    return said


def test_all_kernels_that_leave_weights_to_deepgemm_are_refused(new_ranks):
    deep, flash, cutlass = new_ranks(1, cast_again)[0].values()
    assert "VLLM_USE_DEEP_GEMM_E8M0=0" in deep
    assert flash == deep
    assert cutlass == "accepted"


def rolled_out(kind: str, fp8: dict, folder: str) -> list[str]:
    """Return the tensors that differ from training's in a vLLM with the arguments that TRL's is started with."""
    vllm_loader.prepare()
    from trl.generation.vllm_generation import VLLMGeneration

    engine = engine_of(kind, fp8)
    torch.manual_seed(0)
    model = type(engine.module)(engine.module.config).half()
    model.save_pretrained(folder)  # in FP16, as some models come
    arguments = trl.vllm_arguments(model, parse_fp8({"fp8": fp8}))
    blocks = arguments.get("hf_overrides", {}).get("quantization_config", {}).get("quant_method") == "fp8"
    llm = vllm_loader.loaded(folder, **arguments, **({"linear_backend": "triton"} if blocks else {}))
    for _ in range(3):
        step(engine)
    rollouts = object.__new__(VLLMGeneration)
    rollouts.model, rollouts.mode, rollouts.enable_sleep_mode, rollouts.llm = engine.module, "colocate", False, llm
    rollouts.accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config={"fp8": fp8})),
        deepspeed_engine_wrapped=SimpleNamespace(engine=engine),
    )
    trl.install()
    try:
        rollouts.sync_weights()
    finally:
        trl.uninstall()
    return unequal(vllm_loader.held(llm), dict(served_tensors(engine, served_plan(engine))))


@pytest.mark.parametrize(
    ("kind", "fp8"), [("qwen3", {}), ("llama", FP32), ("qwen2", {"preset": "rowwise"}), ("qwen3", {"preset": "mxfp8"})]
)
def test_trl_brings_every_byte_to_the_vllm_that_it_starts(new_ranks, tmp_path, kind, fp8):
    pytest.importorskip("trl")
    assert new_ranks(1, rolled_out, kind, fp8, str(tmp_path / "stored")) == [[]]


# ---------------------------------------------------------------- updates that fail on the way, and the next one


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
