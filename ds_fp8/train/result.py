"""The result of a run: the model that it writes, adapters for PEFT, and the figures of result.json."""

from __future__ import annotations

import json
import math
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from deepspeed import comm as dist
from safetensors import SafetensorError
from transformers import PreTrainedModel

import ds_fp8
from ds_fp8.cluster import watchdog
from ds_fp8.config.errors import UserError
from ds_fp8.config.files import flush, flush_tree, remove, write_atomically
from ds_fp8.config.log import logger
from ds_fp8.data import save_tokenizer, stop_tokens
from ds_fp8.export.folder import make_readable
from ds_fp8.train.adapters import ends_ties, with_adapters_merged
from ds_fp8.train.loop import Callback, Run
from ds_fp8.train.metrics import summarise
from ds_fp8.train.processes import on_first_rank
from ds_fp8.train.run_folder import ADAPTER, MODEL, RESULT
from ds_fp8.train.saving import versions
from ds_fp8.train.stage import Stage
from ds_fp8.zero.deepspeed.checkpoints import consolidated_state_dict
from ds_fp8.zero.deepspeed.parameters import full_shape


class Result(Callback):
    """Writes run_dir/model (BF16 safetensors, configuration, tokenizer), then run_dir/result.json."""

    def on_start(self, run: Run) -> None:
        self._first_step = run.step

    def on_end(self, run: Run) -> None:
        watchdog.beat("writing the result", slow=True)
        stage, state = run.stage, consolidated_state_dict(run.engine)
        on_first_rank(lambda: _write_model(run, state))
        self.content = {  # the same on every rank but for the FP8 report, which is the rank's own
            **on_first_rank(lambda: summarise(run.log, stage.train.steps)),
            "epochs": stage.train.epochs,
            "ranks": stage.world,
            "device": str(run.engine.device.type),
            "parameters": sum(math.prod(full_shape(p)) for p in run.engine.module.parameters()),
            "data": run.data.report,
            "fp8": run.engine.fp8.report,
            "versions": versions(),
        }
        if dist.get_rank() == 0:
            content = {**self.content, "made": _made(stage, run.engine.device, self._first_step)}
            write_atomically(stage.run_dir / RESULT, json.dumps(content, indent=2) + "\n")
        # Other ranks may not end the job while rank 0 still writes.
        dist.barrier()


def _write_model(run: Run, state: Mapping[str, torch.Tensor]) -> None:
    stage, model, final = run.stage, run.engine.module, run.stage.run_dir / MODEL
    part = final.with_name(f"{MODEL}.part")
    try:
        remove(part)
        # Otherwise a model of chats goes on behind its answer.
        model.generation_config.eos_token_id = stop_tokens(run.tokenizer, stage.data.format == "chat")
        if stage.train.lora is None:
            model.save_pretrained(part, state_dict=state)
        else:
            _save_adapters(model, state, part)
        misread = save_tokenizer(run.tokenizer, part)
        make_readable(part)
        # Flushed before the rename: a model folder under its final name is on the disk as a whole.
        flush_tree(part)
        if stage.train.lora is not None:
            remove(final.with_name(ADAPTER))
            (part / ADAPTER).rename(final.with_name(ADAPTER))
        remove(final)
        part.rename(final)
        flush(final.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(
            f"the model cannot be written to {final}: {error}",
            key="train.run_dir",
            remedy="make room or repair the file system; the same command then writes it",
        ) from None
    if misread:
        logger.info(f"note: to transformers' AutoTokenizer the tokenizer in {final} {misread}")


def _save_adapters(model: PreTrainedModel, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the model with its adapters merged into `folder`, and into folder/adapter what PEFT loads."""
    model.save_pretrained(folder / ADAPTER, state_dict=state)
    merged, tied = with_adapters_merged(model, state), model.config.tie_word_embeddings
    model._hf_peft_config_loaded = False  # if true, save_pretrained writes the adapters alone
    model.config.tie_word_embeddings = tied and not ends_ties(model, merged)
    try:
        model.save_pretrained(folder, state_dict=merged)
    finally:
        model._hf_peft_config_loaded, model.config.tie_word_embeddings = True, tied


def _made(stage: Stage, device: torch.device, first_step: int) -> dict[str, Any]:
    started = psutil.Process().create_time()
    launched = Path(sys.argv[0]).parts[-3:] == ("ds_fp8", "commands", "train.py")
    program = "ds-fp8 train" if launched or sys.argv[0].startswith("ds-fp8 ") else shlex.quote(sys.argv[0])
    arguments = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(started)),
        "seconds": round(time.time() - started),
        "first_step": first_step,
        "host": platform.node(),
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "commit": _commit(),
        "command": f"{program} {shlex.join(arguments)}".strip(),
        "seed": stage.train.seed,
    }


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", information.read_text(), re.MULTILINE) if information.exists() else None
    return f"{found.group(1) if found else platform.machine()}, {psutil.cpu_count()} cores"


def _commit() -> str | None:
    clone = Path(ds_fp8.__file__).parents[1]
    if not (clone / ".git").exists():
        return None
    command = ["git", "-C", str(clone), "describe", "--always", "--exclude=*", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
