"""Compare the tensors of a model in vLLM with those of training: names, types, shapes and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

from torch import nn

Tensor = tuple[str, tuple[int, ...]]  # type, such as "bfloat16", and shape
STACKED_EXPERTS = "w13_weight"  # attribute of modules with experts


def refuse(problem: str, remedy: str) -> NoReturn:
    """Raise an error that `sync_weights`, in the trainer's process, turns into a UserError."""
    raise ValueError(f"[ds_fp8] {problem} [remedy: {remedy}]")


def check_same_model(model: nn.Module, tensors: Iterable[Sequence], ranks: int = 1) -> None:
    """Raise ValueError unless the tensors to be sent are those of the model, by name, type and shape.

    ranks: of vLLM's tensor parallelism.
    """
    sent = {name: (dtype, tuple(shape)) for name, dtype, shape in tensors}
    other = "start the server with the folder of the model that is trained, exported in the same layout"
    used = set()
    for names, (dtype, shape) in _held(model):
        missing = [name for name in names if name not in sent]
        if missing:
            refuse(f"the server's model has {missing[0]}, which training does not send", other)
        used.update(names)
        for name in names:
            if sent[name][0] != dtype:
                refuse(f"{name} is {dtype} in the server and {sent[name][0]} in training", other)
        stacked = _stacked([sent[name][1] for name in names])
        if not _fits(stacked, shape, ranks):
            refuse(f"{_some(names)} is {list(shape)} in the server and {list(stacked)} in training", other)
    unknown = [name for name in sent if name not in used]
    if unknown:
        refuse(f"training sends {unknown[0]}, which the server's model lacks", other)


def check_scales(model: nn.Module, granularity: str, scale: str) -> None:
    """Raise ValueError if the server's kernels would quantize FP8 weights again, with other scales."""
    kernels = {kernel for module in model.modules() for kernel in _kernels(module)}
    if granularity == "tensor":
        refuse(
            "vLLM quantizes stacked layers with scales by tensor again, with the largest of their scales",
            'train with blocks or rows: "fp8": {"linear": {"weight": {"granularity": "128x128"}}}',
        )
    # DeepGemmFp8BlockScaledMMKernel, and FlashInferFp8DeepGEMMDynamicBlockScaledKernel, which leaves weights to it.
    if granularity == "128x128" and scale != "pow2" and any("deepgemm" in kernel.lower() for kernel in kernels):
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        if is_deep_gemm_e8m0_used():
            refuse(
                "training has FP32 scales, and this server's kernels (DeepGEMM) quantize again with powers of two",
                "start the server with VLLM_USE_DEEP_GEMM_E8M0=0 in its environment",
            )


def roll_back(model: nn.Module) -> None:
    """Restore the tensors of layers that an unfinished update has not completed.

    Completed layers keep their new weights. Otherwise vLLM would count the tensors of the next update on top of this
    one's, and complete a layer too early.
    """
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


def names_in_folder(model: nn.Module) -> Callable[[str], list[str]]:
    """Return a function from a tensor's name in vLLM to the names in a folder of its stacked tensors, in order.

    vLLM stacks projections of the same input, and the experts of a layer: gates and ups as w13 [E, 2 I, H], downs as w2
    [E, H, I]; folders have one matrix an expert.
    """
    stacks, experts = getattr(model, "packed_modules_mapping", {}), []
    if any(hasattr(module, STACKED_EXPERTS) for module in model.modules()) and hasattr(model, "get_expert_mapping"):
        # Such as ("experts.routed_experts.w13_", "experts.0.gate_proj.", expert, matrix). Without it no name fits.
        experts = [(stacked, part) for stacked, part, *_ in model.get_expert_mapping()]

    def names_of(name: str) -> list[str]:
        *parents, layer, last = name.split(".")
        dense = [".".join([*parents, part, last]) for part in stacks.get(layer, (layer,))]
        return [name.replace(stacked, part) for stacked, part in experts if stacked in name] or dense

    return names_of


def _held(model: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    names_of = names_in_folder(model)
    seen: set[int] = set()
    for path, module in model.named_modules():
        if hasattr(module, "kv_cache"):
            continue  # attention: scales of its cache, optional in folders
        if hasattr(module, STACKED_EXPERTS) and module.local_num_experts != module.global_num_experts:
            refuse(
                "this server has expert parallelism",
                "start it without --enable-expert-parallel: --tensor-parallel-size spreads experts too",
            )
        # In the layout before kernels rearranged it, that of tensors to be loaded.
        recorded = get_layerwise_info(module).restore_metadata[0] or module._parameters
        for own, parameter in recorded.items():
            # A head that shares the embedding's weight is not loaded.
            shared = id(module._parameters.get(own, parameter))
            if parameter is None or shared in seen:
                continue
            seen.add(shared)
            shape = tuple(parameter.shape)
            if own == "weight" and hasattr(module, "org_vocab_size"):
                shape = (module.org_vocab_size, *shape[1:])  # vLLM pads the vocabulary
            if len(shape) == 3:
                shape = (shape[0] * shape[1], shape[2])  # experts
            yield names_of(f"{path}.{own}"), (str(parameter.dtype).removeprefix("torch."), shape)


def _some(names: list[str]) -> str:
    return " + ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} others, stacked,"


def _stacked(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    first = shapes[0] or (1,)
    if any(shape[1:] != first[1:] for shape in shapes):
        return (0,)
    return (sum(shape[0] if shape else 1 for shape in shapes), *first[1:])


def _fits(shape: tuple[int, ...], shard: tuple[int, ...], ranks: int) -> bool:
    shard = shard or (1,)
    return len(shape) == len(shard) and all(n <= size <= n * ranks for size, n in zip(shape, shard, strict=True))


def _kernels(module: nn.Module) -> Iterator[str]:
    method = getattr(module, "quant_method", None)
    if hasattr(method, "fp8_backend"):
        yield method.fp8_backend.value  # DEEPGEMM, TRITON, ...
    for holder in (method, getattr(module, "scheme", None)):
        for value in vars(holder).values() if hasattr(holder, "__dict__") else ():
            if type(value).__name__.endswith("Kernel"):
                yield type(value).__name__
