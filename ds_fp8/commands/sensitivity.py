"""Measure what casts cost a model on a few rows of text, and propose linear layers to keep in BF16.

    ds-fp8 sensitivity model corpus.jsonl                              casts of precise, on documents
    ds-fp8 sensitivity model my_stage.json --out careful               those of a stage, on its held-out data
    ds-fp8 sensitivity model my_stage.json --budget 0.03 --preset rowwise --set fp8.linear.input.scale=fp32
    ds-fp8 sensitivity model my_stage.json --grid fp8.preset=infir2,rowwise --out runs/sensitivity

FOLDER is a Hugging Face causal language model, FILE a stage's JSON, or a .txt, .jsonl or .parquet file of documents.
Each part of the model (all linear layers, those of one kind, those of one decoder layer) is cast alone; the loss and
the divergence of the predictions from those without casts are printed by cost for the FLOPs. The costliest parts that
together have at most --budget of the FLOPs are proposed as fp8.linear.overrides, and measured. Only forward is
measured. --out leaves sensitivity.json, with all figures, and, where something is proposed, stage.json: the stage, or a
JSON with an "fp8" section alone, with the overrides; of a grid those of every point.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_fp8.commands.arguments import (
    add_grid,
    add_out,
    add_set,
    config_file,
    count,
    load_deepspeed,
    parser_of,
    points_of,
    share,
    tokenizer_of_folder,
)
from ds_fp8.config.errors import UserError
from ds_fp8.config.files import apply_override, check_writable, read_json
from ds_fp8.config.presets import as_section, with_assumed_preset, without_words

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

    from ds_fp8.train.sensitivity import Batch

# Endings of a FILE that holds text and no stage
DOCUMENTS = (".txt", ".jsonl", ".parquet", ".gz", ".bz2", ".xz", ".zst")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a Hugging Face folder with weights in BF16")
    parser.add_argument("file", metavar="FILE", help="a stage's JSON, or documents")
    parser.add_argument("--preset", metavar="NAME", help="casts of this preset (default the stage's, or precise)")
    add_set(parser)
    parser.add_argument("--rows", type=count, default=16, help="rows of text (default 16)")
    parser.add_argument("--length", type=count, default=512, help="tokens of a row (default 512)")
    parser.add_argument("--budget", type=share, default=0.06, help="share of the FLOPs to keep in BF16 (default 0.06)")
    add_out(parser, None)
    add_grid(parser)
    arguments = parser.parse_args()
    if arguments.out is not None:
        check_writable(arguments.out, "--out")
    load_deepspeed()

    from rich.console import Console

    from ds_fp8.config.fp8 import parse_fp8
    from ds_fp8.report.compare import check_folders, folder_of, run_each
    from ds_fp8.train.stored_model import ModelSource, stored_config

    points, file = points_of(arguments), Path(arguments.file)
    check_folders(points if arguments.out else ())
    raws = {point: _configuration(arguments, changes) for point, changes in points.items()}
    fp8 = {point: parse_fp8(raw, None if file.suffix in DOCUMENTS else file) for point, raw in raws.items()}
    if not all(each.enabled for each in fp8.values()):
        raise UserError("FP8 is off: there are no casts to measure", key="fp8.enabled", remedy="--set fp8.enabled=true")
    console = Console(highlight=False, soft_wrap=True)
    say = partial(console.print, markup=False)
    # For all points before the model is loaded: a mistake in the last one shows within seconds.
    embeddings = stored_config(ModelSource("FOLDER", str(arguments.folder))).get_text_config().vocab_size
    rows = {point: _rows(raw["data"], arguments.rows, embeddings) for point, raw in raws.items()}
    model = _model(arguments.folder)

    def measure(point: str) -> None:
        from ds_fp8.train.sensitivity import sensitivity

        # On the device once a point: all of its measurements read the same rows.
        here = [{name: numbers.to(model.device) for name, numbers in row.items()} for row in rows[point]]
        facts = {"model": str(arguments.folder), "data": arguments.file, "preset": fp8[point].preset_name}
        facts |= {"rows": len(here), "length": arguments.length, "budget": arguments.budget}
        with console.status("measuring") as status:
            left = lambda n: status.update(f"{n} measurements left")  # noqa: E731
            figures = facts | sensitivity(model, here, fp8[point], arguments.length, arguments.budget, left)
        figures |= _verdict(figures)
        _print(figures, console)
        written, proposed = {"sensitivity.json": figures}, figures["proposal"]["overrides"]
        if proposed:
            say(f"in the JSON: {json.dumps({'fp8': {'linear': {'overrides': proposed}}})}")
            written["stage.json"] = _stage_with(proposed, raws[point], file)
        for name, content in written.items() if arguments.out is not None else ():
            target = arguments.out / folder_of(point) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            say(f"written: {target}")

    run_each(list(points), (), measure, say)
    return 0


def _configuration(arguments: argparse.Namespace, point: Sequence[str]) -> dict[str, Any]:
    """Return the stage, with the folder's own tokenizer and all changes; of documents such a one."""
    file = Path(arguments.file)
    if file.suffix in DOCUMENTS:
        raw: dict[str, Any] = {"fp8": {}, "data": {"path": str(file), "validation_fraction": 0.5}}
        raw["model"] = {"path": str(arguments.folder)}
    else:
        raw = read_json(config_file(arguments.file))
        if "data" not in raw:
            remedy = "give a stage, or a .jsonl file"
            raise UserError('there is no "data" to measure on', file=file, key="data", remedy=remedy)
    own = [tokenizer_of_folder(arguments.folder), f"data.sequence_length={arguments.length}"]
    preset = [] if arguments.preset is None else [f"fp8.preset={json.dumps(arguments.preset)}"]
    for change in (*own, *preset, *arguments.set, *point):
        apply_override(raw, change)
    return with_assumed_preset(raw)  # also into the stage that is written: what was measured is what it trains


def _rows(section: dict[str, Any], wanted: int, embeddings: int) -> list[Batch]:
    from ds_fp8.config.schema import parse_section
    from ds_fp8.data import DataConfig, build_data, build_tokenizer, check_embeddings
    from ds_fp8.train.sensitivity import rows_of

    config = parse_section(DataConfig, section, key="data")
    tokenizer = build_tokenizer(config)
    check_embeddings(tokenizer, embeddings)
    data = build_data(config, tokenizer)
    rows = rows_of(data.validation, wanted, "cpu", data.weights)
    if not rows:
        raise UserError("the data has no held-out rows", key="data.path", remedy="more text, or a smaller --length")
    return rows


def _model(folder: Path) -> PreTrainedModel:
    import torch
    from deepspeed.accelerator import get_accelerator

    from ds_fp8.train.stored_model import ModelSource, load_stored_model, stored_config

    source = ModelSource("FOLDER", str(folder))
    options = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}  # it finds documents by their positions
    model = load_stored_model(source, stored_config(source), options)
    # In FP32: in BF16 whatever changes a little changes the roundings after it, and small costs drown in that.
    return model.to(get_accelerator().current_device_name()).float().eval()


def _stage_with(proposed: Mapping[str, str], raw: dict[str, Any], file: Path) -> dict[str, Any]:
    fp8 = without_words(as_section(raw["fp8"]))
    linear = fp8.get("linear", {})
    # The proposed ones first: the first pattern that matches applies. Of one in both, too.
    fp8["linear"] = {**linear, "overrides": {**proposed, **linear.get("overrides", {}), **proposed}}
    return {**({} if file.suffix in DOCUMENTS else read_json(config_file(str(file)))), "fp8": fp8}


def _verdict(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return the verdict on all linear layers in FP8, by the loss of the rows; one row decides nothing."""
    from ds_fp8.report.verdict import AS_GOOD, TOLERANCE, UNDECIDED, Mean, Verdict, word_of

    everything, several = figures["costs"][0], figures["rows"] > 1
    loss = Mean(everything["loss_increase"], everything["loss_standard_error"] if several else None)
    word = word_of(loss) if several else UNDECIDED
    gain = ", nothing to gain from BF16" if word == AS_GOOD else ""
    reason = (
        f"all linear layers in FP8 change the loss of {figures['rows']} rows by {loss} ({TOLERANCE:.2%} allowed){gain}"
    )
    return Verdict(word, reason).as_json()


def _print(figures: Mapping[str, Any], console: Console) -> None:
    from rich.table import Table

    from ds_fp8.memory.report import print_table

    table = Table("part", "FLOPs", "loss", "divergence", "for 1% of FLOPs")
    for column in table.columns[1:]:
        column.justify = "right"
    costs, proposal = figures["costs"], figures["proposal"]
    for cost in sorted(costs, key=lambda cost: -cost["divergence_per_percent_of_flops"]):
        part = "all linear layers" if cost["pattern"] == "*" else cost["pattern"]
        loss = f"{cost['loss_increase']:+.3%}"
        loss += f" ± {cost['loss_standard_error']:.3%}" if figures["rows"] > 1 else ""
        numbers = (f"{cost[key]:.2e}" for key in ("divergence", "divergence_per_percent_of_flops"))
        table.add_row(part, f"{cost['flops_share']:.2%}", loss, *numbers)
    console.print(f"preset {figures['preset']}, {figures['tokens']:,} tokens, loss without casts {figures['loss']:.4f}")
    print_table(table, console)
    lines = ["divergence: nats a token from the predictions without casts; chance moves it less than the loss"]
    lines.append(f"{figures['verdict']}: {figures['reason']}")
    if proposal["overrides"]:
        kept, before, after = ", ".join(proposal["overrides"]), costs[0], proposal
        lines += [
            f"in BF16, {proposal['flops_share']:.2%} of the FLOPs: {kept}; all other casts: "
            f"loss {after['loss_increase']:+.3%} in place of {before['loss_increase']:+.3%}, divergence "
            f"{after['divergence']:.2e} in place of {before['divergence']:.2e}",
            "layers that are cast in part are not fused: a step may lose more time than the share of FLOPs says",
        ]
    else:
        smallest = min((cost for cost in costs if cost["divergence"] > 0), key=lambda cost: cost["flops_share"])
        part = smallest["flops_share"]
        lines.append(
            f"nothing is proposed: the budget is {figures['budget']:.1%} of the FLOPs, and the smallest part, "
            f"{smallest['pattern']}, has {part:.2%} (--budget {part + 0.0005:.3f} would allow it)"
        )
    console.print("\n".join(lines), markup=False)
