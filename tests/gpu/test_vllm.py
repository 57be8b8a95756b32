"""Codes of training in a running vLLM, colocated and behind an address: on a GPU, where vLLM is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request

import pytest

from ds_fp8.config.errors import UserError
from tests.integrations.vllm_models import engine_of, step, unequal
from tests.ranks import RankPools

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm")

PROMPT = list(range(7, 40))
SMALL = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 256,
    "gpu_memory_utilization": 0.03,
    "kv_cache_memory_bytes": 256 << 20,
    "max_num_seqs": 4,
    "distributed_executor_backend": "external_launcher",
}


def colocated(folder: str) -> dict:
    """Sync to an LLM of this process; return what vLLM holds and generates before and after."""
    from vllm import LLM, SamplingParams

    from ds_fp8.export import export_engine
    from ds_fp8.export.engines import served_plan, served_tensors
    from ds_fp8.integrations.vllm import sync_weights, transfer_config

    engine = engine_of("qwen3", {}, "cuda", head_dim=128)
    export_engine(engine, folder)
    llm = LLM(folder, **SMALL, weight_transfer_config=transfer_config())

    def generated() -> list[int]:
        greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
        return list(llm.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)[0].outputs[0].token_ids)

    first = generated()
    for _ in range(4):
        step(engine, "cuda")
    sent = sync_weights(engine, llm, chunk_bytes=100_000)
    weights = dict(served_tensors(engine, served_plan(engine)))
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    result = {"unequal": unequal(dict(model.named_parameters()), weights), "chunks": sent.chunks}
    result["texts"] = [len(first), len(generated())]
    return result


def fp32_scales(folder: str) -> str:
    """Return what is said where the kernels would cast FP32 scales again."""
    from vllm import LLM

    from ds_fp8.export import export_engine
    from ds_fp8.integrations.vllm import sync_weights, transfer_config

    engine = engine_of("qwen3", {"linear": {"weight": {"scale": "fp32"}}}, "cuda", head_dim=128)
    export_engine(engine, folder)
    llm = LLM(folder, **SMALL, weight_transfer_config=transfer_config())
    try:
        sync_weights(engine, llm)
    except UserError as error:
        return str(error)
    return "accepted"


def words():
    """Return a tokenizer of 512 words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2", unk_token="w0")


def behind_an_address(folder: str) -> dict:
    """Sync to a server over HTTP; return its answers before and after, and those of one started on the new folder."""
    from ds_fp8.export import export_engine
    from ds_fp8.integrations.vllm import sync_weights

    engine = engine_of("qwen3", {}, "cuda", head_dim=128, vocab_size=512)
    export_engine(engine, folder, tokenizer=words().save_pretrained)
    port = 18000 + os.getpid() % 2000
    url = f"http://127.0.0.1:{port}"
    limits = ["--enforce-eager", "--max-model-len", "256", "--gpu-memory-utilization", "0.03"]
    transfer = ["--weight-transfer-config", '{"backend": "ds_fp8"}', "--kv-cache-memory-bytes", str(256 << 20)]
    command = ["vllm.entrypoints.cli.main", "serve", folder, "--host", "127.0.0.1", "--port", str(port)]
    keep = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    keep |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = subprocess.Popen([sys.executable, "-m", *command, *limits, *transfer], env=keep)

    def ask() -> list:
        body = {"model": folder, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        data = json.dumps(body).encode()
        request = urllib.request.Request(url + "/v1/completions", data, {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["token_ids"]

    try:
        for _ in range(600):
            assert server.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(url + "/health", timeout=2)
                break
            except OSError:
                time.sleep(0.3)
        result = {"before": ask()}
        for _ in range(4):
            step(engine, "cuda")
        sent = sync_weights(engine, url, chunk_bytes=200_000)
        result |= {"after": ask(), "chunks": sent.chunks, "seconds": sent.seconds}
        try:
            sync_weights(engine, url, pause=None)
        except UserError as error:
            result["unpaused"] = str(error)
        return result
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def rank():
    """Run a function in a process of its own: a process holds one vLLM at most."""
    pools = RankPools("cuda")
    yield lambda function, *args: pools(1, function, *args)[0]
    pools.close()


def test_an_llm_of_this_process_holds_the_codes_of_training(rank, tmp_path):
    result = rank(colocated, str(tmp_path / "served"))
    assert result == {"unequal": [], "chunks": result["chunks"], "texts": [8, 8]}
    assert result["chunks"] > 4


def test_kernels_that_cast_again_are_refused(rank, tmp_path):
    assert "VLLM_USE_DEEP_GEMM_E8M0=0" in rank(fp32_scales, str(tmp_path / "served"))


def test_a_server_answers_with_the_new_weights(rank, tmp_path):
    result = rank(behind_an_address, str(tmp_path / "served"))
    assert len(result["after"]) == 4
    assert result["chunks"] > 1
    assert "/pause" in result["unpaused"]
