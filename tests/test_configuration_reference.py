"""The tables of keys and the JSON schema are those of the sections."""

import json

import configuration_reference as reference
import pytest


@pytest.mark.parametrize("file", reference.FILES, ids=lambda file: file.name)
def test_the_tables_are_those_of_the_sections_and_presets(file):
    text = file.read_text()
    assert reference.document(text) == text, "run python scripts/configuration_reference.py"


def test_the_schema_is_that_of_the_sections_and_has_a_description_for_every_key():
    text = reference.SCHEMA.read_text()
    assert reference.schema() == text, "run python scripts/configuration_reference.py"
    found = json.loads(text)["$defs"]
    for name, section in reference.SECTIONS.items():
        assert found[name]["properties"].keys() >= {key.partition(".")[0] for key, _ in reference.keys(section)}
        assert [key for key, field in reference.keys(section) if not field.description] == []


def test_an_editor_marks_a_key_that_no_section_has():
    found = json.loads(reference.SCHEMA.read_text())
    for name in reference.SECTIONS:
        assert found["$defs"][name]["additionalProperties"] is False
        assert found["properties"][name] == {"$ref": f"#/$defs/{name}"}
