"""Schemas of what a run folder's JSON files hold, and their reading: nothing in them is used before it was checked."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds_fp8.config.errors import UserError, clipped
from ds_fp8.config.files import MAX_BYTES, check_plain
from ds_fp8.config.schema import shown
from ds_fp8.monitor.heat_maps import PANELS
from ds_fp8.monitor.records import FALLBACK
from ds_fp8.monitor.routing import FIGURES as ROUTING_FIGURES

MAX_STEPS = 1 << 38
"""More steps than a run can have; times the largest batch they still count rows in 64 bits."""
MAX_RANKS = 1 << 20
CHECKED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""Strict reading by pydantic: no value of another type is converted, no key is unknown, every number finite."""

Step = Annotated[int, Field(ge=0, lt=MAX_STEPS)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Loss = Annotated[float, Field(ge=-1e30, le=1e30)]
Amount = Annotated[float, Field(ge=0, le=1e30)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=10_000)]
Text = Annotated[str, Field(max_length=1_000_000)]


class Invalid(Exception):
    """Raised for a file whose content is not what such a file holds; the message says in what way."""


class _Content(BaseModel):
    """Base of the models: keys beside those that are read may be there."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)


class SavedStep(_Content):
    """saved.json."""

    step: Step


class _ExactMatch(_Content):
    before: Share | None
    after: Share | None
    problems: Count


class _BytesPerStep(_Content):
    all_gather_bytes: Count | None
    grad_bytes: Count | None
    exchange_bytes: Count | None = None


class _FP8Report(_Content):
    enabled: bool
    notes: list[Name] = []


class _Made(_Content):
    started: Name
    seconds: Count
    first_step: Step
    host: Name
    processor: Name
    commit: Name | None
    command: Text
    seed: Count


class Result(_Content):
    """result.json: what is read of it."""

    steps: Step
    epochs: Amount | None = None
    first_loss: Loss | None
    last_train_loss: Loss | None
    first_validation_loss: Loss | None
    final_loss: Loss | None
    exact_match: _ExactMatch
    bytes_per_step: _BytesPerStep
    tokens_per_second: Amount | None
    step_seconds: Amount | None
    peak_memory_bytes: Count | None
    skipped_steps: Count
    rollbacks: Count = 0
    ranks: Ranks
    device: Name
    parameters: Count
    versions: dict[str, str]
    fp8: _FP8Report
    made: _Made | None = None
    """When, where and how; runs of earlier versions do not say."""


class _Answer(_Content):
    prompt: Text
    generated: Text
    expected: Text
    right: bool


class _Health(BaseModel):
    """Names of sites and, by tensor class, a list of each figure in their order."""

    # A ratio of nothing lost is infinite.
    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, dict[str, list[float | None]]]

    sites: list[Name]

    @model_validator(mode="after")
    def _one_value_a_site(self) -> _Health:
        for figures in (self.__pydantic_extra__ or {}).values():
            if lacking := PANELS.keys() - figures.keys():
                raise ValueError(f'the figures lack "{min(lacking)}"')
            if any(len(values) != len(self.sites) for values in figures.values()):
                raise ValueError("the figures are not as many as the sites")
        return self


class _MeanRouting(_Content):
    entropy: Amount
    largest_share: Share
    experts_without_tokens: Amount


class _Routing(_Content):
    """Names of layers with experts, and a list of each figure in their order."""

    layers: list[Name] = Field(min_length=1)
    entropy: list[Amount]
    largest_share: list[Share]
    experts_without_tokens: list[Amount]
    mean: _MeanRouting

    @model_validator(mode="after")
    def _one_value_a_layer(self) -> _Routing:
        if any(len(getattr(self, figure)) != len(self.layers) for figure in ROUTING_FIGURES):
            raise ValueError("the figures are not as many as the layers")
        return self


class RecordContent(_Content):
    """One line of metrics.jsonl: what is read of it."""

    step: Step
    event: Name | None = None
    saved: bool | None = None
    """The checkpoint of this step is whole."""
    loss: Loss | None = None
    validation_loss: Loss | None = None
    test_loss: Loss | None = None
    exact_match: Share | None = None
    problems: Count | None = None
    tokens: Count | None = None
    tokens_per_second: Amount | None = None
    step_seconds: Amount | None = None
    memory_bytes: Count | None = None
    skipped_steps: Count | None = None
    all_gather_bytes: Count | None = None
    grad_bytes: Count | None = None
    exchange_bytes: Count | None = None
    layers: list[Name] | None = None
    site: Name | None = None
    tensor_class: Name | None = None
    reason: Text | None = None
    answers: list[_Answer] | None = None
    health: _Health | None = None
    routing: _Routing | None = None
    auxiliary_loss: Loss | None = None

    @model_validator(mode="after")
    def _event_is_whole(self) -> RecordContent:
        needed = {FALLBACK: ("layers",), "degraded": ("site", "tensor_class", "reason"), "answers": ("answers",)}
        lacking = [key for key in needed.get(self.event, ()) if getattr(self, key) is None]
        if lacking:
            raise ValueError(f'an event "{self.event}" without "{lacking[0]}"')
        return self


Content = TypeVar("Content", bound=_Content)


def read_regular(file: Path, max_bytes: int | None = MAX_BYTES) -> str:
    """Return the text of a regular file: a named pipe or a device could be read for ever.

    Args:
        file: the file, or a link to it.
        max_bytes: size from which it is refused; None for any.

    Raises:
        OSError: it is missing, cannot be read, or is not a regular file.
        Invalid: it is too large, or no UTF-8.
    """
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(None, "not a regular file", str(file))
    if max_bytes is not None and status.st_size > max_bytes:
        raise Invalid(f"has more than {max_bytes:,} bytes")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Invalid("is not text in UTF-8") from None


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`.

    Raises:
        FileNotFoundError: there is no file.
        Invalid: it cannot be read, is damaged, holds something else than an object, or is nested too deeply.
    """
    try:
        content = json.loads(read_regular(file))
        if not isinstance(content, dict):
            raise Invalid("holds no JSON object")
        check_plain(content)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Invalid(f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise Invalid(f"is not valid JSON: {clipped(str(error), 100)}") from None
    except UserError as error:
        raise Invalid(f"is damaged: {error.problem}") from None
    return content


def read_checked(file: Path, model: type[Content]) -> dict[str, Any] | None:
    """Return the JSON object in `file`, whose keys are those of `model`, or None where there is no file.

    Raises:
        Invalid: as `read_object`, or a key is missing or has a value that it cannot have.
    """
    try:
        content = read_object(file)
    except FileNotFoundError:
        return None
    check(content, model)
    return content


def check(content: Any, model: type[Content]) -> None:
    """Check what was parsed against `model`. Raises Invalid, which names the first wrong key."""
    try:
        model.model_validate(content)
    except ValidationError as error:
        raise Invalid(first_mistake(error)) from None


def first_mistake(error: ValidationError) -> str:
    """Return what pydantic found first, in one line."""
    first = error.errors()[0]
    where = ".".join(clipped(str(part), 60) for part in first["loc"])
    if first["type"] == "missing":
        return f'has no "{where}"'
    message = first["msg"].removeprefix("Value error, ")
    return f"has {where or 'a line'} = {shown(first.get('input'))}: {message[0].lower()}{message[1:]}"


def read_lines(file: Path, finished: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the records of a metrics.jsonl, and what is wrong with each of the other lines; nothing without a file.

    Args:
        file: the metrics.jsonl.
        finished: whether its run has ended by itself; otherwise a kill may have cut off the last line.
    """
    try:
        text = read_regular(file, max_bytes=None)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"cannot be read: {error.strerror or error}"]
    except Invalid:
        text = file.read_text(encoding="utf-8", errors="replace")
    records, mistakes = [], []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        try:
            record = json.loads(line)
            check(record, RecordContent)
            records.append(record)
        except (ValueError, RecursionError):
            if finished or line.endswith("\n"):
                mistakes.append(f"line {number} is not valid JSON")
        except Invalid as error:
            mistakes.append(f"line {number} {error}")
    return records, mistakes
