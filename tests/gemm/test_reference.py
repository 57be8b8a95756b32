"""The scaled product against FP64, for every pair of casts and awkward sizes, and which backend is chosen."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from ds_fp8 import gemm
from ds_fp8.casts import quantize
from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import NATIVE_GRANULARITIES, CastSpec
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.presets import PRESETS
from ds_fp8.engine.plans import recipe_from_config
from ds_fp8.gemm import BACKENDS, deep_gemm, scaled_matmul, select_backend, unavailable
from ds_fp8.research import mxfp8
from tests.gemm.tolerance import assert_is_product

SHAPES = [(1, 1, 1), (1, 130, 7), (7, 1, 130), (130, 7, 1), (129, 128, 127), (7, 300, 200), (200, 257, 3)]  # M, K, N


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Numbers whose magnitude differs from row to row and from column to column, so that scales do too."""
    generator = torch.Generator().manual_seed(1000 * rows + columns + seed)
    spread = torch.exp2(torch.randint(-6, 7, (rows, 1), generator=generator))
    spread = spread * torch.exp2(torch.randint(-3, 4, (1, columns), generator=generator))
    return torch.randn(rows, columns, generator=generator) * spread


@pytest.mark.parametrize(("scale", "out_dtype"), [("pow2", torch.float32), ("fp32", torch.bfloat16)])
@pytest.mark.parametrize(("a_granularity", "b_granularity"), list(itertools.product(NATIVE_GRANULARITIES, repeat=2)))
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_product_of_dequantised_operands(m, k, n, a_granularity, b_granularity, scale, out_dtype):
    a = quantize(random(m, k), "e4m3", a_granularity, scale)
    b = quantize(random(n, k, seed=1), "e5m2", b_granularity, scale)
    product = scaled_matmul(a, b, out_dtype=out_dtype)
    assert product.dtype is out_dtype
    assert_is_product(product, a.dequantize(), b.dequantize())


def test_a_transposed_operand():
    a, b = quantize(random(9, 200), "e4m3"), quantize(random(200, 130), "e4m3", "128x128")
    assert_is_product(scaled_matmul(a, b.t()), a.dequantize(), b.dequantize().t())


def test_a_contraction_of_length_zero_is_zero():
    product = scaled_matmul(quantize(torch.empty(3, 0)), quantize(torch.empty(4, 0)))
    assert torch.equal(product, torch.zeros(3, 4, dtype=torch.bfloat16))


def test_nan_reaches_the_rows_that_read_it():
    x = random(3, 200)
    x[1, 150] = torch.inf
    product = scaled_matmul(quantize(x), quantize(random(4, 200)))
    assert product.isnan().all(1).tolist() == [False, True, False]
    assert product[[0, 2]].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_is_selected_by_its_name_or_refused_with_the_reason(backend):
    reason = unavailable(backend)
    if reason is None:
        assert select_backend(backend) == backend
        assert select_backend("auto") in BACKENDS
        return
    with pytest.raises(UserError) as error:
        select_backend(backend)
    assert reason in error.value.problem
    assert error.value.key == "fp8.linear.backend"
    assert "reference" in error.value.remedy


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        (("e5m2", "tensor"), ("e5m2", "tensor"), "two E5M2"),
        (("e5m2", "1x128"), ("e4m3", "128x128"), "block-scaled"),
        (("e4m3", "1x128"), ("e5m2", "tensor"), "block-scaled"),
    ],
)
def test_what_hopper_does_not_multiply_is_refused_with_the_reason(a, b, word):
    assert word in BACKENDS["cublas"].unsupported(*a, *b)
    assert BACKENDS["cublas"].unsupported("e4m3", a[1], "e4m3", b[1]) is None
    assert BACKENDS["reference"].unsupported(*a, *b) is None


# ---------------------------------------------------------------- backends of other GPUs, versions of CUDA and torch


NOT_HOPPER = "DeepSeek style (1x128, 128x128) scaling only supported in CUDA for SM90"
OLD_CUBLAS = "DeepSeek style (1x128, 128x128) scaling requires cublasLt >= 12.9"
BLOCKS = [(CastSpec(), CastSpec(granularity="128x128"))]
ROWS = [(CastSpec(granularity="row"), CastSpec(granularity="row"))]


class Machine:
    """A GPU as torch shows it, whose products of block scales raise what torch raises there."""

    def __init__(self, monkeypatch, capability, blocks_fail=None, has_scaled_mm=True):
        self.products, self._blocks_fail = [], blocks_fail
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
        monkeypatch.setattr(gemm, "_device", lambda: torch.device("cpu"))
        if has_scaled_mm:
            monkeypatch.setattr(F, "scaled_mm", self._scaled_mm, raising=False)
        else:
            monkeypatch.delattr(F, "scaled_mm", raising=False)

    def _scaled_mm(self, a, b, a_scale, a_kind, b_scale, b_kind, output_dtype, use_fast_accum):
        self.products.append((a_kind.name, b_kind.name))
        if self._blocks_fail and "Block" in a_kind.name + b_kind.name:
            raise NotImplementedError(f"{self._blocks_fail}\nException raised from somewhere")
        return (a.float() @ b.float()).to(output_dtype)


@pytest.fixture
def machine(monkeypatch):
    caches = [gemm._tried, deep_gemm.unavailable, mxfp8.unavailable]
    for cache in caches:
        cache.cache_clear()
    yield lambda *arguments, **options: Machine(monkeypatch, *arguments, **options)
    for cache in caches:
        cache.cache_clear()


def test_every_kind_of_product_is_tried_once(machine):
    hopper = machine((9, 0))
    for _ in range(2):
        assert recipe_from_config(FP8Config()).backend == "cublas"
    assert sorted(hopper.products) == [("BlockWise1x128", "BlockWise128x128"), ("BlockWise1x128", "BlockWise1x128")]


@pytest.mark.parametrize(("capability", "error"), [((10, 0), NOT_HOPPER), ((12, 0), NOT_HOPPER), ((9, 0), OLD_CUBLAS)])
def test_the_default_preset_is_refused_at_the_start_where_block_products_fail(machine, capability, error, monkeypatch):
    machine(capability, error)
    loaded = []
    monkeypatch.setattr(gemm.registry, "load", lambda: loaded.append("research"))
    with pytest.raises(UserError) as refusal:
        recipe_from_config(FP8Config())
    assert error in refusal.value.problem
    assert "somewhere" not in refusal.value.problem
    assert loaded  # before its backends are tried
    for backend in ("cublas", "deep_gemm", "mxfp8"):
        assert f"{backend}: " in refusal.value.problem
    assert refusal.value.key == "fp8.linear.backend"
    assert '"preset": "rowwise"' in refusal.value.remedy
    assert '"backend": "reference"' in refusal.value.remedy


def test_no_preset_is_refused_on_hopper(machine):
    machine((9, 0))
    assert {recipe_from_config(FP8Config.from_preset(preset)).backend for preset in PRESETS} == {"cublas"}


@pytest.mark.parametrize(("capability", "preset"), [((8, 9), "rowwise"), ((10, 0), "tensorwise"), ((12, 0), "munit")])
def test_scales_per_row_and_tensor_run_where_blocks_do_not(machine, capability, preset):
    machine(capability, NOT_HOPPER)
    assert recipe_from_config(FP8Config.from_preset(preset)).backend == "cublas"


def test_emulation_needs_no_fp8_products(machine):
    blackwell = machine((10, 0), NOT_HOPPER)
    assert select_backend("reference", BLOCKS) == "reference"
    assert recipe_from_config(FP8Config.from_preset("nvfp4")).backend == "reference"
    assert not blackwell.products


@pytest.mark.parametrize(
    ("capability", "has_scaled_mm", "problem"),
    [((9, 0), False, f"torch {torch.__version__} has no scaled_mm"), ((8, 0), True, "a GPU has no FP8 units")],
)
def test_machines_without_fp8_products_are_named(machine, capability, has_scaled_mm, problem):
    found = machine(capability, has_scaled_mm=has_scaled_mm)
    with pytest.raises(UserError) as refusal:
        select_backend("auto", ROWS)
    assert problem in refusal.value.problem
    assert "torch >= 2.10" in refusal.value.remedy
    assert not found.products


def test_a_backend_that_is_asked_for_is_refused_with_the_error_of_its_product(machine):
    machine((9, 0), OLD_CUBLAS)
    with pytest.raises(UserError) as refusal:
        select_backend("cublas", BLOCKS)
    assert OLD_CUBLAS in refusal.value.problem
    assert '"preset": "rowwise"' in refusal.value.remedy
    assert "auto" not in refusal.value.remedy


def test_a_product_that_is_wrong_counts_as_a_failure(machine, monkeypatch):
    machine((9, 0))
    monkeypatch.setattr(F, "scaled_mm", lambda a, b, *_, output_dtype, **__: torch.zeros(128, 128, dtype=output_dtype))
    assert "its result is wrong" in unavailable("cublas", ROWS)


def test_without_a_gpu_products_are_emulated(machine, monkeypatch):
    machine((9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_backend("auto", BLOCKS) == "reference"


def test_the_trial_runs_on_the_gpu_that_deepspeed_will_make_current(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert gemm._device() == torch.device("cuda", 3)
    monkeypatch.setenv("LOCAL_RANK", "7")  # of a rank that sees one GPU only
    assert gemm._device() == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert gemm._device() == torch.device("cuda", 2)
