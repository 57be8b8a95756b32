"""A script of the user's own whose JSON has "sequence_parallel_size", and no mpu."""

import contextlib
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from deepspeed import comm as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.config.sequence_parallel import check_heads, check_layers, check_rotation, sequence_parallel_size
from ds_fp8.layers.attention import documents
from ds_fp8.train import packed_attention
from tests.layers.hugging_face import causal_lm
from tests.ranks import on_ranks
from tests.zero import models

RANKS = 2
SECTION = {"attention": {"format": "e4m3"}, "monitor": {"every": 0}, "graph": "off"}


@contextlib.contextmanager
def sequences():
    """Let ranks share sequences inside alone: what DeepSpeed keeps of that in a process is forgotten behind it."""
    packed_attention.register()
    before = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "packed")}
    try:
        yield
    finally:
        groups.mpu = None
        for name, attention in before.items():
            ALL_ATTENTION_FUNCTIONS[name] = attention
        parallel_state_sp._release_sequence_parallel_groups()


def initialized(size, length, architecture="qwen3", section=SECTION, training_data=None, **changes):
    packed_attention.register()
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": length}
    model = causal_lm(architecture, **{**sizes, "attn_implementation": "packed", **changes})
    config = {**models.config(section), "train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": size}
    parameters = list(model.parameters())
    return ds_fp8.initialize(model=model, model_parameters=parameters, config=config, training_data=training_data)[0]


def losses(size, length, steps, parts=2):
    """Mean losses of steps over two rows of one document or two, which ranks share or not."""
    with mock.patch.object(documents, "LONG", length // 4):
        engine = initialized(size, length)
        assert len(engine.fp8.conversion.attention.layers) == 2
        assert engine.fp8.report["sequence_parallel_size"] == size
        group, place = divmod(dist.get_rank(), size)
        rows = range(RANKS) if size == RANKS else [group]
        found = []
        for number in range(steps):
            starts = torch.randint(1, 97, (RANKS, 1), generator=torch.Generator().manual_seed(number))
            ids = (starts + torch.arange(length)) % 97
            targets = F.pad(ids[:, 1:], (0, 1), value=-100)
            places = torch.arange(length).expand(RANKS, -1) % (5 * length // 8 if parts == 2 else length)
            whole = {"input_ids": ids, "position_ids": places, "labels": targets, "shift_labels": targets}
            # Label tokens of the step: of the mean over ranks and the sum over micro-batches, the mean over all.
            items = torch.tensor((length - 1) * RANKS / RANKS, device=engine.device)
            total = torch.zeros((), device=engine.device)
            for index, row in enumerate(rows):
                batch = {name: x[row : row + 1].chunk(size, 1)[place].contiguous() for name, x in whole.items()}
                batch = {name: x.to(engine.device) for name, x in batch.items()}
                engine.set_gradient_accumulation_boundary(index == len(rows) - 1)
                loss = engine(**batch, use_cache=False, num_items_in_batch=items).loss
                engine.backward(loss)
                engine.step()
                total += loss.detach()
            dist.all_reduce(total)
            found.append(total.item() / RANKS)
        return found


def slices(size, **rows):
    """This rank's slices of rows."""
    place = dist.get_rank() if size > 1 else 0
    return {name: x.chunk(size, 1)[place].contiguous() for name, x in rows.items()}


def logits_of(engine, size, ids, places):
    """Logits of whole rows, of which this rank computes a slice."""
    batch = slices(size, input_ids=ids, position_ids=places)
    found = engine(**batch, use_cache=False).logits.detach().float().contiguous()
    parts = [torch.empty_like(found) for _ in range(RANKS)]
    dist.all_gather(parts, found)
    return torch.cat(parts[:size], 1)


@on_ranks(RANKS)
def test_training_follows_one_rank_a_sequence():
    whole = losses(1, 128, 4)
    with sequences():
        split = losses(RANKS, 128, 4)
    assert split == pytest.approx(whole, rel=2e-3)
    assert split[-1] < split[0]


@on_ranks(RANKS)
def test_the_meter_knows_of_the_exchange():
    for section in (SECTION, {"enabled": False}):
        with sequences():
            engine = initialized(RANKS, 64, section=section)
            ids = torch.arange(32)[None]
            batch = {"input_ids": ids, "position_ids": 32 * dist.get_rank() + ids, "labels": ids, "shift_labels": ids}
            engine.fp8.wire.take()
            models.take_step(engine, engine(**batch, use_cache=False).loss)
            # Two layers, forward and backward, half of it to the other rank: q and the output of 4 heads, k and v of 2.
            assert engine.fp8.wire.take()["exchange_bytes"] == 2 * 2 * 32 * (2 * 4 + 2 * 2) * 128 * 2 // 2


@on_ranks(RANKS)
def test_what_cannot_be_shared_is_refused():
    """Models without attention functions, of other heads, with windows ..."""
    size, length = RANKS, 64
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8))
    window = "a sliding window of 16 tokens, which is lost where {} attention is exchanged".format
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    raw = {**models.config({}), "sequence_parallel_size": size}
    for words, start in {
        "Sequential has none": lambda: ds_fp8.initialize(model=plain, config=raw),
        "3 heads, and 3 of keys and values, cannot be spread over 2 ranks": lambda: initialized(
            size, length, num_attention_heads=3, num_key_value_heads=3
        ),
        "eager": lambda: initialized(size, length, attn_implementation="eager"),
        window('"packed"'): lambda: initialized(
            size, length, use_sliding_window=True, sliding_window=16, max_window_layers=1
        ),
        window('"sdpa"'): lambda: initialized(size, length, "mistral", sliding_window=16, attn_implementation="sdpa"),
        'layers of type "linear_attention" cannot be computed in slices': lambda: initialized(
            size, length, "qwen3_next", layer_types=["linear_attention", "full_attention"]
        ),
        'rotary embeddings of type "dynamic"': lambda: initialized(size, length, rope_parameters=dynamic),
        "GPTNeoXConfig has none": lambda: initialized(
            size, length, "gpt_neox", num_key_value_heads=None, attn_implementation="sdpa"
        ),
        "no loader of training_data": lambda: initialized(
            size, length, training_data=[{"input_ids": torch.arange(length)}]
        ),
        "already shares sequences of another model": lambda: (
            initialized(size, length),
            initialized(size, length, num_attention_heads=8),
        ),
    }.items():
        with sequences(), pytest.raises(UserError, match=words) as error:
            start()
        assert error.value.key == "sequence_parallel_size"


@on_ranks(RANKS)
def test_no_document_of_a_packed_row_sees_another_by_sdpa():
    """Of a Mixtral, whose configuration computes the size of its heads, with attention in BF16 by "sdpa"."""
    shape = {"head_dim": None, "attn_implementation": "sdpa", "num_local_experts": 2, "sliding_window": None}
    found = []
    for changed in (0, 5):
        ids = torch.arange(1, 33)[None]
        ids[0, :12] += changed
        with sequences():
            engine = initialized(RANKS, 32, "mixtral", {"graph": "off"}, **shape)
            found.append(logits_of(engine, RANKS, ids, torch.arange(32)[None] % 12))
    assert torch.equal(found[0][:, 12:], found[1][:, 12:])
    assert not torch.equal(found[0][:, :12], found[1][:, :12])


@pytest.mark.parametrize(
    ("architecture", "check", "words"),
    [
        *((architecture, check_layers, None) for architecture in ("llama", "gemma3_text", "qwen3_moe")),
        # Each rank would begin their state anew, at the first token of its slice.
        ("llama4_text", check_layers, '"chunked_attention"'),
        ("qwen3_next", check_layers, '"linear_attention"'),
        ("falcon_h1", check_layers, '"hybrid"'),
        ("mamba2", check_layers, '"linear_attention"'),
        ("mamba", check_heads, "MambaConfig has none"),
        # Heads of two sizes.
        ("deepseek_v2", check_layers, "latent attention"),
        ("deepseek_v3", check_layers, "latent attention"),
    ],
)
def test_models_whose_layers_and_heads_cannot_be_shared_are_refused(architecture, check, words):
    config = AutoConfig.for_model(architecture)
    check(config, 1)
    with contextlib.nullcontext() if words is None else pytest.raises(UserError, match=words):
        check(config, RANKS)


SHORT, LONG = [1.0] * 64, [4.0] * 64


@pytest.mark.parametrize(
    ("rope", "refused"),
    [
        ({"rope_type": "default"}, False),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, False),
        ({"rope_type": "linear", "factor": 4.0}, False),
        ({"rope_type": "dynamic", "factor": 4.0}, True),
        ({"rope_type": "longrope", "factor": 4.0, "short_factor": SHORT, "long_factor": LONG}, True),
        ({"rope_type": "longrope", "factor": 4.0, "short_factor": LONG, "long_factor": LONG}, False),
        ({"full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, True),
    ],
    ids=str,
)
def test_rotations_that_depend_on_the_length_of_rows_are_refused(rope, refused):
    """Each rank would take the length from the largest position of its slice."""
    config = AutoConfig.for_model("llama")
    config.rope_parameters = {"rope_theta": 1e4, "original_max_position_embeddings": 32, **rope}
    check_rotation(config, 1)
    with pytest.raises(UserError, match="depend on the length of rows") if refused else contextlib.nullcontext():
        check_rotation(config, RANKS)


@on_ranks(RANKS)
def test_ranks_rotate_slices_as_one_rotates_rows():
    """Of a row of 32 tokens, of a model of 20 without scaled rotary embeddings."""
    shape = {"head_dim": 64, "attn_implementation": "sdpa", "max_position_embeddings": 80}
    for kind, factors in {"yarn": {}, "longrope": {"short_factor": [4.0] * 32, "long_factor": [4.0] * 32}}.items():
        rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 20, **factors}
        found = []
        for size in (RANKS, 1):
            with sequences():
                engine = initialized(size, 80, "llama", {"graph": "off"}, **shape, rope_parameters=rope)
                found.append(logits_of(engine, size, torch.arange(1, 33)[None], torch.arange(32)[None]))
        assert torch.equal(*found), kind


@on_ranks(RANKS)
def test_rows_of_a_micro_batch_follow_from_those_of_a_step():
    """An engine's batch is given by some of DeepSpeed's three sizes."""
    config = {key: value for key, value in models.config({"graph": "off"}).items() if "batch" not in key}
    config = {**config, "sequence_parallel_size": RANKS}
    config.pop("gradient_accumulation_steps")
    several = {"train_batch_size": 4, "gradient_accumulation_steps": 2}
    ids, places, found = torch.arange(1, 33).expand(2, -1), torch.arange(32).expand(2, -1), []
    for sizes in ({"train_micro_batch_size_per_gpu": 2}, {"train_batch_size": 2}, several):
        model = causal_lm("llama", attn_implementation="sdpa")
        with sequences():
            engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config | sizes)[0]
            batch = slices(RANKS, input_ids=ids, position_ids=places, shift_labels=ids, labels=ids)
            found.append(engine(**batch, use_cache=False).loss.item())
    assert found[0] == found[1] == found[2]


def logits_of_the_last_engine(*sizes, attention):
    """Of one model in engines one after the other, of which the last shares a row of three documents."""
    model = causal_lm("llama", head_dim=128, attn_implementation="sdpa")
    with sequences():
        for number, size in enumerate(sizes):
            last = number == len(sizes) - 1
            section = {**SECTION, "attention": {"format": attention if last else "e4m3"}}
            config = {**models.config(section), "train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": size}
            engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
            if not last:
                engine.destroy()
        return logits_of(engine, RANKS, torch.arange(1, 33)[None], torch.arange(32)[None] % 12)


@pytest.mark.parametrize(("before", "attention"), [(1, "e4m3"), (RANKS, "bf16")])
@on_ranks(RANKS)
def test_a_model_whose_attention_an_engine_before_had_in_fp8(before, attention):
    found = logits_of_the_last_engine(before, RANKS, attention=attention)
    assert torch.equal(found, logits_of_the_last_engine(RANKS, attention=attention))


@on_ranks(RANKS)
def test_a_batch_without_positions_is_warned_of():
    """transformers fills in those of the slice, which are those of a row of two documents."""
    for given, length, times in ((True, 32, 0), (True, 12, 0), (True, 8, 0), (False, 32, 1)):
        rows = {"input_ids": torch.arange(1, 33)[None]}
        if given:
            rows["position_ids"] = torch.arange(32)[None] % length
        with sequences(), warnings.catch_warnings(record=True) as caught:
            engine = initialized(RANKS, 32, section={"graph": "off"}, attn_implementation="sdpa")
            warnings.simplefilter("always")
            engine(**slices(RANKS, **rows), use_cache=False)
        said = [str(one.message) for one in caught if "position_ids of unsharded rows" in str(one.message)]
        assert len(said) == times, (given, length)


@pytest.mark.parametrize("size", [0, -1, True, "2", 2.0, None])
def test_no_number_of_ranks(size):
    with pytest.raises(UserError, match="whole number of at least 1"):
        sequence_parallel_size({"sequence_parallel_size": size})
    # A device mesh is left to DeepSpeed.
    assert sequence_parallel_size({"sequence_parallel_size": 2, "data_parallel_size": 1}) == 1
    assert sequence_parallel_size({}) == 1
