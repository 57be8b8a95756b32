"""Graphs of micro-steps whose rows ranks share: captured for rows of one document, with Python's losses and bytes."""

import pytest
import torch
import torch.nn.functional as F
from deepspeed import comm as dist

import ds_fp8
from ds_fp8.layers.attention import documents
from ds_fp8.train import packed_attention
from tests.engine.graphs_in_python import Graphs
from tests.layers.hugging_face import causal_lm
from tests.zero import models

RANKS, LENGTH = 2, 128


def trained(attention, attention_format, rows, graphs, padded=False):
    """Losses and bytes of steps over a row of documents of these lengths, what became of them, and what was said."""
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
        ids = (torch.arange(LENGTH) + 5 * number)[None] % 97
        targets = F.pad(ids[:, 1:], (0, 1), value=-100)
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        whole = {"input_ids": ids, "position_ids": places, "labels": targets, "shift_labels": targets}
        if padded:
            whole["attention_mask"] = (torch.arange(LENGTH) % (LENGTH // RANKS) < 60)[None].long()
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
    return result


# Tokens of the documents of a row. The second of two begins on the second rank, between its tokens or with them.
ONE, TWO, HALVES = [LENGTH], [80, 48], [64, 64]
CAPTURED = ["eager", "eager", "captured for 0", "checked", "eager"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu has it")
def test_rows_of_one_document_are_replayed(new_ranks):
    arguments = "sdpa", "bf16", [ONE] * 6
    eager = new_ranks(RANKS, trained, *arguments, False)
    graphs = new_ranks(RANKS, trained, *arguments, True)
    for (losses, sent, log, _), (wanted, wanted_bytes, _, _) in zip(graphs, eager, strict=True):
        assert log == [*CAPTURED, "replayed for 0", "checked", "eager", "replayed for 0"]
        assert losses == wanted
        assert sent == wanted_bytes
        assert sent[0]["exchange_bytes"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu has it")
def test_rows_of_several_documents_are_launched_by_python(new_ranks):
    arguments = "packed", "e4m3", [ONE, ONE, ONE, TWO, ONE, HALVES]
    eager = new_ranks(RANKS, trained, *arguments, False)
    graphs = new_ranks(RANKS, trained, *arguments, True)
    for (losses, sent, log, _), (wanted, wanted_bytes, _, _) in zip(graphs, eager, strict=True):
        assert log == [*CAPTURED, "eager", "replayed for 0", "eager"]
        assert losses == wanted
        assert sent == wanted_bytes
    # The first rank's slices have one document each.
    assert any("rows that ranks share hold several documents" in line for line in graphs[1][3])


@pytest.mark.skipif(torch.cuda.is_available(), reason="masks are the same there")
def test_padded_rows_that_ranks_share_are_launched_by_python(new_ranks):
    """Their masks are dropped, and a graph would take their documents for one."""
    for _, _, log, said in new_ranks(RANKS, trained, "sdpa", "bf16", [TWO] * 4, True, True):
        assert log == ["eager"] * 4
        assert any("rows are padded" in line for line in said)
