"""DeepSpeed's own sections: known keys, batch arithmetic and DeepSpeed's verdict, before any process group exists."""

from __future__ import annotations

import copy
from collections.abc import Iterator, KeysView
from functools import cache
from typing import Any

import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, TORCH_ADAM_PARAM, DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ValidationError

from ds_fp8.errors import UserError
from ds_fp8.schema import nearest

TRAIN_BATCH, MICRO_BATCH, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


class _KeyRecorder(dict):
    """A config that notes which top-level keys are asked for."""

    def __init__(self, values: dict, asked: set[str]):
        super().__init__(values)
        self.asked = asked

    def __contains__(self, key) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def keys(self):
        return KeysView(self)

    def __copy__(self):
        return _KeyRecorder(self, self.asked)


@cache
def known_keys() -> frozenset[str]:
    """The top-level keys the installed DeepSpeed reads, found by letting it read a config."""
    asked: set[str] = set()
    DeepSpeedConfig(_KeyRecorder({MICRO_BATCH: 1}, asked))
    return frozenset(asked)


def resolve_batch(raw: dict, world: int) -> tuple[int, int, int]:
    """(global batch, micro-batch, accumulation) in rows, from the two or three that `raw` gives.

    Raises UserError, showing the arithmetic, when they do not multiply up over `world` ranks.
    """
    given = {key: raw.get(key) for key in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)}
    for key, value in given.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UserError(
                f"{key} must be a whole number of at least 1, got {value!r}", key=key, remedy=f'"{key}": 8, say'
            )
    total, micro, accumulation = given.values()
    if micro is None and total is None:
        raise UserError(
            "the batch size is missing", key=MICRO_BATCH, remedy=f'give "{MICRO_BATCH}", and "{ACCUMULATION}" if not 1'
        )
    if micro is None:
        accumulation = accumulation or 1
        micro = total // (accumulation * world) or 1
    elif accumulation is None:
        accumulation = 1 if total is None else total // (micro * world) or 1
    product = micro * accumulation * world
    if total is not None and total != product:
        raise UserError(
            f"the batch does not divide: {TRAIN_BATCH} {total} is not {micro} ({MICRO_BATCH}) x {accumulation} "
            f"({ACCUMULATION}) x {world} (ranks) = {product}",
            key=TRAIN_BATCH,
            remedy=f'set "{TRAIN_BATCH}" to {product} or leave it out, or change the number of ranks',
        )
    return product, micro, accumulation


def check_sections(raw: dict, world: int) -> None:
    """Let DeepSpeed judge its own sections of `raw`; what it refuses becomes a UserError with the key it is about."""
    _check_optimizer(raw)
    if "scheduler" in raw:
        raise UserError(
            "the learning-rate schedule belongs to the stage",
            key="scheduler",
            remedy='remove "scheduler" and set "train.schedule"',
        )
    bf16 = raw.get("bf16", raw.get("bfloat16"))
    if not (isinstance(bf16, dict) and bf16.get("enabled") is True):
        raise UserError("the stage runner trains in BF16", key="bf16", remedy='"bf16": {"enabled": true}')
    _, micro, accumulation = resolve_batch(raw, world)
    judged = copy.deepcopy(raw) | {MICRO_BATCH: micro, ACCUMULATION: accumulation}
    # Without a process group DeepSpeed would check this against one rank; resolve_batch did against all.
    judged.pop(TRAIN_BATCH, None)
    try:
        DeepSpeedConfig(judged)
    except ValidationError as error:
        raise _explain(error, raw) from None
    except Exception as error:  # DeepSpeed reports mistakes in a config with every kind of exception
        words, key = str(error) or type(error).__name__, _section_at_fault(raw)
        raise UserError(
            f"DeepSpeed refuses the configuration: {words}", key=key, remedy="change what DeepSpeed names"
        ) from None


def _check_optimizer(raw: dict) -> None:
    section = raw.get("optimizer")
    if not isinstance(section, dict) or not isinstance(section.get("type"), str):
        raise UserError(
            "the optimizer is missing",
            key="optimizer",
            remedy='"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": true}}',
        )
    name, params = section["type"], section.get("params", {})
    of_torch = {entry for entry in vars(torch.optim) if isinstance(getattr(torch.optim, entry), type)} - {"Optimizer"}
    if name.lower() not in DEEPSPEED_OPTIMIZERS and name not in of_torch:
        known = {*of_torch, "AdamW", *DEEPSPEED_OPTIMIZERS}
        raise UserError(f'unknown optimizer "{name}"', key="optimizer.type", remedy=nearest(name, known))
    if not isinstance(params, dict):
        raise UserError("the optimizer's params must be an object", key="optimizer.params", remedy='"params": {...}')
    if name.lower() in ("adam", "adamw") and params.get(TORCH_ADAM_PARAM) is True:
        options = {key: value for key, value in params.items() if key not in (TORCH_ADAM_PARAM, "adam_w_mode")}
        try:
            torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **options)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the optimizer refuses its params: {error}",
                key="optimizer.params",
                remedy="torch.optim.AdamW takes lr, betas, eps, weight_decay, amsgrad, ...",
            ) from None


def _explain(error: ValidationError, raw: dict) -> UserError:
    """The first mistake of a validation by one of DeepSpeed's config models, with its full dotted key."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    dotted = ".".join([_section_at_fault(raw), *path]).strip(".")
    shown = "" if first["type"] == "missing" else f" (got {first.get('input')!r})"
    if first["type"] == "extra_forbidden":
        model = next((model for model in _subclasses(DeepSpeedConfigModel) if model.__name__ == error.title), None)
        known = {field.alias or name for name, field in model.model_fields.items()} if model and len(path) == 1 else ()
        return UserError(f'DeepSpeed does not know the key "{dotted}"', key=dotted, remedy=nearest(path[-1], known))
    message = first["msg"].removeprefix("Value error, ")
    return UserError(f"{dotted}: {message}{shown}", key=dotted, remedy=f'change the value of "{dotted}"')


def _section_at_fault(raw: dict) -> str:
    """The first top-level key that DeepSpeed refuses by itself, "" when only several together are wrong.

    DeepSpeed's messages name the key inside a section, not the section.
    """
    for key in raw.keys() & known_keys() - {TRAIN_BATCH, MICRO_BATCH, ACCUMULATION}:
        try:
            DeepSpeedConfig({MICRO_BATCH: 1, key: copy.deepcopy(raw[key])})
        except Exception:
            return key
    return ""


def _subclasses(model: type) -> Iterator[Any]:
    for child in model.__subclasses__():
        yield child
        yield from _subclasses(child)
