"""Which micro-steps of packed rows become graphs, and for how many documents, on two ranks with rows of their own.

A machine without a GPU captures nothing. What stands in for a graph here is a list of operations, recorded under the
masks of a capture: which micro-step meets which graph is decided as always, and its losses are those of the module.
"""

from itertools import pairwise

import torch
from deepspeed import comm as dist

from ds_fp8.train import packed_attention
from tests.engine.graphs_in_python import engine_of, log_of
from tests.zero.models import take_step

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


def trained(rows, graphs):
    """Losses of this rank whose row of every step has documents of these lengths, what became of it, what was said."""
    packed_attention.register()
    packed_attention._document_by_document = in_one_kernel
    engine, said = engine_of("packed")
    log = log_of(engine, graphs)
    losses = []
    for step, lengths in enumerate(rows):
        positions = torch.cat([torch.arange(length) for length in lengths[dist.get_rank()]])[None]
        tokens = (torch.arange(LENGTH) * 7 + step + dist.get_rank())[None] % 128
        loss = engine(input_ids=tokens, labels=tokens, position_ids=positions, use_cache=False).loss
        losses.append(take_step(engine, loss))
    packed_attention._document_by_document = launched_by_documents
    result = losses, list(log), said
    engine.destroy()
    return result


ONE = [LENGTH]
ROWS = [
    (ONE, ONE, "eager"),
    (ONE, ONE, "eager"),
    (ONE, ONE, "captured for 0, checked, eager"),
    (ONE, ONE, "replayed for 0"),
    ([20, 44], ONE, "eager"),
    ([1] * 64, [63, 1], "eager"),
    ([30, 34], [9, 55], "closed, captured for 128, checked, eager"),
    ([5] * 12 + [4], [31, 33], "replayed for 128"),
]
MORE = [
    ([20, 44], [1, 63], "eager"),
    ([21, 43], [64], "eager"),
    ([22, 42], [2, 62], "captured for 16, checked, eager"),
    ([4] * 16, [2] * 32, "closed, captured for 64, checked, eager"),
    ([22, 42], [1] * 64, "replayed for 64"),
]


def check(ranks, rows):
    given = [row[:2] for row in rows]
    launched, captured = (ranks(2, trained, given, graphs) for graphs in (False, True))
    for theirs, ours in zip(launched, captured, strict=True):
        assert ", ".join(ours[1]) == ", ".join(what for *_, what in rows)
        assert ours[0] == theirs[0]
        assert [line for line in ours[2] if not line.startswith("forward and backward now run as")] == []


def test_rows_of_one_document_are_plain_until_packed_ones_come(ranks):
    check(ranks, ROWS)


def test_a_graph_is_captured_anew_for_more_documents_on_any_rank(ranks):
    check(ranks, MORE)
