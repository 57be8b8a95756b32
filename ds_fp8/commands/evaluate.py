"""Perplexity and exact match of a Hugging Face folder on a stage's held-out data.

ds-fp8 evaluate runs/cpt/model my_stage.json
ds-fp8 evaluate served my_stage.json --set data.path=my.jsonl       an export in FP8 as well

FOLDER is any model that transformers loads: BF16, block-scaled FP8 or compressed-tensors. One with FP8 weights is
evaluated as a server computes with it: linear layers multiply the stored weights with inputs quantized by its
config.json, on GPUs and on CPUs. One in BF16 is evaluated without casts and, as `loss_as_trained`, with those of the
stage's "fp8" section (not with --set fp8.enabled=false). Its own tokenizer reads the
data, with the chat template that the stage gives it. Exact match is measured where the data has known answers. With
the run's --gpus a batch has the run's rows, and the loss is that of the rows of its final_loss. What is printed goes to
--out as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_fp8.commands.arguments import (
    add_stage,
    check_file,
    count,
    load_deepspeed,
    parser_of,
    read_stage,
    say,
    stage_file,
    tokenizer_of_folder,
)
from ds_fp8.config.errors import UserError
from ds_fp8.config.files import model_of_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ds_fp8.data import StageData
    from ds_fp8.train.served_model import Serving
    from ds_fp8.train.stage import Stage

# Files of which a folder with a tokenizer has one
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a Hugging Face folder, in BF16 or FP8")
    add_stage(parser)
    parser.add_argument("--batches", type=count, help="validation batches (default train.eval_batches)")
    parser.add_argument("--gpus", type=count, help="ranks of the run (default: what the stage's batch fixes, or 1)")
    parser.add_argument("--problems", type=partial(count, least=0), default=100,
                        help="held-out problems to answer, if the data has answers (default 100)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    _check(arguments)
    # Once the arguments are right: torch and transformers take seconds, and a typo should not cost them.
    load_deepspeed()
    say(f"loading {arguments.folder}")

    from ds_fp8.data import build_data, build_tokenizer, check_embeddings
    from ds_fp8.train import processes, trial
    from ds_fp8.train.stored_model import ModelSource, stored_config

    # The evaluation of a stage runs its collectives in a process group, here one of a single rank.
    processes.set_single_process_env()
    stage = _stage(arguments)
    processes.init_distributed()
    attention = stage.model.attn_implementation
    model, serving = _load(arguments.folder, attention)
    alone = trial.check_rows(stored_config(ModelSource("FOLDER", str(arguments.folder))), attention) is not None
    result: dict[str, Any] = {"folder": str(arguments.folder)}
    if serving is not None:
        result["fp8"] = {**asdict(serving), "summary": str(serving)}
    tokenizer = build_tokenizer(stage.data)
    check_embeddings(tokenizer, model.get_input_embeddings().num_embeddings)
    data, batches = build_data(stage.data, tokenizer, alone=alone), arguments.batches or stage.train.eval_batches
    loss = _loss(model, stage, data, batches, "batches measured")
    rows = min(batches * stage.global_batch, len(data.validation))
    result |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "rows": rows}
    result |= _answers(model, stage, data, tokenizer, arguments.problems)
    # Last, since it converts the model: what was measured before is the model as it is stored.
    if stage.fp8.enabled and serving is None:
        _convert(model, stage)
        result["loss_as_trained"] = _loss(model, stage, data, batches, "batches measured as trained")
    text = _as_json(result)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    if serving is not None and not arguments.json:
        print(f"{'fp8':<15} {serving}")
    figures = "\n".join(f"{name:<15} {value:.5g}" for name, value in result.items() if isinstance(value, int | float))
    print(text if arguments.json else figures)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    folder = arguments.folder
    if (of_run := model_of_run(folder)) is not None:
        raise UserError(f"{folder} is the folder of a run", remedy=f"give its model: {of_run}")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a Hugging Face folder", remedy="give a folder with a config.json")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(f"{folder} has no tokenizer", remedy="copy tokenizer.json and tokenizer_config.json there")
    stage_file(arguments)
    if arguments.out is not None:
        check_file("--out", arguments.out)


def _stage(arguments: argparse.Namespace) -> Stage:
    from ds_fp8.config.sequence_parallel import sequence_parallel_size
    from ds_fp8.train import load_stage
    from ds_fp8.train.stage import ranks_of_batch

    raw = read_stage(arguments)
    # The global batch of a stage depends on its ranks, and the validation rows read on the batch: the run's own number
    # is needed to read the same rows.
    ranks = arguments.gpus or (ranks_of_batch(raw) or 1) * sequence_parallel_size(raw)
    changes = [*arguments.set, tokenizer_of_folder(arguments.folder)]
    # One rank evaluates, and shares its rows with no other.
    return load_stage(stage_file(arguments), changes, ranks).unshared()


def _load(folder: Path, attention: str) -> tuple[PreTrainedModel, Serving | None]:
    """Return the model of `folder` on this rank's device, and how it computes where its weights are in FP8."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from ds_fp8.train import packed_attention
    from ds_fp8.train.served_model import load_served_model

    # Before the folder is loaded, whose configuration may name a model of this type.
    packed_attention.register()
    device = get_accelerator().current_device_name()
    return load_served_model(folder, device, {"dtype": torch.bfloat16, "attn_implementation": attention})


def _loss(model: PreTrainedModel, stage: Stage, data: StageData, batches: int, words: str) -> float:
    from ds_fp8.export.folder import Progress
    from ds_fp8.train.evaluation import Alone, validation_loss

    progress = Progress(words, batches, say)
    loss = validation_loss(Alone(model), stage, data.validation, batches, lambda: progress.add(1))
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss}", remedy="write or copy the folder again: its weights may not be finite")
    return loss


def _answers(
    model: PreTrainedModel, stage: Stage, data: StageData, tokenizer: PreTrainedTokenizerBase, most: int
) -> dict[str, Any]:
    from ds_fp8.train.evaluation import Alone, exact_match

    questions = data.questions(most)
    if not questions:
        return {}
    say(f"answering {len(questions)} problems")
    share, _ = exact_match(Alone(model), stage, tokenizer, questions, data.answer_pattern, lambda: None)
    return {"exact_match": share, "problems": len(questions)}


def _convert(model: PreTrainedModel, stage: Stage) -> None:
    from ds_fp8 import convert
    from ds_fp8.engine.plans import recipe_from_config
    from ds_fp8.layers.head.loss import fuse_loss
    from ds_fp8.monitor.cast_monitor import CastMonitor

    convert(model, stage.fp8)
    if stage.fp8.multiplies_head_in_fp8:
        fuse_loss(model, recipe_from_config(stage.fp8, CastMonitor(0)))


def _as_json(result: dict[str, Any]) -> str:
    # JSON has no NaN and no Inf.
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in result.items()
    }
    return json.dumps(finite, indent=2)
