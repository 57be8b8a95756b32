"""The gain of FP8 in ZeRO-3 on many nodes: a cost model, extended to 1024 GPUs and checked against measured steps.

    python scripts/bench/scaling.py                                              7B, 70B and 405B, 8 to 1024 GPUs
    python scripts/bench/scaling.py --measured fast_step.json:fast_collectives.json,slow_step.json:slow_collectives.json
    python scripts/bench/scaling.py --quick                                      one model, few sizes

A training step is its layers one after the other. ZeRO-3 gathers the next layer while one computes, in forward and
again in backward, where gradients are reduced as well; what takes longer counts:

    forward    max(compute, gather)        backward    max(2 compute, gather + reduce)
    once       refresh of the FP8 shards (three passes over the master shards' bytes) and the optimizer

Assumptions, all of them options:
    nodes of 8 GPUs; between GPUs of a node --nvlink GB/s, to other nodes --ports ports a node of --network Gb/s each,
    of which --efficiency arrives; a ring has a step of --latency microseconds for every rank, an all-to-all a tenth
    of that for every peer
    BF16   all-gather and reduce-scatter as rings in which every network port of a node takes its share, 2 bytes each
    FP8    all-gather the same with 1 byte; gradients in two levels, 33/32 byte each: inside the node, then what has
           been summed there between nodes; casts, sums and the copy of what was gathered at --memory TB/s
    compute at --bf16 and --fp8 TFLOP/s for linears, attention at --attention; embeddings and head are sent in BF16;
    recomputation, data loading, stragglers and congestion are left out, and so is whether activations fit

--measured takes pairs of files that step.py and collectives.py wrote on the same link, with the same size. The first
pair gives the compute time of every variant; for each further pair the step is predicted from its collectives and
compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common import SIZES, ModelSize, integers, print_table, words, write_json

from ds_fp8.config.errors import UserError, main_entry

NODE = 8


class Model(NamedTuple):
    """A language model: its layer's shape, how many there are, its vocabulary."""

    layer: ModelSize
    layers: int
    vocabulary: int

    @property
    def layer_parameters(self) -> int:
        return sum(n * k for n, k in self.layer.linears().values())

    @property
    def embedding_parameters(self) -> int:
        """Return the parameters of embeddings and head."""
        return 2 * self.vocabulary * self.layer.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding_parameters


MODELS = {
    "7b": Model(SIZES["7b"], 28, 152064),  # Qwen2.5-7B
    "70b": Model(ModelSize(8192, 28672, 64, 8, 128), 80, 128256),  # Llama 3 70B
    "405b": Model(ModelSize(16384, 53248, 128, 8, 128), 126, 128256),  # Llama 3.1 405B
}


class Variant(NamedTuple):
    """Precision in which a variant computes and sends."""

    fp8_compute: bool
    fp8_wire: bool


VARIANTS = {"bf16": Variant(False, False), "fp8/bf16-wire": Variant(True, False), "fp8": Variant(True, True)}


class Layer(NamedTuple):
    """Seconds of one layer: its forward, one gather, one reduction."""

    compute: float
    gather: float
    reduce: float

    @property
    def total(self) -> float:
        """Return the seconds of forward and backward, communication behind compute where it fits."""
        return max(self.compute, self.gather) + max(2 * self.compute, self.gather + self.reduce)


def between_nodes(sent: float, gpus: int, cost: argparse.Namespace) -> float:
    """Return the seconds that a node's ports take to send what other nodes need of `sent` bytes."""
    nodes = max(1, gpus // NODE)
    return sent * (nodes - 1) / nodes / (cost.ports * cost.network)


def ring(sent: float, gpus: int, cost: argparse.Namespace) -> float:
    """Return the seconds of an all-gather or reduce-scatter of `sent` bytes, over rings through a node's ports."""
    between = between_nodes(sent, gpus, cost)
    return max(sent * (gpus - 1) / gpus / cost.nvlink, between) + (gpus - 1) * cost.latency


def two_levels(sent: float, gpus: int, cost: argparse.Namespace) -> float:
    """Return the seconds of an all-to-all of `sent` bytes inside the node, then of the node's share between nodes."""
    nodes, inside = max(1, gpus // NODE), min(gpus, NODE)
    peers = inside - 1 + nodes - 1
    first = sent * (inside - 1) / inside / cost.nvlink
    return first + between_nodes(sent, gpus, cost) + peers * cost.latency / 10


def layer_cost(parameters: int, flops: float, variant: Variant, gpus: int, cost: argparse.Namespace) -> Layer:
    """Return the seconds of a layer of `parameters` parameters, whose forward takes `flops` seconds."""
    if not variant.fp8_wire:
        return Layer(flops, ring(2 * parameters, gpus, cost), ring(2 * parameters, gpus, cost))
    copies, casts = 2 * parameters / cost.memory, (2 + 1 + 1) * parameters / cost.memory
    return Layer(
        flops,
        ring(parameters, gpus, cost) + copies,
        two_levels(parameters * 33 / 32, gpus, cost) + casts,
    )


def step_seconds(model: Model, variant: Variant, gpus: int, cost: argparse.Namespace) -> float:
    """Return the seconds of a training step on one micro-batch of cost.tokens tokens a GPU."""
    rate = cost.fp8 if variant.fp8_compute else cost.bf16
    linears = 2 * model.layer_parameters * cost.tokens / rate
    attention = 2 * cost.length * model.layer.heads * model.layer.head_dim * cost.tokens / cost.attention
    layer = layer_cost(model.layer_parameters, linears + attention, variant, gpus, cost)
    head = 2 * model.embedding_parameters / 2 * cost.tokens / cost.bf16
    ends = Layer(head, *layer_cost(model.embedding_parameters, 0, Variant(False, False), gpus, cost)[1:])
    shard = model.parameters / gpus
    refresh = 9 * shard / cost.memory if variant.fp8_wire else 0.0
    return model.layers * layer.total + ends.total + refresh + 28 * shard / cost.memory


def simulate(cost: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, ports, gpus in itertools.product(cost.models, cost.all_ports, cost.gpus):
        model = MODELS[name]
        cost.ports = ports
        seconds = {variant: step_seconds(model, how, gpus, cost) for variant, how in VARIANTS.items()}
        rows.append(
            {
                "model": name,
                "ports_per_node": ports,
                "gpus": gpus,
                "state_gb_per_gpu": 16 * model.parameters / gpus / 1e9,
                "step_seconds": seconds,
                "tokens_per_second_per_gpu": {variant: cost.tokens / s for variant, s in seconds.items()},
            }
        )
    return rows


def print_rows(rows: list[dict[str, Any]], cost: argparse.Namespace) -> None:
    print_table(
        f"tokens/s a GPU, {cost.tokens} tokens a GPU and step, simulated",
        ("model", "ports a node", "GPUs", "state GB a GPU", *VARIANTS, "fp8 / bf16", "fp8 / fp8 with bf16 wire"),
        [
            (
                row["model"],
                row["ports_per_node"],
                row["gpus"],
                row["state_gb_per_gpu"],
                *row["tokens_per_second_per_gpu"].values(),
                row["step_seconds"]["bf16"] / row["step_seconds"]["fp8"],
                row["step_seconds"]["fp8/bf16-wire"] / row["step_seconds"]["fp8"],
            )
            for row in rows
        ],
    )


class Point(NamedTuple):
    """A measured pair: seconds of a step by variant, and seconds of a layer's collectives by precision."""

    name: str
    layers: int
    accumulation: int
    steps: dict[str, float]
    collectives: dict[str, tuple[float, float, float]]
    """By "bf16" and "fp8": gather, reduce, refresh of all layers."""


def read_point(pair: str) -> Point:
    """Read STEP.json:COLLECTIVES.json. Raise UserError for files that do not belong together."""
    parts = pair.split(":")
    if len(parts) != 2:
        raise UserError(f'"{pair}" is no pair of files', key="--measured", remedy="STEP.json:COLLECTIVES.json")
    try:
        step, collectives = (json.loads(Path(part).read_text()) for part in parts)
        layers, size = step["settings"]["layers"], step["settings"]["size"]
        rows = {(row["operation"], row["weights"]): row for row in collectives["rows"]}
        gather, reduce, refresh = (rows[operation, "layer"] for operation in ("gather", "reduce", "refresh"))
        steps = {row["variant"]: row["step_seconds"] for row in step["rows"]}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{pair} cannot be used: {error}", key="--measured", remedy="files that step.py and collectives.py wrote"
        ) from error
    if size != collectives["size"] or step["link"] != collectives["link"]:
        raise UserError(f"{pair} differ in size or link", key="--measured", remedy="run both on the same link and size")
    return Point(
        f"{step['rows'][0]['gpus']} GPUs, {step['link']}",
        layers,
        step["settings"]["accumulation"],
        steps,
        {
            "bf16": (gather["bf16_milliseconds"] / 1e3, reduce["bf16_milliseconds"] / 1e3, 0.0),
            "fp8": (
                gather["fp8_milliseconds"] / 1e3,
                reduce["fp8_milliseconds"] / 1e3,
                refresh["fp8_milliseconds"] / 1e3 * layers,
            ),
        },
    )


def predicted(point: Point, variant: str, compute: float) -> float:
    """Return the seconds of a step whose layers' forward, with a share of all the rest, takes `compute` seconds."""
    in_fp8 = variant != "bf16" and not variant.endswith("/bf16-wire")
    gather, reduce, refresh = point.collectives["fp8" if in_fp8 else "bf16"]
    return point.layers * point.accumulation * Layer(compute, gather, reduce).total + refresh


def solve(function: Callable[[float], float], target: float) -> float:
    """Return the seconds at which the increasing `function` reaches `target`, or 0 if it starts above."""
    low, high = 0.0, target
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > target else (middle, high)
    return low


def check(points: list[Point]) -> list[dict[str, Any]]:
    """Return predicted and measured steps of all points but the first, which gives the compute times."""
    first, *others = points
    compute = {
        variant: solve(lambda c, v=variant: predicted(first, v, c), seconds) for variant, seconds in first.steps.items()
    }
    return [
        {
            "point": point.name,
            "variant": variant,
            "measured": seconds,
            "predicted": predicted(point, variant, compute[variant]),
        }
        for point in others
        for variant, seconds in point.steps.items()
        if variant in compute
    ]


def print_check(rows: list[dict[str, Any]]) -> None:
    print_table(
        "seconds a step, predicted from the first measured pair's compute and each pair's collectives",
        ("point", "variant", "measured", "predicted", "error"),
        [(*row.values(), f"{row['predicted'] / row['measured'] - 1:+.1%}") for row in rows],
    )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words, metavar="NAME,...", help=f"default {','.join(MODELS)}")
    parser.add_argument("--gpus", type=integers, metavar="N,...", help="multiples of 8, or fewer")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch on each GPU")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--bf16", type=float, default=600, help="TFLOP/s of BF16 linears")
    parser.add_argument("--fp8", type=float, default=900, help="TFLOP/s of FP8 linears with their casts")
    parser.add_argument("--attention", type=float, default=400, help="TFLOP/s of attention")
    parser.add_argument("--nvlink", type=float, default=350, help="GB/s a GPU sends inside a node")
    parser.add_argument("--network", type=float, default=400, help="Gb/s of a port")
    parser.add_argument("--ports", dest="all_ports", type=integers, default=[8, 1], metavar="N,...", help="of a node")
    parser.add_argument("--efficiency", type=float, default=0.85, help="share of the network's rate that arrives")
    parser.add_argument("--latency", type=float, default=2.0, help="microseconds of a step of a ring")
    parser.add_argument("--memory", type=float, default=3.5, help="TB/s of a GPU's memory")
    parser.add_argument("--measured", type=words, default=[], metavar="STEP.json:COLLECTIVES.json,...")
    parser.add_argument("--quick", action="store_true", help="one model and three sizes")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    cost = parser.parse_args(arguments)
    cost.models = cost.models or (["7b"] if cost.quick else list(MODELS))
    cost.gpus = cost.gpus or ([8, 64, 1024] if cost.quick else [2**power for power in range(3, 11)])
    for name in cost.models:
        if name not in MODELS:
            raise UserError(f'unknown model "{name}"', key="--models", remedy=f"one of {', '.join(MODELS)}")
    for gpus in cost.gpus:
        if gpus > NODE and gpus % NODE:
            raise UserError(f"{gpus} GPUs are no whole nodes", key="--gpus", remedy=f"multiples of {NODE}, or fewer")
    if len(cost.measured) == 1:
        raise UserError("one measured pair leaves nothing to check", key="--measured", remedy="a second pair")
    for name in ("bf16", "fp8", "attention", "memory"):
        setattr(cost, name, getattr(cost, name) * 1e12)
    cost.nvlink *= 1e9
    cost.network *= cost.efficiency * 1e9 / 8
    cost.latency *= 1e-6
    return cost


def main(arguments: list[str] | None = None) -> int:
    cost = parse_arguments(arguments)
    checked = check([read_point(pair) for pair in cost.measured]) if cost.measured else []
    if checked:
        print_check(checked)
    rows = simulate(cost)
    print_rows(rows, cost)
    if cost.json:
        assumptions = {key: value for key, value in vars(cost).items() if isinstance(value, int | float)}
        worst = max((abs(math.log(row["predicted"] / row["measured"])) for row in checked), default=None)
        write_json(cost.json, assumptions=assumptions, checked=checked, worst_log_error=worst, rows=rows)
    return 0


if __name__ == "__main__":
    main_entry(main)
