"""GPUs as ranks on a CPU see them, for tests of what they share."""

import os
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch

from ds_fp8.zero import collectives


class Memory:
    """Memory that ranks share in name only."""

    problem = None

    def __init__(self, numel, device, group):
        self.overlapping = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")

    def why_wrong(self):
        return self.problem


@contextmanager
def gpus(visible, index, memory=Memory, accessible=True):
    """Let this rank see GPUs of these UUIDs, as torch shows them."""

    def can_access(device, peer):
        assert peer < len(visible), "Invalid peer device id"  # as torch does
        return accessible

    with (
        patch.object(torch.cuda, "device_count", lambda: len(visible)),
        patch.object(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=visible[i])),
        patch.object(torch.cuda, "can_device_access_peer", can_access),
        patch.object(collectives, "PeerMemory", memory),
    ):
        yield torch.device("cuda", index)
