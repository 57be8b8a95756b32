"""fp8_attention.py for sequences that ranks share: FP8 codes travel between them, and attention's bits are the same.

Attention of whole sequences casts q, k and v once a rank, over all tokens of its heads. The scale of that cast is the
largest of those that the tokens' owners find, so that it can be known before anything travels, and codes be sent:

    sums                of k and v over all tokens, for their means: an all-reduce SUM of FP64 [2, B, kv_heads, 1, D]
    bounds    [4, P]    amax of q, k, v and max ‖v‖, by the rank whose heads these are: an all-reduce MAX
    q, k, v             cast by their owners with the scale of the rank they go to: 1 byte an element in place of 2
    o                   as the kernels leave it, in E4M3 with the scale of v, which all ranks know: 1 byte
    do                  BF16: backward's bounds are sums over all tokens, which partial sums would round otherwise
    dq, dk, dv          as the kernels leave them, in E5M2 with scales of the rank that computed them: 1 byte

Codes decode exactly, at either end. Tensors on the way are [P, S / P, B, heads, D], as DeepSpeed has them: of the ranks
they go to, or come from. Heads of k and v that several ranks need are cast once and sent several times.

Rows of several documents (shared_documents_attention): codes of long documents travel, and BF16 of short ones.
documents.py makes a call of each long document, in FP8, and of the short documents side by side, in BF16. Documents lie
on the ranks as they come, so that each rank sends other numbers of tokens of either kind:

    row     | long document                | short | long document       | short | short |
    ranks   | 0                   | 1                   | 2                   | 3     |
    FP8     | all tokens          | some | | some        | all tokens          |
    BF16    |                     |      | some |        |                     | all    |

All ranks know from the positions where documents end. Casts have a scale for each long document and rank, as in a row
by itself, and every bit is that of casts after the exchange. Rows that are one document each are one call together.
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
    KEPT,
    add_mean_of_values,
    attend,
    decode_exactly,
    factor_of,
    find_gradients,
    implementation_for,
    rotate_back,
    rotate_heads,
    sum_over_tokens,
)

_sent = 0


def count_sent(nbytes: int) -> None:
    global _sent
    _sent += nbytes


def bytes_sent() -> int:
    return _sent


def _share(nbytes: int, ranks: int) -> int:
    return nbytes * (ranks - 1) // ranks


@torch.compiler.disable(reason="cuDNN's FP8 attention stays outside of the graphs of torch.compile")
def shared_fp8_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup, scaling: float | None = None
) -> torch.Tensor:
    """Compute causal attention in FP8 over whole sequences, of which each rank has consecutive tokens. Collective.

    q [B, heads, S / P, D], k and v [B, kv_heads, S / P, D] of this rank's tokens -> [B, S / P, heads · D]. P divides
    heads; kv_heads divides P or is a multiple of it. group: the P ranks, in the order of their tokens.
    """
    length = q.shape[2]
    split = Split([(0, length * dist.get_world_size(group))], length, group, rows=len(q))
    return _CallsInFP8.apply(q, k, v, factor_of(q, scaling), split)


def by_rank(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """View x [B, heads, S / P, D] as [P, S / P, B, heads / P, D]; with fewer than P heads [heads, S / P, B, 1, D]."""
    return x.unflatten(1, (min(ranks, x.shape[1]), -1)).permute(1, 3, 0, 2, 4)


def bounds_by_rank(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the amax of q, k, v and the largest norm of v by rank, FP32 [4, P]; Inf where anything is not finite."""
    amax = [torch.linalg.vector_norm(x, torch.inf, dim=(1, 2, 3, 4), dtype=torch.float32) for x in (q, k, v)]
    norms = torch.linalg.vector_norm(v, dim=-1, dtype=torch.float32).amax((1, 2, 3))
    found = torch.stack([x.repeat_interleave(ranks // len(x)) for x in (*amax, norms)])
    return found.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a maximum over ranks carries Inf, and not NaN


def cast_by_rank(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return codes [P, S / P, B, n, D] of x as `by_rank` views it, with a scale for each rank."""
    copies = len(scale) // len(x)
    # In BF16 as exact as in FP32, for scales are powers of two, and nothing saturates: they come of the largest amax.
    in_units = x * scale[::copies].reciprocal().to(x.dtype).view(-1, 1, 1, 1, 1)
    codes = torch.empty(x.shape, dtype=FORMATS[FORWARD].dtype, device=x.device).copy_(in_units)
    return codes if copies == 1 else codes.view(torch.uint8).repeat_interleave(copies, 0).view(codes.dtype)


def own_gradient(found: torch.Tensor, which: int, kv_heads: int, ranks: int) -> torch.Tensor:
    """Return the gradient of q, k or v (`which`: 0, 1, 2) [..., heads, D] of what ranks have sent [..., P · n, D]."""
    if which < 2:
        found = rotate_back(found)
    if which and kv_heads < ranks:  # each rank that needed a head has a part of its gradient
        found = found.unflatten(-2, (kv_heads, -1)).sum(-2)
    return found


def all_reduced(sums: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    count_sent(_share(2 * sums.nbytes, dist.get_world_size(group)))
    return sums


def _exchange(x: torch.Tensor, group: dist.ProcessGroup, parts: list[int], arriving: list[int]) -> torch.Tensor:
    """Send the first parts[0] of x to rank 0, the next parts[1] to rank 1, ...; return what came, likewise."""
    # NCCL and gloo know no FP8; they only move the bytes.
    sent = x.view(torch.uint8) if x.element_size() == 1 else x
    received = sent.new_empty(sum(arriving), *sent.shape[1:])
    dist.all_to_all_single(received, sent, arriving, parts, group=group)
    if len(sent):
        count_sent(sent.nbytes // len(sent) * (len(sent) - parts[dist.get_rank(group)]))
    return received.view(x.dtype)


def own_tokens(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [B, S / P, P · n, D] in `dtype` of what ranks have sent [P, S / P, B, n, D], with a scale each."""
    found = decode_exactly(codes, scales.view(-1, 1, 1, 1, 1), dtype)
    return found.permute(2, 1, 0, 3, 4).flatten(2, 3)


class Piece(NamedTuple):
    """The tokens of one call that lie on one rank."""

    call: int
    rows: slice
    start: int  # First token in the rank's slice of the rows
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class Split:
    """Calls of attention as they are spread over ranks: exchanges of their tokens against heads."""

    def __init__(
        self, calls: Sequence[tuple[int, int]], length: int, group: dist.ProcessGroup, rows: int | None = None
    ):
        """Find the pieces of calls, (first token, end) through all rows, of which a rank has slices of `length`.

        No call crosses the end of a row. The group is in the order of its tokens. rows: the only call is one of so many
        whole rows, side by side.
        """
        self.whole, self.rows = rows is not None, rows or 1
        self.group, self.ranks, rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.calls = range(len(calls))
        self.lengths = [end - begin for begin, end in calls]
        self.pieces: list[list[Piece]] = [[] for _ in range(self.ranks)]
        for call, (begin, end) in enumerate(calls):
            row, first = divmod(begin, length * self.ranks)
            of_rows = slice(row, row + self.rows)
            for place in range(self.ranks):
                start, stop = (min(max(x - place * length, 0), length) for x in (first, first + end - begin))
                if start < stop:
                    self.pieces[place].append(Piece(call, of_rows, start, stop))
        self.tokens = [sum(piece.tokens for piece in pieces) for pieces in self.pieces]
        self.own, self.own_tokens, self.rank = self.pieces[rank], self.tokens[rank], rank

    def of_own(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces [P, n, rows, ...] of this rank's tokens [P, S / P, B, ...]."""
        return [x[:, piece.start : piece.stop, piece.rows] for piece in self.own]

    def of_pieces(self, x: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Return own pieces, each with its part along dimension 1 of x."""
        return zip(self.own, x.split([piece.tokens for piece in self.own], 1), strict=True)

    def to_heads(self, sent: torch.Tensor) -> torch.Tensor:
        """Send own tokens [P, n, ...] to the ranks of the heads; return what came of all tokens, by rank and call."""
        return _exchange(sent.contiguous().flatten(0, 1), self.group, [self.own_tokens] * self.ranks, self.tokens)

    def to_owners(self, sent: torch.Tensor) -> torch.Tensor:
        """Send all tokens, by rank and call, to their ranks; return what came of own tokens, [P, n, ...]."""
        received = _exchange(sent.contiguous(), self.group, self.tokens, [self.own_tokens] * self.ranks)
        return received.unflatten(0, (self.ranks, self.own_tokens))

    def by_call(self, received: torch.Tensor) -> list[torch.Tensor]:
        """Return the tokens of each call, in order, of what `to_heads` returned."""
        if len(self.calls) == 1:
            return [received]
        pieces = [piece for of_rank in self.pieces for piece in of_rank]
        parts = list(zip(pieces, received.split([piece.tokens for piece in pieces]), strict=True))
        return [torch.cat([part for piece, part in parts if piece.call == call]) for call in self.calls]

    def by_rank(self, calls: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tokens of calls as `to_owners` takes them."""
        if len(self.calls) == 1:
            return calls[0]
        sizes = [[piece.tokens for of_rank in self.pieces for piece in of_rank if piece.call == c] for c in self.calls]
        parts = [iter(x.split(sizes[call])) for call, x in enumerate(calls)]
        return torch.cat([next(parts[piece.call]) for of_rank in self.pieces for piece in of_rank])


class _CallsInFP8(torch.autograd.Function):
    """[B, heads, S / P, D] of all tokens -> [rows, n, heads · D] of own tokens of the calls."""

    @staticmethod
    def forward(ctx, q, k, v, scaling: float, split: Split):
        implementation, ranks, rank = implementation_for(q), split.ranks, split.rank
        k_means, v_means = _means_of_calls(k, v, split)
        q, k, v = (
            rotate_heads(q),
            rotate_heads(_less_means(k, k_means, split)),
            _less_means(v, v_means, split),
        )
        slices = [by_rank(x, ranks) for x in (q, k, v)]
        pieces = [split.of_own(x) for x in slices]
        bounds = torch.zeros(len(split.calls), 4, ranks, device=q.device)
        for piece, *parts in zip(split.own, *pieces, strict=True):
            bounds[piece.call] = bounds_by_rank(*parts, ranks)
        # A maximum does not depend on the order of the ranks: every one casts with the scale that a cast of the whole
        # tensor, after the exchange, would find.
        dist.all_reduce(bounds, dist.ReduceOp.MAX, split.group)
        count_sent(_share(2 * bounds.nbytes, ranks))
        scales = scale_from_amax(bounds[:, :3], FORWARD, "pow2")  # [calls, 3, P]
        whole = []
        for which, parts in enumerate(pieces):
            codes = [cast_by_rank(x, scales[p.call, which]) for p, x in zip(split.own, parts, strict=True)]
            whole.append(split.by_call(split.to_heads(_joined(codes, slices[which]))))
        outputs, kept = [], []
        for call, operands in enumerate(zip(*whole, strict=True)):
            casts = [
                QuantizedTensor(x.transpose(0, 1).contiguous(), scale.clone(), "tensor", "pow2")
                for x, scale in zip(operands, scales[call, :, rank], strict=True)
            ]
            output, tensors = attend(*casts, bounds[call, 3, rank].clone(), scaling, implementation)
            outputs.append(output.transpose(0, 1))
            kept += tensors
        ctx.save_for_backward(*kept)
        ctx.split, ctx.scaling, ctx.implementation = split, scaling, implementation
        ctx.shapes, ctx.kv_heads = [x.shape for x in (q, k, v)], k.shape[1]
        found = split.to_owners(_bytes_by_rank(split, outputs))
        # Averages of rows of v are never larger than v, so o has v's scale, that of the rank which computed it.
        output = _decoded(found, scales[:, 2], split, v.dtype)
        for piece, part in split.of_pieces(output):
            add_mean_of_values(part, v_means[piece.call])
        return output.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        split, ranks, head_dim = ctx.split, ctx.split.ranks, ctx.shapes[0][3]
        sent = do.unflatten(2, (ranks, -1, head_dim)).permute(2, 1, 0, 3, 4)
        saved, codes, scales = ctx.saved_tensors, [], []
        for call, gradient in enumerate(split.by_call(split.to_heads(sent))):
            kept, gradient = saved[KEPT * call :][:KEPT], gradient.transpose(0, 1)
            found = find_gradients(kept, gradient, ctx.scaling, ctx.implementation)
            codes.append([x.transpose(0, 1) for x, _ in found])
            scales.append(torch.stack([scale for _, scale in found]))
        # dq, dk and dv come as codes with one scale each, which only this rank knows: the others are told.
        own = torch.stack(scales)  # [calls, 3]
        of_all = own.new_empty(ranks, *own.shape)
        dist.all_gather_into_tensor(of_all.view(-1), own.view(-1), split.group)
        count_sent(_share(of_all.nbytes, ranks))
        gradients = []
        for which, (x, shape) in enumerate(zip(zip(*codes, strict=True), ctx.shapes, strict=True)):
            found = split.to_owners(_bytes_by_rank(split, x))
            found = _decoded(found, of_all[:, :, which].t(), split, do.dtype)  # [rows, n, P · heads / P, D]
            gradient = found = own_gradient(found, which, ctx.kv_heads, ranks)
            if not split.whole:
                gradient = found.new_zeros(shape[0], shape[2], shape[1], shape[3])
                for piece, part in split.of_pieces(found):
                    gradient[piece.rows, piece.start : piece.stop] = part
            gradients.append(gradient.transpose(1, 2))
        return *gradients, None, None


class _ToHeads(torch.autograd.Function):
    """Own tokens of q, k and v -> all tokens of a rank's heads.

    `earlier` only has its backward after this one: autograd would choose, and on every rank another, for the ranks have
    other numbers of pieces.
    """

    @staticmethod
    def forward(ctx, split: Split, earlier: torch.Tensor | None, *own: torch.Tensor):
        ctx.split = split
        return tuple(map(split.to_heads, own))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, None, *map(ctx.split.to_owners, gradients)


class _ToOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, split: Split):
        ctx.split = split
        return split.to_owners(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return ctx.split.to_heads(gradient), None


@torch.compiler.disable(reason="cuDNN's FP8 attention stays outside of the graphs of torch.compile")
def shared_documents_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup,
    ends: torch.Tensor,
    in_bf16: Callable[..., torch.Tensor],
    scaling: float | None = None,
) -> torch.Tensor:
    """Compute causal attention within documents, with q, k, v and group as of `shared_fp8_attention`. Collective.

    ends: int32 [documents + 1] through all whole rows. in_bf16: attention of short documents,
    QKV of one row, ends -> [1, n, heads, D].
    """
    ranks, length = dist.get_world_size(group), q.shape[2]
    calls = documents.calls(ends, length * ranks)
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    unused = []
    found = None
    for in_fp8 in (True, False):
        some = [call for call in calls if call.in_fp8 == in_fp8]
        split = Split([(call.start, call.stop) for call in some], length, group)
        if not some:
            continue
        if in_fp8:
            found = _CallsInFP8.apply(q, k, v, factor_of(q, scaling), split)
        else:
            heads = _ToHeads.apply(split, found, *(_own(x, split, ranks) for x in (q, k, v)))
            found = [
                in_bf16(QKV(*(x.permute(1, 2, 0, 3) for x in of_call)), call.ends).transpose(0, 1)
                for call, *of_call in zip(some, *map(split.by_call, heads), strict=True)
            ]
            found = _ToOwners.apply(split.by_rank(found), split).permute(2, 1, 0, 3, 4).flatten(2)
        for piece, part in split.of_pieces(found):
            outputs[piece.rows.start, piece.start] = part[0]
        # A rank without tokens of a kind computes its heads of them, and joins the exchanges of backward.
        unused.append(found[0, :0])
    return torch.cat([*(outputs[place] for place in sorted(outputs)), *unused]).unflatten(0, (len(q), length))


def _means_of_calls(k: torch.Tensor, v: torch.Tensor, split: Split) -> torch.Tensor:
    """Return the means of k and v over the tokens of each call, [2, calls, rows, kv_heads, 1, D]."""
    shape = 2, len(split.calls), split.rows, k.shape[1], 1, k.shape[3]
    sums = torch.zeros(shape, dtype=torch.float64, device=k.device)
    for piece in split.own:
        for total, x in zip(sums, (k, v), strict=True):
            total[piece.call] += sum_over_tokens(x[piece.rows, :, piece.start : piece.stop])
    # Numbers of the host in place of a tensor of them: copying one to the device would wait for it.
    sums = all_reduced(sums, split.group).unbind(1)
    means = [total / length for total, length in zip(sums, split.lengths, strict=True)]
    return torch.stack(means, 1).to(k.dtype)


def _less_means(x: torch.Tensor, means: torch.Tensor, split: Split) -> torch.Tensor:
    """Return x [B, heads, S / P, D] less the mean [rows, heads, 1, D] of the call that a token belongs to."""
    if len(split.calls) == 1:  # tokens of no call are not read
        return x - means[0]
    result = x.clone()
    for piece in split.own:
        result[piece.rows, :, piece.start : piece.stop] -= means[piece.call]
    return result


def _own(x: torch.Tensor, split: Split, ranks: int) -> torch.Tensor:
    """Return this rank's tokens of all calls [P, n, 1, heads / P, D], of own tokens [B, heads, S / P, D]."""
    # As DeepSpeed does, so that gradients of shared heads are summed in its order.
    x = x.transpose(1, 2).repeat_interleave(max(1, ranks // x.shape[1]), dim=2).transpose(1, 2)
    slices = by_rank(x, ranks)
    return _joined(split.of_own(slices), slices)


def _joined(pieces: Sequence[torch.Tensor], slices: torch.Tensor) -> torch.Tensor:
    """Return pieces [P, n, rows, heads / P, D] one behind the other; none, of `slices`, if empty."""
    if len(pieces) == 1:
        return pieces[0]
    if pieces and pieces[0].element_size() == 1:  # torch joins no FP8 on every device
        return torch.cat([x.view(torch.uint8) for x in pieces], 1).view(pieces[0].dtype)
    if pieces:
        return torch.cat(pieces, 1)
    return slices[:, :0, :1]  # of the graph of autograd: backward exchanges even so


def _bytes_by_rank(split: Split, calls: Sequence[torch.Tensor]) -> torch.Tensor:
    return split.by_rank([x.view(torch.uint8) for x in calls]).view(calls[0].dtype)


def _decoded(codes: torch.Tensor, scales: torch.Tensor, split: Split, dtype: torch.dtype) -> torch.Tensor:
    """Return [rows, n, P · heads / P, D] of codes [P, n, rows, heads / P, D] that came with scales [calls, P]."""
    parts = [own_tokens(x, scales[piece.call], dtype) for piece, x in split.of_pieces(codes)]
    if not parts:
        shape = split.rows, 0, codes.shape[0] * codes.shape[3], codes.shape[4]
        return torch.empty(shape, dtype=dtype, device=codes.device)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
