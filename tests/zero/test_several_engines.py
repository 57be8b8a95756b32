"""Several engines in one process: parameters of each go to its own handlers, in whatever list DeepSpeed hands over."""

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import Init

import ds_fp8
from ds_fp8.config.errors import UserError
from tests.zero import models

QUIET = {"monitor": {"every": 0}}
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
    gather = of.fp8.weights
    gather.requantize_and_wait()
    return gather.data.clone()


def copies(first: str, second: str, trains: bool):
    """Both engines in one list, the second a copy of the first: what is read, and losses and shards then."""
    one, other = engine(first, 1), engine(second, 2, trains)
    mine, theirs = list(one.module.parameters()), list(other.module.parameters())
    with deepspeed.zero.GatheredParameters([*theirs, *mine]):
        read = all(bool(p.isfinite().all()) and p.numel() == p.ds_numel for p in (*mine, *theirs))
    with deepspeed.zero.GatheredParameters([*mine, *theirs], modifier_rank=0), torch.no_grad():
        if deepspeed.comm.get_rank() == 0:
            for p, q in zip(mine, theirs, strict=True):
                q.copy_(p)
    result = {"read": read, "losses": (loss(one), loss(other))}
    if first == second == "fp8":
        result["shards"] = torch.equal(codes(one), codes(other))
    if trains:
        result["trained"] = [models.take_step(e, e(models.batch(1, deepspeed.comm.get_rank()))) for e in (one, other)]
    for each in (one, other):
        each.destroy()
    return result


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("first", "second", "trains"),
    [
        ("fp8", "fp8", True),
        ("fp8", "fp8", False),
        ("compact", "compact", False),  # the reference model of a trained one, with its section
        ("fp8", "stock", True),
        ("stock", "fp8", True),
        ("stock", "fp8", False),
    ],
)
def test_a_list_over_engines_is_read_and_written(ranks, world, first, second, trains):
    for result in ranks(world, copies, first, second, trains):
        assert result["read"]
        mine, theirs = result["losses"]
        assert mine == theirs if first == second else abs(mine - theirs) < 0.02 * mine
        assert result.get("shards", True)
        for before, after in zip(result["losses"], result.get("trained", ()), strict=False):
            assert abs(after - before) < 0.5


def averages(together: bool):
    """A moving average of a trained model, updated in one list or weight by weight; the right values beside."""
    policy, average = engine("fp8", 1), engine("fp8", 1, trains=False)
    right = {name: p.float() for name, p in models.bf16_weights(policy).items()}
    for step in range(2):
        models.take_step(policy, policy(models.batch(step, deepspeed.comm.get_rank())))
        pairs = list(zip(policy.module.parameters(), average.module.parameters(), strict=True))
        for some in [pairs] if together else [[pair] for pair in pairs]:
            with (
                deepspeed.zero.GatheredParameters([p for pair in some for p in pair], modifier_rank=0),
                torch.no_grad(),
            ):
                for p, q in some:
                    q.copy_(0.5 * q + 0.5 * p)
        for name, p in models.bf16_weights(policy).items():
            right[name] = (0.5 * right[name].bfloat16() + 0.5 * p).float()
    found = models.bf16_weights(average)
    equal = all(torch.equal(found[name].float(), right[name]) for name in right)
    before = codes(average)
    average.fp8.weights.load_wrote()  # all cast again, from the shards
    result = equal, torch.equal(before, codes(average)), loss(average)
    for each in (policy, average):
        each.destroy()
    return result


@pytest.mark.parametrize("together", [True, False])
def test_a_moving_average_follows_a_trained_model(ranks, together):
    for equal, fresh, value in ranks(2, averages, together):
        assert equal
        assert fresh
        assert value > 0


def patched(_):
    before = Init._all_gather, Init._partition
    engines = [engine("fp8", 1), engine("fp8", 2)]
    changed = [before != (Init._all_gather, Init._partition)]
    for each in engines:
        each.destroy()
        changed.append(before != (Init._all_gather, Init._partition))
    return changed


def refused(_):
    before = Init._all_gather, Init._partition
    with pytest.raises(UserError, match="need this package's step") as caught:
        models.build(models.config(KINDS["compact"]), own=False)
    later = engine("fp8", 1)
    later.destroy()
    return caught.value.key, before == (Init._all_gather, Init._partition)


def test_the_class_is_as_before_once_an_engine_was_refused(new_ranks):
    assert new_ranks(1, refused, None) == [("fp8.optimizer.master", True)]


def test_the_class_is_as_before_once_the_last_engine_is_destroyed(new_ranks):
    assert new_ranks(1, patched, None) == [[True, True, False]]
