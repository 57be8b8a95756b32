"""Codes of a live engine in vLLM's own models, by its own loader: on a CPU too, wherever vLLM is installed."""

from __future__ import annotations

import os

import pytest
import torch

from tests.integrations.vllm_models import engine_of, step, unequal
from tests.ranks import RankPools

pytest.importorskip("vllm")

FP32 = {"linear": {"weight": {"scale": "fp32"}}}


def synced(kind: str, fp8: dict, layout: str, folder: str) -> tuple[list[str], list[str], int]:
    """Return a vLLM's tensors that differ from training's, before and after an update, and how many chunks it took."""
    from tests.integrations import vllm_loader

    vllm_loader.prepare()
    os.environ["VLLM_USE_DEEP_GEMM"] = "0"
    from ds_fp8.export import export_engine
    from ds_fp8.export.engines import served_plan, served_tensors
    from ds_fp8.integrations.vllm import sync_weights, transfer_config

    engine = engine_of(kind, fp8)
    export_engine(engine, folder, layout=layout)
    arguments = {"linear_backend": "triton"} if layout == "fp8" else {}
    llm = vllm_loader.loaded(folder, weight_transfer_config=transfer_config(), **arguments)
    for _ in range(3):
        step(engine)
    weights = dict(served_tensors(engine, served_plan(engine)))
    before = unequal(vllm_loader.held(llm), weights)
    sent = sync_weights(engine, llm, chunk_bytes=100_000)
    assert sent.bytes == sum(tensor.nbytes for tensor in weights.values())
    return before, unequal(vllm_loader.held(llm), weights), sent.chunks


@pytest.fixture
def rank():
    """Run a function in a process of its own: what vLLM and torch are told there stays there."""
    pools = RankPools()
    yield lambda function, *args: pools(1, function, *args)[0]
    pools.close()


@pytest.mark.parametrize(
    ("kind", "fp8", "layout"),
    [
        ("llama", FP32, "fp8"),
        ("qwen2", {}, "fp8"),
        ("qwen3", {}, "fp8"),
        ("qwen3", {"preset": "rowwise"}, "compressed-tensors"),
    ],
)
def test_every_byte_in_vllm_is_that_of_training(rank, tmp_path, kind, fp8, layout):
    before, after, chunks = rank(synced, kind, fp8, layout, str(tmp_path / "served"))
    assert before
    assert after == []
    assert chunks > 5


def refused(folder: str) -> list[str]:
    """Return what is said to other models, to another layout, and where a generation runs; the model stays as it is."""
    from tests.integrations import vllm_loader

    vllm_loader.prepare()
    os.environ["VLLM_USE_DEEP_GEMM"] = "0"
    from ds_fp8.config.errors import UserError
    from ds_fp8.export import export_engine
    from ds_fp8.integrations.vllm import sync_weights, transfer_config

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
    said = []
    for trained, server in [*((other, llm) for other in others), (engine, in_bf16), (engine, without)]:
        try:
            sync_weights(trained, server)
            said.append("accepted")
        except UserError as error:
            said.append(str(error))
    llm.llm_engine.has_unfinished_requests = lambda: True
    try:
        sync_weights(engine, llm)
    except UserError as error:
        said.append(str(error))
    after = vllm_loader.held(llm)
    assert all(torch.equal(own.float(), after[name].float()) for name, own in before.items())
    return said


def test_what_does_not_fit_is_refused_before_the_first_tensor(rank, tmp_path):
    said = rank(refused, str(tmp_path))
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
