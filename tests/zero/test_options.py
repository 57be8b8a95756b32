"""What a user may combine ZeRO-3 with: each case trains, gathers in FP8 in backward too, and leaves nothing behind."""

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import set_z3_leaf_modules
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import ds_fp8
from ds_fp8.casts import quantize
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.layers.linear.weights import UNSHARDED
from tests.layers.hugging_face import causal_lm
from tests.zero import models
from tests.zero.test_training import QUIET

STEPS = 4
LOSS_GAP = 0.02  # Relative difference to the BF16 twin after a few steps


def make_leaves(model):
    set_z3_leaf_modules(model, [models.Block])


def freeze_a_layer(model):
    for parameter in model.layers[1].parameters():
        parameter.requires_grad_(False)


def freeze_but_the_head(model):
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.lm_head.weight or parameter is model.layers[0].up.bias)


def tie(model):
    model.lm_head.weight = model.embedding.weight


CASES = {
    "plain": {},
    "recompute in leaf modules": {"recompute": True, "prepare": make_leaves},
    "accumulation": {"config": {"gradient_accumulation_steps": 3}},
    "zero.Init in leaf modules": {"born_sharded": True, "prepare": make_leaves},
    "optimizer offload": {
        "config": {"zero_force_ds_cpu_optimizer": False},
        "zero": {"offload_optimizer": {"device": "cpu"}},
    },
    "a frozen layer": {"prepare": freeze_a_layer},
    "almost all frozen": {"prepare": freeze_but_the_head},
    "tied embeddings": {"prepare": tie},
    "strong clipping": {"config": {"gradient_clipping": 0.01}},
    "no bucket": {"zero": {"contiguous_gradients": False, "reduce_bucket_size": 1}},
    "e5m2 gradients": {"fp8": {"grad_reduce": {"format": "e5m2"}}},
    "gradients with one scale": {"fp8": {"grad_reduce": {"scale": "tensor"}}},
    "rowwise": {"fp8": {"preset": "rowwise"}},
    "tensorwise": {"fp8": {"preset": "tensorwise"}},
}


def twin_of(case):
    """The first case that is the same without FP8: their BF16 twins are one."""

    def outside_fp8(name):
        return {key: value for key, value in CASES[name].items() if key != "fp8"}

    return next(other for other in CASES if outside_fp8(other) == outside_fp8(case))


def engine_of(case, fp8):
    options = CASES[case]
    section = {**QUIET, **options.get("fp8", {})} if fp8 else {"enabled": False}
    ds_config = {**models.config(section, **options.get("zero", {})), **options.get("config", {})}
    keys = ("recompute", "prepare", "born_sharded")
    return models.build(ds_config, **{key: options[key] for key in keys if key in options})


def train_and_look(case, fp8):
    """Losses, the last gradient norm, bytes gathered by one backward, how many weights FP8 left behind or got wrong."""
    engine = engine_of(case, fp8)
    losses = models.train(engine, STEPS)
    norm = float(engine.get_global_grad_norm())
    loss = engine(models.batch(1000, dist.get_rank()).to(engine.device))
    engine.fp8.wire.take()
    engine.backward(loss)
    gathered = engine.fp8.wire.take()["all_gather_bytes"]
    engine.step()
    weights = [m.weight for m in engine.module.modules() if isinstance(m, FP8Linear)]
    left_behind = [weight for weight in weights if getattr(weight, UNSHARDED) is not None]
    return losses, norm, gathered, len(left_behind), count_wrong(engine, weights) if weights else 0


def count_wrong(engine, weights):
    """How many weights are not gathered as the cast of their whole master tensor, or of the BF16 they are frozen at."""
    masters = []
    for weight in weights:
        with deepspeed.zero.GatheredParameters([weight]):
            bf16 = weight.detach().float().clone()
        masters.append(models.full_master(weight) if weight.requires_grad else bf16)
    weights[0].all_gather_coalesced(weights).wait()
    wrong = 0
    for weight, master in zip(weights, masters, strict=True):
        gathered = getattr(weight, UNSHARDED)
        wrong += not torch.equal(gathered.dequantize(), quantize(master, "e4m3", gathered.granularity).dequantize())
        weight.partition()
    return wrong


@pytest.mark.parametrize("case", CASES)
def test_training(baseline, case):
    fp8, bf16 = baseline(2, train_and_look, case, True), baseline(2, train_and_look, twin_of(case), False)
    for (losses, norm, gathered, left_behind, wrong), (twin, twin_norm, twin_gathered, _, _) in zip(
        fp8, bf16, strict=True
    ):
        assert (left_behind, wrong) == (0, 0)
        assert losses != twin
        assert losses == pytest.approx(twin, rel=LOSS_GAP)
        assert norm == pytest.approx(twin_norm, rel=0.1)
        # Backward gathers the layers again, in half the bytes; the head stays BF16.
        layers = 3 * 2 * 131 * 301
        assert gathered >= layers / 2
        assert twin_gathered - gathered >= 0.47 * 2 * layers / 2


def test_offloading_the_optimizer_changes_the_order_of_sums_alone(baseline):
    """DeepSpeed then sums the gradient norm in another order, so the last bits differ."""
    offloaded, plain = (baseline(2, train_and_look, case, True)[0] for case in ("optimizer offload", "plain"))
    assert offloaded[0] == pytest.approx(plain[0], rel=1e-3)


@pytest.mark.parametrize("case", ["plain", "zero.Init in leaf modules", "tied embeddings", "a frozen layer"])
def test_training_on_three_ranks(ranks, case):
    for losses, _, _, left_behind, wrong in ranks(3, train_and_look, case, True):
        assert (left_behind, wrong) == (0, 0)
        assert losses[-1] < losses[0]


def saved_files(folder):
    engine = models.build(models.config(QUIET, stage3_gather_16bit_weights_on_model_save=True))
    models.train(engine, 2)
    masters = {name: models.full_master(p).clone() for name, p in engine.module.named_parameters()}
    engine.save_16bit_model(folder, "model.bin")
    engine.save_checkpoint(folder, tag="last")
    dist.barrier()
    fp32 = get_fp32_state_dict_from_zero_checkpoint(folder, tag="last")
    bf16 = torch.load(f"{folder}/model.bin")
    return (
        {name: torch.equal(fp32[name], master) for name, master in masters.items()},
        {name: torch.equal(bf16[name], master.bfloat16()) for name, master in masters.items()},
    )


@pytest.mark.parametrize("world", [2, 3])
def test_saved_models_hold_the_master_weights(ranks, world, tmp_path):
    """save_16bit_model, and the FP32 weights that zero_to_fp32.py finds in a checkpoint."""
    for fp32, bf16 in ranks(world, saved_files, str(tmp_path)):
        assert fp32.keys() == bf16.keys()
        assert all(fp32.values()), fp32
        assert all(bf16.values()), bf16


def engine_of_llama(leaf):
    model = causal_lm("llama", eos_token_id=None)
    if leaf:
        set_z3_leaf_modules(model, [type(model.model.layers[0])])
    parameters = list(model.parameters())
    return ds_fp8.initialize(model=model, model_parameters=parameters, config=models.config(QUIET))[0]


def generate_between_steps(leaf):
    engine = engine_of_llama(leaf)

    def train(steps, start=0):
        losses = []
        for step in range(start, start + steps):
            tokens = models.batch(step, dist.get_rank())
            losses.append(models.take_step(engine, engine(input_ids=tokens, labels=tokens).loss))
        return losses

    first = train(2)
    engine.eval()
    prompt = models.batch(50, 0)[:, :5]
    with torch.no_grad():
        text = engine.module.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=True)
        greedy = engine(input_ids=text[:, :-1]).logits[:, 4:].argmax(-1)
    engine.train()
    losses = first + train(2, start=2)
    weights = [m.weight for m in engine.module.modules() if isinstance(m, FP8Linear)]
    left = sum(getattr(weight, UNSHARDED) is not None for weight in weights)

    engine = engine_of_llama(leaf)
    return text[:, 5:], greedy, losses, train(4), len(weights), left


@pytest.mark.parametrize("leaf", [False, True])
def test_generation_between_steps(ranks, leaf):
    """generate() says what a forward over the whole text says, and training goes on as if it had not been."""
    results = ranks(2, generate_between_steps, leaf)
    for text, greedy, losses, plain, linears, left in results:
        assert text.shape == (2, 4)
        assert torch.equal(text, greedy)
        assert losses == plain
        assert (linears, left) == (14, 0)
    assert torch.equal(results[0][0], results[1][0])
