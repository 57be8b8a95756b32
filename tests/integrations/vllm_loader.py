"""vLLM's own model, loader and weight update in this process, without its scheduler: on a CPU as on a GPU.

Where there is no GPU vLLM is told that there is a Hopper, on which it chooses kernels, and the model lies on the CPU:
all of loading runs there, nothing that computes.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch


def prepare(deep_gemm: bool = False) -> None:
    """Make vLLM importable and silent in this process."""
    os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    if not deep_gemm:
        os.environ["VLLM_USE_DEEP_GEMM"] = "0"
    if torch.cuda.is_available():
        return
    import triton.backends

    triton.backends.backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    NonNvmlCudaPlatform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    NonNvmlCudaPlatform.get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H200")
    NonNvmlCudaPlatform.get_device_total_memory = classmethod(lambda cls, device_id=0: 141 << 30)
    # Ranks of tensor parallelism load and compare, and nothing of NCCL is there to be initialised.
    communicator = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    NonNvmlCudaPlatform.get_device_communicator_cls = classmethod(lambda cls: communicator)
    platforms._current_platform = NonNvmlCudaPlatform()
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_name = lambda *_: "NVIDIA H200"
    torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *_: None


def loaded(folder: str, **arguments: Any) -> Any:
    """Return what has the weight-update calls of an LLM, around a model that vLLM loads from a folder.

    Of several ranks each holds its share of a model (tensor_parallel_size among the arguments), as where torchrun
    starts vLLM on every rank of a trainer.
    """
    from vllm import LLM
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker.gpu_worker import Worker

    limits = {"max_model_len": 256, "enforce_eager": True, "skip_tokenizer_init": True}
    ranks, rank = arguments.get("tensor_parallel_size", 1), 0
    if ranks > 1:
        rank, arguments["distributed_executor_backend"] = torch.distributed.get_rank(), "external_launcher"
    config = EngineArgs(model=folder, **limits, **arguments).create_engine_config()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config.device_config.device, config.load_config.device = torch.device(device), device
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            init_distributed_environment(ranks, rank, "tcp://127.0.0.1:29781", rank, backend="gloo")
            initialize_model_parallel(ranks, 1, backend="gloo")
        model = get_model(vllm_config=config)
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model), device=torch.device(device))
    worker.model_config, worker.parallel_config = config.model_config, config.parallel_config
    worker._weight_update_active, worker._is_checkpoint_format = False, True
    worker.weight_transfer_engine = None
    if config.weight_transfer_config is not None:
        worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            config.weight_transfer_config, config.parallel_config, model
        )
    worker._check_weight_transfer_engine = lambda: Worker._check_weight_transfer_engine(worker)

    def collective_rpc(method: str, kwargs: dict | None = None) -> list:
        with set_current_vllm_config(config):
            return [getattr(Worker, method)(worker, **(kwargs or {}))]

    llm = object.__new__(LLM)
    llm.llm_engine = SimpleNamespace(
        collective_rpc=collective_rpc,
        has_unfinished_requests=lambda: False,
        model_executor=SimpleNamespace(driver_worker=worker),
        reset_prefix_cache=lambda *_: True,
    )
    return llm


def held(llm: Any) -> dict[str, torch.Tensor]:
    """Return copies of all tensors of its model, by vLLM's names."""
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
