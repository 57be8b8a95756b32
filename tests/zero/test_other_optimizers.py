"""Optimizers other than this package's AdamW step as in stock DeepSpeed: those of docs/support.md."""

import contextlib
import importlib

import deepspeed
import pytest
import torch
from torch import optim

import ds_fp8
from tests.zero import models

BF16_GRADIENTS = {"grad_reduce": {"format": "bf16"}, "monitor": {"every": 0}}
SIZES, STEPS = (132, 300), 5  # without padding, in which stock DeepSpeed has numbers that Adafactor's mean meets


class SignedMomentum(optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.add_(mean.sign(), alpha=-group["lr"])


# Names for the section of torch's, each with a learning rate
NAMED = {"SGD": 0.1, "Adafactor": 1e-3, "RMSprop": 2e-5, "Adagrad": 2e-4, "NAdam": 3e-4, "Adamax": 3e-4}
# Objects: a class or the name of one in a package that may be missing, and a learning rate
GIVEN = {
    "own class": (SignedMomentum, 1e-4),
    "function": (lambda params, lr: lambda sharded: optim.AdamW(sharded, lr=lr), 3e-4),
    "torchao.optim.AdamW8bit": (None, 3e-4),
    "torchao.optim.AdamWFp8": (None, 3e-4),
    "schedulefree.AdamWScheduleFree": (None, 3e-4),
    "pytorch_optimizer.Lion": (None, 1e-4),
}


def losses(ds_config, given=None):
    """The losses of this rank in stock DeepSpeed, and here."""
    found = []
    for initialize in (deepspeed.initialize, ds_fp8.initialize):
        torch.manual_seed(0)
        model = models.Net(*SIZES).bfloat16()
        parameters, more = list(model.parameters()), {}
        if given is not None:
            kind, lr = GIVEN[given]
            module, _, name = given.rpartition(".")
            more["optimizer"] = (kind or getattr(importlib.import_module(module), name))(parameters, lr=lr)
        stock = {key: value for key, value in ds_config.items() if key != "fp8" or initialize is ds_fp8.initialize}
        engine = initialize(model=model, model_parameters=parameters, config=stock, **more)[0]
        if hasattr(more.get("optimizer"), "train"):
            more["optimizer"].train()  # as schedule-free ones ask for
        assert getattr(engine, "fp8", None) is None or engine.fp8.report["fp8_linears"] == 6
        found.append(models.train(engine, STEPS))
        engine.destroy()
    return found


def assert_alike(results):
    for stock, here in results:
        assert here == pytest.approx(stock, rel=0.015)
        assert stock[-1] != pytest.approx(stock[0], rel=0.005)  # weights have moved


def untested(fp8, optimizer, **zero):
    section = {} if optimizer is None else {"optimizer": optimizer}
    without = {key: value for key, value in models.config(fp8, **zero).items() if key != "optimizer"}
    return {**without, **section, "zero_allow_untested_optimizer": True}


@pytest.mark.parametrize("name", NAMED)
def test_one_that_the_section_names(ranks, name):
    section = {"type": name, "params": {"lr": NAMED[name]}}
    assert_alike(ranks(2, losses, untested({"monitor": {"every": 0}}, section)))


@pytest.mark.parametrize("name", GIVEN)
def test_one_that_is_given(ranks, name):
    if "." in name:
        pytest.importorskip(name.partition(".")[0])
    assert_alike(ranks(2, losses, untested({"monitor": {"every": 0}}, None), name))


def losses_of_muon(ds_config):
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(disable=True))  # DeepSpeed compiles its iterations, for minutes
        return losses(ds_config)


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 2}, {"stage": 3, "reduce_scatter": False}], ids=str)
def test_deepspeeds_muon(ranks, zero):
    fp8 = BF16_GRADIENTS | ({} if zero["stage"] == 3 else {"param_gather": {"format": "bf16"}})
    section = {"type": "Muon", "params": {"lr": 3e-4, "adam_lr": 3e-4, "torch_adam": True}}
    ds_config = untested(fp8, section, **zero)
    if zero["stage"] == 1:
        ds_config.pop("data_types")
    assert_alike(ranks(2, losses_of_muon, ds_config))
