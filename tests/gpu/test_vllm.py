"""Codes of training in a running vLLM, colocated and behind an address: on a GPU, where vLLM is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from unittest import mock

import pytest

from tests.integrations.vllm_models import engine_of, refusal, step, unequal
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
    return refusal(sync_weights, engine, llm)


def words():
    """Return a tokenizer of 512 words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2", unk_token="w0")


class Serving:
    """`vllm serve` of a folder while the context lasts."""

    def __init__(self, folder: str):
        self.folder = folder
        port = 18000 + os.getpid() % 2000
        self.url = f"http://127.0.0.1:{port}"
        limits = ["--enforce-eager", "--max-model-len", "256", "--gpu-memory-utilization", "0.03"]
        transfer = ["--weight-transfer-config", '{"backend": "ds_fp8"}', "--kv-cache-memory-bytes", str(256 << 20)]
        command = ["vllm.entrypoints.cli.main", "serve", folder, "--host", "127.0.0.1", "--port", str(port)]
        keep = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        keep |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self.process = subprocess.Popen([sys.executable, "-m", *command, *limits, *transfer], env=keep)

    def __enter__(self) -> Serving:
        end = time.monotonic() + 180
        while self.process.poll() is None and time.monotonic() < end:
            try:
                urllib.request.urlopen(self.url + "/health", timeout=2)
                return self
            except OSError:
                time.sleep(0.3)
        self.__exit__()
        raise AssertionError("the server ended, or does not answer")

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.wait(30)

    def ask(self) -> list[tuple[int, float]]:
        """Return the tokens of a greedy answer with their log-probabilities."""
        body = {"model": self.folder, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 0}
        data = json.dumps(body | {"return_token_ids": True}).encode()
        request = urllib.request.Request(self.url + "/v1/completions", data, {"Content-Type": "application/json"})
        choice = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]
        return list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))


def behind_an_address(folder: str) -> dict:
    """Sync to a server over HTTP; return its answers before and after, and those of one started on the new folder."""
    from ds_fp8.export import export_engine
    from ds_fp8.integrations import vllm

    engine = engine_of("qwen3", {}, "cuda", head_dim=128, vocab_size=512)
    export_engine(engine, folder, tokenizer=words().save_pretrained)
    with Serving(folder) as server:
        result = {"before": server.ask()}
        for _ in range(20):
            step(engine, "cuda")
        sent = vllm.sync_weights(engine, server.url, chunk_bytes=200_000)
        result |= {"after": server.ask(), "chunks": sent.chunks}
        shared = vllm._buffer.memory.data_ptr()
        vllm.sync_weights(engine, server.url, chunk_bytes=200_000)
        result |= {"again": server.ask(), "one_buffer": shared == vllm._buffer.memory.data_ptr()}
        result["unpaused"] = refusal(vllm.sync_weights, engine, server.url, pause=None)
        # One of its GPUs alone would do; with none of them nothing is begun, and the server goes on.
        with mock.patch.object(vllm, "gpu_of_this_process", return_value="GPU-0"):
            result["elsewhere"] = refusal(vllm.sync_weights, engine, server.url)
        result["unharmed"] = server.ask()
    export_engine(engine, f"{folder}_new", tokenizer=words().save_pretrained)
    with Serving(f"{folder}_new") as server:
        result["fresh"] = server.ask()
    return result


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
    assert result["chunks"] > 1
    assert result["one_buffer"]
    assert "/pause" in result["unpaused"]
    assert "start the server on the trainer's GPUs" in result["elsewhere"]
    assert result["before"] != result["after"]
    for name in ("after", "again", "unharmed"):
        assert [token for token, _ in result[name]] == [token for token, _ in result["fresh"]]
        assert [p for _, p in result[name]] == pytest.approx([p for _, p in result["fresh"]], abs=1e-4)
