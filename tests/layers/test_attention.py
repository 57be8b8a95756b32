"""Which kernels of attention run."""

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import _cur_sdpa_kernel_backends as enabled

from ds_fp8.layers.decoder.attention import FASTEST_FIRST, fastest_kernel_first


@pytest.mark.parametrize(
    "chosen",
    [[SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], list(FASTEST_FIRST)],
    ids=lambda chosen: "+".join(kernel.name for kernel in chosen),
)
def test_kernels_that_the_user_disabled_stay_disabled(chosen):
    with sdpa_kernel(chosen):
        with fastest_kernel_first():
            assert set(enabled()) == set(chosen)
        assert set(enabled()) == set(chosen)
