"""`ds-fp8 export` of runs, of damaged ones, and of folders."""

import json
import shutil

import pytest
import torch

from ds_fp8.casts import QuantizedTensor, quantize
from ds_fp8.cli import main
from ds_fp8.config.errors import UserError
from ds_fp8.train.checkpoints import MANIFEST, Manifest, SavedFile, hash_of
from ds_fp8.train.stored_model import ModelSource, load_stored_model, stored_config
from tests.export.trained import logits, tensors, train_and_export


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    ranks(2, train_and_export, folder, {}, ["fp8", "bf16"], 1 << 30, {})
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A run folder with this checkpoint; call it with the training's JSON."""

    def of(config):
        run_dir = tmp_path / "run"
        checkpoint = run_dir / "checkpoints/step_3"
        shutil.copytree(trained / "checkpoints/step_3", checkpoint)
        shutil.copytree(trained / "bf16", run_dir / "model")
        # What a user has changed since is not what was trained.
        (run_dir / "config.json").write_text(json.dumps({"fp8": {"preset": "rowwise"}}))
        files = {file.name: SavedFile(file.stat().st_size, hash_of(file), 0) for file in checkpoint.glob("*.pt")}
        Manifest(3, 2, 4, 3, (), config, {}, files).write(checkpoint)
        return run_dir

    return of


def equal(folder, other):
    found, expected = tensors(folder), tensors(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), own.view(torch.uint8)) for name, own in expected.items())


def exchanged(checkpoint):
    first, second = sorted(checkpoint.glob("*_optim_states.pt"))
    first.rename(checkpoint / "other")
    second.rename(first)
    (checkpoint / "other").rename(second)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (None, None),
        (exchanged, "has other content than was saved"),
        (lambda checkpoint: (checkpoint / MANIFEST).unlink(), "manifest.json is missing"),
    ],
)
def test_a_run_is_exported_as_it_was_saved_or_not_at_all(trained, run, tmp_path, damage, words):
    run_dir = run({"fp8": {}})
    command = ["export", str(run_dir), str(tmp_path / "out")]
    if damage is None:
        assert main(command) == 0
        equal(tmp_path / "out", trained / "fp8")
        return
    damage(run_dir / "checkpoints/step_3")
    with pytest.raises(UserError, match=words) as caught:
        main(command)
    assert "another checkpoint" in caught.value.remedy
    assert not (tmp_path / "out").exists()


def test_outlier_channels_that_a_folder_has_not_are_named(run, tmp_path, capsys):
    assert main(["export", str(run({"fp8": {"preset": "precise"}})), str(tmp_path / "out")]) == 0
    assert "outlier channels of training are in no FP8 folder" in capsys.readouterr().out


def test_a_run_of_adapters_gives_its_merged_model(trained, run, tmp_path):
    run_dir = run({"fp8": {}, "train": {"lora": {"r": 4}}})
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    assert main(["export", str(run_dir), str(tmp_path / "bf16"), "--format", "bf16"]) == 0
    equal(tmp_path / "bf16", trained / "bf16")
    found = tensors(tmp_path / "out")
    for name, weight in tensors(trained / "bf16").items():
        if f"{name}_scale_inv" in found:
            codes = quantize(weight, "e4m3", "128x128", "pow2")
            assert torch.equal(found[name].view(torch.uint8), codes.data.view(torch.uint8))
            assert torch.equal(found[f"{name}_scale_inv"], codes.scale)
    assert sum(name.endswith("_scale_inv") for name in found) == 14
    assert "trained" not in (tmp_path / "out/README.md").read_text().partition("```")[0]
    with pytest.raises(UserError, match="adapters") as caught:
        main(["export", str(run_dir / "checkpoints/step_3"), str(tmp_path / "again")])
    assert f"ds-fp8 export {run_dir}" in caught.value.remedy


def test_a_folder_is_exported_in_the_other_type(trained, tmp_path):
    assert main(["export", str(trained / "bf16"), str(tmp_path / "fp8")]) == 0
    assert main(["export", str(tmp_path / "fp8"), str(tmp_path / "bf16"), "--format", "bf16"]) == 0
    codes, again = tensors(tmp_path / "fp8"), tensors(tmp_path / "bf16")
    for name, weight in again.items():
        expected = codes[name]
        if f"{name}_scale_inv" in codes:
            expected = QuantizedTensor(expected, codes[f"{name}_scale_inv"], "128x128").dequantize(torch.bfloat16)
        assert torch.equal(weight, expected), name
    with pytest.raises(UserError, match="is in FP8") as caught:
        main(["export", str(tmp_path / "fp8"), str(tmp_path / "again")])
    assert "--format bf16" in caught.value.remedy


def test_weights_that_an_export_did_not_write_are_not_loaded(trained, tmp_path):
    shutil.copytree(trained / "fp8", tmp_path / "fp8")
    source = ModelSource("FOLDER", str(tmp_path / "fp8"))
    assert logits(load_stored_model(source, stored_config(source), {})).isfinite().all()
    file = tmp_path / "fp8/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors .* has another content") as caught:
        load_stored_model(source, stored_config(source), {})
    assert "checksums.sha256" in caught.value.remedy
