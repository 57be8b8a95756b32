"""Copies of a training state in host memory that one save leaves to the next."""

import torch

from ds_fp8.train.host_copies import HostCopies


def state(seed: int, random_bytes: int) -> dict:
    torch.manual_seed(seed)
    return {
        "masters": [torch.randn(5), torch.randn(0), torch.randn(5).bfloat16()],
        "random": torch.randint(0, 255, (random_bytes,), dtype=torch.uint8),
        "moments": ({"exp_avg": torch.randn(5)}, torch.randn(7, 3)),
        "step": 3,
    }


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for one in inner for tensor in tensors(one)]


def test_copies_have_the_values_and_memory_of_their_own():
    original = state(0, 10)
    copied = HostCopies().copy(original)
    assert copied["step"] == 3
    assert [type(copied[name]) for name in original] == [type(part) for part in original.values()]
    for ours, theirs in zip(tensors(copied), tensors(original), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
        assert ours.numel() == 0 or ours.data_ptr() != theirs.data_ptr()


def test_all_memory_is_used_again_though_one_part_has_another_size():
    """Allocating pinned memory takes seconds: what comes behind a part that grew keeps its own."""
    copies = HostCopies()
    first = {tensor.data_ptr() for tensor in tensors(copies.copy(state(0, 10))) if tensor.nbytes > 10}
    again = state(1, 14)
    second = copies.copy(again)
    assert {tensor.data_ptr() for tensor in tensors(second) if tensor.nbytes > 14} == first
    for ours, theirs in zip(tensors(second), tensors(again), strict=True):
        assert torch.equal(ours, theirs)
