"""The plugin for Axolotl; where Axolotl is not installed, below a class of the same name and method."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import deepspeed
import pytest
import yaml

import ds_fp8
from ds_fp8.config.errors import UserError
from tests.integrations.test_examples import EXAMPLES


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
