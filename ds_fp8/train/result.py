"""Write the results of a finished run: a Hugging Face model folder and result.json."""

from __future__ import annotations

import json
import math
import platform
import shutil
from collections.abc import Callable
from importlib.metadata import version
from statistics import fmean
from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.data import save_tokenizer, stop_tokens
from ds_fp8.export.folder import make_readable
from ds_fp8.train.checkpoints import MODEL, RESULT
from ds_fp8.train.durable import flush, flush_tree, remove, write_atomically
from ds_fp8.train.metrics import MetricsLog, summarise
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
        write_atomically(stage.run_dir / RESULT, json.dumps(result, indent=2) + "\n")
    return result
