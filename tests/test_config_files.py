"""Configuration files and overrides: what DeepSpeed reads is read alike, and whatever else there is, is an error."""

import base64
import json

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fp8.config.errors import UserError
from ds_fp8.config.files import MAX_BYTES, MAX_DEPTH, apply_override, read_config, read_json

HJSON = """\ufeff{
  # how many
  "train_micro_batch_size_per_gpu": 2, // rows
  /* the rest */
  "zero_optimization": {"stage": 3,},
}
"""


def test_comments_and_trailing_commas_are_read_as_deepspeed_reads_them(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(HJSON.lstrip("\ufeff"))
    raw = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    assert read_json(file) == raw
    assert DeepSpeedConfig(str(file)).zero_config.stage == 3
    file.write_text(HJSON)
    assert read_json(file) == raw


def test_base64_is_read_as_deepspeed_reads_it():
    encoded = base64.urlsafe_b64encode(b'{"bf16": {"enabled": true}}').decode()
    assert read_config(encoded) == ({"bf16": {"enabled": True}}, None)


def test_a_mapping_is_copied():
    given = {"bf16": {"enabled": True}}
    raw, file = read_config(given)
    raw["bf16"]["enabled"] = False
    assert (given, file) == ({"bf16": {"enabled": True}}, None)


# (text, words of the error)
WRONG_TEXTS = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"[1, 2]", "JSON object"),
    (b"3", "JSON object"),
    (b"hello", "not valid JSON"),
    (b'{"a": 1} {"b": 2}', "line 1, column 10"),
    (b'{"a": 1, # one\n"b" 2}', "line 2"),
    (b'{"a": {"b": 1, "b": 2}}', '"b" appears twice'),
    (b'{"a": 1, # one\n"a": 2}', '"a" appears twice'),
    (b'{"a": NaN}', "not valid JSON"),
    (b'{"a": -Infinity}', "not valid JSON"),
    (b'{"a": [1e999]}', "inf"),
    (b'{"a": {"b": 99999999999999999999}}', "a.b"),
    (b'{"a": ' + b"9" * 5000 + b"}", "finite numbers"),
    (b'{"a": ' + b"9" * 5000 + b", # one\n}", "numbers"),
    (b'{"a": ' * 40 + b"1" + b"}" * 40, f"{MAX_DEPTH} levels"),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", f"{MAX_DEPTH} levels"),
    (b"[" * 100_000, f"{MAX_DEPTH} levels"),
    (b'{"a": "\\ud800"}', "Unicode"),
    (b'{"a\\ud800": {"c": 1}}', "Unicode"),
    (b'{"a": "x\\u0000y"}', "Unicode"),
    (b'{"a": "\xff\xfe"}', "cannot be read"),
    (b"\x00\x01\x02" * 50, "not valid JSON"),
    (b'{"' + b"k" * 100_000 + b'": 1, "' + b"k" * 100_000 + b'": 2}', "appears twice"),
    (b" " * (MAX_BYTES + 1), "bytes"),
]


@pytest.mark.parametrize(("text", "words"), WRONG_TEXTS, ids=lambda value: repr(value)[:30])
def test_what_is_no_configuration_is_refused_on_one_screen(text, words, tmp_path):
    file = tmp_path / "ds.json"
    file.write_bytes(text)
    with pytest.raises(UserError) as caught:
        read_json(file)
    screen = str(caught.value)
    assert words in screen
    assert str(file) in screen
    assert caught.value.remedy
    assert len(screen) < 1000
    screen.encode()


@pytest.mark.parametrize("name", ["none.json", ".", "x" * 5000, "a\0b", "folder"])
def test_what_is_no_file_is_refused(name, tmp_path):
    (tmp_path / "folder").mkdir()
    for read in (read_json, read_config):
        with pytest.raises(UserError) as caught:
            read(f"{tmp_path}/{name}")
        assert caught.value.remedy
        assert len(str(caught.value)) < 1000


def test_a_device_is_not_read():
    with pytest.raises(UserError, match="is not a file"):
        read_json("/dev/zero")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("a=1", 1),
        ("a=1.5e-3", 1.5e-3),
        ("a=true", True),
        ("a=null", None),
        ("a=text", "text"),
        ("a=", ""),
        ("a=x=y", "x=y"),
        ("a=NaN", "NaN"),
        ('a={"b": NaN}', '{"b": NaN}'),
        ("a=[1, 2", "[1, 2"),
        ('a={"b": [1]}', {"b": [1]}),
        ('a="1"', "1"),
    ],
)
def test_a_value_is_json_or_text(override, value):
    raw = {}
    apply_override(raw, override)
    assert raw == {"a": value}


@pytest.mark.parametrize(
    "override",
    [
        "",
        "a",
        "=1",
        "a..b=1",
        ".=1",
        "a=1e999",
        "a=-1e999",
        "a=" + "9" * 5000,
        "a=99999999999999999999",
        "a=" + "[" * 100_000,
        "a=" + "[" * 100_000 + "]" * 100_000,
        "a=" + '{"x":' * 40 + "1" + "}" * 40,
        ".".join("a" * 5000) + "=1",
        'a={"x": 1, "x": 2}',
        'a="\\ud800"',
        "a=\udcff",
        "a\0=1",
        "n.x=1",
        "k" * 100_000,
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_a_wrong_override_is_refused_and_changes_nothing(override):
    raw = {"n": [1]}
    with pytest.raises(UserError) as caught:
        apply_override(raw, override)
    assert raw == {"n": [1]}
    assert caught.value.remedy
    assert len(str(caught.value)) < 1500
    str(caught.value).encode()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(raw=st.dictionaries(st.text("abcd", min_size=1), PLAIN, max_size=5), indent=st.sampled_from([None, 2]))
def test_plain_json_is_read_as_it_is(raw, indent, tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "ds.json"
    file.write_text(json.dumps(raw, indent=indent))
    assert read_json(file) == raw
    for key, value in raw.items():
        target = {}
        apply_override(target, f"{key}={json.dumps(value)}")
        assert target == {key: value}
