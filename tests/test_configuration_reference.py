"""docs/configuration.md says what the sections are: their keys, defaults and presets."""

import sys
from pathlib import Path

from ds_fp8.config.presets import EMULATED_PRESETS, PRESETS

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import configuration_reference as reference


def test_the_tables_are_those_of_the_sections_and_presets():
    text = reference.FILE.read_text()
    assert reference.document(text) == text, "run python scripts/configuration_reference.py"


def test_every_key_says_what_it_means():
    fields = [field for section in reference.SECTIONS.values() for field in reference.keys(section)]
    assert [key for key, field in fields if not field.description] == []


def test_the_table_of_presets_says_what_travels():
    rows = [line.strip("| ").split(" | ") for line in reference.preset_table().splitlines()[2:]]
    travels = {cells[0].split("`")[1]: cells[2:] for cells in rows}
    assert set(travels) == {*PRESETS, *EMULATED_PRESETS}
    assert travels["infir2"] == ["E4M3", "E4M3", "FP32"]
    assert travels["fp8lm_o2"] == ["BF16", "E4M3, one adaptive scale per gradient", "moments E4M3 and FP16"]
    assert travels["fp8lm_o3"][2] == "moments E4M3 and FP16; masters FP16"
    assert travels["coat"] == ["E4M3", "BF16", "moments E4M3 with its range expanded"]
    assert travels["halo"] == ["INT8", "BF16", "FP32"]
