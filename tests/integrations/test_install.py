"""install and python -m ds_fp8, the plugin for Axolotl, and what loaders tell of their batches."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import sys
from types import ModuleType, SimpleNamespace

import deepspeed
import pytest
import torch
import yaml
from accelerate import data_loader
from accelerate.utils import DeepSpeedPlugin
from deepspeed import comm as dist
from torch import nn

import ds_fp8
from ds_fp8.__main__ import main
from ds_fp8.config.errors import UserError
from ds_fp8.graphs.conditions import rows_in_a_graph
from ds_fp8.integrations.install import uninstall, with_section
from ds_fp8.layers.attention import documents
from tests.integrations.test_examples import EXAMPLES
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


# -------------------- what Accelerate's loader moves to a device is known on the host


# A tensor on it has no values: whoever reads one raises, as whoever waits for a GPU does not.
ELSEWHERE = torch.device("meta")


@pytest.fixture
def loader():
    """Accelerate's loader of these batches, on a device."""
    ds_fp8.install()

    def load(*batches):
        loader = torch.utils.data.DataLoader(list(batches), batch_size=None)
        return list(data_loader.prepare_data_loader(loader, device=ELSEWHERE, put_on_device=True, even_batches=False))

    yield load
    uninstall()


def batch(mask, positions=None):
    found = {"input_ids": torch.ones(2, 4, dtype=torch.int64)}
    if mask is not None:
        found["attention_mask"] = torch.tensor(mask)
    if positions is not None:
        found["position_ids"] = torch.tensor(positions)
    return found


ONES, PADDED = [[1, 1, 1, 1]] * 2, [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_masks_are_known_without_a_wait(loader):
    whole, padded = loader(batch(ONES), batch(PADDED))
    assert whole["attention_mask"].device == ELSEWHERE
    for _ in range(2):
        assert rows_in_a_graph(nn.Identity(), whole) == (0, None)
        assert "padded" in rows_in_a_graph(nn.Identity(), padded)[1]


def test_positions_are_known_without_a_wait(loader):
    (one,) = loader(batch(None, [[0, 1, 2, 3]] * 2))
    assert rows_in_a_graph(nn.Identity(), one) == (0, None)
    (several,) = loader(batch(None, [[0, 1, 0, 1], [0, 1, 2, 3]]))
    assert documents.count(several["position_ids"]) == 3


def test_a_mask_that_is_written_to_is_read_again(loader):
    (moved,) = loader(batch(ONES))
    moved["attention_mask"].zero_()
    with pytest.raises((RuntimeError, NotImplementedError)):
        rows_in_a_graph(nn.Identity(), moved)


def test_without_it_somebody_waits(loader):
    uninstall()
    (moved,) = loader(batch(ONES))
    with pytest.raises((RuntimeError, NotImplementedError)):
        rows_in_a_graph(nn.Identity(), moved)


def test_a_mask_is_read_once():
    mask = torch.tensor(PADDED)
    assert not documents.is_full(mask)
    mask.data = torch.ones(2, 4, dtype=torch.int64)  # which no version tells of: only a note does not see it
    assert not documents.is_full(mask)
    mask.fill_(1)
    assert documents.is_full(mask)
    mask[0, 0] = 0
    assert not documents.is_full(mask)
    with torch.inference_mode():
        assert documents.is_full(torch.ones(2, 3))


# -------------------- the plugin for Axolotl; without Axolotl, below a class of the same name and method


@pytest.fixture
def plugin(monkeypatch):
    """The plugin that the example's YAML names, made as Axolotl makes it: module, then class, without arguments."""
    if not importlib.util.find_spec("axolotl"):
        base = ModuleType("axolotl.integrations.base")
        base.BasePlugin = type("BasePlugin", (), {"pre_model_load": lambda self, cfg: None})
        for name in ("axolotl", "axolotl.integrations"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, base.__name__, base)
    (name,) = yaml.safe_load((EXAMPLES / "axolotl.yaml").read_text())["plugins"]
    module, _, kind = name.rpartition(".")
    monkeypatch.delitem(sys.modules, module, raising=False)
    yield getattr(importlib.import_module(module), kind)()
    ds_fp8.uninstall()


def test_the_plugin_installs_before_the_model_is_built(plugin):
    before = deepspeed.initialize
    plugin.pre_model_load(SimpleNamespace(fp8=False, deepspeed="zero3.json"))
    assert deepspeed.initialize is not before
    ds_fp8.uninstall()
    assert deepspeed.initialize is before


@pytest.mark.parametrize(
    ("cfg", "key"), [({"fp8": True, "deepspeed": "zero3.json"}, "fp8"), ({"fp8": None, "deepspeed": None}, "deepspeed")]
)
def test_recipes_that_could_not_train_in_fp8_are_refused(plugin, cfg, key):
    with pytest.raises(UserError) as caught:
        plugin.pre_model_load(SimpleNamespace(**cfg))
    assert caught.value.key == key
