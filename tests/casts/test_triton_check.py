"""A Triton that may miscompile transposing casts is tried with bits."""

from dataclasses import replace

import pytest
import torch
from packaging.version import Version

from ds_fp8.casts import quantization as triton_check
from ds_fp8.config.errors import UserError

CUDA = torch.device("cuda")


def test_right_casts_differ_nowhere():
    assert triton_check.wrong_casts(torch.device("cpu")) == []


@pytest.mark.parametrize("name", ["transpose", "quantize_both"])
def test_one_wrong_byte_is_refused_with_a_remedy(monkeypatch, name):
    right = getattr(triton_check, name)

    def wrong(*args):
        result = right(*args)
        q = result[1] if isinstance(result, tuple) else result
        codes = q.data.contiguous().view(torch.uint8).clone()
        codes[1, 1] ^= 1
        q = replace(q, data=codes.view(q.data.dtype))
        return (result[0], q) if isinstance(result, tuple) else q

    monkeypatch.setattr(triton_check, name, wrong)
    found = triton_check.wrong_casts(torch.device("cpu"))
    assert len(found) == (2 if name == "transpose" else 6)
    monkeypatch.setattr(triton_check, "wrong_casts", lambda device: found)
    monkeypatch.setattr(triton_check, "_version", lambda: Version("3.8.0"))
    with pytest.raises(UserError, match=r"(?s)Triton 3\.8\.0 miscompiles .*constraints-gpu") as raised:
        triton_check.check_triton(CUDA)
    assert "triton#11111" in str(raised.value)
    monkeypatch.setattr(triton_check, "_version", lambda: Version("3.7.1"))
    triton_check.check_triton(CUDA)
    triton_check.check_triton(torch.device("cpu"))
