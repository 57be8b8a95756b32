"""Perplexity and exact match of a Hugging Face folder on a stage's held-out data, and tasks of lm_eval.

ds-fp8 evaluate runs/cpt/model my_stage.json
ds-fp8 evaluate served my_stage.json --set data.path=my.jsonl       an export in FP8 as well
ds-fp8 evaluate served --tasks gsm8k,hellaswag --out served.json          needs pip install "lm_eval[hf]"

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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_fp8.commands.arguments import (
    add_stage,
    check_file,
    count,
    count_or_none,
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
    parser.add_argument("--problems", type=count_or_none, default=100,
                        help="held-out problems to answer, if the data has answers (default 100)")  # fmt: skip
    parser.add_argument("--tasks", metavar="NAMES", help="tasks of lm_eval, separated by commas")
    parser.add_argument("--include", metavar="FOLDER", help="folder with additional tasks as YAML")
    parser.add_argument("--limit", type=count, help="documents of each task (default all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    has_stage = arguments.stage is not None or arguments.deepspeed_config is not None
    _check(arguments, has_stage)
    # Once the arguments are right: torch and transformers take seconds, and a typo should not cost them.
    load_deepspeed()
    say(f"loading {arguments.folder}")

    from ds_fp8.data import build_data, build_tokenizer, check_embeddings, load_tokenizer
    from ds_fp8.train import processes

    # The evaluation of a stage runs its collectives in a process group, here one of a single rank.
    processes.set_single_process_env()
    stage = _stage(arguments) if has_stage else None
    processes.init_distributed()
    model, serving = _load(arguments.folder, stage.model.attn_implementation if stage else "sdpa")
    result: dict[str, Any] = {"folder": str(arguments.folder)}
    if serving is not None:
        result["fp8"] = {**asdict(serving), "summary": str(serving)}
    if stage is not None:
        tokenizer = build_tokenizer(stage.data)
        check_embeddings(tokenizer, model.get_input_embeddings().num_embeddings)
        data, batches = build_data(stage.data, tokenizer), arguments.batches or stage.train.eval_batches
        loss = _loss(model, stage, data, batches, "batches measured")
        rows = min(batches * stage.global_batch, len(data.validation))
        result |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "rows": rows}
        result |= _answers(model, stage, data, tokenizer, arguments.problems)
    if arguments.tasks is not None:
        tokenizer = load_tokenizer(str(arguments.folder))
        result["tasks"] = _on_tasks(model, tokenizer, arguments.tasks.split(","), arguments.include, arguments.limit)
    # Last, since it converts the model: what was measured before is the model as it is stored.
    if stage is not None and stage.fp8.enabled and serving is None:
        _convert(model, stage)
        result["loss_as_trained"] = _loss(model, stage, data, batches, "batches measured as trained")
    text = _as_json(result)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    print(text if arguments.json else "\n".join(_lines(result)))
    return 0


def _check(arguments: argparse.Namespace, has_stage: bool) -> None:
    folder, out = arguments.folder, arguments.out
    if (of_run := model_of_run(folder)) is not None:
        raise UserError(f"{folder} is the folder of a run", remedy=f"give its model: {of_run}")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a Hugging Face folder", remedy="give a folder with a config.json")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(f"{folder} has no tokenizer", remedy="copy tokenizer.json and tokenizer_config.json there")
    if not has_stage and arguments.tasks is None:
        raise UserError(
            "neither a stage nor --tasks is given", remedy="name a stage, whose held-out data is read; or --tasks"
        )
    if arguments.tasks is not None:
        try:
            import lm_eval  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"--tasks needs lm_eval, which cannot be imported: {error}", remedy='pip install "lm_eval[hf]"'
            ) from None
    if out is not None:
        check_file("--out", out)


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


def _on_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    names: Sequence[str],
    include: str | None,
    limit: int | None,
) -> dict[str, dict[str, float]]:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise UserError(
            f"lm_eval has no task {', '.join(unknown)}",
            remedy="`lm_eval ls tasks` lists them; --include FOLDER adds your own",
        )
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer)
    found = lm_eval.simple_evaluate(wrapped, tasks=list(names), task_manager=manager, limit=limit)
    return {
        task: {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        for task, metrics in found["results"].items()
    }


def _as_json(result: dict[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in result.items()
    }
    return json.dumps(finite, indent=2)


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [f"{'fp8':<15} {result['fp8']['summary']}"] if "fp8" in result else []
    lines += [f"{name:<15} {value:.5g}" for name, value in result.items() if isinstance(value, int | float)]
    for task, metrics in result.get("tasks", {}).items():
        lines += [f"{task}  {name:<28} {value:.5g}" for name, value in metrics.items()]
    return lines
