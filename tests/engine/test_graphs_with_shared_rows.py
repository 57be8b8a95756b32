"""Graphs of micro-steps whose rows ranks share: captured for rows of one document, with Python's losses and bytes."""

import pytest
import torch
import torch.nn.functional as F
from deepspeed import comm as dist
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ds_fp8
from ds_fp8.layers.attention import documents
from ds_fp8.layers.attention.sequence_parallel import exchange_of
from ds_fp8.train import packed_attention
from tests.engine.graphs_in_python import Graphs
from tests.layers.hugging_face import causal_lm
from tests.ranks import RankPool
from tests.zero import models

RANKS, LENGTH = 2, 128


def trained(attention, attention_format, rows, graphs, later=None):
    """Losses and bytes of steps over a row of documents of these lengths, what became of them, and what was said.

    later: the number of a step, and what is done to the engine before it, which returns what undoes it.
    """
    packed_attention.register()
    documents.LONG = LENGTH // 4
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": LENGTH}
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
        if later is not None and number == later[0]:
            undo = later[1](engine)
        ids = (torch.arange(LENGTH) + 5 * number)[None] % 97
        targets = F.pad(ids[:, 1:], (0, 1), value=-100)
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        whole = {"input_ids": ids, "position_ids": places, "labels": targets, "shift_labels": targets}
        batch = {name: x.chunk(RANKS, 1)[dist.get_rank()].to(engine.device).contiguous() for name, x in whole.items()}
        items = torch.tensor((LENGTH - 1) / RANKS, device=engine.device)
        engine.fp8.wire.take()
        loss = engine(**batch, use_cache=False, num_items_in_batch=items).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
        sent.append(engine.fp8.wire.take())
    if graphs and engine.device.type == "cuda":
        log = [f"{engine.fp8.graphs.captured} captured"]
    result = found, sent, list(log), said
    engine.destroy()
    if later is not None:
        undo()
    return result


@pytest.fixture
def own_ranks():
    """Two ranks of the test's own: DeepSpeed's groups of sequence parallelism stay with a process."""
    pool = RankPool(RANKS)
    yield pool.run
    pool.close()


ONE, TWO, HALVES = [LENGTH], [80, 48], [64, 64]
"""Tokens of the documents of a row. The second of two begins on the second rank, between its tokens or with them."""
CAPTURED = ["eager", "eager", "captured for 0", "checked", "eager"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu has it")
@pytest.mark.parametrize(("attention", "number_format"), [("sdpa", "bf16"), ("packed", "bf16"), ("packed", "e4m3")])
def test_rows_of_one_document_are_replayed(own_ranks, attention, number_format):
    arguments = attention, number_format, [ONE] * 6
    eager = own_ranks(trained, *arguments, False)
    graphs = own_ranks(trained, *arguments, True)
    for (losses, sent, log, _), (wanted, wanted_bytes, _, _) in zip(graphs, eager, strict=True):
        assert log == [*CAPTURED, "replayed for 0", "checked", "eager", "replayed for 0"]
        assert losses == wanted
        assert sent == wanted_bytes
        assert sent[0]["exchange_bytes"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu has it")
def test_rows_of_several_documents_are_launched_by_python(own_ranks):
    arguments = "packed", "e4m3", [ONE, ONE, ONE, TWO, ONE, HALVES]
    eager = own_ranks(trained, *arguments, False)
    graphs = own_ranks(trained, *arguments, True)
    for (losses, sent, log, _), (wanted, wanted_bytes, _, _) in zip(graphs, eager, strict=True):
        assert log == [*CAPTURED, "eager", "replayed for 0", "eager"]
        assert losses == wanted
        assert sent == wanted_bytes
    # The first rank's slices have one document each.
    assert any("rows that ranks share hold several documents" in line for line in graphs[1][3])


def scale_attention(engine):
    """Change what runs between the exchanges, of which no module or setting tells."""
    exchange = exchange_of(ALL_ATTENTION_FUNCTIONS["sdpa"])
    before = exchange.attn

    def scaled(module, query, key, value, mask, **options):
        return before(module, query, 2 * key, value, mask, **options)

    exchange.attn = scaled
    return lambda: setattr(exchange, "attn", before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu has it")
def test_a_graph_that_is_stale_ends_on_all_ranks(own_ranks):
    arguments = "sdpa", "bf16", [ONE] * 6
    eager = own_ranks(trained, *arguments, False, (4, scale_attention))
    graphs = own_ranks(trained, *arguments, True, (4, scale_attention))
    for (losses, _, log, said), (wanted, *_) in zip(graphs, eager, strict=True):
        assert log == [*CAPTURED, "replayed for 0", "checked", "eager", "closed"]
        assert losses == wanted
        assert any("in step 5 the outputs of a graph and of Python differ" in line for line in said)
