"""Where an export may write: said before the work."""

import hashlib
import os

import pytest

from ds_fp8.config.errors import UserError
from ds_fp8.data import DataConfig, build_data
from ds_fp8.export import export_checkpoint
from ds_fp8.export.folder import _complete, check_target
from tests.corpus import DOCUMENTS


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (".", "you are in"),
        ("..", "you are in"),
        ("file", "exists"),
        ("file/out", "cannot be written"),
        ("/dev/null/out", "cannot be written"),
    ],
)
def test_targets_that_are_refused(target, problem, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here/file").touch()
    with pytest.raises(UserError, match=problem) as caught:
        export_checkpoint(tmp_path / "checkpoint", target, None, None, force=True)
    assert caught.value.remedy


def exported(folder):
    """A folder as exports leave it: files, and their sums by name."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "checksums.sha256").write_text(f"{hashlib.sha256(b'{}').hexdigest()}  config.json\n")


def named_by_a_foreign_list(folder):
    (folder / "thesis.txt").write_text("mine")
    with (folder / "checksums.sha256").open("a") as file:
        file.write("0  thesis.txt\n")


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "mine.txt").write_text("mine"), "holds mine.txt next to an export"),
        (lambda folder: (folder / "mine").mkdir(), "holds mine next to an export"),
        (lambda folder: (folder / "checksums.sha256").unlink(), "holds no export"),
        (named_by_a_foreign_list, "holds thesis.txt, which is not as an export wrote it"),
        (lambda folder: (folder / "config.json").write_text("mine"), "holds config.json, which is not as"),
        (lambda folder: (folder / "checksums.sha256").write_text("0123  other"), "holds no export"),
        (lambda folder: None, None),
        (lambda folder: [path.unlink() for path in folder.iterdir()], None),
    ],
)
def test_force_replaces_exports_alone(change, words, linked, tmp_path):
    exported(tmp_path / "real")
    change(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    target = tmp_path / ("link" if linked else "real")
    if words is None:
        check_target(target, force=True)
        return
    with pytest.raises(UserError, match=words) as caught:
        check_target(target, force=True)
    assert caught.value.remedy


def test_a_folder_of_the_user_by_the_name_of_an_unfinished_export_stays(tmp_path):
    (tmp_path / "served.part").mkdir()
    (tmp_path / "served.part/mine").touch()
    with _complete(tmp_path / "served") as part:
        (part / "new").touch()
    assert sorted(os.listdir(tmp_path)) == ["served", "served.part"]
    assert os.listdir(tmp_path / "served.part") == ["mine"]


def test_a_target_behind_a_link_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    check_target(tmp_path / "link", force=True)
    with _complete(tmp_path / "link") as part:
        (part / "new").touch()
    assert os.listdir(tmp_path / "real") == ["new"]
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


@pytest.mark.parametrize(("own", "key"), [(True, "data.cache_dir"), (False, "DS_FP8_CACHE")])
def test_a_cache_that_cannot_be_written(own, key, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_FP8_CACHE", str(tmp_path / "file/cache"))
    (tmp_path / "file").touch()
    config = DataConfig(**DOCUMENTS, cache_dir=str(tmp_path / "file/cache") if own else None)
    with pytest.raises(UserError, match="cannot be written") as caught:
        build_data(config, None)
    assert caught.value.key == key
