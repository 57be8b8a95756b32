"""Write the results of a finished run: a Hugging Face model folder and result.json."""

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
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch
from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.data import save_tokenizer, stop_tokens
from ds_fp8.export.folder import make_readable
from ds_fp8.train.metrics import MetricsLog, summarise
from ds_fp8.train.run_folder import MODEL, RESULT, flush, flush_tree, remove, write_atomically
from ds_fp8.train.stage import Stage
from ds_fp8.zero.seams import consolidated_state_dict, full_shape

_PACKAGES = ("torch", "deepspeed", "transformers")


def write_result(
    stage: Stage,
    engine: DeepSpeedEngine,
    tokenizer: PreTrainedTokenizerBase,
    log: MetricsLog,
    data: dict[str, Any],
    say: Callable[[str], None],
    first_step: int = 0,
) -> dict[str, Any]:
    """Write run_dir/model (BF16 safetensors, configuration, tokenizer), then run_dir/result.json. Collective.

    Returns the result, the same on every rank but for the FP8 report, which is the rank's own. `say` is told where
    others will read the tokenizer differently.
    """
    state = consolidated_state_dict(engine)
    if dist.get_rank() == 0:
        part, final = stage.run_dir / f"{MODEL}.part", stage.run_dir / MODEL
        try:
            remove(part)
            # Otherwise a model of chats goes on behind its answer.
            engine.module.generation_config.eos_token_id = stop_tokens(tokenizer, stage.data.format == "chat")
            engine.module.save_pretrained(part, state_dict=state)
            misread = save_tokenizer(tokenizer, part)
            make_readable(part)
            # Flushed before the rename: a model folder under its final name is on the disk as a whole.
            flush_tree(part)
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
            say(f"note: to transformers' AutoTokenizer the tokenizer in {final} {misread}")
    result = {
        **summarise(log, stage.train.steps),
        "epochs": stage.train.epochs,
        "ranks": stage.world,
        "device": str(engine.device.type),
        "parameters": sum(math.prod(full_shape(p)) for p in engine.module.parameters()),
        "tokens_per_step": round(fmean(tokens)) if (tokens := log.by_step("tokens").values()) else None,
        "data": data,
        "fp8": engine.fp8.report,
        "versions": {
            "python": platform.python_version(),
            "ds_fp8": ds_fp8.__version__,
            **{name: version(name) for name in _PACKAGES},
        },
    }
    if dist.get_rank() == 0:
        content = {**result, "made": _made(stage, engine.device, first_step)}
        write_atomically(stage.run_dir / RESULT, json.dumps(content, indent=2) + "\n")
    return result


def _made(stage: Stage, device: torch.device, first_step: int) -> dict[str, Any]:
    """Return when, where and how the run was made, since its last start; `first_step` is what it then had behind it."""
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
    """Return the commit of this package's clone, with "-dirty" where files were changed; None where it is installed."""
    clone = Path(ds_fp8.__file__).parents[1]
    if not (clone / ".git").exists():
        return None
    command = ["git", "-C", str(clone), "describe", "--always", "--exclude=*", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
