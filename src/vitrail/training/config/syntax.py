"""How a few fields of a config are read from the short text of a command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.errors import InvalidOption
from vitrail.tokens import Role, TokenSpec, check_specs

_MERGE = ("r", "keep", "gflops", "schedule", "proportional", "order", "method", "from_epoch", "over_epochs")
_KINDS = {
    "cls": ("cls", "class"),
    "distillation": ("distillation", "distillation"),
    "register": ("registers", "register"),
    "registers": ("registers", "register"),
}
STAGES = 4
"""Most steps on the way up: each one is compiled anew."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Give a question about the name that was probably meant, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def read_tokens(value: Any, tasks: Mapping[str, int]) -> tuple[TokenSpec, ...]:
    """Read ``"cls,distillation,register=4"``, or a list of specs or their dicts; tasks come with their classes."""
    if isinstance(value, str):
        value = [_one_token(part.strip(), tasks) for part in value.split(",") if part.strip()]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise InvalidOption(f"tokens={value!r}; expected text like 'cls,distillation,register=4', or a list of specs")
    specs = []
    for spec in value:
        if isinstance(spec, Mapping):
            spec = dict(spec)
            if spec.get("role") == Role.TASK.value and spec.get("name") in tasks:
                spec.setdefault("classes", tasks[spec["name"]])
            spec = TokenSpec.from_dict(spec)
        specs.append(spec)
    return check_specs(specs)


def _one_token(text: str, tasks: Mapping[str, int]) -> dict[str, Any]:
    name, _, number = text.partition("=")
    name = name.strip()
    if number and not (number.strip().isascii() and number.strip().isdigit() and int(number)):
        raise InvalidOption(f"tokens: {text!r} has no whole number of tokens; expected one like register=4")
    count = int(number or 1)
    if name in tasks:
        return {"name": name, "role": "task", "count": count, "classes": tasks[name]}
    if name not in _KINDS:
        known = [*_KINDS, *tasks]
        raise InvalidOption(
            f"tokens: there is no {name!r}; expected some of {', '.join(known)}, with commas{nearest(name, known)}. "
            "The token of a task is named as its column, and tasks names those"
        )
    shown, role = _KINDS[name]
    return {"name": shown, "role": role, "count": count}


@dataclass(frozen=True)
class MergePlan:
    """Merging while training: what is merged in the end, since which epoch, and how r gets there.

    Attributes:
        options: arguments of ``vitrail.merge``.
        from_epoch: the first epoch with merging, counted from 0.
        over_epochs: epochs in which merges per layer rise to that, in at most four equal steps; 0 for at once.
    """

    options: dict[str, Any]
    from_epoch: int = 0
    over_epochs: int = 0

    def share_at(self, epoch: int) -> float:
        """Give the share of the merges that an epoch has: 0 before the first one, then up to 1."""
        done = epoch - self.from_epoch
        if done < 0:
            return 0.0
        stages = min(STAGES, self.over_epochs)
        return (done * stages // self.over_epochs + 1) / (stages + 1) if done < self.over_epochs else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Give plain values, ready for YAML."""
        return {**self.options, "from_epoch": self.from_epoch, "over_epochs": self.over_epochs}


def read_merge(value: Any) -> MergePlan | None:
    """Read ``"r=8,schedule=decreasing,from_epoch=2"``, or a mapping with these names."""
    if value is None or isinstance(value, MergePlan):
        return value
    if isinstance(value, str):
        value = dict(_pair(part) for part in value.split(",") if part.strip())
    if not isinstance(value, Mapping):
        raise InvalidOption(f"merge={value!r}; expected text like 'r=8,from_epoch=2', or a mapping with these names")
    for name in value:
        if name not in _MERGE:
            raise InvalidOption(
                f"merge: there is no {name!r}; expected {', '.join(_MERGE)}{nearest(str(name), _MERGE)}"
            )
    amounts = [name for name in ("r", "keep", "gflops") if value.get(name) is not None]
    if len(amounts) != 1:
        raise InvalidOption(f"merge={dict(value)!r}; expected one of r, keep and gflops")
    epochs = {name: value.get(name, 0) for name in ("from_epoch", "over_epochs")}
    for name, number in epochs.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise InvalidOption(f"merge: {name}={number!r}; expected a whole number, 0 or more")
    options = {name: number for name, number in value.items() if name not in epochs and number is not None}
    return MergePlan(options, **epochs)


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise InvalidOption(f"merge: {text!r} has no value; expected name=value, like r=8, with commas between them")
    if "/" in value:
        return name, [_number(part) for part in value.split("/")]
    return name, _number(value)


def _number(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


@dataclass(frozen=True)
class Every:
    """A distance in steps or in epochs."""

    number: int
    unit: str

    def due(self, step: int, steps_per_epoch: int) -> bool:
        """Whether it is time after so many steps."""
        return step % (self.number * (steps_per_epoch if self.unit == "epochs" else 1)) == 0


def read_every(name: str, value: Any) -> Every:
    """Read ``5`` (epochs), ``"5 epochs"`` or ``"200 steps"``."""
    words = value.split() if isinstance(value, str) else [value]
    number = int(words[0]) if isinstance(words[0], str) and words[0].isdigit() else words[0] if words else None
    unit = words[1].rstrip("s") + "s" if len(words) == 2 else "epochs"
    right = isinstance(number, int) and not isinstance(number, bool) and number > 0
    if not right or len(words) > 2 or unit not in ("epochs", "steps"):
        raise InvalidOption(f"{name}={value!r}; expected a number of epochs, or text like '2 epochs' or '200 steps'")
    return Every(number, unit)  # type: ignore[arg-type]
