"""DeepSpeed-Ulysses: sequences split over ranks train as whole sequences do, in FP8."""

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

import ds_fp8
from tests.layers.hugging_face import causal_lm
from tests.ranks import RankPool
from tests.zero import models
from tests.zero.test_training import QUIET

LENGTH, SPLIT = 32, 2
IGNORED = -100


def shard(step, rows, columns):
    """Rows and columns of a batch of sequences that count upwards, and what comes after each token."""
    starts = torch.randint(1, 97, (16, 1), generator=torch.Generator().manual_seed(step))
    ids = (starts + torch.arange(LENGTH)) % 97
    targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORED)
    return {
        "input_ids": ids[rows, columns],
        "position_ids": torch.arange(LENGTH)[None, columns].expand(len(ids[rows]), -1),
        "labels": targets[rows, columns].contiguous(),
        "shift_labels": targets[rows, columns].contiguous(),
    }


def train(sections, split, steps=4):
    """By section: mean loss of every step, bytes of the last, number of fused layers; `split`: ranks a sequence."""
    results, mpu = [], None
    for section in sections:
        model = causal_lm("qwen2")
        if mpu is None:  # DeepSpeed allows it once a process
            mpu = UlyssesSPAttentionHF.register_with_transformers(
                model, core_attn_implementation="sdpa", sequence_parallel_size=split, micro_batch_size=split
            )
        engine = ds_fp8.initialize(
            model=model, model_parameters=list(model.parameters()), config=models.config(section), mpu=mpu
        )[0]
        group, place = divmod(dist.get_rank(), split)
        rows = slice(group * split, (group + 1) * split)
        columns = slice(place * LENGTH // split, (place + 1) * LENGTH // split)
        losses = []
        for step in range(steps):
            engine.fp8.wire.take()
            # As many targets a rank as without the split, on average.
            loss = engine(**shard(step, rows, columns), num_items_in_batch=LENGTH - 1, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
        results.append((losses, engine.fp8.wire.take(), engine.fp8.report.get("fused_layers")))
    return results


def test_sequences_split_over_ranks_train_as_whole_ones(ranks):
    """4 ranks, 2 a sequence: what is sharded over all of them meets attention's exchanges between two."""
    (whole,) = ranks(4, train, [QUIET], 1)[0]
    pool = RankPool(4)  # DeepSpeed's groups of sequence parallelism stay with a process
    try:
        split, twin = pool.run(train, [QUIET, {"enabled": False}], SPLIT)[0]
    finally:
        pool.close()
    assert split[0] == pytest.approx(whole[0], rel=2e-3)
    assert split[0] == pytest.approx(twin[0], rel=0.02)
    assert split[0] != twin[0]
    assert split[0][-1] < split[0][0]
    assert (split[2], whole[2]) == (2, 2)
    # What attention exchanges is no gradient. (Under Ulysses DeepSpeed sends the small gradients in FP32.)
    assert split[1]["all_gather_bytes"] == whole[1]["all_gather_bytes"]
    assert split[1]["grad_bytes"] == pytest.approx(whole[1]["grad_bytes"], rel=0.01)
    assert split[1]["grad_bytes"] < 0.53 * twin[1]["grad_bytes"] / 2
