"""Finished run folders, and pairs of an FP8 run and its BF16 run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
# Keys and sections in which an FP8 run and its BF16 run may differ: formats, paths, what is saved and written
_FREE = {
    *FREE,
    *("fp8", *_STARTS, "train.eval_bf16", "train.compact_checkpoints"),
} - {
    *("train.steps", "train.epochs", "train.spike", "train.spike_threshold"),
    *("train.eval_batches", "train.exact_match_problems", "train.max_new_tokens"),
}
KINDS = FP8, BF16 = ("fp8", "bf16")  # Folders of a comparison: FP8 runs in fp8/NAME, their BF16 runs in bf16/NAME


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
        """Return the rows of a step, None where the configuration does not say."""
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
        """Return losses of a kind by step; where nothing is quantized, those in BF16 are the validation losses."""
        steps, losses = self.series(key)
        return dict(zip(steps, losses, strict=True)) if steps or key != BF16_LOSS else self.losses("validation_loss")

    def events(self, name: str) -> list[dict[str, Any]]:
        return [record for record in self.metrics if record.get("event") == name]

    def with_key(self, key: str) -> list[dict[str, Any]]:
        return [record for record in self.metrics if record.get(key)]

    def routing(self, key: str, worst: Callable[[Any], float] | None = None) -> tuple[list[int], list[float]]:
        """Return the steps, and the mean over the layers of a figure of routing, or that of the `worst` layer."""
        found = self.with_key("routing")
        figures = [each["routing"] for each in found]
        return [each["step"] for each in found], [worst(f[key]) if worst else f["mean"][key] for f in figures]

    @property
    def spikes(self) -> int:
        """Return how many losses stood out from those before, by train.spike_threshold and train.spike_window."""
        return len(self.events("spike")) + len(self.events("rollback"))


@dataclass(frozen=True)
class Comparison:
    """A run, with the run that it is compared with."""

    name: str  # Name of the stage or the seed
    run: RunRecord
    other: RunRecord | None = None  # The BF16 run of `run`, or any other

    @property
    def columns(self) -> dict[str, RunRecord]:
        if self.other is None:
            return {self.run.label: self.run}
        labels = [self.run.label, self.other.label]
        if labels[0] == labels[1]:
            labels = [str(self.run.folder), str(self.other.folder)]
        return dict(zip(labels, (self.run, self.other), strict=True))

    def gap(self, key: str) -> float | None:
        """Return FP8 / BF16 - 1 of a final loss, a key of result.json; None where one of them is not known."""
        losses = [run.result.get(key) for run in self.columns.values()]
        return losses[0] / losses[1] - 1 if len(losses) == 2 and all(losses) else None

    def gaps(self, key: str, first: int = 0) -> tuple[list[int], list[float]]:
        """Return the steps from `first` on at which both have a loss, and FP8 / BF16 - 1 of it."""
        ours, theirs = (run.losses(key) for run in (self.run, self.other))
        steps = [step for step in ours if step >= first and theirs.get(step)]
        return steps, [ours[step] / theirs[step] - 1 for step in steps]

    def differences(self) -> list[tuple[str, Any, Any]]:
        """Return the keys in which the configurations differ, with both values, None where one has none; no paths."""
        if self.other is None:
            return []
        ours, theirs = dict(flat(self.run.config)), dict(flat(self.other.config))
        keys = [key for key in dict.fromkeys([*ours, *theirs]) if key not in ("train.run_dir", "train.init_from")]
        return [(key, ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)]

    def confounds(self) -> list[tuple[str, Any, Any]]:
        """Return the differences with which a gap says nothing about FP8; none where a configuration is missing.

        A batch may be divided in another way: BF16 needs more memory.
        """
        if self.other is None or not (self.run.config and self.other.config):
            return []
        found = [
            each
            for each in self.differences()
            if each[0] not in BATCH_KEYS and not {each[0], each[0].partition(".")[0]} & _FREE
        ]
        ours, theirs = (dict(flat(run.config)) for run in (self.run, self.other))
        # The runs of a second stage each start from their own first stage.
        starts = [(key, ours.get(key), theirs.get(key)) for key in _STARTS]
        found += [each for each in starts if (each[1] is None) != (each[2] is None)]
        batches = self.run.global_batch, self.other.global_batch
        return found if None in batches or batches[0] == batches[1] else [*found, (TRAIN_BATCH, *batches)]


def find(folders: Iterable[Path]) -> list[Comparison]:
    """Return the comparisons of a run, of two runs, or of one folder with fp8/NAME and bf16/NAME."""
    first, *rest = folders
    if rest:
        # FP8 first, in whatever order the folders are given.
        return [Comparison(first.name, *sorted(map(RunRecord, (first, rest[0])), key=lambda run: run.kind == BF16))]
    if not all((first / kind).is_dir() for kind in KINDS):
        return [Comparison(first.name, RunRecord(first))]
    fp8, bf16 = ({file.parent.name for file in (first / kind).glob(f"*/{RESULT}")} for kind in KINDS)
    unpaired = fp8 ^ bf16
    if unpaired or not fp8:
        raise UserError(
            f"{', '.join(sorted(unpaired)) or 'nothing'} has finished in only one of {first / FP8} and {BF16}",
            file=first,
            remedy="finish the FP8 run and the BF16 run, or name the folders of two runs",
        )
    found = [Comparison(name, *(RunRecord(first / kind / name) for kind in KINDS)) for name in sorted(fp8)]
    return sorted(found, key=lambda each: (each.run.result.get("made") or {"started": ""})["started"])


def by_point(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Return seeds, as `ds-fp8 parity` names them, as those of one point, and stages as a point each."""
    if comparisons[0].other and all(re.fullmatch(r"seed_\d+", each.name) for each in comparisons):
        return {"": list(comparisons)}
    return {each.name: [each] for each in comparisons}
