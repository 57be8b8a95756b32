"""docs/api.md says what the docstrings say, of every public name."""

import api_reference as reference

import ds_fp8


def test_the_page_is_up_to_date():
    assert reference.document() == reference.FILE.read_text(), "run python scripts/api_reference.py"


def test_every_public_name_is_on_the_page():
    from ds_fp8 import export

    told = {path for names in reference.PAGE.values() for path in names}
    public = {f"ds_fp8.{name}" for name in ds_fp8.__all__} | {f"ds_fp8.export.{name}" for name in export.__all__}
    assert public - told == set()


def test_blocks_of_a_docstring():
    text = "Do it.\n\nMore.\n\nArgs:\n    x: One,\n        two.\n    y: Three.\n\nReturns:\n    All of\n    it.\n"
    assert reference.markdown(text) == (
        "Do it.\n\nMore.\n\n**Args**\n\n- `x`: One,\n  two.\n- `y`: Three.\n\n**Returns**\n\nAll of\nit.\n"
    )


def test_signatures_show_defaults_and_what_is_given_by_name_only():
    def function(a: "int", *, b: "str" = "c") -> "None":
        """Do nothing."""

    assert reference.signature("f", function) == "f(a: int, *, b: str = 'c') -> None"
