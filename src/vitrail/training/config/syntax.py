"""Values written as short text: tokens (``"cls,register=4"``), merging (``"r=8"``), intervals (``"200 steps"``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail._checks import is_int
from vitrail.errors import InvalidOption
from vitrail.surgery.saving.text import check_amounts, check_keys, parse_options
from vitrail.tokens import Role, TokenSpec, check_specs
from vitrail.training.config.options import suggest

_MERGE_KEYS = ("r", "keep", "gflops", "schedule", "proportional", "order", "method", "from_epoch", "over_epochs")
_TOKENS = {
    "cls": ("cls", "class"),
    "distillation": ("distillation", "distillation"),
    "register": ("registers", "register"),
    "registers": ("registers", "register"),
}
MAX_STAGES = 4
"""Stages in which merging ramps up; each one is compiled again."""


def read_tokens(value: Any, tasks: Mapping[str, int], *, option: str = "tokens") -> tuple[TokenSpec, ...]:
    """Return token specs for text such as ``"cls,distillation,register=4"``, or for a list of specs or their dicts.

    ``tasks`` holds the number of classes of each task; a task token is named after its task. Errors name
    the ``option``.
    """
    if isinstance(value, str):
        value = [_read_token(part.strip(), tasks, option) for part in value.split(",") if part.strip()]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise InvalidOption(
            f"{option}={value!r}: expected text such as 'cls,distillation,register=4', or a list of specs"
        )
    specs = []
    for spec in value:
        if isinstance(spec, Mapping):
            is_task = spec.get("role") == Role.TASK.value and spec.get("name") in tasks
            spec = TokenSpec.from_dict({**({"classes": tasks[spec["name"]]} if is_task else {}), **spec})
        specs.append(spec)
    return check_specs(specs)


def _read_token(text: str, tasks: Mapping[str, int], option: str) -> dict[str, Any]:
    name, _, number = (part.strip() for part in text.partition("="))
    if number and not (number.isascii() and number.isdigit() and int(number)):
        raise InvalidOption(
            f"{option}: {text!r} has no valid count; expected an integer of at least 1, as in register=4"
        )
    count = int(number or 1)
    if name in tasks:
        return {"name": name, "role": "task", "count": count, "classes": tasks[name]}
    if name not in _TOKENS:
        known = [*_TOKENS, *tasks]
        raise InvalidOption(
            f"{option}: unknown token {name!r}; expected names from {', '.join(known)}, separated by commas"
            f"{suggest(name, known) or '.'} A task token is named after its column, which must be listed in tasks"
        )
    shown, role = _TOKENS[name]
    return {"name": shown, "role": role, "count": count}


def token_roles(tokens: Any) -> list[str]:
    """Return the names or roles of the tokens that a config requests, without validating them."""
    if isinstance(tokens, str):
        return [part.partition("=")[0].strip() for part in tokens.split(",")]
    specs = tokens if isinstance(tokens, list | tuple) else ()
    given = [spec.to_dict() if isinstance(spec, TokenSpec) else spec for spec in specs]
    return [str(spec.get("role")) for spec in given if isinstance(spec, Mapping)]


@dataclass(frozen=True)
class MergePlan:
    """Merging during training, with ``options`` of `vitrail.merge`, from an epoch (counted from 0) on.

    r ramps up to its final value over ``over_epochs`` epochs, in at most `MAX_STAGES` stages.
    """

    options: dict[str, Any]
    from_epoch: int = 0
    over_epochs: int = 0

    def share_at(self, epoch: int) -> float:
        """Return the fraction of the final r that applies in an epoch, from 0 to 1."""
        done = epoch - self.from_epoch
        if done < 0:
            return 0.0
        stages = min(MAX_STAGES, self.over_epochs)
        return (done * stages // self.over_epochs + 1) / (stages + 1) if done < self.over_epochs else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {**self.options, "from_epoch": self.from_epoch, "over_epochs": self.over_epochs}


def read_merge(value: Any) -> MergePlan | None:
    """Return the plan for text such as ``"r=8,schedule=decreasing,from_epoch=2"``, or for a mapping with these keys."""
    if value is None or isinstance(value, MergePlan):
        return value
    if isinstance(value, str):
        value = parse_options(value, _MERGE_KEYS)
    if not isinstance(value, Mapping):
        raise InvalidOption(f"merge={value!r}: expected text such as 'r=8,from_epoch=2', or a mapping")
    check_keys(value, _MERGE_KEYS)
    check_amounts(value)
    epochs = {name: value.get(name, 0) for name in ("from_epoch", "over_epochs")}
    for name, number in epochs.items():
        if not is_int(number, 0):
            raise InvalidOption(f"merge: {name}={number!r}: expected an integer of at least 0")
    options = {name: number for name, number in value.items() if name not in epochs and number is not None}
    return MergePlan(options, **epochs)


def read_interval(value: Any, steps_per_epoch: int) -> int:
    """Return the steps in ``5`` (epochs), ``"5 epochs"`` or ``"200 steps"``; raise `ValueError` for other values."""
    words = value.split() if isinstance(value, str) else [value]
    unit = words[1].rstrip("s") + "s" if len(words) == 2 else "epochs"
    if len(words) not in (1, 2) or unit not in ("epochs", "steps"):
        raise ValueError(value)
    count = int(words[0]) if isinstance(words[0], str) else words[0]
    if not is_int(count, 1):
        raise ValueError(value)
    return count * (steps_per_epoch if unit == "epochs" else 1)
