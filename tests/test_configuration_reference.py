"""docs/configuration.md says what the sections are: their keys, defaults and presets."""

import sys
from pathlib import Path

from ds_fp8.config.presets import PRESETS

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import configuration_reference as reference


def test_the_tables_are_those_of_the_sections():
    assert reference.tables() in reference.FILE.read_text(), "run python scripts/configuration_reference.py"


def test_every_key_says_what_it_means():
    fields = [field for section in reference.SECTIONS.values() for field in reference.keys(section)]
    assert [key for key, field in fields if not field.description] == []


def test_every_preset_is_in_the_table():
    text = reference.FILE.read_text().split(reference.BEGIN)[0]
    assert all(f"`{name}`" in text for name in PRESETS)
