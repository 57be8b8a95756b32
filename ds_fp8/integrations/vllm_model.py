"""Tensors of a model in vLLM beside those that training sends: names, types, shapes and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

from torch import nn

Tensor = tuple[str, tuple[int, ...]]  # Type, such as "bfloat16", and shape
STACKED_EXPERTS = "w13_weight"  # Attribute of modules with experts


def refuse(problem: str, remedy: str) -> NoReturn:
    """Raise what `sync_weights` makes a UserError of, in the trainer's process."""
    raise ValueError(f"[ds_fp8] {problem} [remedy: {remedy}]")


def check_same_model(model: nn.Module, tensors: Iterable[Sequence], ranks: int = 1) -> None:
    """Raise ValueError where the tensors that are to be sent are not, by name, type and shape, those of the model.

    `ranks` are those over which vLLM's tensor parallelism spreads it.
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
        whole = _stacked([sent[name][1] for name in names])
        if not _fits(whole, shape, ranks):
            refuse(f"{_some(names)} is {list(shape)} in the server and {list(whole)} in training", other)
    unknown = [name for name in sent if name not in used]
    if unknown:
        refuse(f"training sends {unknown[0]}, which the server's model has not", other)


def check_scales(model: nn.Module, granularity: str, scale: str) -> None:
    """Raise ValueError where the server's kernels would cast codes again, to scales of their own."""
    kernels = {kernel for module in model.modules() for kernel in _kernels(module)}
    if granularity == "tensor":
        refuse(
            "vLLM casts stacked layers again where scales are by tensor, to the largest of their scales",
            'train with blocks or rows: "fp8": {"linear": {"weight": {"granularity": "128x128"}}}',
        )
    # DeepGemmFp8BlockScaledMMKernel, and FlashInferFp8DeepGEMMDynamicBlockScaledKernel, which leaves weights to it.
    if granularity == "128x128" and scale != "pow2" and any("deepgemm" in kernel.lower() for kernel in kernels):
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        if is_deep_gemm_e8m0_used():
            refuse(
                "training has FP32 scales, and this server's kernels (DeepGEMM) cast codes again to powers of two",
                "start the server with VLLM_USE_DEEP_GEMM_E8M0=0 in its environment",
            )


def roll_back(model: nn.Module) -> None:
    """Put every layer's tensors back in place that an update, which did not end, has taken out of it.

    Layers that the update had completed keep their new numbers. Without this vLLM would go on to count the tensors of
    the next update where this one has stopped, and take a layer for complete too early.
    """
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()


def names_in_folder(model: nn.Module) -> Callable[[str], list[str]]:
    """Return a function from a tensor's name in vLLM to those in a folder of all that it stacks, in their order.

    vLLM stacks projections of the same input, and all experts of a layer: gates and ups into w13 [E, 2 I, H] and downs
    into w2 [E, H, I], where folders have a matrix of each.
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
            continue  # attention: scales of its cache, which folders need not hold
        if hasattr(module, STACKED_EXPERTS) and module.local_num_experts != module.global_num_experts:
            refuse(
                "this server has expert parallelism",
                "start it without --enable-expert-parallel: --tensor-parallel-size spreads experts too",
            )
        # As it was before kernels arranged it, which is how tensors arrive.
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
                shape = (shape[0] * shape[1], shape[2])  # experts, one below the other
            yield names_of(f"{path}.{own}"), (str(parameter.dtype).removeprefix("torch."), shape)


def _some(names: list[str]) -> str:
    return " + ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} others, stacked,"


def _stacked(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    first = shapes[0] or (1,)
    if any(shape[1:] != first[1:] for shape in shapes):
        return (0,)
    return (sum(shape[0] if shape else 1 for shape in shapes), *first[1:])


def _fits(whole: tuple[int, ...], held: tuple[int, ...], ranks: int) -> bool:
    return len(whole) == len(held or (1,)) and all(
        own <= side <= own * ranks for side, own in zip(whole, held or (1,), strict=True)
    )


def _kernels(module: nn.Module) -> Iterator[str]:
    method = getattr(module, "quant_method", None)
    if hasattr(method, "fp8_backend"):
        yield method.fp8_backend.value  # DEEPGEMM, TRITON, ...
    for holder in (method, getattr(module, "scheme", None)):
        for value in vars(holder).values() if hasattr(holder, "__dict__") else ():
            if type(value).__name__.endswith("Kernel"):
                yield type(value).__name__
