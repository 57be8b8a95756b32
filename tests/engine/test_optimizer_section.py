"""The "optimizer" section is tried out: what DeepSpeed's optimizer would not take or survive is an error beforehand."""

import logging
import os
import shutil

import pytest

from ds_fp8.config.deepspeed_json import Configuration
from ds_fp8.config.errors import UserError
from ds_fp8.engine.compiled_kernels import announce_compilation
from ds_fp8.engine.optimizer_section import check_optimizer

UNTESTED = {"zero_allow_untested_optimizer": True}


def configuration(kind, params, **more):
    return {"zero_optimization": {"stage": 3}, "optimizer": {"type": kind, "params": params}, **more}


def adamw(**params):
    return configuration("AdamW", {"lr": 1e-3, "torch_adam": True, **params})


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({}, "optimizer"),
        ({"optimizer": None}, "optimizer"),
        ({"optimizer": {"type": 3}}, "optimizer"),
        (configuration("AdamX", {}), "optimizer.type"),
        (configuration("AdamW", None), "optimizer.params"),
        (configuration("AdamW", [1]), "optimizer.params"),
        (adamw(betas=[0.9]), "optimizer.params.betas"),
        (adamw(betas=[0.9, 0.95, 0.99]), "optimizer.params.betas"),
        (adamw(betas=0.9), "optimizer.params.betas"),
        (adamw(betas=["a", "b"]), "optimizer.params.betas"),
        (adamw(betas=[0.9, 1.5]), "optimizer.params.betas"),
        (adamw(lr="1e-3"), "optimizer.params.lr"),
        (adamw(lr=True), "optimizer.params.lr"),
        (adamw(lr=None), "optimizer.params.lr"),
        (adamw(lr=-1), "optimizer.params.lr"),
        (adamw(lr=1e30), "optimizer.params"),
        (adamw(eps=0), "optimizer.params"),
        (adamw(eps=-1e-8), "optimizer.params.eps"),
        (adamw(weight_decay=1e30), "optimizer.params"),
        (adamw(weight_decay="no"), "optimizer.params.weight_decay"),
        (adamw(beta=0.9), "optimizer.params.beta"),
        (adamw(max_grad_norm=1.0), "optimizer.params.max_grad_norm"),
        (configuration("SGD", {"lr": 1e-3}), "optimizer.type"),
        (configuration("SGD", {"lr": 1e-3, "torch_adam": True}, **UNTESTED), "optimizer.params.torch_adam"),
        (configuration("SGD", {"betas": [0.9, 0.95]}, **UNTESTED), "optimizer.params.betas"),
        (configuration("SGD", {"nesterov": True}, **UNTESTED), "optimizer.params.nesterov"),
        (configuration("Adafactor", {"lr": 1e-3, "eps": 1e-8}, **UNTESTED), "optimizer.params.eps"),
        (configuration("Lion", {"lr": 1e-3, "eps": 1e-8}), "optimizer.params.eps"),
        (configuration("Lamb", {"lr": 1e-3}, **UNTESTED), "optimizer.type"),
        (configuration("LBFGS", {"lr": 1e-3}, **UNTESTED), "optimizer.type"),
        (configuration("SparseAdam", {"lr": 1e-3}, **UNTESTED), "optimizer.type"),
        (configuration("Muon", {"lr": 1e-3}), "optimizer.type"),
        (configuration("MuAdam", {"lr": 1e-3}), "optimizer.type"),
    ],
    ids=lambda value: str(value)[25:90] if isinstance(value, dict) else "",
)
def test_a_wrong_section_names_file_key_and_remedy(raw, key):
    with pytest.raises(UserError) as caught:
        check_optimizer(Configuration(raw, "ds.json"))
    assert (caught.value.key, caught.value.file) == (key, "ds.json")
    assert caught.value.remedy
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    "raw",
    [
        adamw(),
        adamw(betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, adam_w_mode=True, amsgrad=False, foreach=True),
        adamw(lr=0),
        configuration("Adam", {"torch_adam": True, "adam_w_mode": False}),
        configuration("Adagrad", {"lr": 1e-2}),
        configuration("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, **UNTESTED),
        configuration("Adafactor", {"lr": 1e-3}, **UNTESTED),
        configuration("RMSprop", {"lr": 1e-3}, **UNTESTED),
        {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}},  # without ZeRO DeepSpeed asks for no test
    ],
    ids=lambda raw: str(raw["optimizer"])[:70],
)
def test_what_the_optimizer_takes_is_accepted(raw):
    check_optimizer(Configuration(raw))


def test_what_this_packages_adamw_takes_is_accepted():
    """make_adamw checks its keys; no kernel of DeepSpeed's has to be compiled for it."""
    check_optimizer(Configuration(configuration("AdamW", {"lr": 1e-3, "set_grad_none": True})), own=True)
    with pytest.raises(UserError, match="not a pair"):
        check_optimizer(Configuration(configuration("AdamW", {"lr": 1e-3, "betas": [0.9]})), own=True)


def test_an_optimizer_that_must_be_compiled_needs_a_compiler(monkeypatch):
    raw = configuration("AdamW", {"lr": 1e-3})
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    check_optimizer(Configuration(raw))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="ninja") as caught:
        check_optimizer(Configuration(raw))
    assert '"torch_adam": true' in caught.value.remedy


def test_an_optimizer_that_a_cpu_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(UserError, match="no FusedLion for cpu"):
        check_optimizer(Configuration(configuration("Lion", {"lr": 1e-3})))
    offloaded = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    check_optimizer(Configuration({**configuration("Lion", {"lr": 1e-3}), "zero_optimization": offloaded}))


@pytest.fixture
def cpu_adam(tmp_path, monkeypatch):
    """Return a configuration whose Adam is compiled, and the folder that torch compiles it in."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    offloaded = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "cpu_adam").mkdir()
    return configuration("AdamW", {"lr": 1e-3}) | offloaded, tmp_path / "cpu_adam"


def test_a_compilation_is_announced_by_the_first_rank_until_it_is_done(cpu_adam, caplog, monkeypatch):
    raw, folder = cpu_adam
    caplog.set_level(logging.INFO, logger="ds_fp8")
    with monkeypatch.context() as second:
        second.setenv("RANK", "1")
        announce_compilation(Configuration(raw))
    assert caplog.text == ""
    announce_compilation(Configuration(raw))
    assert str(folder) in caplog.text
    assert "minutes" in caplog.text
    caplog.clear()
    (folder / "cpu_adam.so").touch()
    announce_compilation(Configuration(raw))
    announce_compilation(Configuration(configuration("AdamW", {"lr": 1e-3, "torch_adam": True})))
    announce_compilation(Configuration(configuration("SGD", {"lr": 1e-3})))
    assert caplog.text == ""


def test_a_lock_that_no_process_holds_is_named(cpu_adam, caplog):
    raw, folder = cpu_adam
    caplog.set_level(logging.INFO, logger="ds_fp8")
    lock = folder / "lock"
    with lock.open("x"):
        os.utime(lock, (0, 0))
        announce_compilation(Configuration(raw))  # held by this process
    assert f"waiting until {lock}" in caplog.text
    caplog.clear()
    with pytest.raises(UserError, match="wait for ever") as caught:
        announce_compilation(Configuration(raw))
    assert f"remove {lock}" in caught.value.remedy
    assert caplog.text == ""
    os.utime(lock)
    announce_compilation(Configuration(raw))  # about to be opened, perhaps
    assert f"waiting until {lock}" in caplog.text
