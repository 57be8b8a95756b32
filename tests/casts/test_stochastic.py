import pytest
import torch

from ds_fp8.casts.primitives import round_stochastically, uniform
from ds_fp8.config.formats import FORMATS, NATIVE_FORMATS

SAMPLES = 20000


def grid(format):
    numbers = torch.arange(256, dtype=torch.uint8).view(FORMATS[format].dtype).float()
    return numbers[numbers.isfinite()]


def draws(count, key=0):
    return uniform(torch.arange(count), key)


def test_draws_are_even_and_repeat_with_their_key_only():
    first = draws(SAMPLES, 7)
    assert first.min() >= 0
    assert first.max() < 1
    assert torch.equal(first, draws(SAMPLES, 7))
    assert torch.histc(first, 10, 0, 1).sub(SAMPLES / 10).abs().max() < 5 * (SAMPLES / 10) ** 0.5
    for other in (draws(SAMPLES, 8), first.roll(1)):
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 5 / SAMPLES**0.5


@pytest.mark.parametrize("format", NATIVE_FORMATS)
def test_numbers_on_the_grid_stay(format):
    numbers = grid(format)
    for draw in (0.0, 1 - 2.0**-16):
        assert torch.equal(round_stochastically(numbers, torch.full_like(numbers, draw), format), numbers)


@pytest.mark.parametrize("format", NATIVE_FORMATS)
def test_every_result_is_a_neighbour_on_the_grid(format):
    target = FORMATS[format]
    x = torch.cat(
        [torch.randn(SAMPLES), torch.randn(SAMPLES) * target.smallest_subnormal * 3, torch.tensor([target.max])]
    )
    result = round_stochastically(x, draws(len(x)), format)
    assert torch.isin(result, grid(format)).all()
    assert torch.equal(result.to(target.dtype).float(), result)
    down, up = (round_stochastically(x, torch.full_like(x, draw), format) for draw in (0.0, 1 - 2.0**-16))
    assert ((result == down) | (result == up)).all()
    assert result.abs().max() <= target.max
    assert round_stochastically(torch.tensor([torch.nan]), torch.zeros(1), format).isnan().all()


@pytest.mark.parametrize("format", NATIVE_FORMATS)
@pytest.mark.parametrize("value", [1.01, -1.3, 17.99, 2.0**-17, -3e-3])
def test_the_expectation_is_the_number(format, value):
    x = torch.full((SAMPLES,), value)
    result = round_stochastically(x, draws(SAMPLES), format)
    spread = result.std().item() / SAMPLES**0.5
    assert abs(result.mean().item() - value) <= 5 * spread + 1e-9
