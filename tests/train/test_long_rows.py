"""A stage whose ranks share rows, with the inputs of layers on the host and MLPs in tiles, beside the same without."""

import pytest
from transformers import AutoConfig

from ds_fp8.config.errors import UserError
from ds_fp8.train import load_stage
from ds_fp8.train.model import build_model
from tests.train.test_sequence_parallel import losses, own_ranks, pools, run, stage_of, two

__all__ = ["own_ranks", "pools", "two"]

FUSED = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
LENGTH = 512  # A rank has 256 tokens of a row: two tiles


def long_rows(tiny, folder, **changes):
    tiny["model"]["config"] |= {"max_position_embeddings": LENGTH}
    raw = stage_of(tiny, folder, 2, data__sequence_length=LENGTH, train__steps=2, train__eval_batches=1)
    raw["model"]["config"] |= FUSED
    raw["model"] |= {"activation_checkpointing": changes.get("recomputed", True)}
    raw["fp8"]["activations"] = {"mlp_tile_tokens": changes.get("tile")}
    return raw


def test_a_stage_with_both_trains_as_one_without(tiny, write, tmp_path, cache_home, two):
    found = {}
    for name, changes in {"plain": {}, "both": {"recomputed": "offload", "tile": 128}}.items():
        folder = tmp_path / name
        two(run, str(write(long_rows(tiny, folder, **changes), f"{name}.json")), str(cache_home))
        found[name] = losses(folder)
    first = min(found["plain"])
    assert found["both"][first] == found["plain"][first]  # before the first gradient no bit differs
    assert list(found["both"].values()) == pytest.approx(list(found["plain"].values()), rel=1e-3)


def test_a_model_that_recomputes_by_itself_is_refused(tiny, write, monkeypatch):
    tiny["model"]["activation_checkpointing"] = "offload"
    stage = load_stage(write(tiny))
    monkeypatch.setattr("transformers.modeling_utils.checkpoint", lambda function, *args, **options: function(*args))
    with pytest.raises(UserError, match="recomputes its layers by a function of its own") as error:
        build_model(stage, AutoConfig.for_model(**stage.model.config, vocab_size=640))
    assert (error.value.key, error.value.remedy) == ("model.activation_checkpointing", "true")
