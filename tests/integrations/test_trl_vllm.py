"""TRL's own vLLM generation with codes of training: arguments of its vLLM, and what it says where one cannot be fed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_fp8.config.errors import UserError
from ds_fp8.integrations import trl
from tests.integrations.vllm_models import SHAPE

generation = pytest.importorskip("trl.generation.vllm_generation")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


def trainer(fp8: dict | None, kind: str = "qwen3", engine: object = None, **shape: int):
    """Return TRL's generation as a trainer makes it, before it has a vLLM."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE | shape), dtype=torch.bfloat16)
    plugin = SimpleNamespace(deepspeed_config={} if fp8 is None else {"fp8": fp8})
    made = object.__new__(generation.VLLMGeneration)
    made.accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=plugin),
        deepspeed_engine_wrapped=SimpleNamespace(engine=engine),
        num_processes=1,
        process_index=0,
        local_process_index=0,
        wait_for_everyone=lambda: None,
    )
    made.model, made.mode, made.tensor_parallel_size, made.enable_sleep_mode = model, "colocate", 1, False
    made.gpu_memory_utilization = made.max_model_length = made.max_num_seqs = made.model_impl = None
    made.trust_remote_code = False
    return made


@pytest.fixture
def started(monkeypatch):
    """The arguments of every vLLM that TRL starts."""
    vllm, config = ModuleType("vllm"), ModuleType("vllm.config")
    vllm.__spec__, config.WeightTransferConfig = object(), SimpleNamespace
    for name, module in {"vllm": vllm, "vllm.config": config, "vllm.distributed": None}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # TRL sets them
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "")
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM_E8M0")
    monkeypatch.setattr(generation, "is_vllm_available", lambda: True)
    calls = []
    monkeypatch.setattr(generation, "LLM", lambda **arguments: calls.append(arguments), raising=False)
    trl.install()
    yield calls
    trl.uninstall()


@pytest.mark.parametrize(
    ("fp8", "shape", "method"),
    [
        ({}, {}, "fp8"),
        ({"preset": "rowwise"}, {}, "compressed-tensors"),
        ({"preset": "mxfp8"}, {}, None),
        ({"preset": "halo"}, {}, None),
        ({}, {"hidden_size": 192, "intermediate_size": 320}, None),
    ],
)
def test_a_colocated_vllm_is_started_for_the_weights_that_will_be_sent(started, fp8, shape, method):
    trainer(fp8, **shape)._init_vllm()
    (arguments,) = started
    assert arguments["dtype"] == "bfloat16"
    assert arguments["load_format"] == "dummy"
    assert arguments["weight_transfer_config"].backend == "ds_fp8"
    section = arguments.get("hf_overrides", {}).get("quantization_config", {})
    assert section.get("quant_method") == method


@pytest.mark.parametrize(("kind", "shape"), [("qwen3", {}), ("qwen3_moe", EXPERTS)])
def test_what_no_sync_could_bring_is_refused_before_vllm_starts(started, kind, shape):
    with pytest.raises(UserError, match="scales by tensor") as raised:
        trainer({"preset": "coat"}, kind, **shape)._init_vllm()
    assert "install() out" in raised.value.remedy
    assert started == []


def test_without_a_section_trl_starts_its_own(started):
    trainer(None)._init_vllm()
    assert "load_format" not in started[0]


def test_trl_says_itself_that_vllm_is_missing(started, monkeypatch):
    monkeypatch.setattr(trl, "find_spec", lambda name: None)
    monkeypatch.setattr(generation, "is_vllm_available", lambda: False)
    with pytest.raises(ImportError, match="vLLM is not available"):
        trainer({})._init_vllm()


def test_a_section_that_nothing_has_read_is_said(started):
    with pytest.raises(UserError, match="was not read") as raised:
        trainer({}, engine=object()).sync_weights()
    assert "ds_fp8.install()" in raised.value.remedy


def test_an_older_trl_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl.generation.vllm_generation", None)
    with pytest.raises(UserError, match="installed here"):
        trl.install()
