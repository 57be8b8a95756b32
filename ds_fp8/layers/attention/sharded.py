"""FP8 attention of sequences sharded over ranks: FP8 data is exchanged, and the bits are those of one rank.

fp8_attention.py quantizes q, k and v with one scale over all tokens of a rank's heads. Here the ranks that hold the
tokens find that scale before the exchange, and send FP8 data:

    sums                of k and v over all tokens, for their means: all-reduce SUM of FP64 [2, B, kv_heads, 1, D]
    bounds    [4, P]    amax of q, k, v and max ‖v‖ by the rank of the heads: all-reduce MAX
    q, k, v             quantized with the scale of the receiving rank: 1 byte an element in place of 2
    o                   E4M3 with the scale of v, which all ranks know: 1 byte
    do                  BF16: the bounds of backward are sums over all tokens, which partial sums would round otherwise
    dq, dk, dv          E5M2 with scales of the sending rank: 1 byte

Exchanged tensors are [P, S / P, B, heads, D], as in DeepSpeed, by receiving or sending rank. Heads of k and v for
several ranks are quantized once and sent several times.

Rows of several documents (sharded_documents_attention): FP8 data of long documents, BF16 of short ones. documents.py
makes one FP8 call of each long document and one BF16 call of neighbouring short ones. A document lies on any ranks:

    row     | long document                | short | long document       | short | short |
    ranks   | 0                   | 1                   | 2                   | 3     |
    FP8     | all tokens          | some | | some        | all tokens          |
    BF16    |                     |      | some |        |                     | all    |

All ranks know from the positions where documents end. Each long document has its own scale on each rank, as in a row by
itself. Rows that are one document each are one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from deepspeed import comm as dist
from torch.autograd.function import once_differentiable

from ds_fp8.casts import QuantizedTensor
from ds_fp8.casts.primitives import scale_from_amax
from ds_fp8.config.formats import FORMATS
from ds_fp8.layers.attention import documents
from ds_fp8.layers.attention.cudnn import FORWARD
from ds_fp8.layers.attention.documents import QKV
from ds_fp8.layers.attention.fp8_attention import (
    SAVED,
    add_mean_of_values,
    attend,
    compute_gradients,
    dequantize_exactly,
    implementation_for,
    rotate_back,
    rotate_heads,
    softmax_scale,
    sum_over_tokens,
)

_sent = 0


def count_sent(nbytes: int) -> None:
    global _sent
    _sent += nbytes


def count_shards(nbytes: int, ranks: int) -> None:
    """Count the bytes sent to other ranks of a tensor of equal shards, one a rank."""
    count_sent(nbytes * (ranks - 1) // ranks)


def bytes_sent() -> int:
    return _sent


@torch.compiler.disable(reason="cuDNN's FP8 attention stays outside of the graphs of torch.compile")
def sharded_fp8_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, scaling: float | None = None
) -> torch.Tensor:
    """Compute causal attention in FP8 over sequences of which each rank holds consecutive tokens. Collective.

    q [B, heads, S / P, D], k and v [B, kv_heads, S / P, D] of this rank's tokens -> [B, S / P, heads · D]. P divides
    heads; kv_heads divides P or is a multiple of it. group: the P ranks, in the order of their tokens.
    """
    length = q.shape[2]
    shards = CallShards([(0, length * dist.get_world_size(group))], length, group, rows=len(q))
    return _FP8Calls.apply(q, k, v, softmax_scale(q, scaling), shards)


def by_rank(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """View x [B, heads, S / P, D] as [P, S / P, B, heads / P, D]; with fewer than P heads [heads, S / P, B, 1, D]."""
    return x.unflatten(1, (min(ranks, x.shape[1]), -1)).permute(1, 3, 0, 2, 4)


def bounds_by_rank(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the amax of q, k, v and the largest norm of v by rank, FP32 [4, P]; Inf where a value is not finite."""
    amax = [torch.linalg.vector_norm(x, torch.inf, dim=(1, 2, 3, 4), dtype=torch.float32) for x in (q, k, v)]
    norms = torch.linalg.vector_norm(v, dim=-1, dtype=torch.float32).amax((1, 2, 3))
    bounds = torch.stack([x.repeat_interleave(ranks // len(x)) for x in (*amax, norms)])
    return bounds.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a maximum over ranks propagates Inf, not NaN


def quantize_by_rank(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantize x, as viewed by `by_rank`, with a scale for each rank: E4M3 [P, S / P, B, n, D]."""
    copies = len(scale) // len(x)
    # Scales are powers of two, of the amax over all ranks: BF16 holds the quotient exactly, and nothing saturates.
    scaled = x * scale[::copies].reciprocal().to(x.dtype).view(-1, 1, 1, 1, 1)
    data = torch.empty(x.shape, dtype=FORMATS[FORWARD].dtype, device=x.device).copy_(scaled)
    return data if copies == 1 else data.view(torch.uint8).repeat_interleave(copies, 0).view(data.dtype)


def dequantize_by_rank(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize received data [P, S / P, B, n, D], with one scale a rank, to [B, S / P, P · n, D]."""
    return dequantize_exactly(data, scales.view(-1, 1, 1, 1, 1), dtype).permute(2, 1, 0, 3, 4).flatten(2, 3)


def own_gradient(gradient: torch.Tensor, which: int, kv_heads: int, ranks: int) -> torch.Tensor:
    """Return the gradient of q, k or v (`which`: 0, 1, 2) [..., heads, D] of the received [..., P · n, D]."""
    if which < 2:
        gradient = rotate_back(gradient)
    if which and kv_heads < ranks:  # partial gradients of the ranks that share a head
        gradient = gradient.unflatten(-2, (kv_heads, -1)).sum(-2)
    return gradient


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup, send: list[int], receive: list[int]) -> torch.Tensor:
    """Send the first send[0] rows of x to rank 0, the next send[1] to rank 1, ...; return the received rows."""
    sent = x.view(torch.uint8) if x.element_size() == 1 else x  # NCCL and gloo have no FP8
    received = sent.new_empty(sum(receive), *sent.shape[1:])
    dist.all_to_all_single(received, sent, receive, send, group=group)
    if len(sent):
        count_sent(sent.nbytes // len(sent) * (len(sent) - send[dist.get_rank(group)]))
    return received.view(x.dtype)


def _cat(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts[0].element_size() == 1:  # torch.cat of FP8 does not exist on every device
        return torch.cat([x.view(torch.uint8) for x in parts], dim).view(parts[0].dtype)
    return torch.cat(parts, dim)


class Piece(NamedTuple):
    """The tokens of one call on one rank: rows, and a slice of the rank's S / P tokens of them."""

    call: int
    rows: slice
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class CallShards:
    """Calls of attention whose tokens are sharded over ranks: exchanges of token shards for head shards."""

    def __init__(
        self, calls: Sequence[tuple[int, int]], length: int, group: dist.ProcessGroup, rows: int | None = None
    ):
        """Find the pieces of calls, each (first token, end) through all rows; ranks hold `length` tokens of a row.

        No call crosses the end of a row. rows: the only call is one of so many rows of one document each.
        """
        self.one_call, self.rows = rows is not None, rows or 1
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.calls = range(len(calls))
        self.lengths = [end - begin for begin, end in calls]
        self.pieces: list[list[Piece]] = [[] for _ in range(self.ranks)]
        for call, (begin, end) in enumerate(calls):
            row, first = divmod(begin, length * self.ranks)
            for rank in range(self.ranks):
                start, stop = (min(max(x - rank * length, 0), length) for x in (first, first + end - begin))
                if start < stop:
                    self.pieces[rank].append(Piece(call, slice(row, row + self.rows), start, stop))
        self.all_pieces = [piece for pieces in self.pieces for piece in pieces]
        self.tokens = [sum(piece.tokens for piece in pieces) for pieces in self.pieces]
        self.own, self.own_tokens = self.pieces[self.rank], self.tokens[self.rank]

    def own_pieces(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces [P, n, rows, ...] of this rank's tokens [P, S / P, B, ...]."""
        return [x[:, piece.start : piece.stop, piece.rows] for piece in self.own]

    def split(self, x: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Return this rank's pieces, each with its part along dimension 1 of x."""
        return zip(self.own, x.split([piece.tokens for piece in self.own], 1), strict=True)

    def to_heads(self, sent: torch.Tensor) -> torch.Tensor:
        """Send own tokens [P, n, ...] to the ranks of the heads; return all tokens of own heads, by rank and call."""
        return _all_to_all(sent.contiguous().flatten(0, 1), self.group, [self.own_tokens] * self.ranks, self.tokens)

    def to_tokens(self, sent: torch.Tensor) -> torch.Tensor:
        """Undo `to_heads`: send all tokens of own heads, by rank and call; return own tokens [P, n, ...]."""
        received = _all_to_all(sent.contiguous(), self.group, self.tokens, [self.own_tokens] * self.ranks)
        return received.unflatten(0, (self.ranks, self.own_tokens))

    def by_call(self, received: torch.Tensor) -> list[torch.Tensor]:
        """Return the tokens of each call, in order, from the result of `to_heads`."""
        if len(self.calls) == 1:
            return [received]
        parts = list(zip(self.all_pieces, received.split([piece.tokens for piece in self.all_pieces]), strict=True))
        return [torch.cat([part for piece, part in parts if piece.call == call]) for call in self.calls]

    def by_rank(self, calls: Sequence[torch.Tensor]) -> torch.Tensor:
        """Undo `by_call`: return the argument of `to_tokens` from the tokens of each call."""
        if len(self.calls) == 1:
            return calls[0]
        sizes = [[piece.tokens for piece in self.all_pieces if piece.call == call] for call in self.calls]
        parts = [iter(x.split(size)) for x, size in zip(calls, sizes, strict=True)]
        return _cat([next(parts[piece.call]) for piece in self.all_pieces])

    def join(self, pieces: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Concatenate pieces [P, n, rows, heads / P, D] of x; without any, an empty part of x, for autograd's graph."""
        return _cat(pieces, 1) if pieces else x[:, :0, :1]  # backward exchanges even so


class _FP8Calls(torch.autograd.Function):
    """q, k, v [B, heads, S / P, D] -> output [rows, n, heads · D] of this rank's tokens of the calls."""

    @staticmethod
    def forward(ctx, q, k, v, scaling: float, shards: CallShards):
        implementation, ranks, rank = implementation_for(q), shards.ranks, shards.rank
        k_means, v_means = _means_of_calls(k, v, shards)
        q, k, v = rotate_heads(q), rotate_heads(_subtract(k, k_means, shards)), _subtract(v, v_means, shards)
        views = [by_rank(x, ranks) for x in (q, k, v)]
        pieces = [shards.own_pieces(x) for x in views]
        bounds = torch.zeros(len(shards.calls), 4, ranks, device=q.device)
        for piece, *parts in zip(shards.own, *pieces, strict=True):
            bounds[piece.call] = bounds_by_rank(*parts, ranks)
        # The maximum over ranks is the amax of all tokens: every rank quantizes with the scale of one unsharded tensor.
        dist.all_reduce(bounds, dist.ReduceOp.MAX, shards.group)
        count_shards(2 * bounds.nbytes, ranks)
        scales = scale_from_amax(bounds[:, :3], FORWARD, "pow2")  # [calls, 3, P]
        inputs = []
        for which, parts in enumerate(pieces):
            data = [quantize_by_rank(x, scales[p.call, which]) for p, x in zip(shards.own, parts, strict=True)]
            inputs.append(shards.by_call(shards.to_heads(shards.join(data, views[which]))))
        outputs, saved = [], []
        for call, qkv in enumerate(zip(*inputs, strict=True)):
            casts = [
                QuantizedTensor(x.transpose(0, 1).contiguous(), scale.clone(), "tensor", "pow2")
                for x, scale in zip(qkv, scales[call, :, rank], strict=True)
            ]
            output, tensors = attend(*casts, bounds[call, 3, rank].clone(), scaling, implementation)
            outputs.append(output.transpose(0, 1))
            saved += tensors
        ctx.save_for_backward(*saved)
        ctx.shards, ctx.scaling, ctx.implementation = shards, scaling, implementation
        ctx.shapes, ctx.kv_heads = [x.shape for x in (q, k, v)], k.shape[1]
        received = shards.to_tokens(shards.by_rank(outputs))
        # Rows of p sum to 1: o needs no larger scale than v, that of the sending rank.
        output = _dequantize(received, scales[:, 2], shards, v.dtype)
        for piece, part in shards.split(output):
            add_mean_of_values(part, v_means[piece.call])
        return output.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        shards, ranks, head_dim = ctx.shards, ctx.shards.ranks, ctx.shapes[0][3]
        sent = do.unflatten(2, (ranks, -1, head_dim)).permute(2, 1, 0, 3, 4)
        saved, data, scales = ctx.saved_tensors, [], []
        for call, gradient in enumerate(shards.by_call(shards.to_heads(sent))):
            of_call = saved[SAVED * call :][:SAVED]
            results = compute_gradients(of_call, gradient.transpose(0, 1), ctx.scaling, ctx.implementation)
            data.append([x.transpose(0, 1) for x, _ in results])
            scales.append(torch.stack([scale for _, scale in results]))
        own = torch.stack(scales)  # [calls, 3] of dq, dk, dv, known to this rank alone
        all_scales = own.new_empty(ranks, *own.shape)
        dist.all_gather_into_tensor(all_scales.view(-1), own.view(-1), shards.group)
        count_shards(all_scales.nbytes, ranks)
        gradients = []
        for which, (x, shape) in enumerate(zip(zip(*data, strict=True), ctx.shapes, strict=True)):
            received = shards.to_tokens(shards.by_rank(x))
            received = _dequantize(received, all_scales[:, :, which].t(), shards, do.dtype)
            gradient = own = own_gradient(received, which, ctx.kv_heads, ranks)  # [rows, n, heads, D]
            if not shards.one_call:
                gradient = own.new_zeros(shape[0], shape[2], shape[1], shape[3])
                for piece, part in shards.split(own):
                    gradient[piece.rows, piece.start : piece.stop] = part
            gradients.append(gradient.transpose(1, 2))
        return *gradients, None, None


class _ToHeads(torch.autograd.Function):
    """`CallShards.to_heads` of q, k and v.

    `earlier` orders backward after that of the FP8 calls: autograd's own order would differ between ranks, with their
    numbers of pieces, and with it the order of collectives.
    """

    @staticmethod
    def forward(ctx, shards: CallShards, earlier: torch.Tensor | None, *own: torch.Tensor):
        ctx.shards = shards
        return tuple(map(shards.to_heads, own))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, None, *map(ctx.shards.to_tokens, gradients)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shards: CallShards):
        ctx.shards = shards
        return shards.to_tokens(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return ctx.shards.to_heads(gradient), None


@torch.compiler.disable(reason="cuDNN's FP8 attention stays outside of the graphs of torch.compile")
def sharded_documents_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup,
    ends: torch.Tensor,
    in_bf16: Callable[..., torch.Tensor],
    scaling: float | None = None,
) -> torch.Tensor:
    """Compute causal attention within documents; q, k, v and group as in `sharded_fp8_attention`. Collective.

    ends: int32 [documents + 1] through all unsharded rows. in_bf16: attention of short documents, QKV of one row, ends
    -> [1, n, heads, D].
    """
    ranks, length = dist.get_world_size(group), q.shape[2]
    calls = documents.calls(ends, length * ranks)
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    unused = []
    output = None
    for in_fp8 in (True, False):
        some = [call for call in calls if call.in_fp8 == in_fp8]
        if not some:
            continue
        shards = CallShards([(call.start, call.stop) for call in some], length, group)
        if in_fp8:
            output = _FP8Calls.apply(q, k, v, softmax_scale(q, scaling), shards)
        else:
            heads = _ToHeads.apply(shards, output, *(_own_tokens(x, shards) for x in (q, k, v)))
            of_calls = [
                in_bf16(QKV(*(x.permute(1, 2, 0, 3) for x in qkv)), call.ends).transpose(0, 1)
                for call, *qkv in zip(some, *map(shards.by_call, heads), strict=True)
            ]
            output = _ToTokens.apply(shards.by_rank(of_calls), shards).permute(2, 1, 0, 3, 4).flatten(2)
        for piece, part in shards.split(output):
            outputs[piece.rows.start, piece.start] = part[0]
        # Keeps a rank without tokens of this format in the graph: it computes its heads, and backward exchanges.
        unused.append(output[0, :0])
    return torch.cat([*(outputs[place] for place in sorted(outputs)), *unused]).unflatten(0, (len(q), length))


def _means_of_calls(k: torch.Tensor, v: torch.Tensor, shards: CallShards) -> torch.Tensor:
    """Return the means of k and v over the tokens of each call, [2, calls, rows, kv_heads, 1, D]."""
    shape = 2, len(shards.calls), shards.rows, k.shape[1], 1, k.shape[3]
    sums = torch.zeros(shape, dtype=torch.float64, device=k.device)
    for piece in shards.own:
        for total, x in zip(sums, (k, v), strict=True):
            total[piece.call] += sum_over_tokens(x[piece.rows, :, piece.start : piece.stop])
    dist.all_reduce(sums, dist.ReduceOp.SUM, shards.group)
    count_shards(2 * sums.nbytes, shards.ranks)
    # Divided by Python numbers: a tensor of them would be copied to the device with a host sync.
    means = [total / length for total, length in zip(sums.unbind(1), shards.lengths, strict=True)]
    return torch.stack(means, 1).to(k.dtype)


def _subtract(x: torch.Tensor, means: torch.Tensor, shards: CallShards) -> torch.Tensor:
    """Return x [B, heads, S / P, D] less the mean [rows, heads, 1, D] of each token's call."""
    if len(shards.calls) == 1:  # tokens outside of the call are not read
        return x - means[0]
    result = x.clone()
    for piece in shards.own:
        result[piece.rows, :, piece.start : piece.stop] -= means[piece.call]
    return result


def _own_tokens(x: torch.Tensor, shards: CallShards) -> torch.Tensor:
    """Return this rank's tokens of all calls [P, n, 1, heads / P, D] of x [B, heads, S / P, D]."""
    # Repeated as DeepSpeed does, for its order of sums of the gradients of shared heads.
    x = x.transpose(1, 2).repeat_interleave(max(1, shards.ranks // x.shape[1]), dim=2).transpose(1, 2)
    view = by_rank(x, shards.ranks)
    return shards.join(shards.own_pieces(view), view)


def _dequantize(data: torch.Tensor, scales: torch.Tensor, shards: CallShards, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize received data [P, n, rows, heads / P, D] by scales [calls, P] to [rows, n, P · heads / P, D]."""
    parts = [dequantize_by_rank(x, scales[piece.call], dtype) for piece, x in shards.split(data)]
    if not parts:
        shape = shards.rows, 0, data.shape[0] * data.shape[3], data.shape[4]
        return torch.empty(shape, dtype=dtype, device=data.device)
    return _cat(parts, 1)
