"""A stage whose ranks share sequences ("sequence_parallel_size") beside the same stage on one rank."""

import contextlib
import functools
import io
import json
import shutil

import pytest
import torch
from transformers import AutoConfig

from ds_fp8.data import build_data, build_tokenizer
from ds_fp8.layers.attention import documents
from ds_fp8.train import load_stage, train
from ds_fp8.train.batches import label_tokens, micro_batches
from ds_fp8.train.metrics import read_metrics
from ds_fp8.train.model import build_model
from ds_fp8.train.resume import inspect_run
from tests.corpus import CHATS
from tests.ranks import RankPools
from tests.refusals import refused

STEPS = 4
ROUNDING = 2e-3  # Relative: FP8 scales follow the tokens and heads of a rank, and sums are in another order


def stage_of(tiny, folder, size, **changes):
    """A stage with four heads, two rows of a step and documents that lie on both ranks."""
    tiny["sequence_parallel_size"] = size
    tiny["train_batch_size"] = 2
    tiny["train_micro_batch_size_per_gpu"] = 1
    tiny["gradient_accumulation_steps"] = 2
    tiny["fp8"]["attention"] = {"format": "e4m3"}
    tiny["model"]["config"] |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny["train"] |= {"run_dir": str(folder), "steps": STEPS, "save_every": 2, "keep_last": 3}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tiny[section] = {**tiny[section], name: value} if name else value
    return tiny


def run(file, long=32):
    """The result of a stage on this rank; documents of `long` tokens are in FP8."""
    documents.LONG = long
    with contextlib.redirect_stdout(io.StringIO()):
        result = train(load_stage(file))
    return result


def losses(folder):
    return {r["step"]: r["loss"] for r in read_metrics(folder / "metrics.jsonl", STEPS) if "loss" in r}


@pytest.fixture(scope="module")
def pools():
    """Ranks of these tests' own: DeepSpeed's groups of sequence parallelism stay with a process."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def own_ranks(pools, monkeypatch):
    def start(world):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        return functools.partial(pools, world)

    return start


@pytest.fixture
def two(own_ranks):
    """Two of them."""
    return own_ranks(2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"data__tokens_per_gpu": 64}, marks=pytest.mark.slow),
        pytest.param({"fp8__enabled": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_ranks_that_share_sequences_are_one(tiny, write, tmp_path, ranks, two, changes):
    chats = {"data__path": CHATS["path"], "data__format": "chat", "data__answer_pattern": r"answer is (\d+)"}
    changes = {"train__exact_match_problems": 2, "train__max_new_tokens": 4, **chats, **changes}
    one = dict(changes)
    if "data__tokens_per_gpu" in changes:
        changes |= {"train_batch_size": 6, "gradient_accumulation_steps": 6}
        one = {**changes, "data__tokens_per_gpu": 2 * changes["data__tokens_per_gpu"]}
    folders = tmp_path / "shared", tmp_path / "whole"
    shared = write(stage_of(json.loads(json.dumps(tiny)), folders[0], 2, **changes), "shared.json")
    whole = write(stage_of(json.loads(json.dumps(tiny)), folders[1], 1, **one), "whole.json")
    of_two = two(run, str(shared))[0]
    of_one = ranks(1, run, str(whole))[0]
    assert list(losses(folders[0]).values()) == pytest.approx(list(losses(folders[1]).values()), rel=ROUNDING)
    for name in ("first_validation_loss", "final_loss"):
        assert of_two[name] == pytest.approx(of_one[name], rel=ROUNDING), name
    assert of_two["exact_match"]["problems"] == 2
    logged = [read_metrics(folder / "metrics.jsonl", STEPS) for folder in folders]
    sent = [{r["exchange_bytes"] for r in records if "loss" in r} for records in logged]
    assert min(sent[0]) > 0 == max(sent[1])
    assert (of_two["bytes_per_step"]["exchange_bytes"] > 0) == (of_one["bytes_per_step"]["exchange_bytes"] == 0)
    tokens, norms = (
        [[r[key] for r in records if key in r] for records in logged] for key in ("tokens", "gradient_norm")
    )
    assert tokens[0] == tokens[1]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)  # DeepSpeed's mean over ranks is that over the step's tokens


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_resumed_run_repeats_the_whole_one(tiny, write, tmp_path, own_ranks, world):
    """4 ranks are two groups, whose shards of the optimizer are those of all ranks."""
    accumulation = 4 // world
    file = write(stage_of(tiny, tmp_path / "run", 2, gradient_accumulation_steps=accumulation))
    start = own_ranks(world)
    start(run, str(file))
    first = losses(tmp_path / "run")
    model = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    for gone in (f"checkpoints/step_{STEPS}", "model"):
        shutil.rmtree(tmp_path / "run" / gone)
    (tmp_path / "run" / "result.json").unlink()
    start(run, str(file))
    assert losses(tmp_path / "run") == first
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == model
    tiny |= {"sequence_parallel_size": 1, "train_batch_size": world * accumulation}
    with refused("holds a run with sequence_parallel_size = 2, not 1"):
        inspect_run(load_stage(write(tiny, "other.json"), world=world))
    other = 6 - world  # the other of 2 and 4, with the same batches
    tiny |= {"sequence_parallel_size": 2, "train_batch_size": 2, "gradient_accumulation_steps": 4 // other}
    (tmp_path / "run" / "result.json").unlink()
    with refused(f"was saved by {world} ranks that share sequences, not {other}"):
        inspect_run(load_stage(write(tiny, "more.json"), world=other))


@pytest.mark.parametrize(
    ("changes", "world", "key", "message"),
    [
        ({"sequence_parallel_size": 0}, 2, "sequence_parallel_size", "at least 1"),
        ({"sequence_parallel_size": "2"}, 2, "sequence_parallel_size", "whole number"),
        ({"sequence_parallel_size": 2}, 3, "sequence_parallel_size", "2 ranks share a sequence, but there are 3 ranks"),
        ({"sequence_parallel_size": 1, "data__tokens_per_gpu": 63}, 1, "data.tokens_per_gpu", "into tokens_per_gpu 63"),
        ({"data__tokens_per_gpu": 31}, 2, "data.tokens_per_gpu", "does not fit into tokens_per_gpu 31 over 2 GPUs"),
    ],
    ids=str,
)
def test_what_cannot_be_shared_is_refused(tiny, write, tmp_path, changes, world, key, message):
    raw = stage_of(tiny, tmp_path / "run", 2, **changes)
    with refused(message, key):
        load_stage(write(raw), world=world)


def slices(file):
    """This rank's slices of two rows, and how many of their tokens carry loss."""
    stage = load_stage(file)
    data = build_data(stage.data, build_tokenizer(stage.data))
    batches = micro_batches(stage, data.train, [0, 1], torch.device("cpu"))
    return [(batch, int(label_tokens(batch))) for batch in batches], [data.train[row] for row in (0, 1)]


def test_slices_make_up_the_rows(tiny, write, tmp_path, two):
    file = write(stage_of(tiny, tmp_path / "run", 2))
    (first, rows), (second, _) = two(slices, str(file))
    for (left, left_count), (right, right_count), row in zip(first, second, rows, strict=True):
        for name in ("input_ids", "position_ids"):
            assert torch.equal(torch.cat([left[name], right[name]], 1)[0], row[name])
        targets = torch.cat([left["shift_labels"], right["shift_labels"]], 1)[0]
        assert torch.equal(targets[:-1], row["labels"][1:])
        assert left_count + right_count == int((row["labels"][1:] != -100).sum())
        assert torch.equal(left["labels"], left["shift_labels"])


# ---------------------------------------------------------------- inputs on the host, MLPs in tiles


FUSED = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
LENGTH = 512  # A rank has 256 tokens of a row: two tiles


def long_rows(tiny, folder, **changes):
    tiny["model"]["config"] |= {"max_position_embeddings": LENGTH}
    raw = stage_of(tiny, folder, 2, data__sequence_length=LENGTH, train__steps=2, train__eval_batches=1)
    raw["model"]["config"] |= FUSED
    raw["model"] |= {"activation_checkpointing": changes.get("recomputed", True)}
    raw["fp8"]["activations"] = {"mlp_tile_tokens": changes.get("tile")}
    return raw


def test_a_stage_with_both_trains_as_one_without(tiny, write, tmp_path, new_ranks, monkeypatch):
    """In new processes: DeepSpeed's attention of shared rows has the heads of the first model of a process for good."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = {}
    for name, changes in {"plain": {}, "both": {"recomputed": "offload", "tile": 128}}.items():
        folder = tmp_path / name
        new_ranks(2, run, str(write(long_rows(tiny, folder, **changes), f"{name}.json")))
        found[name] = losses(folder)
    first = min(found["plain"])
    assert found["both"][first] == found["plain"][first]  # before the first gradient no bit differs
    assert list(found["both"].values()) == pytest.approx(list(found["plain"].values()), rel=1e-3)


def test_a_model_that_recomputes_by_itself_is_refused(tiny, write, monkeypatch):
    tiny["model"]["activation_checkpointing"] = "offload"
    stage = load_stage(write(tiny))
    monkeypatch.setattr("transformers.modeling_utils.checkpoint", lambda function, *args, **options: function(*args))
    with refused("recomputes its layers by a function of its own") as error:
        build_model(stage, AutoConfig.for_model(**stage.model.config, vocab_size=640))
    assert (error.value.key, error.value.remedy) == ("model.activation_checkpointing", "true")
