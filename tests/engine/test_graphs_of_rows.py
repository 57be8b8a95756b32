"""Which micro-steps become graphs by what their rows hold: documents, padding, routed tokens, parts of shared rows.

A machine without a GPU captures nothing. What stands in for a graph here is a list of operations, recorded under the
masks of a capture: which micro-step meets which graph is decided as always, and its losses are those of the module.
"""

from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from deepspeed import comm as dist

import ds_fp8
from ds_fp8.layers.attention import documents
from ds_fp8.layers.experts import routing
from ds_fp8.train import packed_attention
from tests.engine.graphs_in_python import Graphs, Run
from tests.engine.test_sequence_parallel import sequences
from tests.layers.hugging_face import causal_lm
from tests.layers.moe import EXPERTS, mixture, routed_steps
from tests.ranks import on_ranks
from tests.zero import models

CAPTURED = "captured for {}, checked, eager".format

# ---------------------------------------------------------------- packed rows

LENGTH = 64

launched_by_documents = packed_attention._document_by_document


@torch.library.custom_op("ds_fp8_tests::packed", mutates_args=())
def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, scaling: float) -> torch.Tensor:
    """One operation that reads where documents end when it runs, as a GPU's kernel does."""
    return launched_by_documents(q, k, v, ends, 0.0, scaling).clone()


@torch.library.custom_op("ds_fp8_tests::packed_backward", mutates_args=())
def backward_kernel(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `kernel`, for q, k and v of [tokens, heads, D]."""
    groups = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, q, q))
    for start, end in pairwise(ends.tolist()):
        do, mine, keys, values = (
            x[start:end].float().repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1)
            for x in (gradient, q, k, v)
        )
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        p = (mine @ keys.mT * scaling).masked_fill(future, -torch.inf).softmax(-1)
        dp = do @ values.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scaling
        for place, found in ((dq, ds @ keys), (dk, ds.mT @ mine), (dv, p.mT @ do)):
            place[start:end] = found.transpose(0, 1)
    dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
    return tuple(x.to(q.dtype) for x in (dq, dk, dv))


def _keep(ctx, inputs, output):
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors)


kernel.register_autograd(
    lambda ctx, gradient: (*backward_kernel(gradient, *ctx.saved_tensors, ctx.scaling), None, None), setup_context=_keep
)


def in_one_kernel(q, k, v, ends, dropout, scaling):
    return kernel(q, k, v, ends, scaling)


# Documents of the row of either rank, and what becomes of the micro-step
ONE = [LENGTH]
ROWS = {
    "plain rows until packed ones come": [
        (ONE, ONE, "eager"),
        (ONE, ONE, "eager"),
        (ONE, ONE, CAPTURED(0)),
        (ONE, ONE, "replayed for 0"),
        ([20, 44], ONE, "eager"),
        ([1] * 64, [63, 1], "eager"),
        ([30, 34], [9, 55], f"closed, {CAPTURED(128)}"),
        ([5] * 12 + [4], [31, 33], "replayed for 128"),
    ],
    "more documents on any rank": [
        ([20, 44], [1, 63], "eager"),
        ([21, 43], [64], "eager"),
        ([22, 42], [2, 62], CAPTURED(16)),
        ([4] * 16, [2] * 32, f"closed, {CAPTURED(64)}"),
        ([22, 42], [1] * 64, "replayed for 64"),
    ],
}


@pytest.mark.parametrize("kind", ROWS)
@on_ranks(2)
def test_graphs_have_room_for_the_documents_of_packed_rows(kind):
    packed_attention.register()
    runs, rank = [], dist.get_rank()
    for graphs in (False, True):
        with (
            mock.patch.object(packed_attention, "_document_by_document", in_one_kernel),
            Run("packed", graphs) as run,
        ):
            for step, lengths in enumerate(ROWS[kind]):
                positions = torch.cat([torch.arange(length) for length in lengths[rank]])[None]
                tokens = (torch.arange(LENGTH) * 7 + step + rank)[None] % 128
                run.step(run.engine(input_ids=tokens, labels=tokens, position_ids=positions, use_cache=False).loss)
            runs.append(run)
    assert runs[1].found == runs[0].found
    assert runs[1].happened == [what for *_, what in ROWS[kind]]
    assert [line for line in runs[1].said if not line.startswith("forward and backward now run as")] == []


# ---------------------------------------------------------------- padded rows: the mask is one of a graph's inputs

PADDED, PADDED_LENGTH = 3, 32
PADDINGS = ("right", "left")
EVERY = ("right", "ones", "left", "absent", "with positions")


def mask(step, side):
    """Ones, zeros at one side: as many as it likes, others at every step."""
    padding = torch.tensor([(5 * step + 11 * row + 1) % (PADDED_LENGTH - 2) for row in range(PADDED)])[:, None]
    places = torch.arange(PADDED_LENGTH)[None]
    return ((places >= padding) if side == "left" else (places < PADDED_LENGTH - padding)).long()


def padded_batch(step, kind):
    tokens = (torch.arange(PADDED_LENGTH * PADDED).view(PADDED, -1) * 7 + step) % 128
    more = {}
    if kind != "absent":
        side = kind if kind in PADDINGS else ("left", "right")[step % 2]
        more["attention_mask"] = torch.ones_like(tokens) if kind == "ones" else mask(step, side)
    if kind == "with positions":
        more["position_ids"] = (more["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    labels = tokens if "attention_mask" not in more else tokens.masked_fill(more["attention_mask"] == 0, -100)
    return {"input_ids": tokens, "labels": labels, **more}


def padded(graphs, attention, kinds):
    packed_attention.register()
    with Run(attention, graphs, auto=True) as run:
        for step in range(4 * len(kinds) + 1):
            run.step(run.engine(**padded_batch(step, kinds[step % len(kinds)])).loss)
        return run, graphs and (run.graphs.off, run.graphs.captured)


@pytest.mark.parametrize(("attention", "kinds", "captured"), [("sdpa", EVERY, 3), ("eager", PADDINGS, 1)])
@on_ranks(1)
def test_every_bit_is_that_of_python_whatever_the_padding(attention, kinds, captured):
    (plain, _), (run, outcome) = (padded(graphs, attention, kinds) for graphs in (False, True))
    assert run.found == plain.found
    assert outcome == (None, captured), run.said
    assert "captured for 0, padded" in run.log
    assert run.log.count("replayed for 0") >= 2 * len(kinds) - captured
    assert not any("differ" in line for line in run.said)


@on_ranks(1)
def test_attention_that_reads_the_padding_is_launched_by_python():
    run, outcome = padded(True, "packed", ("right",))
    assert outcome == (None, 0)
    assert run.said == ["without CUDA graphs: rows are padded, so that attention's work differs from batch to batch"]


# ---------------------------------------------------------------- routed tokens

MEASURED_EVERY, REPLAYED_IN = 5, 8  # Steps; the routing of the latter is given


def routed(graphs):
    """(losses, router statistics by step), and the run, of steps of two micro-batches' tokens."""
    model = mixture("qwen3_moe", num_hidden_layers=1)
    # All experts for all tokens: operations that an OperationList repeats need fixed sizes.
    model.config._experts_implementation = "batched_mm"
    with Run(graphs=graphs, fp8={"monitor": {"every": MEASURED_EVERY}}, model=model) as run:
        engine = run.engine

        def routes(ids):
            with routing.record(engine) as recorded, torch.no_grad():
                engine.eval()
                engine(input_ids=ids)
                engine.train()
            return {name: (chosen + 1) % EXPERTS for name, chosen in recorded.items()}

        def batch(step):
            return ((torch.arange(64) * 7 + step) % model.config.vocab_size)[None]

        return routed_steps(engine, batch, 11, REPLAYED_IN, routes), run


@on_ranks(1)
def test_measured_steps_are_counted_and_given_routing_runs_eagerly():
    (plain, _), (found, run) = routed(False), routed(True)
    assert found == plain
    measured = [step for step, statistics in enumerate(found[1]) if statistics is not None]
    assert measured == [0, MEASURED_EVERY, 2 * MEASURED_EVERY]
    assert any(line.startswith("replayed") for line in run.log)
    assert "without CUDA graphs: routing of experts is recorded or replayed" in run.said


# ---------------------------------------------------------------- rows that ranks share

RANKS, SHARED = 2, 128


@mock.patch.object(documents, "LONG", SHARED // 4)
def trained(attention, attention_format, rows, graphs, padded=False):
    """Losses and bytes of steps over a row of documents of these lengths, what became of them, and what was said."""
    packed_attention.register()
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": SHARED}
    model = causal_lm("qwen3", **sizes, attn_implementation=attention)
    section = {"attention": {"format": attention_format}, "monitor": {"every": 0}, "graph": "on" if graphs else "off"}
    config = {**models.config(section), "train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": RANKS}
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    said, log = [], []
    engine.fp8.health.say = said.append
    if graphs and engine.device.type != "cuda":
        engine.fp8.graphs = Graphs(engine, auto=True)
        log = engine.fp8.graphs.log
    found, sent = [], []
    for number, lengths in enumerate(rows):
        ids = (torch.arange(SHARED) + 5 * number)[None] % 97
        targets = F.pad(ids[:, 1:], (0, 1), value=-100)
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        whole = {"input_ids": ids, "position_ids": places, "labels": targets, "shift_labels": targets}
        if padded:
            whole["attention_mask"] = (torch.arange(SHARED) % (SHARED // RANKS) < 60)[None].long()
        batch = {name: x.chunk(RANKS, 1)[dist.get_rank()].to(engine.device).contiguous() for name, x in whole.items()}
        items = torch.tensor((SHARED - 1) / RANKS, device=engine.device)
        engine.fp8.wire.take()
        found.append(models.take_step(engine, engine(**batch, use_cache=False, num_items_in_batch=items).loss))
        sent.append(engine.fp8.wire.take())
    if graphs and engine.device.type == "cuda":
        log = [f"{engine.fp8.graphs.captured} captured"]
    result = found, sent, list(log), said
    engine.destroy()
    return result


# Tokens of the documents of a row. The second of two begins on the second rank, between its tokens or with them.
WHOLE, TWO, HALVES = [SHARED], [80, 48], [64, 64]
BEGINNING = ["eager", "eager", "captured for 0", "checked", "eager"]
SHARED_ROWS = {
    "sdpa": ("bf16", [WHOLE] * 6, ["replayed for 0", "checked", "eager", "replayed for 0"]),
    "packed": ("e4m3", [WHOLE, WHOLE, WHOLE, TWO, WHOLE, HALVES], ["eager", "replayed for 0", "eager"]),
}


@pytest.mark.parametrize("attention", SHARED_ROWS)
@on_ranks(RANKS)
def test_shared_rows_of_one_document_are_replayed_and_others_launched_by_python(attention):
    number_format, rows, expected = SHARED_ROWS[attention]
    with sequences():
        wanted, wanted_bytes, *_ = trained(attention, number_format, rows, False)
        losses, sent, log, said = trained(attention, number_format, rows, True)
        padded = trained(attention, number_format, [TWO] * 4, True, True) if attention == "sdpa" else None
    assert log == [*BEGINNING, *expected]
    assert losses == wanted
    assert sent == wanted_bytes
    assert sent[0]["exchange_bytes"] > 0
    # The first rank's slices have one document each.
    several = any("rows that ranks share hold several documents" in line for line in said)
    assert several == (attention == "packed") or dist.get_rank() == 0
    if padded:  # their masks are dropped, and a graph would take their documents for one
        assert padded[2] == ["eager"] * 4
        assert any("rows are padded" in line for line in padded[3])
