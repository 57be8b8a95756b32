"""Skip steps on non-finite gradients, without a host sync."""

from __future__ import annotations

from typing import Any

import torch


class FiniteCheck:
    """Checks all gradients before a step, and counts the steps skipped.

    On a GPU the verdict stays a flag in device memory, which the kernel reads and obeys. The host counts the step as
    done, starts a copy of the flag, and takes the count back when it next looks, a whole step later.
    """

    def __init__(self) -> None:
        self._skipped = 0
        self._pending: tuple[torch.cuda.Event, torch.Tensor, list[dict[str, Any]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_skipped": self.resolve(), "_pending": None}

    def begin(
        self, gradients: list[torch.Tensor], states: list[dict[str, Any]]
    ) -> dict[torch.device, torch.Tensor] | bool | None:
        """Return whether to skip the step of `states`.

        Returns:
            True to skip it, None to take it; otherwise by device a flag that is not zero if it is to be skipped.
        """
        # The largest magnitude: NaN and Inf carry through it, and no sum can overflow.
        norm = torch.nn.utils.get_total_norm(gradients, norm_type=torch.inf)
        flag = norm.isfinite().logical_not().to(torch.int32)
        devices = {gradient.device for gradient in gradients}
        if not all(device.type == "cuda" for device in devices):
            self._skipped += int(flag.item())
            return bool(flag.item()) or None
        # Pinned: from pageable memory the copy would make the host wait.
        host = torch.empty((), dtype=torch.int32, pin_memory=True)
        host.copy_(flag, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(flag.device))
        self._pending = (copied, host, states)
        return {device: flag.to(device) for device in devices}

    def resolve(self) -> int:
        """Take back the count of the last step if it was left out; returns how many steps were so far."""
        if self._pending is not None:
            copied, host, states = self._pending
            self._pending = None
            # A step later the copy has long been done.
            copied.synchronize()
            if host.item():
                self._skipped += 1
                for state in states:
                    state["step"] = state["step"] - 1
        return self._skipped
