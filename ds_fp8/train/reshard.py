"""A checkpoint loaded on another number of ranks than the one that wrote it, by way of DeepSpeed's universal format."""

from __future__ import annotations

import contextlib
import io
import shutil
from argparse import Namespace
from pathlib import Path

import deepspeed
from deepspeed import comm as dist

from ds_fp8.config.errors import UserError
from ds_fp8.train.durable import remove
from ds_fp8.train.processes import on_first_rank


def load_on_other_ranks(
    engine: deepspeed.DeepSpeedEngine, folder: Path, scratch: Path, *, with_schedule: bool
) -> str | None:
    """Load the checkpoint in `folder`; returns what engine.load_checkpoint does. Collective.

    Needs as much room in `scratch` as the checkpoint takes, for the time of loading: all ranks must see it.
    """
    universal = scratch / "universal"
    on_first_rank(lambda: _convert(folder, universal))
    # An engine loads either kind of checkpoint as its configuration says; later ones of this run are of the other kind.
    engine.load_universal_checkpoint = lambda: True
    try:
        loaded, _ = engine.load_checkpoint(
            str(universal), tag=folder.name, load_module_strict=False, load_lr_scheduler_states=with_schedule
        )
    finally:
        del engine.load_universal_checkpoint
    # No rank may still read the folder when rank 0 removes it.
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(universal)
    return loaded


def _convert(folder: Path, universal: Path) -> None:
    """Write the checkpoint into the folder `universal`. Raises UserError where that cannot be written."""
    try:
        remove(universal)
        _write_universal(folder, universal / folder.name)
    except OSError as error:
        shutil.rmtree(universal, ignore_errors=True)
        raise UserError(
            f"{folder} could not be rewritten for {dist.get_world_size()} ranks: {error.strerror or error}",
            key="train.run_dir",
            remedy=f"make room in {universal.parent} for as much again, or train on as many ranks as before",
        ) from error


def _write_universal(folder: Path, universal: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    # One worker each: the extraction of several would fork a process that has threads and a CUDA context.
    options = Namespace(
        input_folder=str(folder),
        output_folder=str(universal),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    universal.mkdir(parents=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(options)
