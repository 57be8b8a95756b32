"""Train a model on data, or one stage.

ds-fp8 train MODEL DATA [--gpus 2] [--lora 16]           chats or text; decides the rest, and says what
ds-fp8 train MODEL DATA --write my_stage.json            writes the stage and stops
ds-fp8 train my_stage.json --gpus 2 [--set train.steps=50 ...]
ds-fp8 train my_stage.json --hostfile hosts              starts itself on all hosts, and ends with them
deepspeed --module ds_fp8.commands.train my_stage.json   with the launcher's own options

SIGTERM saves a checkpoint and ends with exit code 143; the same command resumes. --max-restarts also goes without
--hostfile.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_fp8.cluster.entry import rank_entry
from ds_fp8.cluster.launcher import TRAIN, add_launch_options, check_launch_options, launch, train_here
from ds_fp8.commands.arguments import add_stage, as_served, check_file, count, parser_of, stage_file
from ds_fp8.commands.new_stage import add_new_stage, check_options, check_run, look_for_network, new_stage
from ds_fp8.config.errors import EXIT_INTERRUPTED, UserError
from ds_fp8.config.files import read_json

if TYPE_CHECKING:
    from ds_fp8.train import Stage


def main() -> int:
    """Train on this rank, or start the ranks where there are to be several; returns the exit code."""
    parser = parser_of(__doc__)
    add_stage(parser)
    add_new_stage(parser)
    parser.add_argument("--write", metavar="FILE", help="with MODEL DATA: write the stage to this file and stop")
    parser.add_argument("--gpus", type=count, help="ranks to start here (default: the GPUs; without GPUs 1)")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    add_launch_options(parser)
    arguments = parser.parse_args()
    check_options(arguments)
    file = None if arguments.data else stage_file(arguments)
    rank = os.environ.get("RANK")
    if rank in (None, "0") and "torch" not in sys.modules:  # most of the time before the first step
        print(f"{'' if rank is None else 'rank 0: '}loading torch, DeepSpeed and transformers", flush=True)

    if file is None:
        return _train_new(arguments)
    own = ["--deepspeed_config", str(file), *(part for change in arguments.set for part in ("--set", change))]
    check_launch_options(arguments, local_restarts=True)
    if arguments.hostfile:
        if arguments.gpus:
            raise UserError(
                "--gpus has no effect together with --hostfile", key="--gpus", remedy="its lines have slots=GPUS"
            )
        options = shlex.split(arguments.launcher_options)
        return launch(arguments.hostfile, ["--module", TRAIN, *own], options, arguments.max_restarts)
    # A launcher sets RANK for the processes that it starts: without it this one starts the ranks.
    if "RANK" not in os.environ:
        import torch

        ranks = arguments.gpus or torch.cuda.device_count() or 1
        if ranks > 1 or arguments.max_restarts:
            return train_here(own, ranks, arguments.max_restarts)
    return _train(file, arguments.set)


def _train_new(arguments: argparse.Namespace) -> int:
    """Make a stage of a model and data, write it, and train it in processes of its own."""
    check_launch_options(arguments, local_restarts=True)
    if arguments.hostfile:
        problem = "the stage of many hosts is written first"
        raise UserError(problem, key="--hostfile", remedy="--write stage.json, then ds-fp8 train stage.json --hostfile")
    if arguments.write:
        check_file("--write", Path(arguments.write))
    look_for_network(arguments.stage, arguments.data)
    import torch
    from rich.console import Console

    from ds_fp8.train.run_folder import write_atomically

    ranks = arguments.gpus or torch.cuda.device_count() or 1
    stage, needs = new_stage(arguments, ranks, Console(highlight=False, soft_wrap=True))
    file = Path(arguments.write or stage.run_dir / "stage.json")
    if not arguments.write:
        check_run(stage, needs)
        stage.run_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(stage.raw, indent=2) + "\n")
    print(f"written: {file}; the same run: ds-fp8 train {shlex.quote(str(file))} --gpus {ranks}", flush=True)
    if arguments.write:
        return 0
    return train_here(["--deepspeed_config", str(file)], ranks, arguments.max_restarts)


def _train(file: Path, changes: list[str]) -> int:
    import torch
    import transformers
    from deepspeed.utils.logging import set_log_level_from_string

    from ds_fp8.cluster import watchdog
    from ds_fp8.cluster.start_checks import Job, check_ranks
    from ds_fp8.train import load_stage, train
    from ds_fp8.train.processes import Interrupted

    # Ranks on one CPU share its cores: as many threads each as there are cores would slow all of them down.
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        ranks_here = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks_here))
    set_log_level_from_string("warning")
    transformers.utils.logging.disable_progress_bar()
    # DeepSpeed calls collectives under names that newer versions of torch announce to rename.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # Before the stage is loaded: a rank that fails at loading is noticed by the others, too.
    store = watchdog.start()
    try:
        stage = load_stage(file, changes)
        # Known only now; until here the watchdog's default applies.
        watchdog.set_timeout(stage.train.timeout)
        if store is not None:
            # Before anything is built: hosts with different files or versions would fail much later, in a collective.
            same = check_ranks(store, Job(stage.raw, stage.file, stage.paths(), stage.run_dir))
            if int(os.environ["RANK"]) == 0:
                print(same, flush=True)
        result = train(stage)
    except Interrupted:
        return EXIT_INTERRUPTED
    if int(os.environ["RANK"]) == 0:
        # Drawing the report of a long run may take longer than a step is given.
        watchdog.beat("writing the report", slow=True)
        print("\n".join(_end(stage, result)), flush=True)
    return 0


def _end(stage: Stage, result: dict[str, Any]) -> list[str]:
    from ds_fp8.report.page import write_report
    from ds_fp8.train.run_folder import MODEL

    loss, in_bf16 = result["final_loss"], result.get("final_loss_bf16")
    weights = "" if in_bf16 in (None, loss) else f" ({in_bf16:.4f} by its weights in BF16, without casts)"
    loss = "is not finite" if loss is None else f"{loss:.4f}"
    folder, model = shlex.quote(str(stage.run_dir)), shlex.quote(str(stage.run_dir / MODEL))
    lines = [
        f"final validation loss {loss}{weights} after {result['steps']} steps",
        f"model:   {stage.run_dir / MODEL}   (BF16; transformers and vLLM load it)",
    ]
    try:
        _, page, _ = write_report([stage.run_dir], stage.run_dir)
        lines.append(f"report:  {page}")
    except (OSError, UserError) as error:  # the run itself is done, and its model written
        why = error.problem if isinstance(error, UserError) else error
        lines.append(f"report:  not written ({why}); once that is mended: ds-fp8 report {folder}")
    lines.append(f'ask:     ds-fp8 chat {model} "..."')
    layout = _served_layout(stage, read_json(stage.run_dir / MODEL / "config.json"))
    if layout is not None and stage.fp8.linear.outlier_channels:
        lost = f": {words}" if (words := as_served(result)) else ""
        why = f"BF16: FP8 folders, of ds-fp8 export, have no outlier channels{lost}"
        lines.append(f"serve:   vllm serve {model}   ({why})")
    elif layout is not None:
        lines.append(f"export:  ds-fp8 export {folder} {shlex.quote(f'{stage.run_dir}-{layout}')} --format {layout}")
    return lines


def _served_layout(stage: Stage, model: dict[str, Any]) -> str | None:
    """Return the first layout of an export that holds the weights as training cast them, or None.

    None for a model, given as its config.json, of which no weight is whole blocks.
    """
    from ds_fp8.config.formats import BLOCK
    from ds_fp8.export.plan import SCALE_SUFFIX, check_layout

    linear, kind = stage.fp8.linear, str(model.get("model_type", ""))
    if not stage.fp8.enabled or kind.startswith("munit"):
        return None
    if linear.weight.granularity == "128x128" and model.get("hidden_size", 0) % BLOCK:
        return None
    for layout in SCALE_SUFFIX:
        try:
            check_layout(layout, linear.weight)
        except UserError:
            continue
        return layout
    return None


if __name__ == "__main__":
    rank_entry(main)
