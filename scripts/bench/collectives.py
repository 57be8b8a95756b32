"""ZeRO-3's two collectives in FP8 against DeepSpeed's own in BF16, at the message sizes of a decoder layer.

    torchrun --nproc_per_node 2 scripts/bench/collectives.py --size 7b --json collectives.json
    NCCL_P2P_DISABLE=1 torchrun --nproc_per_node 2 scripts/bench/collectives.py            a slower link
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_SOCKET_IFNAME=lo torchrun ...               a network's pace
    python scripts/bench/collectives.py --quick                                            seconds on a CPU

    gather    from shards to weights ready to be multiplied, and their release: as a layer is fetched
    reduce    from full BF16 gradients to this rank's slice of their mean
    --transports    the shards of a layer's weights alone, by collectives, copy engines, and NCCL into symmetric memory
                    (set NCCL_CTA_POLICY=2 for NCCL's copy engines)
    refresh   FP8 only, once an optimizer step: amax, its all-reduce and the cast of the shards of all weights

Times are the slowest rank's median; bytes are what one rank sends, "bytes" and "held" FP8's share of BF16's: of what is
sent, and of what gathered weights occupy. `layer` is all linears of a layer together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from common import SIZES, banner, device, print_banner, print_table, write_json
from deepspeed import comm as dist
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from torch import nn
from zero_ranks import is_first, join_ranks, leave_ranks, link, timed, zero3_config

import ds_fp8
from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import step_plan
from ds_fp8.zero.collectives import Transport, Wait, WireMeter, choose
from ds_fp8.zero.hosts import find_hosts, find_nodes
from ds_fp8.zero.reduce import ReduceScatter


class Measured(NamedTuple):
    """Time and bytes of one collective."""

    milliseconds: float | None = None
    sent: int | None = None  # Bytes
    held: int | None = None  # Bytes that gathered weights occupy on the GPU until they are released


class Layer(nn.Module):
    """The linears of a decoder layer, for their weights only."""

    def __init__(self, size: str):
        super().__init__()
        self.linears = nn.ModuleDict(
            {name: nn.Linear(k, n, bias=False) for name, (n, k) in SIZES[size].linears().items()}
        )


def engine_of(size: str, fp8: dict[str, Any] | None) -> Any:
    torch.manual_seed(0)
    with torch.device(device()):
        model = Layer(size).bfloat16()
    config = zero3_config(fp8=fp8)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def groups_of(engine: Any) -> dict[str, list[nn.Parameter]]:
    """Return the weights that are gathered together, by name: each alone, then the layer."""
    linears = engine.module.linears
    return {**{name: [m.weight] for name, m in linears.items()}, "layer": [m.weight for m in linears.values()]}


def allocated() -> int | None:
    return torch.cuda.memory_allocated() if device().type == "cuda" else None


def measure_gathers(size: str, fp8: dict[str, Any] | None, repeats: int) -> dict[str, Measured]:
    engine = engine_of(size, fp8)
    found = {}
    for name, weights in groups_of(engine).items():

        def gather_and_release(weights: list[nn.Parameter] = weights) -> None:
            weights[0].all_gather_coalesced(weights).wait()
            weights[0].partition(weights)

        gather_and_release()
        engine.fp8.wire.take()
        before = allocated()
        weights[0].all_gather_coalesced(weights).wait()
        held = None if before is None else allocated() - before
        weights[0].partition(weights)
        sent = engine.fp8.wire.take()["all_gather_bytes"]
        found[name] = Measured(timed(gather_and_release, repeats), sent, held)
    if engine.fp8.weights is not None:
        shards = engine.fp8.weights

        def refresh() -> None:
            shards.load_wrote()
            shards.requantize()

        engine.fp8.wire.take()
        refresh()
        sent = engine.fp8.wire.take()["all_gather_bytes"]
        found["refresh"] = Measured(timed(refresh, repeats), sent)
    engine.destroy()
    return found


class SymmetricCollectives(Transport):
    """NCCL's all-gather into symmetric memory, which copy engines carry where NCCL_CTA_POLICY is 2 (NCCL 2.28)."""

    def __init__(self, numel: int, device: torch.device, group: object):
        """Allocate the shards. Collective.

        Args:
            numel: Bytes of them.
            device: Where they lie.
            group: Process group of all weights.
        """
        from torch.distributed import _symmetric_memory as symmetric

        super().__init__(numel, device)
        self.description = "by NCCL into symmetric memory"
        self._group = group or torch.distributed.group.WORLD
        self._symmetric = symmetric
        symmetric.set_backend("NCCL")
        torch.distributed.barrier(self._group)  # makes the communicator, which `rendezvous` needs

    def allocate(self, numel: int) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._symmetric.get_mem_pool(self.local.device)):
            memory = self.local.new_empty(numel)
        self._symmetric.rendezvous(memory, group=self._group.group_name)
        return memory

    def gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: object) -> Wait:
        """Begin to gather every input into its output, in place: only outputs are symmetric memory."""
        rank = torch.distributed.get_rank(self._group)
        own = [output[rank * len(part) : (rank + 1) * len(part)] for output, part in zip(outputs, inputs, strict=True)]
        torch._foreach_copy_(own, list(inputs))
        return super().gather(outputs, own, group)


def measure_transports(size: str, repeats: int) -> list[dict[str, Any]]:
    """Measure the gather of a layer's shards by each transport, alone and beside products; or say why there is none."""
    world, group = dist.get_world_size(), torch.distributed.group.WORLD
    lengths = [n * k // world for n, k in SIZES[size].linears().values()]
    total = sum(lengths)
    transports: dict[str, Callable[[], Transport]] = {
        "collectives": lambda: Transport(total, device()),
        "copy engines": lambda: choose(total, device(), [group]),
        "NCCL, symmetric": lambda: SymmetricCollectives(total, device(), group),
    }
    a = torch.randn(4096 if device().type == "cuda" else 64, 4096, device=device(), dtype=torch.bfloat16)
    b = a.mT.contiguous()
    rows = []
    for name, make in transports.items():
        row: dict[str, Any] = {"transport": name, "bytes": (world - 1) * total}
        try:
            transport = make()

            def gather(transport: Transport = transport) -> None:
                outputs = transport.allocate(world * total).split([world * n for n in lengths])
                transport.gather(outputs, transport.local.split(lengths), group)()

            def beside_products(transport: Transport = transport) -> None:
                outputs = transport.allocate(world * total).split([world * n for n in lengths])
                wait = transport.gather(outputs, transport.local.split(lengths), group)
                for _ in range(8):
                    a @ b
                wait()

            transport.local.fill_(dist.get_rank() + 1)
            transport.written()
            memory = transport.allocate(world * total)
            transport.gather(memory.split([world * n for n in lengths]), transport.local.split(lengths), group)()
            ends = memory.split([n for n in lengths for _ in range(world)])
            row["right"] = [int(part[-1]) for part in ends] == list(range(1, world + 1)) * len(lengths)
            row |= {"ms": timed(gather, repeats), "ms_beside_products": timed(beside_products, repeats)}
        except (UserError, RuntimeError, AttributeError, NotImplementedError) as error:
            row["why_not"] = str(error).partition("\n")[0]
        rows.append(row)
    return rows


def measure_reductions(size: str, options: dict[str, Any] | None, repeats: int) -> dict[str, Measured]:
    """Measure the reduction of each group of gradients; options of "grad_reduce", None for DeepSpeed's own."""
    shapes = list(SIZES[size].linears().items())
    wire = WireMeter()
    reduction = ReduceScatter(wire)
    if options is not None:
        reduction = ReduceScatter(
            wire, None, step_plan(parse_fp8({"fp8": {"grad_reduce": options}})).reduction, find_nodes(find_hosts())
        )

    def reduce(parameters: dict[str, nn.Parameter]) -> None:
        reduction(
            parameters, torch.bfloat16, False, lambda some: reduce_scatter_coalesced([p.grad for p in some], None)
        )

    found = {}
    for name in [*dict(shapes), "layer"]:
        parameters = {}
        for linear, shape in shapes:
            if name in (linear, "layer"):
                parameters[linear] = nn.Parameter(torch.empty(shape, device=device(), dtype=torch.bfloat16))
                parameters[linear].grad = torch.randn_like(parameters[linear])
                parameters[linear].ds_process_group = None
        wire.take()
        reduce(parameters)
        sent = wire.take()["grad_bytes"]
        found[name] = Measured(timed(lambda parameters=parameters: reduce(parameters), repeats), sent)
    return found


def rows_of(operation: str, size: str, bf16: dict, fp8: dict) -> list[dict[str, Any]]:
    sizes = {name: n * k for name, (n, k) in SIZES[size].linears().items()}
    sizes["layer"] = sizes["refresh"] = sum(sizes.values())
    rows = []
    for name, ours in fp8.items():
        stock = bf16.get(name, Measured())
        rows.append(
            {
                "operation": "refresh" if name == "refresh" else operation,
                "weights": "layer" if name == "refresh" else name,
                "parameters": sizes[name],
                "bf16_milliseconds": stock.milliseconds,
                "fp8_milliseconds": ours.milliseconds,
                "bf16_bytes": stock.sent,
                "fp8_bytes": ours.sent,
                "bf16_held_bytes": stock.held,
                "fp8_held_bytes": ours.held,
            }
        )
    return rows


def print_rows(rows: list[dict[str, Any]], ranks: int) -> None:
    def ratio(over: Any, under: Any) -> float | None:
        return over / under if over and under else None

    print_table(
        f"{ranks} ranks, link: {link()}",
        ("operation", "weights", "M parameters", "BF16 ms", "FP8 ms", "speed-up", "BF16 MB", "FP8 MB", "bytes", "held"),
        [
            (
                row["operation"],
                row["weights"],
                row["parameters"] / 1e6,
                row["bf16_milliseconds"],
                row["fp8_milliseconds"],
                ratio(row["bf16_milliseconds"], row["fp8_milliseconds"]),
                row["bf16_bytes"] / 1e6 if row["bf16_bytes"] is not None else None,
                row["fp8_bytes"] / 1e6,
                ratio(row["fp8_bytes"], row["bf16_bytes"]),
                ratio(row["fp8_held_bytes"], row["bf16_held_bytes"]),
            )
            for row in rows
        ],
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    parser.add_argument("--size", choices=list(SIZES), help="whose linears (default 7b, --quick: tiny)")
    parser.add_argument("--preset", default="infir2", help="whose weights the gather carries (default infir2)")
    parser.add_argument("--scale", choices=["group", "tensor"], default="group", help="of gradients")
    parser.add_argument("--repeats", type=int, help="default 20, --quick: 3")
    parser.add_argument("--transports", action="store_true", help="measure the transports of shards alone")
    parser.add_argument("--quick", action="store_true", help="small messages and few repetitions, for any machine")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    options = parser.parse_args(arguments)
    size = options.size or ("tiny" if options.quick else "7b")
    repeats = options.repeats or (3 if options.quick else 20)

    join_ranks()
    facts = banner()
    if is_first():
        print_banner(facts)
    if options.transports:
        rows = measure_transports(size, repeats)
        if is_first():
            columns = ("transport", "bytes", "right", "ms", "ms_beside_products", "why_not")
            print_table("shards of a layer", columns, [[row.get(column) for column in columns] for row in rows])
            if options.json:
                write_json(options.json, banner=facts, link=link(), ranks=dist.get_world_size(), size=size, rows=rows)
        leave_ranks()
        return 0
    fp8 = {"preset": options.preset, "monitor": {"every": 0}}
    rows = rows_of("gather", size, measure_gathers(size, None, repeats), measure_gathers(size, fp8, repeats))
    stock, ours = (measure_reductions(size, how, repeats) for how in (None, {"scale": options.scale}))
    rows += rows_of("reduce", size, stock, ours)
    if is_first():
        print_rows(rows, dist.get_world_size())
        if options.json:
            write_json(options.json, banner=facts, link=link(), ranks=dist.get_world_size(), size=size, rows=rows)
    leave_ranks()
    return 0


if __name__ == "__main__":
    main_entry(main)
