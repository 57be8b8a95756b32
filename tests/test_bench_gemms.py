"""The GEMM benchmark: what it multiplies, what it reports, and how it refuses."""

import json

import common
import gemms
import pytest
import torch

from ds_fp8.config.errors import UserError
from ds_fp8.config.presets import PRESETS
from ds_fp8.gemm import scaled_matmul

PRODUCT_ERROR = 3e-3
"""A BF16 result of an exact product: rounding loses 1.7e-3 of its norm."""
CAST_ERROR = {"e4m3": (0.02, 0.06), "e5m2": (0.04, 0.10)}
"""What two casts of normally distributed operands lose, when the coarser of them has this format."""


def run(capsys, benchmark, *arguments):
    benchmark.main([*arguments])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("size", "linear", "expected"),
    [
        ("7b", "qkv", (4608, 3584)),
        ("7b", "o", (3584, 3584)),
        ("7b", "gate_up", (37888, 3584)),
        ("7b", "down", (3584, 18944)),
        ("1.5b", "qkv", (2048, 1536)),
        ("1.5b", "gate_up", (17920, 1536)),
    ],
)
def test_linears_of_a_decoder_layer(size, linear, expected):
    assert common.SIZES[size].linears()[linear] == expected


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize(("tokens", "n", "k"), [(128, 256, 384), (100, 72, 200), (1, 128, 128)])
def test_every_preset_multiplies_what_the_linear_needs(preset, tokens, n, k):
    x, w, dy = common.random_operands(tokens, n, k)
    exact = {
        "fprop": x.double() @ w.double().t(),
        "dgrad": dy.double() @ w.double(),
        "wgrad": dy.double().t() @ x.double(),
    }
    found = gemms.products(common.preset_recipe(preset), x, w, dy)
    assert [product.name for product in found] == list(exact)
    for product in found:
        result = scaled_matmul(product.a, product.b, out_dtype=torch.float32)
        low, high = CAST_ERROR["e5m2" if "e5m2" in (product.a.format, product.b.format) else "e4m3"]
        error = ((result - exact[product.name]).norm() / exact[product.name].norm()).item()
        assert low / 2 < error < high
        errors = gemms.sampled_errors(result.bfloat16(), product)
        assert errors["error_vs_fp64"] < PRODUCT_ERROR
        assert low / 2 < errors["error_vs_bf16"] < high


def test_sampled_errors_see_a_wrong_product():
    product = gemms.products(common.preset_recipe("infir2"), *common.random_operands(128, 128, 128))[0]
    wrong = 1.01 * scaled_matmul(product.a, product.b, out_dtype=torch.float32)
    assert gemms.sampled_errors(wrong, product)["error_vs_fp64"] == pytest.approx(0.01, rel=1e-2)


def test_quick_measures_every_product_of_every_preset(tmp_path, capsys):
    file = tmp_path / "new" / "gemms.json"
    backends = "--backends", "reference"
    output = run(capsys, gemms, "--quick", "--json", str(file), *backends)
    written = json.loads(file.read_text())
    assert written["banner"]["torch"] == torch.__version__
    for preset in PRESETS:
        covered = {(row["linear"], row["pass"]) for row in written["rows"] if preset in row["presets"]}
        assert covered == {(linear, name) for linear in common.SIZES["tiny"].linears() for name in gemms.PASSES}
        assert preset in output
    for row in written["rows"]:
        assert row["teraflops"] == pytest.approx(2e-9 * torch.tensor(row["shape"]).prod().item() / row["milliseconds"])
        assert row["speedup"] == pytest.approx(row["bf16_milliseconds"] / row["milliseconds"])
        assert row["milliseconds"] > 0
        assert row["error_vs_fp64"] < PRODUCT_ERROR < row["error_vs_bf16"]
    keys = [(row["linear"], row["pass"], row["casts"], row["accumulation"], row["backend"]) for row in written["rows"]]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--quick", "--presets", "infir3"], "infir2"),
        (["--quick", "--backends", "referense"], "reference"),
        (["--quick", "--json", "/proc/nowhere/x.json"], "cannot write"),
    ],
)
def test_mistakes_name_the_remedy(arguments, expected, capsys):
    with pytest.raises(UserError) as error:
        gemms.main(arguments)
    assert expected in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_large_sizes_and_gpu_backends_are_refused():
    with pytest.raises(UserError, match="--quick"):
        gemms.main(["--size", "7b"])
    with pytest.raises(UserError, match="no CUDA GPU"):
        gemms.main(["--quick", "--backends", "cublas"])


@pytest.mark.parametrize("text", ["0", "16,-1", "a", ""])
def test_token_counts_are_positive_integers(text):
    with pytest.raises(SystemExit):
        gemms.main(["--quick", "--tokens", text])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (7, "7"), ("row", "row"),
        (1148.2, "1148"), (10.34, "10.3"), (0.907, "0.907"), (0.0, "0"), (1.7e-3, "1.7e-03"),
    ],
)  # fmt: skip
def test_cells(value, text):
    assert common.format_cell(value) == text


def test_measure_gives_milliseconds():
    import time

    if common.device().type == "cuda":
        pytest.skip("CUDA events do not see the host sleep")
    assert 5 <= common.measure(lambda: time.sleep(5e-3), milliseconds=20) < 1000


def test_tables_paste_as_markdown(capsys):
    common.print_table("title", ("name", "ms"), [("a", 1.5), ("b", None)])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == "title"
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[1], *lines[3:])] == [
        ["name", "ms"], ["a", "1.5"], ["b", "-"],
    ]  # fmt: skip
