"""`install` and `python -m ds_fp8`: what other programs' calls of deepspeed.initialize become."""

from __future__ import annotations

import contextlib
import io
import json
import sys

import deepspeed
import pytest
from accelerate.utils import DeepSpeedPlugin
from deepspeed import comm as dist

import ds_fp8
from ds_fp8.__main__ import main
from ds_fp8.config.errors import UserError
from ds_fp8.integrations.install import with_section
from tests.zero.models import Net, config


@pytest.fixture
def clean():
    """deepspeed.initialize as it was, afterwards too."""
    yield deepspeed.initialize
    ds_fp8.uninstall()


def engines(section, default, twice):
    """What reports of engines say that DeepSpeed's initialize makes: with a section, without one, and after
    uninstall."""
    if twice:
        ds_fp8.install()
    ds_fp8.install(default)
    try:
        results = []
        for raw in (config(section), config()):
            by_position = (None, Net().bfloat16(), None, None, None, None, 29500, None, None, None, raw)
            results.append(deepspeed.initialize(*by_position)[0].fp8.report)
    finally:
        ds_fp8.uninstall()
    plain = deepspeed.initialize(model=Net().bfloat16(), config=config(section))[0]
    made, enabled = ([report.get(key) for report in results] for key in ("preset", "enabled"))
    return made, enabled, hasattr(plain, "fp8")


@pytest.mark.parametrize(
    ("default", "twice", "presets"), [(None, True, ["rowwise", None]), ("coat", False, ["rowwise", "coat"])]
)
def test_every_call_honours_its_section_until_uninstalled(ranks, default, twice, presets):
    for made, enabled, still_installed in ranks(2, engines, {"preset": "rowwise"}, default, twice):
        assert made == presets
        assert enabled == [preset is not None for preset in presets]  # as docs/integrations.md has programs ask
        assert not still_installed


def test_a_second_install_changes_nothing_and_one_uninstall_undoes_both(clean):
    process = DeepSpeedPlugin.deepspeed_config_process
    ds_fp8.install()
    first = deepspeed.initialize, DeepSpeedPlugin.deepspeed_config_process
    ds_fp8.install()
    assert (deepspeed.initialize, DeepSpeedPlugin.deepspeed_config_process) == first != (clean, process)
    ds_fp8.uninstall()
    ds_fp8.uninstall()
    assert (deepspeed.initialize, DeepSpeedPlugin.deepspeed_config_process) == (clean, process)


def test_accelerate_fills_in_its_values_and_leaves_the_section_alone(clean, monkeypatch):
    section = {"fuse": "auto", "linear": {"backend": "auto"}}
    raw = {**config(section), "gradient_clipping": "auto"}
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    ds_fp8.install()
    plugin = DeepSpeedPlugin(hf_ds_config=raw)
    plugin.deepspeed_config_process(must_match=False, gradient_clipping=0.5)
    assert plugin.deepspeed_config["gradient_clipping"] == 0.5
    assert plugin.deepspeed_config["fp8"] == section


def test_an_empty_variable_is_none_and_true_is_a_section(clean, monkeypatch):
    monkeypatch.setenv("DS_FP8", "")
    ds_fp8.install()
    assert "fp8" not in with_section({})
    ds_fp8.install(True)
    assert with_section({}) == {"fp8": {}}


@pytest.mark.parametrize("value", ['{"preset": ', "coats", '{"fuze": "off"}'])
def test_a_default_that_is_no_section_is_refused(clean, monkeypatch, value):
    monkeypatch.setenv("DS_FP8", value)
    with pytest.raises(UserError) as caught:
        ds_fp8.install()
    assert caught.value.file == "environment variable DS_FP8"
    assert caught.value.remedy
    assert deepspeed.initialize is clean


def test_a_program_is_run_as_python_runs_it_with_fp8_installed(clean, monkeypatch, tmp_path):
    (tmp_path / "beside.py").write_text("")
    program = tmp_path / "program.py"
    out = tmp_path / "out.json"
    program.write_text(
        "import json, sys, beside, deepspeed\n"
        f"json.dump([__name__, sys.argv, deepspeed.initialize.__wrapped__ is not None], open({str(out)!r}, 'w'))\n"
    )
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", ["ds_fp8", "--local_rank=1", str(program), "--lr", "1"])
    main()
    assert json.loads(out.read_text()) == ["__main__", [str(program), "--local_rank=1", "--lr", "1"], True]


@pytest.mark.parametrize("arguments", [[], ["--stritc", "x.py"], ["absent.py"]])
def test_without_a_program_the_remedy_is_the_command_line(clean, monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["ds_fp8", *arguments])
    with pytest.raises(UserError) as caught:
        main()
    assert "-m" in caught.value.remedy


def test_help_is_help(clean, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ds_fp8", "--help"])
    main()
    assert "usage: python -m ds_fp8" in capsys.readouterr().out


def start_without_section(tmp_path, strict, section):
    """Run a program of one engine under `python -m ds_fp8` and return what rank 0 prints, or the error."""
    program = tmp_path / f"program{dist.get_rank()}.py"  # one each: another rank's may be half written
    file = program.with_suffix(".json")
    file.write_text(json.dumps(config(section)))
    program.write_text(
        "import deepspeed\nfrom tests.zero.models import Net\n"
        f"deepspeed.initialize(model=Net().bfloat16(), config={str(file)!r})\n"
    )
    argv, before, said = sys.argv, sys.path[0], io.StringIO()
    sys.argv = ["ds_fp8", *(["--strict"] if strict else []), str(program)]
    try:
        with contextlib.redirect_stdout(said):
            main()
        return said.getvalue()
    except UserError as error:
        return str(error)
    finally:
        sys.argv, sys.path[0] = argv, before
        ds_fp8.uninstall()


@pytest.mark.parametrize("strict", [False, True])
def test_a_configuration_without_a_section_is_said_or_refused(ranks, tmp_path, strict, monkeypatch):
    monkeypatch.delenv("DS_FP8", raising=False)
    said = ranks(2, start_without_section, tmp_path, strict, None)
    assert 'no "fp8" section' in said[0]
    assert 'add "fp8": {} to it' in said[0]
    if strict:
        for rank, words in enumerate(said):
            assert words.startswith("error: ")
            assert str(tmp_path / f"program{rank}.json") in words
    else:
        assert said[0].count("ds_fp8: ") == 1
        assert "ds_fp8: " not in said[1]
    for section in ({"preset": "rowwise"}, {"enabled": False}):  # asked for, or asked not to be
        assert not any('no "fp8"' in words for words in ranks(2, start_without_section, tmp_path, strict, section))
