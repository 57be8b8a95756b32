"""Moments in emulated formats: the nearest number, found again exactly, and never zero where it must not be."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ds_fp8.config.formats import FORMATS
from ds_fp8.optim import AdamW
from ds_fp8.optim.moments import CODECS, dequantize_moment, quantize_moment
from ds_fp8.research.formats import EMULATED
from tests.optim.numbers import SCALES, awkward, gradients

SOME = ("int8", "int4", "log8", "e3m4", "e2m1")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("codec", EMULATED)
def test_every_number_becomes_the_nearest_of_its_group(codec, scale):
    x, kind = gradients(300, spread=1), CODECS[codec]
    quantized = quantize_moment(x, kind, "1x128", scale)
    assert quantized.data.dtype is torch.uint8
    numbers = torch.tensor(FORMATS[codec].codec.magnitudes, dtype=torch.float64)
    for group, (part, factor) in enumerate(zip(x.split(128), quantized.scale, strict=True)):
        assert 0.49 * kind.max < part.abs().max() / factor <= kind.max
        distance = (part.abs().double()[:, None] - numbers * factor.double()).abs().amin(1)
        found = dequantize_moment(quantized, kind)[128 * group :][: len(part)].double()
        assert ((found - part).abs() <= distance * (1 + 1e-5) + 2e-7 * part.abs()).all()


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("codec", EMULATED)
def test_decoding_and_encoding_again_changes_nothing(codec, scale, noisy):
    kind = CODECS[codec]
    for granularity in ("1x128", "tensor"):
        for name, x in {"spread": gradients(1000, spread=4), **awkward()}.items():
            noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) if noisy else None
            first = quantize_moment(x, kind, granularity, scale, never_zero=True, noise=noise)
            numbers = dequantize_moment(first, kind, granularity)
            assert numbers.isfinite().all(), name
            assert ((numbers == 0) == (x.abs() < 2.0**-126)).all(), name
            second = dequantize_moment(
                quantize_moment(numbers, kind, granularity, scale, never_zero=True), kind, granularity
            )
            # What rounding took below FP32's normal numbers counts as zero.
            expected = torch.where(numbers.abs() < 2.0**-126, 0.0, numbers)
            torch.testing.assert_close(second, expected, rtol=0 if codec != "log8" else 3e-7, atol=0, msg=name)


@pytest.mark.parametrize("codec", SOME)
def test_noise_is_right_on_average_and_hits_the_neighbours_only(codec):
    x, kind, generator = gradients(128, spread=1).abs(), CODECS[codec], torch.Generator().manual_seed(0)
    draws = [
        dequantize_moment(quantize_moment(x, kind, noise=torch.rand(128, generator=generator)), kind)
        for _ in range(400)
    ]
    columns = torch.stack(draws)
    assert all(len(column.unique()) <= 2 for column in columns.t())
    spacing = columns.amax(0) - columns.amin(0)
    off = (columns.mean(0) - x).abs()
    assert (off <= 5 * 0.5 * spacing / 400**0.5 + x * 0.05 * (spacing == 0)).all()


def steps(optimizer, parameter, first, last):
    for step in range(first, last):
        parameter.grad = gradients(parameter.numel(), seed=step, spread=1).view(parameter.shape)
        optimizer.step()


@pytest.mark.parametrize("kept", [{"exp_avg": "int8", "exp_avg_sq": "log8"}, {"exp_avg": "e3m4", "exp_avg_sq": "e4m2"}])
def test_adamw_with_emulated_moments_goes_on_from_its_checkpoint_and_stays_near_fp32(kept):
    weights, results = gradients(3000, seed=9), {}
    for name, options in {"fp32": {}, "kept": kept}.items():
        parameter = torch.nn.Parameter(weights.clone().view(30, 100))
        optimizer = AdamW([parameter], lr=1e-3, **options)
        steps(optimizer, parameter, 0, 6)
        saved, middle = optimizer.state_dict(), parameter.detach().clone()
        steps(optimizer, parameter, 6, 10)
        results[name] = parameter.detach().clone()
        if name == "kept":
            assert optimizer.state_bytes() < 2.1 * 3000  # a byte an element and moment, and scales
            again = torch.nn.Parameter(middle)
            resumed = AdamW([again], lr=1e-3, **options)
            resumed.load_state_dict(saved)
            steps(resumed, again, 6, 10)
            torch.testing.assert_close(again, parameter, rtol=1e-6, atol=0)
    moved = (results["fp32"] - weights.view(30, 100)).norm()
    assert 0 < (results["kept"] - results["fp32"]).norm() < 0.1 * moved


PROGRAM = """
import sys, torch
from ds_fp8.optim import AdamW
optimizer = AdamW([torch.nn.Parameter(torch.ones(256))])
optimizer.load_state_dict(torch.load(sys.argv[1]))
torch.save(next(iter(optimizer.state.values()))["exp_avg"], sys.argv[1])
"""


def test_a_run_without_emulated_formats_goes_on_from_a_compact_checkpoint_with_them(tmp_path):
    optimizer = AdamW([parameter := torch.nn.Parameter(torch.ones(256))], exp_avg="log8", exp_avg_sq="e3m4")
    parameter.grad = gradients(256, spread=1)
    optimizer.step()
    optimizer.compact = True
    torch.save(optimizer.state_dict(), tmp_path / "state")
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path / "state"], check=True, timeout=120)
    assert torch.equal(torch.load(tmp_path / "state"), optimizer.state[parameter]["exp_avg"].dequantize())
