"""The kernels of a model's products are on disk when `initialize` returns, compiled by processes of one rank."""

import logging
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from ds_fp8.config.errors import UserError
from ds_fp8.gemm import cublas, deep_gemm, reference, trial
from tests.gemm.deep_gemm_on_cpu import Library, forget
from tests.layers.hugging_face import causal_lm
from tests.zero import models

LENGTH = 128
KERNELS = 8
"""Of the trial, and of the layers' products, where q, k, v and gate, up are one each."""


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def step_by_deep_gemm(folder, environment, data):
    """What was compiled before a step and after it, by other processes alone, and what was said until then."""
    import ds_fp8

    lines = Lines()
    logging.getLogger("ds_fp8").addHandler(lines)
    with mock.patch.dict(os.environ, environment), mock.patch.object(sys, "path", sys.path[:]):
        library = Library(Path(folder), os.environ.__setitem__, lambda path: sys.path.insert(0, path))
        trial._why_not.cache_clear()
        try:
            with (
                mock.patch.object(deep_gemm, "unavailable", return_value=None),
                mock.patch.object(cublas, "scaled_matmul", reference_product),
            ):
                model = causal_lm("qwen2", hidden_size=256, intermediate_size=384, num_attention_heads=2)
                section = {"linear": {"backend": "deep_gemm"}, "monitor": {"every": 0}}
                config = models.config({"preset": "hybrid_fast", **section}) | {"train_micro_batch_size_per_gpu": 1}
                parameters = list(model.parameters())
                try:
                    engine = ds_fp8.initialize(model=model, model_parameters=parameters, config={**config, **data})[0]
                except UserError as error:
                    return str(error)
                before = len(library.compiled)
                tokens = (torch.arange(LENGTH) * 7)[None] % 97
                engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
                engine.step()
                own = [line for line in library.compiled if line[0] == str(os.getpid())]
                return before, len(library.compiled), own, lines.found
        finally:
            logging.getLogger("ds_fp8").removeHandler(lines)
            forget()
            trial._why_not.cache_clear()


def reference_product(a, b, out_dtype, fast_accumulation=False):
    """The product of casts that DeepGEMM leaves to cuBLAS."""
    return reference.scaled_matmul(a, b, out_dtype)


def test_kernels_are_compiled_when_initialize_returns(ranks, tmp_path):
    found = ranks(2, step_by_deep_gemm, str(tmp_path), {}, {"data": {"sequence_length": LENGTH}})
    (before, after, own, lines), (_, after_of_second, own_of_second, _) = found
    assert after == after_of_second == before == KERNELS
    assert own == own_of_second == []
    assert any("compiling the kernels of" in line or "another process of this host compiles" in line for line in lines)


def test_without_a_known_length_the_first_product_brings_all(ranks, tmp_path):
    found = ranks(2, step_by_deep_gemm, str(tmp_path), {}, {})
    (before, after, own, lines), (_, after_of_second, own_of_second, _) = found
    assert before == 1  # the trial's
    assert after == after_of_second == KERNELS
    assert own == own_of_second == []
    said = [line for line in lines if "compiling the kernels" in line or "another process of this host" in line]
    assert 1 <= len(said) <= 4


@pytest.mark.parametrize("size", [128, 384])
def test_a_kernel_that_cannot_be_compiled_is_an_error_of_initialize(ranks, tmp_path, size):
    """Of the trial, or of the model's own products."""
    data = {"data": {"sequence_length": LENGTH}}
    for error in ranks(2, step_by_deep_gemm, str(tmp_path), {"FAKE_DEEP_GEMM_FAILS": str(size)}, data):
        assert error.startswith("error: ")
        assert "NVCC compilation failed" in error
        assert "fp8.linear.backend" in error
        assert ("or auto" if size == 128 else '"backend": "cublas"') in error
