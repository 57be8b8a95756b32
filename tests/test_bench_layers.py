"""The benchmark of decoder layers: what it compares, what it reports, and how it refuses."""

import json

import common
import decoder_stacks
import layers
import pytest
import torch

from ds_fp8.config.errors import UserError
from ds_fp8.config.presets import PRESETS
from ds_fp8.layers.linear.linear import FP8Linear

SHAPE = decoder_stacks.Shape(common.SIZES["tiny"], layers=1, sequences=2, length=24)

FP8_ERROR = 0.01, 0.15
"""What FP8 costs a layer: less would mean that nothing was cast."""

SAME = 1e-2 if torch.cuda.is_available() else 0
"""Between two runs of one computation: attention's backward adds in any order on a GPU."""

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def relative_error(found, expected):
    return layers.relative_error(found.double(), expected.double())


@pytest.mark.parametrize("preset", list(common.distinct_presets(PRESETS)))
def test_our_layers_compute_what_transformers_do_whatever_is_recomputed_or_held(preset):
    x, dy = layers.operands(SHAPE)
    y, dx = decoder_stacks.transformers_layers(SHAPE).step(x, dy)
    results = []
    for weights in ("fp8", "bf16"):
        for recompute in ("none", "mlp", "layer"):
            activations = {"recompute": "mlp"} if recompute == "mlp" else None
            stack = decoder_stacks.our_layers(SHAPE, preset, weights, activations)
            results.append(stack.step(x, dy, recompute == "layer"))
            held = [
                module.weight.isnan().any().item() for module in stack.layers.modules() if type(module) is FP8Linear
            ]
            assert set(held) == {weights == "fp8"}
    low, high = FP8_ERROR
    assert low < relative_error(results[0][0] - x, y - x) < high
    assert low < relative_error(results[0][1] - dy, dx - dy) < high
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            assert relative_error(one, same) <= SAME


def test_recompute_keeps_less():
    def kept_bytes(recompute):
        kept = {}
        stack = decoder_stacks.transformers_layers(SHAPE)
        owned = {parameter.data_ptr() for parameter in stack.layers.parameters()}
        x, dy = layers.operands(SHAPE)

        def pack(tensor):
            if tensor.data_ptr() not in owned:
                kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            stack.step(x, dy, recompute)
        return sum(kept.values())

    assert kept_bytes(True) < kept_bytes(False) / 2


def test_a_layer_that_cannot_be_fused_is_an_error():
    narrow = SHAPE.size._replace(intermediate=320)  # gate's last 128x128 block would straddle up
    with pytest.raises(UserError, match="straddle"):
        decoder_stacks.our_layers(decoder_stacks.Shape(narrow, 1, 1, 8), "infir2", "fp8")


def quick(tmp_path, *arguments):
    file = tmp_path / "layers.json"
    size = "--layers", "1", "--length", "16", "--sequences", "1", "--repeats", "1"
    layers.main(["--quick", *size, "--json", str(file), *arguments])
    return json.loads(file.read_text())


@pytest.mark.slow
def test_quick_measures_every_preset_beside_bf16(tmp_path, capsys):
    written = quick(tmp_path)
    output = capsys.readouterr().out
    assert written["banner"]["torch"] == torch.__version__
    assert written["shape"] == {"layers": 1, "sequences": 1, "length": 16, "repeats": 1}
    rows = {(row["layers"], row["weights"], row["recompute"]): row for row in written["rows"]}
    assert len(rows) == len(written["rows"])
    presets = common.distinct_presets(PRESETS)
    expected = {("hf", "bf16", "none")} | {(preset, held, "none") for preset in presets for held in ("fp8", "bf16")}
    assert rows.keys() >= expected
    hf = rows["hf", "bf16", "none"]
    assert max(hf["y_error"], hf["dx_error"]) <= SAME
    for key in expected - {("hf", "bf16", "none")}:
        low, high = FP8_ERROR
        assert low < rows[key]["y_error"] < high
        assert low < rows[key]["dx_error"] < high
        assert rows[key]["speedup_over_hf"] == pytest.approx(hf["milliseconds"] / rows[key]["milliseconds"])
        assert rows[key]["backend"] == common.preset_recipe(key[0]).backend
        assert key[0] in output


@needs_no_gpu
@pytest.mark.slow
def test_missing_peers_are_said_to_be(tmp_path, capsys):
    rows = quick(tmp_path, "--only", "hf,te-block,torchao-rowwise,rowwise", "--recompute")["rows"]
    output = capsys.readouterr().out
    assert "not measured: te-block (there is no CUDA GPU)" in output
    assert "not measured: torchao-rowwise" in output
    kinds = {(row["layers"], row["recompute"]) for row in rows}
    assert kinds == {("hf", "none"), ("hf", "layer"), *(("rowwise", kind) for kind in ("none", "mlp", "layer"))}
    assert all(row["time_of_te"] is None for row in rows)


def test_ratios_compare_rows_of_the_same_recompute():
    def row(name, weights, recompute, milliseconds, peak):
        keys = "layers", "weights", "recompute", "milliseconds", "peak_gib"
        return dict(zip(keys, (name, weights, recompute, milliseconds, peak), strict=True))

    rows = [
        row("hf", "bf16", "none", 200.0, 16.0), row("hf", "bf16", "layer", 260.0, 4.0),
        row("torchao-tensorwise", "bf16", "none", 160.0, 8.0),
        row("te-block", "bf16", "none", 1.0, 1.0), row("te-block", "fp8", "none", 125.0, 10.0),
        row("te-block", "fp8", "layer", 160.0, 5.0),
        row("infir2", "fp8", "none", 100.0, 5.0), row("infir2", "fp8", "mlp", 110.0, 4.0),
        row("infir2", "fp8", "layer", 130.0, 2.0),
    ]  # fmt: skip
    layers.add_ratios(rows)
    none, mlp, layer = rows[-3:]
    keys = "speedup_over_hf", "time_of_te", "peak_of_te", "time_of_torchao", "peak_of_torchao"
    assert [none[key] for key in keys] == [2.0, 0.8, 0.5, 0.625, 0.625]
    assert [mlp[key] for key in keys] == pytest.approx([200 / 110, 0.88, 0.4, 110 / 160, 0.5])
    assert [layer[key] for key in keys] == [2.0, 0.8125, 0.4, None, None]


def test_a_peer_that_fails_is_said_to_and_the_rest_measured(capsys):
    def fail(shape):
        raise RuntimeError("no kernel image\nand a long trace")

    hf = decoder_stacks.contestants()[0]
    broken = decoder_stacks.Contestant("te-block", "fp8", fail, lambda: None)
    results = list(layers.measure_rows([layers.Row(broken, "none"), layers.Row(hf, "none")], SHAPE, 1))
    assert [result["layers"] for result in results] == ["hf"]
    assert "not measured: te-block, fp8 weights, recompute none (no kernel image)" in capsys.readouterr().out


def test_our_own_failure_is_not_swallowed():
    def fail(shape):
        raise RuntimeError("a bug")

    ours = decoder_stacks.Contestant("infir2", "fp8", fail, lambda: None, is_peer=False)
    with pytest.raises(RuntimeError, match="a bug"):
        list(layers.measure_rows([layers.Row(ours, "none")], SHAPE, 1))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--quick", "--only", "infir3"], "infir2"),
        (["--quick", "--sizes", "7c"], "7b"),
    ],
)
def test_mistakes_name_the_remedy(arguments, expected):
    with pytest.raises(UserError) as error:
        layers.main(arguments)
    assert expected in str(error.value)


@needs_no_gpu
def test_without_a_gpu_large_sizes_are_refused():
    with pytest.raises(UserError, match="--quick"):
        layers.main(["--sizes", "7b"])


@pytest.mark.parametrize("option", ["--layers", "--length", "--repeats"])
def test_counts_are_positive_integers(option):
    with pytest.raises(SystemExit):
        layers.main(["--quick", option, "0"])
