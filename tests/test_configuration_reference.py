"""The pages of docs/ say what the sections are: their keys, defaults and presets."""

import configuration_reference as reference
import pytest

from ds_fp8.config.presets import PRESETS
from ds_fp8.research.presets import PRESETS as RESEARCH_PRESETS


@pytest.mark.parametrize("file", reference.FILES, ids=lambda file: file.name)
def test_the_tables_are_those_of_the_sections_and_presets(file):
    text = file.read_text()
    assert reference.document(text) == text, "run python scripts/configuration_reference.py"


def test_every_written_part_is_on_a_page_and_every_key_in_one_table():
    pages = "".join(file.read_text() for file in reference.FILES)
    for name in reference.BLOCKS:
        assert pages.count(f"<!-- {name}: written by") == pages.count(f"<!-- end of {name} -->") == 1
    for section in reference.SECTIONS.values():
        for key, field in reference.keys(section):
            assert reference.row(key, field) in pages


def test_every_key_says_what_it_means():
    fields = [field for section in reference.SECTIONS.values() for field in reference.keys(section)]
    assert [key for key, field in fields if not field.description] == []


def test_the_table_of_presets_says_what_travels():
    rows = [
        line.strip("| ").split(" | ") for line in reference.preset_table([*PRESETS, *RESEARCH_PRESETS]).splitlines()[2:]
    ]
    travels = {cells[0].split("`")[1]: cells[2:] for cells in rows}
    assert set(travels) == {*PRESETS, *RESEARCH_PRESETS}
    assert travels["infir2"] == ["E4M3", "E4M3", "FP32"]
    assert travels["fp8lm_o2"] == ["BF16", "E4M3, one adaptive scale per gradient", "moments E4M3 and FP16"]
    assert travels["fp8lm_o3"][2] == "moments E4M3 and FP16"
    assert travels["coat"] == ["E4M3", "BF16", "moments E4M3 with its range expanded"]
    assert travels["halo"] == ["INT8", "BF16", "FP32"]
