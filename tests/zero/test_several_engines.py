"""Several engines in one process, and several groups of ranks: every parameter goes to its own handlers and group."""

import os
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.runtime.zero.partition_parameters import Init

import ds_fp8
from ds_fp8.config.errors import UserError
from tests.layers.hugging_face import causal_lm
from tests.ranks import RankPool, case, on_ranks
from tests.zero import models
from tests.zero.models import QUIET
from tests.zero.test_training import assert_same, make_leaves

KINDS = {"fp8": QUIET, "stock": None, "compact": {**QUIET, "preset": "compact"}}


def engine(kind: str, seed: int, trains: bool = True):
    """An engine around Net; kind: a key of KINDS."""
    section = KINDS[kind]
    ds_config = models.config(section)
    if not trains:
        ds_config.pop("optimizer")
    torch.manual_seed(seed)
    model = models.Net(128, 256).bfloat16()
    initialize = deepspeed.initialize if section is None else ds_fp8.initialize
    parameters = {"model_parameters": list(model.parameters())} if trains else {}
    return initialize(model=model, config=ds_config, **parameters)[0]


def loss(of) -> float:
    with torch.no_grad():
        return of(models.batch(0, 0)).item()


def codes(of) -> torch.Tensor | None:
    """FP8 shards cast from the present weights."""
    of.fp8.weights.requantize_and_wait()
    return of.fp8.weights.data.clone()


@on_ranks(1, 2)
def test_a_list_over_engines_is_read_and_written():
    """Whatever list DeepSpeed hands over: one with both engines' parameters, the second a copy of the first."""
    for kinds in [
        ("fp8", "fp8", True),
        ("fp8", "fp8", False),
        ("compact", "compact", False),  # the reference model of a trained one, with its section
        ("fp8", "stock", True),
        ("stock", "fp8", True),
        ("stock", "fp8", False),
    ][: 6 if dist.get_world_size() > 1 else 3]:
        with case(kinds):
            first, second, trains = kinds
            one, other = engine(first, 1), engine(second, 2, trains)
            mine, theirs = list(one.module.parameters()), list(other.module.parameters())
            with deepspeed.zero.GatheredParameters([*theirs, *mine]):
                assert all(bool(p.isfinite().all()) and p.numel() == p.ds_numel for p in (*mine, *theirs))
            with deepspeed.zero.GatheredParameters([*mine, *theirs], modifier_rank=0), torch.no_grad():
                if dist.get_rank() == 0:
                    for p, q in zip(mine, theirs, strict=True):
                        q.copy_(p)
            losses = loss(one), loss(other)
            assert losses[0] == losses[1] if first == second else abs(losses[0] - losses[1]) < 0.02 * losses[0]
            if first == second == "fp8":
                assert torch.equal(codes(one), codes(other))
            for before, each in zip(losses, (one, other) if trains else (), strict=trains):
                assert abs(models.take_step(each, each(models.batch(1, dist.get_rank()))) - before) < 0.5
            one.destroy()
            other.destroy()


@on_ranks(2)
def test_a_moving_average_follows_a_trained_model():
    """Updated in one list or weight by weight."""
    for together in (True, False):
        policy, average = engine("fp8", 1), engine("fp8", 1, trains=False)
        right = models.bf16_weights(policy)
        for step in range(2):
            models.take_step(policy, policy(models.batch(step, dist.get_rank())))
            pairs = list(zip(policy.module.parameters(), average.module.parameters(), strict=True))
            for some in [pairs] if together else [[pair] for pair in pairs]:
                both = [p for pair in some for p in pair]
                with deepspeed.zero.GatheredParameters(both, modifier_rank=0), torch.no_grad():
                    for p, q in some:
                        q.copy_(0.5 * q + 0.5 * p)
            right = {name: 0.5 * right[name] + 0.5 * p for name, p in models.bf16_weights(policy).items()}
        models.assert_same(models.bf16_weights(average), right)
        before = codes(average)
        average.fp8.weights.load_wrote()  # all cast again, from the shards
        assert torch.equal(before, codes(average))
        assert loss(average) > 0
        policy.destroy()
        average.destroy()


def patched_and_refused():
    before = Init._all_gather, Init._partition
    with pytest.raises(UserError, match="need this package's step") as caught:
        models.build(models.config(KINDS["compact"]), own=False)
    engine("fp8", 1).destroy()
    assert (caught.value.key, before) == ("fp8.optimizer.master", (Init._all_gather, Init._partition))
    engines, changed = [engine("fp8", 1), engine("fp8", 2)], []
    for each in engines:
        changed.append(before != (Init._all_gather, Init._partition))
        each.destroy()
    changed.append(before != (Init._all_gather, Init._partition))
    assert changed == [True, True, False]


def test_the_class_is_as_before_once_an_engine_was_refused_and_the_last_is_destroyed(new_ranks):
    new_ranks(1, patched_and_refused)


# ---------------------------------------------------------------- groups of ranks


def losses_weights_and_figures(engine, rank):
    losses = models.train(engine, 3, rows=lambda number, _: models.batch(number, rank))
    return losses, models.bf16_weights(engine), engine.fp8.health.last


def in_pairs(section):
    """Two trainings beside each other on 4 ranks, each sharded over its own two."""
    os.environ["LOCAL_SIZE"] = "2"
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    pair, rank = divmod(dist.get_rank(), 2)
    mpu = SimpleNamespace(
        get_data_parallel_group=lambda: pairs[pair],
        get_data_parallel_world_size=lambda: 2,
        get_data_parallel_rank=lambda: rank,
        get_model_parallel_group=lambda: None,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_rank=lambda: 0,
    )
    torch.manual_seed(0)
    model, config = models.Net().bfloat16(), models.config(section)
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config, mpu=mpu)[0]
    return losses_weights_and_figures(engine, rank + 10 * pair)


def each_alone(section):
    return [losses_weights_and_figures(models.engine(section), dist.get_rank() + 10 * pair) for pair in range(2)]


def on_new_ranks(function, *arguments):
    """What DeepSpeed keeps of groups stays with a process."""
    pool = RankPool(4)
    try:
        return pool.run(function, *arguments)
    finally:
        pool.close()


def test_two_pairs_of_ranks_train_as_each_alone(ranks):
    """The 4 ranks are 2 nodes to FP8's reduction in two levels, which is not for groups inside a node."""
    section = {"grad_reduce": {"scale": "tensor"}, "monitor": {"every": 1}}
    together = on_new_ranks(in_pairs, section)
    for rank, pairs in enumerate(ranks(2, each_alone, section)):
        for pair, alone in enumerate(pairs):
            assert_same(alone, together[2 * pair + rank])
            assert alone[2].measurement == together[2 * pair + rank][2].measurement


@on_ranks(2)
def test_weights_of_several_groups_are_gathered_together():
    """Sharded over different groups, though of the same ranks; also the residuals of their outlier channels."""

    def two_groups(several, section):
        other, config = dist.new_group(list(range(dist.get_world_size()))), models.config(QUIET | section)
        torch.manual_seed(0)

        def init(group):
            return deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16, data_parallel_group=group)

        with init(None):
            model = models.Net()
        for block in model.layers if several else ():
            whole = models.bf16(block.down.weight)
            with init(other):
                block.down = torch.nn.Linear(*reversed(whole.shape), bias=False)
            with deepspeed.zero.GatheredParameters([block.down.weight], modifier_rank=0):
                block.down.weight.data.copy_(whole)
        make_leaves(model)
        return losses_weights_and_figures(models.engine(section, model), dist.get_rank())

    for section in ({}, {"preset": "precise"}):
        with case(section):
            assert_same(*(two_groups(several, section) for several in (False, True)))


LENGTH, SPLIT = 32, 2


def shard(step, rows, columns):
    """Rows and columns of a batch of sequences that count upwards, and what comes after each token."""
    starts = torch.randint(1, 97, (16, 1), generator=torch.Generator().manual_seed(step))
    ids = (starts + torch.arange(LENGTH)) % 97
    targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)[rows, columns].contiguous()
    positions = torch.arange(LENGTH)[None, columns].expand(len(targets), -1)
    given = {"input_ids": ids[rows, columns], "position_ids": positions, "labels": targets, "shift_labels": targets}
    # As many targets a rank as without the split, on average.
    return given | {"num_items_in_batch": LENGTH - 1, "use_cache": False}


def of_sequences(sections, split):
    """By section: mean loss of every step, bytes of the last, number of fused layers; `split`: ranks a sequence."""
    results, mpu = [], None
    for section in sections:
        model, config = causal_lm("qwen2"), models.config(section)
        if mpu is None:  # DeepSpeed allows it once a process
            mpu = UlyssesSPAttentionHF.register_with_transformers(
                model, core_attn_implementation="sdpa", sequence_parallel_size=split, micro_batch_size=split
            )
        engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config, mpu=mpu)[0]
        group, place = divmod(dist.get_rank(), split)
        rows = slice(group * split, (group + 1) * split)
        columns = slice(place * LENGTH // split, (place + 1) * LENGTH // split)
        losses = []
        for step in range(3):
            engine.fp8.wire.take()
            mean = engine(**shard(step, rows, columns)).loss
            models.take_step(engine, mean)
            dist.all_reduce(mean := mean.detach().clone())
            losses.append(mean.item() / dist.get_world_size())
        results.append((losses, engine.fp8.wire.take(), engine.fp8.report.get("fused_layers")))
    return results


def test_sequences_split_over_ranks_train_as_whole_ones(ranks):
    """DeepSpeed-Ulysses: what is sharded over 4 ranks meets attention's exchanges between two."""
    (whole,) = ranks(4, of_sequences, [QUIET], 1)[0]
    split, bf16 = on_new_ranks(of_sequences, [QUIET, {"enabled": False}], SPLIT)[0]
    assert split[0] == pytest.approx(whole[0], rel=2e-3)
    assert split[0] == pytest.approx(bf16[0], rel=0.02)
    assert split[0] != bf16[0]
    assert split[0][-1] < split[0][0]
    assert (split[2], whole[2]) == (2, 2)
    # What attention exchanges is no gradient. (Under Ulysses DeepSpeed sends the small gradients in FP32.)
    assert split[1]["all_gather_bytes"] == whole[1]["all_gather_bytes"]
    assert split[1]["grad_bytes"] == pytest.approx(whole[1]["grad_bytes"], rel=0.01)
    assert split[1]["grad_bytes"] < 0.53 * bf16[1]["grad_bytes"] / 2
