"""The report of errors: that it sees them, and what they are here."""

import dataclasses
import json
import math
from types import SimpleNamespace

import common
import numeric_parts
import numerics
import pytest
import torch

from ds_fp8.config.errors import UserError
from ds_fp8.config.presets import PRESETS
from ds_fp8.gemm import BACKENDS, unavailable
from ds_fp8.layers.linear.recipe import LinearRecipe

PRODUCT_ERROR = 1e-3
"""Of a part that multiplies what it was given: rounding to BF16 falls to the other side now and then."""
CAST_ERROR = 1e-2
"""Of a part that casts what it has computed: rounding to FP8, too, falls to the other side now and then."""
FP8_ERROR = 0.02, 0.15
"""What FP8 costs."""

DISTINCT = list(common.distinct_presets(PRESETS))


class WrongRecipe(LinearRecipe):
    """Products that are off by one percent."""

    def multiply(self, a, b, out_dtype):
        return (1.01 * super().multiply(a, b, torch.float32)).to(out_dtype)


def limit(part):
    return PRODUCT_ERROR if part == "linear" else CAST_ERROR


def assert_exact(rows):
    assert rows
    for row in rows:
        assert row["error_vs_fp64"] < limit(row["part"]), row
        assert row["error_vs_first"] is None or row["error_vs_first"] < limit(row["part"]), row


@pytest.mark.parametrize("preset", DISTINCT)
@pytest.mark.parametrize("name", list(numeric_parts.PARTS))
def test_every_part_is_exact_at_every_size(name, preset):
    part = numeric_parts.PARTS[name]
    for shape in part.shapes:
        rows = numerics.measure_part(name, part, shape, preset, ["reference"])
        assert {row["kind"] for row in rows} == {"output", "dgrad", "wgrad"}
        assert_exact(rows)
        if shape == part.shapes[0]:
            worst = numerics.worst(rows)
            assert all(FP8_ERROR[0] < row["error_vs_bf16"] < FP8_ERROR[1] for row in worst)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", DISTINCT)
@pytest.mark.parametrize("name", list(numeric_parts.PARTS))
def test_every_backend_is_exact_at_every_size(name, preset):
    part = numeric_parts.PARTS[name]
    backends = [backend for backend in BACKENDS if unavailable(backend) is None]
    rows = [row for shape in part.shapes for row in numerics.measure_part(name, part, shape, preset, backends)]
    assert {"cublas", "reference"} <= {row["backend"] for row in rows}
    assert_exact(rows)


@pytest.mark.parametrize("name", list(numeric_parts.PARTS))
def test_a_wrong_product_is_seen(name):
    part, recipe, cpu = numeric_parts.PARTS[name], common.preset_recipe("infir2"), torch.device("cpu")
    tensors = numeric_parts.random_tensors(part, part.shapes[0])
    wrong = WrongRecipe(**{field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)})
    found = numerics.outputs_and_gradients(part, wrong, tensors, cpu)
    expected = numerics.outputs_and_gradients(part, numerics.exact(recipe), tensors, cpu)
    assert found.keys() == expected.keys()
    for result, values in found.items():
        if not result.endswith(".bias"):  # no product has a part in a bias's gradient
            assert numerics.relative_error(values, expected[result]) > 2e-3, result


def test_the_worst_of_several_sizes_is_kept_and_nan_is_worse_than_any():
    def row(vs_fp64, vs_bf16):
        of = {"part": "linear", "kind": "output", "preset": "infir2", "backend": "reference"}
        return of | {"error_vs_fp64": vs_fp64, "error_vs_first": None, "error_vs_bf16": vs_bf16}

    (kept,) = numerics.worst([row(1e-4, 0.05), row(3e-4, 0.04), row(2e-4, math.nan), row(0.0, 0.01)])
    assert kept["error_vs_fp64"] == 3e-4
    assert math.isnan(kept["error_vs_bf16"])
    assert kept["error_vs_first"] is None


def test_relative_error():
    assert numerics.relative_error(torch.tensor([1.0, 2.2]), torch.tensor([1.0, 2.0])) == pytest.approx(0.2 / 5**0.5)
    assert numerics.relative_error(torch.zeros(0), torch.zeros(0)) == 0
    assert numerics.relative_error(torch.tensor([0.5]), torch.tensor([0.0])) == 0.5


def test_quick_reports_every_part(tmp_path, capsys):
    file = tmp_path / "numerics.json"
    numerics.main(["--quick", "--presets", "infir2,coat", "--json", str(file)])
    output = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert {row["part"] for row in rows} == set(numeric_parts.PARTS)
    assert {row["preset"] for row in rows} == {"infir2", "coat"}
    assert all(name in output for name in numeric_parts.PARTS)


def test_a_backend_that_lacks_a_product_is_said_to(capsys, monkeypatch):
    poor = SimpleNamespace(unavailable=lambda: None, unsupported=lambda *operands: "no such product")
    monkeypatch.setitem(BACKENDS, "poor", poor)
    rows = numerics.measure_part("linear", numeric_parts.LINEAR, (17, 8, 16), "infir2", ["poor", "reference"])
    assert {row["backend"] for row in rows} == {"reference"}
    assert "not measured: linear [17, 8, 16], infir2 on poor (no such product)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"), [(["--presets", "infir3"], "infir2"), (["--backends", "referense"], "reference")]
)
def test_mistakes_name_the_remedy(arguments, expected):
    with pytest.raises(UserError) as error:
        numerics.main(["--quick", *arguments])
    assert expected in str(error.value)
