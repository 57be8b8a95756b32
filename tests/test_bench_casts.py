"""The benchmark of the casts: what it times, what it counts, and how it refuses."""

import json

import casts
import common
import pytest
import torch

from ds_fp8.casts import QuantizedTensor
from ds_fp8.config.errors import UserError
from ds_fp8.config.presets import PRESETS

SIZE = common.ModelSize(hidden=256, intermediate=384, heads=4, kv_heads=2, head_dim=32)

READ = {
    "x": 2, "dy": 2, "dy · weight scales": 2, "w": 2, "w transposed": 1, "RMSNorm": 2, "RMSNorm again": 2,
    "SwiGLU": 4, "SwiGLU, keeping": 4, "SwiGLU backward": 2 + 2,
}  # fmt: skip
"""Bytes an element that an operation has to read: BF16, but a weight to transpose and SwiGLU's kept halves are FP8."""

OTHERS = {"add, RMSNorm", "RMSNorm backward, add", "bias, rotary", "rotary backward"}
"""Operations that write BF16, too."""


def fp8_bytes(result):
    if isinstance(result, QuantizedTensor):
        return result.data.nbytes
    return sum(map(fp8_bytes, result)) if isinstance(result, tuple) else 0


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("tokens", [128, 100, 1])
def test_bytes_are_those_read_and_written(preset, tokens):
    recipe = common.preset_recipe(preset)
    seen = set()
    for operation in casts.operations(recipe, SIZE, tokens):
        result = operation.run()
        seen.add(operation.name)
        if operation.name in READ:
            written = fp8_bytes(result) / operation.elements
            assert operation.bytes_per_element == READ[operation.name] + written, operation.name
    assert seen >= OTHERS
    assert seen - OTHERS <= READ.keys()


def test_operations_are_told_apart_within_a_preset():
    for preset in PRESETS:
        keys = [(o.name, o.casts) for o in casts.operations(common.preset_recipe(preset), SIZE, 16)]
        assert len(keys) == len(set(keys))


def test_quick_covers_every_preset(tmp_path, capsys):
    file = tmp_path / "casts.json"
    casts.main(["--quick", "--json", str(file)])
    output = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["banner"]["torch"] == torch.__version__
    rows = written["rows"]
    for preset in PRESETS:
        names = {row["operation"] for row in rows if preset in row["presets"]}
        assert names >= OTHERS | {"x", "w", "w transposed", "RMSNorm", "SwiGLU", "SwiGLU, keeping", "SwiGLU backward"}
        assert names & {"dy", "dy · weight scales"}
        assert preset in output
    for row in rows:
        moved = row["elements"] * row["bytes_per_element"]
        assert row["terabytes_per_second"] == pytest.approx(moved / row["milliseconds"] / 1e9, rel=1e-3)
        assert row["of_copy"] > 0
    assert len({(row["operation"], row["casts"]) for row in rows}) == len(rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_peers_are_said_to_be_missing_and_large_sizes_refused(capsys):
    casts.main(["--quick", "--presets", "tensorwise", "--tokens", "16"])
    assert "not measured: Transformer Engine (there is no CUDA GPU)" in capsys.readouterr().out
    with pytest.raises(UserError, match="--quick"):
        casts.main(["--size", "7b"])


def test_a_peer_that_fails_is_said_to(capsys):
    def fail():
        raise RuntimeError("no such kernel\nand a long trace")

    operation = casts.Operation("x", "rows 1x128", 128, 3, lambda: None, fail)
    row = casts.measure_operation(operation, 0.1)
    assert row["te_milliseconds"] is row["of_te"] is None
    assert row["milliseconds"] > 0
    assert "x, rows 1x128 (no such kernel)" in capsys.readouterr().out


def test_a_peer_that_runs_is_compared():
    operation = casts.Operation("x", "rows 1x128", 128, 3, lambda: None, lambda: None)
    row = casts.measure_operation(operation, 0.1)
    assert row["of_te"] == pytest.approx(row["milliseconds"] / row["te_milliseconds"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--quick", "--presets", "infir3"], "infir2"),
        (["--quick", "--tokens", "8", "--presets", "infir2", "--json", "/proc/nowhere/x.json"], "cannot write"),
    ],
)
def test_mistakes_name_the_remedy(arguments, expected, capsys):
    with pytest.raises(UserError) as error:
        casts.main(arguments)
    assert expected in str(error.value)


@pytest.mark.parametrize("text", ["0", "-1", "a", ""])
def test_the_token_count_is_a_positive_integer(text):
    with pytest.raises(SystemExit):
        casts.main(["--quick", "--tokens", text])
