"""The surroundings of a run of tests: it reads nothing that another command, another run or the user's account left."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import torch

VARIABLE = "DS_FP8_TEST_FOLDER"  # Names the folder that all processes of a run share
# How variables begin that change what programs do and are not settings of the tests
OF_OTHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC"),  # a job's
    *("ACCELERATE_", "DEEPSPEED_", "WANDB_", "COMET_", "HF_HOME", "HF_TOKEN", "HF_HUB_CACHE", "HF_DATASETS_CACHE"),
    *("HF_ENDPOINT", "XDG_", "MPLCONFIGDIR", "TORCH_EXTENSIONS_DIR", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"),
    *("DS_FP8_CACHE", "DS_FP8_TIMEOUT", "DS_FP8_STARTED_BY", "LOG_LEVEL", "CDPATH"),
)


def leave() -> Path:
    """Forget the user's variables and home, and return the folder of this run, which is removed at its end.

    Beside a GPU the home stays: kernels that were compiled for it take minutes.
    """
    if VARIABLE not in os.environ:
        for name in [name for name in os.environ if name.startswith(OF_OTHERS) or name == "DS_FP8"]:
            del os.environ[name]
        os.environ[VARIABLE] = tempfile.mkdtemp(prefix="ds_fp8_tests_")
        os.environ["DS_FP8_CACHE"] = f"{os.environ[VARIABLE]}/cache"  # each corpus is tokenised once
        atexit.register(_remove, os.environ[VARIABLE], os.getpid())
        if not torch.cuda.is_available():
            os.environ["HOME"] = os.environ[VARIABLE]
    return Path(os.environ[VARIABLE])


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in what was forked from it
        shutil.rmtree(folder, ignore_errors=True)
