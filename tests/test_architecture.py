"""docs/architecture.md names files, and functions in them, that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
FILES = sorted(set(re.findall(r"`(?!NAME)([\w./]+(?:\.py|\.md|\.toml|/))`", TEXT)))
NAMES = sorted(set(re.findall(r"`([\w/]+\.py)` \(`(\w+)`\)", TEXT)))


@pytest.mark.parametrize("name", FILES)
def test_files(name):
    assert any((folder / name).exists() for folder in (ROOT / "ds_fp8", ROOT))


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_names_in_files(file, name):
    assert re.search(rf"^ *(def |class )?{name}\b", (ROOT / "ds_fp8" / file).read_text(), re.MULTILINE)


def test_every_package_is_told_of():
    packages = [folder.name for folder in (ROOT / "ds_fp8").iterdir() if (folder / "__init__.py").exists()]
    assert [package for package in packages if f"`{package}/`" not in TEXT] == []
