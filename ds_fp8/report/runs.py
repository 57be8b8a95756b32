"""Finished run folders, and pairs of them that belong together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ds_fp8.config.deepspeed_json import TRAIN_BATCH
from ds_fp8.config.errors import UserError
from ds_fp8.config.files import flat, read_json
from ds_fp8.config.sequence_parallel import sequence_parallel_size
from ds_fp8.train.checkpoints import step_beyond_result
from ds_fp8.train.metrics import BF16_LOSS, read_metrics
from ds_fp8.train.run_folder import BATCH_KEYS, CONFIG, FREE, METRICS, RESULT, Invalid, read_object
from ds_fp8.train.stage import resolve_batch

_STARTS = ("train.init_from", "train.resume")
# Keys and sections in which a run in FP8 and its twin in BF16 may differ: casts, paths, what is saved and written
_FREE_IN_TWINS = {
    *FREE,
    *("fp8", *_STARTS, "train.eval_bf16", "train.compact_checkpoints"),
} - {
    *("train.steps", "train.epochs", "train.spike", "train.spike_threshold"),
    *("train.eval_batches", "train.exact_match_problems", "train.max_new_tokens"),
}
KINDS = ("fp8", "bf16")  # Folders of a comparison: FP8 runs in fp8/NAME, their BF16 twins in bf16/NAME


class RunRecord:
    """The record of a finished run, read from its folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}", remedy="give the train.run_dir of a finished run")
        missing = next((name for name in (RESULT, METRICS) if not (folder / name).exists()), None)
        beyond = step_beyond_result(folder)
        if missing is not None or beyond is not None:
            why = f"{missing} is missing" if beyond is None else f"it was made longer, and is at step {beyond}"
            problem = f"{folder} is not a finished run: {why}"
            remedy = "run the stage to its end first: the same command resumes it"
            raise UserError(problem, file=folder, remedy=remedy)
        try:
            self.result: dict[str, Any] = read_object(folder / RESULT)
        except Invalid as error:
            problem, remedy = f"{RESULT} cannot be read: it {error}", "restore the file, or train into another folder"
            raise UserError(problem, file=folder / RESULT, remedy=remedy) from None
        self.metrics: list[dict[str, Any]] = read_metrics(folder / METRICS)
        self.config: dict[str, Any] = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}

    @property
    def kind(self) -> str:
        """Return "fp8" or "bf16": that also of a run whose overrides leave no linear in FP8."""
        report = self.result["fp8"]
        return "fp8" if report["enabled"] and report.get("fp8_linears") != 0 else "bf16"

    @property
    def global_batch(self) -> int | None:
        """Return the rows of a step, None where the configuration does not tell."""
        try:
            return resolve_batch(self.config, self.result["ranks"] // sequence_parallel_size(self.config) or 1)[0]
        except UserError:
            return None

    @property
    def label(self) -> str:
        return self.kind.upper()

    def series(self, key: str) -> tuple[list[int], list[float]]:
        pairs = [(record["step"], record[key]) for record in self.metrics if record.get(key) is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def losses(self, key: str) -> dict[int, float]:
        """Return losses of a kind by step; where nothing is cast, those in BF16 are the validation losses."""
        steps, losses = self.series(key)
        return dict(zip(steps, losses, strict=True)) if steps or key != BF16_LOSS else self.losses("validation_loss")

    def events(self, name: str) -> list[dict[str, Any]]:
        return [record for record in self.metrics if record.get("event") == name]

    @cached_property
    def measurements(self) -> list[dict[str, Any]]:
        return [record for record in self.metrics if record.get("health")]

    @cached_property
    def routing(self) -> list[dict[str, Any]]:
        return [record for record in self.metrics if record.get("routing")]

    @property
    def spikes(self) -> int:
        """Return how many losses stood out from those before, by train.spike_threshold and train.spike_window."""
        return len(self.events("spike")) + len(self.events("rollback"))


@dataclass(frozen=True)
class Comparison:
    """A run, beside its twin where there is one."""

    name: str  # Name of the stage or the seed
    run: RunRecord
    twin: RunRecord | None = None
    longer: RunRecord | None = None  # The run again, with more steps

    @property
    def columns(self) -> dict[str, RunRecord]:
        if self.twin is None:
            return {self.run.label: self.run}
        labels = [self.run.label, self.twin.label]
        if labels[0] == labels[1]:
            labels = [str(self.run.folder), str(self.twin.folder)]
        return dict(zip(labels, (self.run, self.twin), strict=True))

    def gaps(self, key: str, first: int = 0) -> tuple[list[int], list[float]]:
        """Return the steps from `first` on at which both have a loss, and FP8 / BF16 - 1 of it."""
        ours, theirs = (run.losses(key) for run in (self.run, self.twin))
        steps = [step for step in ours if step >= first and theirs.get(step)]
        return steps, [ours[step] / theirs[step] - 1 for step in steps]

    def differences(self) -> list[tuple[str, Any, Any]]:
        """Return the keys in which the configurations differ, with the values of run and twin, None where one has none.

        Paths that always differ are left out.
        """
        if self.twin is None:
            return []
        ours, theirs = dict(flat(self.run.config)), dict(flat(self.twin.config))
        keys = [key for key in dict.fromkeys([*ours, *theirs]) if key not in ("train.run_dir", "train.init_from")]
        return [(key, ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)]

    def differences_of_no_twins(self) -> list[tuple[str, Any, Any]]:
        """Return the differences beside which a gap says nothing about FP8; none where a configuration is missing.

        A batch may be divided in another way, of which BF16, with its larger memory, may have need.
        """
        if self.twin is None or not (self.run.config and self.twin.config):
            return []
        found = [
            each
            for each in self.differences()
            if each[0] not in BATCH_KEYS and not {each[0], each[0].partition(".")[0]} & _FREE_IN_TWINS
        ]
        ours, theirs = (dict(flat(run.config)) for run in (self.run, self.twin))
        # Twins of a second stage each go on from their own first one; one that begins anew is no twin.
        starts = [(key, ours.get(key), theirs.get(key)) for key in _STARTS]
        found += [each for each in starts if (each[1] is None) != (each[2] is None)]
        batches = self.run.global_batch, self.twin.global_batch
        return found if None in batches or batches[0] == batches[1] else [*found, (TRAIN_BATCH, *batches)]


def find(folders: Iterable[Path]) -> list[Comparison]:
    """Return the comparisons of a run, of a run and its twin, or of one folder with fp8/NAME and bf16/NAME."""
    first, *rest = folders
    if rest:
        return [Comparison(first.name, RunRecord(first), RunRecord(rest[0]))]
    if all((first / kind).is_dir() for kind in KINDS):
        fp8, bf16 = ({file.parent.name for file in (first / kind).glob(f"*/{RESULT}")} for kind in KINDS)
        alone = fp8 ^ bf16
        if alone or not fp8:
            raise UserError(
                f"{', '.join(sorted(alone)) or 'nothing'} has finished in only one of {first / 'fp8'} and bf16",
                file=first,
                remedy="run both twins to their end, or name the folders of two runs",
            )
        found = [Comparison(name, *(RunRecord(first / kind / name) for kind in KINDS)) for name in sorted(fp8)]
        return sorted(found, key=lambda each: (each.run.result.get("made") or {"started": ""})["started"])
    return [Comparison(first.name, RunRecord(first))]


def seeds(comparisons: Iterable[Comparison]) -> list[int] | None:
    """Return the seeds of twins that differ in nothing else, as `ds-fp8 parity` names them, or None."""
    found = [comparison.twin and re.fullmatch(r"seed_(\d+)", comparison.name) for comparison in comparisons]
    return [int(match.group(1)) for match in found] if all(found) else None
