"""Strict sections: every mistake names its key and what would be right."""

import pytest

from ds_fp8.config.errors import UserError
from ds_fp8.config.schema import Section, nearest, parse_section


class Inner(Section):
    width: int = 1
    height: int = 2


class Middle(Section):
    inner: Inner = Inner()
    optional: Inner | None = None
    name: str = "x"


class Outer(Section):
    middle: Middle = Middle()
    ratio: float = 0.5
    needed: int
    several: tuple[Inner, ...] | None = None


def mistake(values, **words) -> UserError:
    with pytest.raises(UserError) as error:
        parse_section(Outer, values, key="top", file="config.json", **words)
    assert str(error.value.file) == "config.json"
    assert "Traceback" not in str(error.value)
    return error.value


def test_values_become_a_section():
    outer = parse_section(Outer, {"needed": 3, "middle": {"inner": {"width": 7}}}, key="top")
    assert (outer.needed, outer.ratio, outer.middle.inner.width, outer.middle.inner.height) == (3, 0.5, 7, 2)


@pytest.mark.parametrize(
    ("values", "key", "meant"),
    [
        ({"ration": 1}, "top.ration", "ratio"),
        ({"middle": {"nam": 1}}, "top.middle.nam", "name"),
        ({"middle": {"inner": {"widht": 1}}}, "top.middle.inner.widht", "width"),
        ({"middle": {"optional": {"heigth": 1}}}, "top.middle.optional.heigth", "height"),
        ({"several": [{}, {"heigth": 1}]}, "top.several.1.heigth", "height"),
    ],
)
def test_an_unknown_key_at_any_depth_names_the_nearest(values, key, meant):
    error = mistake({"needed": 1, **values})
    assert error.key == key
    assert f'"{key.split(".")[-1]}"' in error.problem
    assert f'"{meant}"' in error.remedy


@pytest.mark.parametrize(
    ("values", "key", "shown"),
    [
        ({"needed": "many"}, "top.needed", "'many'"),
        ({"needed": 1.5}, "top.needed", "1.5"),
        ({"needed": 1, "ratio": float("nan")}, "top.ratio", "nan"),
        ({"needed": 1, "ratio": float("inf")}, "top.ratio", "inf"),
        ({"needed": 1, "middle": {"inner": {"width": None}}}, "top.middle.inner.width", "None"),
        ({"needed": 1, "middle": 5}, "top.middle", "5"),
        ({}, "top.needed", "required"),
    ],
)
def test_a_wrong_value_names_its_key_and_is_shown(values, key, shown):
    error = mistake(values)
    assert error.key == key
    assert shown in error.problem
    assert key in error.remedy


@pytest.mark.parametrize("values", [None, 3, "text", ["a"], True])
def test_a_section_that_is_no_object_is_refused(values):
    error = mistake(values)
    assert error.key == "top"
    assert repr(values) in error.problem


def test_a_check_of_the_section_itself_keeps_its_key_and_gains_the_file():
    class Strict(Section):
        def model_post_init(self, context):
            raise UserError("no", key="top.a", remedy="yes")

    with pytest.raises(UserError) as error:
        parse_section(Strict, {}, key="top", file="config.json")
    assert (error.value.key, error.value.remedy, error.value.file) == ("top.a", "yes", "config.json")


def test_a_section_is_immutable():
    with pytest.raises(ValueError, match="frozen"):
        Inner().width = 3


@pytest.mark.parametrize(
    ("key", "choices", "expected"),
    [("formt", ["format", "scale"], 'Did you mean "format"?'), ("zzz", ["b", "a"], "Known keys: a, b."), ("a", [], "")],
)
def test_nearest(key, choices, expected):
    assert nearest(key, choices) == expected
