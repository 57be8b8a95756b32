"""What a user may combine ZeRO-3 with: options, lists of parameters, other stages, optimizers of docs/support.md."""

import importlib
import importlib.util

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import optim

import ds_fp8
from tests.layers.hugging_face import causal_lm
from tests.ranks import case, on_ranks
from tests.zero import models
from tests.zero.models import QUIET
from tests.zero.test_training import make_leaves

STEPS = 3
LOSS_GAP = 0.02  # Relative difference to the BF16 twin after a few steps


def freeze_a_layer(model):
    model.layers[1].requires_grad_(False)


def freeze_but_the_head(model):
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.lm_head.weight or parameter is model.layers[0].up.bias)


def tie(model):
    model.lm_head.weight = model.embedding.weight


CASES = {
    "plain": {},
    "recompute in leaf modules": {"recompute": True, "prepare": make_leaves},
    "accumulation": {"changes": {"gradient_accumulation_steps": 3}},
    "zero.Init in leaf modules": {"born_sharded": True, "prepare": make_leaves},
    "optimizer offload": {
        "changes": {"zero_force_ds_cpu_optimizer": False},
        "offload_optimizer": {"device": "cpu"},
    },
    "a frozen layer": {"prepare": freeze_a_layer},
    "almost all frozen": {"prepare": freeze_but_the_head},
    "tied embeddings": {"prepare": tie},
    "strong clipping": {"changes": {"gradient_clipping": 0.01}},
    "no bucket": {"contiguous_gradients": False, "reduce_bucket_size": 1},
    "e5m2 gradients": {"fp8": {"grad_reduce": {"format": "e5m2"}}},
    "gradients with one scale": {"fp8": {"grad_reduce": {"scale": "tensor"}}},
    "rowwise": {"fp8": {"preset": "rowwise"}},
    "tensorwise": {"fp8": {"preset": "tensorwise"}},
}
TWINS: dict[str, list[str]] = {}  # By the first case that is the same without FP8
for name, options in CASES.items():
    TWINS.setdefault(name if "fp8" not in options else "plain", []).append(name)


def engine_of(case, fp8):
    options = CASES[case]
    return models.engine(**options | {"fp8": options.get("fp8", {}) if fp8 else None})


def train_and_look(case, fp8):
    """Losses, the last gradient norm, bytes gathered by one backward, how many weights FP8 left behind or got wrong."""
    engine = engine_of(case, fp8)
    losses = models.train(engine, STEPS)
    norm = float(engine.get_global_grad_norm())
    loss = models.loss_of(engine, models.batch(1000, dist.get_rank()))
    engine.fp8.wire.take()
    engine.backward(loss)
    gathered = engine.fp8.wire.take()["all_gather_bytes"]
    engine.step()
    left_behind, wrong = len(models.held(engine)), len(models.wrong_casts(engine))
    engine.destroy()
    return losses, norm, gathered, left_behind, wrong


@pytest.mark.parametrize(
    "twin", sorted(TWINS.keys() - {"accumulation", "strong clipping", "a frozen layer", "tied embeddings"})
)
@on_ranks(2)
def test_training(twin):
    """Each case trains as in BF16, gathers in FP8 in backward too, and leaves nothing behind.

    (The others: below, and test_state_machine.py.)
    """
    bf16, bf16_norm, bf16_gathered, _, _ = train_and_look(twin, False)
    for name in TWINS[twin]:
        with case(name):
            losses, norm, gathered, left_behind, wrong = train_and_look(name, True)
            assert (left_behind, wrong) == (0, 0)
            assert losses != bf16
            assert losses == pytest.approx(bf16, rel=LOSS_GAP)
            assert norm == pytest.approx(bf16_norm, rel=0.1)
            # Backward gathers the layers again, in half the bytes; the head stays BF16.
            layers = 2 * 2 * 131 * 301
            assert gathered >= layers / 2
            assert bf16_gathered - gathered >= 0.47 * 2 * layers / 2
    if twin == "optimizer offload":  # DeepSpeed then sums the gradient norm in another order
        assert losses == pytest.approx(train_and_look("plain", True)[0], rel=1e-3)


@on_ranks(3)
def test_training_on_three_ranks():
    for name in ("zero.Init in leaf modules", "tied embeddings", "a frozen layer"):
        with case(name):
            losses, _, _, left_behind, wrong = train_and_look(name, True)
            assert (left_behind, wrong) == (0, 0)
            assert losses == pytest.approx(train_and_look(name, False)[0], rel=LOSS_GAP)


@on_ranks(3)
def test_saved_models_hold_the_master_weights(tmp_path):
    """save_16bit_model, and the FP32 weights that zero_to_fp32.py finds in a checkpoint."""
    engine, folder = models.engine({}, stage3_gather_16bit_weights_on_model_save=True), str(tmp_path)
    models.train(engine, 2)
    masters = models.masters(engine)
    engine.save_16bit_model(folder, "model.bin")
    engine.save_checkpoint(folder, tag="last")
    dist.barrier()
    models.assert_same(dict(get_fp32_state_dict_from_zero_checkpoint(folder, tag="last")), masters)
    rounded = {name: master.bfloat16() for name, master in masters.items()}
    models.assert_same(dict(torch.load(f"{folder}/model.bin")), rounded)


@pytest.mark.parametrize("leaf", [False, True])
@on_ranks(2)
def test_generation_between_steps(leaf):
    """generate() says what a forward over the whole text says, and training goes on as if it had not been."""
    engines = []
    for _ in range(2):
        model = causal_lm("llama", eos_token_id=None)
        if leaf:
            deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0])])
        engines.append(models.engine({}, model))
    engine, undisturbed = engines
    losses = models.train(engine, 2)
    engine.eval()
    with torch.no_grad():
        text = engine.module.generate(models.batch(50, 0)[:, :5], max_new_tokens=4, do_sample=False, synced_gpus=True)
        greedy = engine(input_ids=text[:, :-1]).logits[:, 4:].argmax(-1)
    engine.train()
    assert text.shape == (2, 9)
    assert torch.equal(text[:, 5:], greedy)
    dist.broadcast(greedy, 0)
    assert torch.equal(text[:, 5:], greedy)
    assert losses + models.train(engine, 2, start=2) == models.train(undisturbed, 4)
    assert (len(models.fp8_linears(engine)), models.held(engine)) == (14, [])


# ---------------------------------------------------------------- what learns is what the optimizer was given


def without(name):
    return lambda model: [parameter for own, parameter in model.named_parameters() if own != name]


def groups(model):
    """Vectors without weight decay, and one group of what is frozen."""
    model.layers[0].requires_grad_(False)
    rest = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": list(model.layers[0].parameters()), "weight_decay": 0.1},
        {"params": [parameter for parameter in rest if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in rest if parameter.dim() == 1], "weight_decay": 0.0},
    ]


# What the optimizer is given, and what the start report says of the others
LISTS = {
    "a layer": (lambda model: list(model.layers[1].parameters()), "5 parameters that require"),
    "all but a bias": (without("layers.1.up.bias"), "1 parameter that requires"),
    "all but a weight": (without("layers.1.up.weight"), "1 parameter that requires"),
    "groups": (groups, None),
}
COMPRESSED = {"optimizer": {"exp_avg": "e4m3", "exp_avg_sq": "e5m2"}}


def trained(section, given, unfreeze):
    """Losses, the names of what steps changed and of what has moments, the report, whether this package steps."""
    torch.manual_seed(0)
    model = models.Net().bfloat16()
    config = models.config(section)
    engine = ds_fp8.initialize(model=model, model_parameters=LISTS[given][0](model), config=config)[0]
    losses = models.train(engine, 2)
    if unfreeze:
        engine.module.layers[0].requires_grad_(True)
    before = models.bf16_weights(engine)
    losses += models.train(engine, 2, start=2)
    after, known = models.bf16_weights(engine), {p for group in engine.optimizer.fp16_groups for p in group}
    moments = {
        name
        for name, parameter in engine.module.named_parameters()
        if parameter in known and safe_get_full_optimizer_state(parameter, "exp_avg").any()
    }
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    engine.destroy()
    return losses, changed, moments, engine.fp8.report, engine.fp8.step is not None


@pytest.mark.parametrize("given", [*LISTS, "unfrozen"])
@on_ranks(2)
def test_the_parameters_of_the_optimizer_learn_and_no_others(given):
    """What the optimizer lacks cannot be unfrozen: DeepSpeed takes frozen parameters out of the groups for good."""
    unfreeze, given = given == "unfrozen", given if given in LISTS else "groups"
    expected, stock, moved_there, *_ = trained({"enabled": False}, given, unfreeze)
    for section in [{}, COMPRESSED] if given in ("a layer", "groups") else [{}]:
        with case(section):
            losses, changed, moved, report, own = trained(QUIET | section, given, unfreeze)
            assert own
            assert losses == pytest.approx(expected, rel=0.02)
            assert changed == stock
            assert moved == moved_there
            assert given != "groups" or not any("layers.0" in name for name in changed)
            notes, words = [note for note in report["notes"] if "optimizer" in note], LISTS[given][1]
            assert [words in note for note in notes] == [True] * (words is not None)


# ---------------------------------------------------------------- other stages


PLAIN = {"param_gather": {"format": "bf16"}, "grad_reduce": {"format": "bf16"}}


def at_stage(stage, moments="fp32", accumulation=None, **zero):
    data_types = {} if accumulation is None else {"grad_accum_dtype": accumulation}
    changes = {"data_types": data_types, "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6, **zero}}
    return models.engine({**PLAIN, "optimizer": {"exp_avg": moments, "exp_avg_sq": moments}}, changes=changes)


def moments_of(engine):
    keys, named = ("exp_avg", "exp_avg_sq"), engine.module.named_parameters()
    return {f"{name} {key}": safe_get_full_optimizer_state(p, key) for name, p in named for key in keys}


@pytest.mark.parametrize(("stage", "accumulation"), [(1, None), (2, "fp32"), (2, None)])
@on_ranks(2)
def test_compressed_moments_are_read_and_written_below_stage_3(stage, accumulation):
    """Through DeepSpeed's functions. (At stage 3: test_state_machine.py.) The optimizer may be offloaded there."""
    plain = at_stage(stage, "fp32", accumulation)
    losses, right = models.train(plain, 2), moments_of(plain)
    for moments, bound in (("e4m3", 0.06), ("bf16", 0.005)):
        with case(moments):
            engine = at_stage(stage, moments, accumulation)
            models.train(engine, 2)
            found, state_bytes = moments_of(engine), engine.fp8.optimizer.state_bytes()
            assert all((found[name] - right[name]).norm() < bound * right[name].norm() for name in right)
            weight, other = engine.module.layers[1].up.weight, engine.module.layers[0].up.weight
            shape = found["layers.1.up.weight exp_avg"].shape
            value = torch.linspace(-1, 1, shape.numel()).view(shape).bfloat16().float()
            safe_set_full_optimizer_state(weight, value, "exp_avg")
            assert torch.equal(safe_get_full_optimizer_state(weight, "exp_avg"), value)
            kept = safe_get_full_optimizer_state(other, "exp_avg")
            assert torch.equal(kept, found["layers.0.up.weight exp_avg"])
            models.train(engine, 1, start=2)  # which compresses it again
            assert engine.fp8.optimizer.state_bytes() == state_bytes
            after = safe_get_full_optimizer_state(weight, "exp_avg")
            assert (after - 0.9 * value).norm() < 0.06 * value.norm()
            engine.destroy()
    offloaded = at_stage(stage, accumulation=accumulation, offload_optimizer={"device": "cpu"})
    assert models.train(offloaded, 2) == pytest.approx(losses, rel=1e-3)


@on_ranks(2)
def test_micro_batches_are_never_summed_in_bf16():
    """Boundaries of accumulation that a program sets, as Accelerate does, with one micro-batch in the JSON."""
    for dtype, expected in (("fp32", "summed"), ("bf16", "data_types.grad_accum_dtype")):
        engine, said = models.engine({}, changes={"data_types": {"grad_accum_dtype": dtype}}), "summed"
        try:
            for micro in range(2):
                loss = models.loss_of(engine, models.batch(micro, dist.get_rank()))
                engine.set_gradient_accumulation_boundary(micro == 1)
                engine.backward(loss)
                if micro == 0:
                    engine.step()
        except Exception as error:
            said = str(getattr(error, "key", error))
        assert said == expected


# ---------------------------------------------------------------- other optimizers step as in stock DeepSpeed


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


# Objects: a class, or None for the one in a package that may be missing, and a learning rate
GIVEN = {
    "own class": (SignedMomentum, 1e-4),
    "function": (lambda params, lr: lambda sharded: optim.AdamW(sharded, lr=lr), 3e-4),
    "torchao.optim.AdamW8bit": (None, 3e-4),
    "torchao.optim.AdamWFp8": (None, 3e-4),
    "schedulefree.AdamWScheduleFree": (None, 3e-4),
    "pytorch_optimizer.Lion": (None, 1e-4),
}


def assert_as_in_stock(section, given=None, fp8=QUIET, **zero):
    """Compare the losses of five steps in stock DeepSpeed, and here."""
    ds_config = {key: value for key, value in models.config(fp8, **zero).items() if key != "optimizer"}
    ds_config |= {"zero_allow_untested_optimizer": True} | ({} if section is None else {"optimizer": section})
    if zero.get("stage") == 1:
        del ds_config["data_types"]
    found = []
    for initialize in (deepspeed.initialize, ds_fp8.initialize):
        torch.manual_seed(0)
        # Without padding, in which stock DeepSpeed has numbers that Adafactor's mean meets
        model = models.Net(132, 300).bfloat16()
        parameters, more = list(model.parameters()), {}
        if given is not None:
            kind, lr = GIVEN[given]
            module, _, name = given.rpartition(".")
            more["optimizer"] = (kind or getattr(importlib.import_module(module), name))(parameters, lr=lr)
        own = {key: value for key, value in ds_config.items() if key != "fp8" or initialize is ds_fp8.initialize}
        engine = initialize(model=model, model_parameters=parameters, config=own, **more)[0]
        if hasattr(more.get("optimizer"), "train"):
            more["optimizer"].train()  # as schedule-free ones ask for
        assert getattr(engine, "fp8", None) is None or engine.fp8.report["fp8_linears"] == 4
        found.append(models.train(engine, 5))
        engine.destroy()
    stock, here = found
    assert here == pytest.approx(stock, rel=0.015)
    assert stock[-1] != pytest.approx(stock[0], rel=0.005)  # weights have moved


@on_ranks(2)
def test_an_optimizer_that_the_section_names():
    """Of torch's, each with a learning rate."""
    named = {"SGD": 0.1, "Adafactor": 1e-3, "RMSprop": 2e-5, "Adagrad": 2e-4, "NAdam": 3e-4, "Adamax": 3e-4}
    for name, lr in named.items():
        with case(name):
            assert_as_in_stock({"type": name, "params": {"lr": lr}})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif("." in name and missing, reason="not installed"))
        for name in GIVEN
        for missing in [importlib.util.find_spec(name.partition(".")[0]) is None if "." in name else False]
    ],
)
@on_ranks(2)
def test_an_optimizer_that_is_given(name):
    assert_as_in_stock(None, name)


@on_ranks(2)
def test_deepspeeds_muon():
    section = {"type": "Muon", "params": {"lr": 3e-4, "adam_lr": 3e-4, "torch_adam": True}}
    with torch._dynamo.config.patch(disable=True):  # DeepSpeed compiles its iterations, for minutes
        for zero in ({"stage": 1}, {"stage": 2}, {"stage": 3, "reduce_scatter": False}):
            part = {} if zero["stage"] == 3 else {"param_gather": {"format": "bf16"}}
            with case(zero):
                assert_as_in_stock(section, fp8=QUIET | {"grad_reduce": {"format": "bf16"}} | part, **zero)
