"""Pages refer to files and headings that exist; tables of keys and the JSON schema are those of the sections."""

import json
import re
from pathlib import Path

import configuration_reference as reference
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "ds_configs").rglob("*.md"))]
LOG = ROOT / "docs" / "log"


def headings(page):
    """Return the headings of a page, of all levels, code blocks left out."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


def anchor_of(heading):
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in map(anchor_of, headings(file))):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != LOG], ids=lambda page: page.name)
def test_files_of_the_repository_that_a_page_names_are_there(page):
    named = re.findall(r"(?<![\w/])(?:scripts|tests|ds_fp8|docs)/[\w./]+\.(?:py|sh|md)", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_files_that_docstrings_and_comments_name_are_there():
    paths = [
        f"/{file.relative_to(ROOT)}"
        for folder in ("ds_fp8", "tests", "scripts")
        for file in (ROOT / folder).rglob("*.py")
    ]
    gone = []
    for file in (ROOT / "ds_fp8").rglob("*.py"):
        for name in re.findall(r"(?<![\w/.$\"{])(?:[a-z_0-9]+/)*[a-z_0-9]+\.py\b", file.read_text()):
            if not any(path.endswith(f"/{name}") for path in paths):
                gone.append((file.name, name))
    assert gone == []


def test_files_and_packages_that_the_page_of_architecture_names_are_there_and_no_package_is_forgotten():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`(?!NAME)([\w/]+(?:\.py|/))`", text)) - {
        "linear/",
        "decoder/",
        "experts/",
        "attention/",
        "head/",
    }
    assert [name for name in named if not any((folder / name).exists() for folder in (ROOT / "ds_fp8", ROOT))] == []
    packages = [f"{folder.name}/" for folder in (ROOT / "ds_fp8").iterdir() if (folder / "__init__.py").exists()]
    assert set(packages) <= named


def test_messages_that_the_page_of_symptoms_quotes_are_those_of_the_code():
    signs = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [
        quote for sign in signs for quote in re.findall(r'(?<!`)"([^"`]{6,})"(?!`)', re.sub(r"`[^`]*`", "", sign))
    ]
    source = "".join(file.read_text() for file in (ROOT / "ds_fp8").rglob("*.py"))
    source = re.sub(r'"\s+f?"', "", source)  # a text over several lines
    # Names, numbers and dots stand for what the code fills in.
    parts = [part.strip(" :,") for quote in quoted for part in re.split(r"\.\.\.|\b\d+\b|\b[A-Z_]{4,}\b", quote)]
    assert len(quoted) > 6
    assert [part for part in parts if len(part) > 5 and part not in source] == []


# ---------------------------------------------------------------- tables of keys, and the JSON schema


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
