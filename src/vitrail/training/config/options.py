"""Declaration of options: one field says type, default, allowed values, help text and command-line spelling.

`Config` declares each of its fields with `option`. Checks, command-line options and the table in ``docs/training.md``
are generated from these declarations.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from vitrail._checks import is_int, is_number, shown
from vitrail._wording import kind_of
from vitrail.errors import InvalidOption


@dataclass(frozen=True)
class Kind:
    """Type of an option; ``expected`` describes it in errors and docs, ``metavar`` on the command line.

    ``parse`` returns the value to store, and raises `ValueError` if it is not allowed. ``choices`` are suggested for a
    misspelled value.
    """

    expected: str
    metavar: str
    parse: Callable[[Any], Any]
    cli_type: type = str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    """One field of the training configuration."""

    name: str
    kind: Kind
    default: Any
    help: str
    group: str
    short: str | None
    resumable: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """Spellings on the command line, such as ``-o`` and ``--out``."""
        long = "--" + self.name.replace("_", "-")
        if self.kind.cli_type is bool:
            long += f"/--no-{self.name.replace('_', '-')}"
        return (self.short, long) if self.short else (long,)

    def check(self, value: Any) -> Any:
        """Return the value to store, or raise `InvalidOption` naming the option, the value and what is allowed."""
        if value is None:
            if self.default in (None, MISSING) or self.name == "validation":
                return None
            raise InvalidOption(f"{self.name} is empty; give a value, or leave it out for {self.default!r}")
        if isinstance(value, Path):
            value = str(value)
        try:
            return self.kind.parse(value)
        except InvalidOption:
            raise
        except (ValueError, TypeError, AttributeError, OverflowError):  # of the wrong type, or out of all bounds
            hint = suggest(value, self.kind.choices) if isinstance(value, str) and len(value) < 100 else ""
            raise InvalidOption(f"{self.name}={shown(value)}: expected {self.kind.expected}{hint}") from None


def option(
    group: str, kind: Kind, help: str, default: Any = None, *, resumable: bool = False, short: str | None = None
) -> Any:
    """Declare a field of the training configuration, listed under ``group`` in the help and the docs.

    The default is `MISSING` if the option is required, None if it is derived. Options that are ``resumable`` may change
    when a run is resumed. ``short`` is a one-letter spelling on the command line.
    """
    metadata = {"kind": kind, "help": help, "group": group, "short": short, "resumable": resumable}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options_of(config: type) -> dict[str, Option]:
    """Return the options that a dataclass declares, by name."""
    return {
        field.name: Option(
            field.name, default={} if callable(field.default_factory) else field.default, **field.metadata
        )
        for field in dataclasses.fields(config)
    }


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'NAME'?"`` for a known name that is close, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def choice(*names: str) -> Kind:
    return Kind(
        f"one of {', '.join(names)}",
        "|".join(names),
        only(lambda value: isinstance(value, str) and value in names),
        choices=names,
    )


def integer(minimum: int) -> Kind:
    return Kind(f"an integer of at least {minimum}", "N", only(lambda value: is_int(value, minimum)), int)


def number(low: float = 0.0, high: float = inf, *, above: bool = False, below: bool = False) -> Kind:
    """Accept numbers in a range; ``above`` and ``below`` exclude its ends. Text such as ``"1e-3"`` is converted."""

    def parse(value: Any) -> float:
        x = float("nan" if isinstance(value, bool) or not isinstance(value, int | float | str) else value)
        if not (isfinite(x) and (low < x if above else low <= x) and (x < high if below else x <= high)):
            raise ValueError
        return x

    start = f"above {low:g}" if above else f"of at least {low:g}"
    end = "" if high == inf else f" and {'below' if below else 'at most'} {high:g}"
    return Kind(f"a number {start}{end}", "X", parse, float)


def sizes() -> Kind:
    size = only(lambda value: is_int(value, 1, 2**20))

    def parse(value: Any) -> Any:
        if isinstance(value, str):
            value = [int(part) for part in value.replace("x", ",").split(",")]
            value = value[0] if len(value) == 1 else value
        several = isinstance(value, list | tuple) and len(value) in (2, 3)
        return tuple(map(size, value)) if several else size(value)

    return Kind("an integer of at least 1, or two or three of them, such as 8,64,64", "N", parse)


def flag() -> Kind:
    return Kind("true or false", "", only(lambda value: isinstance(value, bool)), bool)


def text(metavar: str) -> Kind:
    return Kind(
        "text", metavar, only(lambda value: isinstance(value, str) and 0 < len(value) < 4096 and "\0" not in value)
    )


def weights() -> Kind:
    """Accept a mapping of names to numbers that are not negative; on the command line it is written in YAML."""
    named = mapping().parse

    def parse(value: Any) -> dict[str, float]:
        found = named(value)
        if not all(isinstance(name, str) and is_number(one) and one >= 0 for name, one in found.items()):
            raise ValueError
        return found

    return Kind("a mapping of names to numbers of at least 0, such as {color: 2, shape: 0.5}", "YAML", parse)


def mapping() -> Kind:
    """Accept a mapping of names to values; on the command line it is written in YAML."""
    mapped = only(lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value))

    def parse(value: Any) -> dict[str, Any]:
        return dict(mapped(read_value(value) if isinstance(value, str) else value))

    return Kind("a mapping such as {name: value}", "YAML", parse)


def only(allowed: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Return a function that returns allowed values unchanged and raises `ValueError` for others."""

    def parse(value: Any) -> Any:
        if not allowed(value):
            raise ValueError
        return value

    return parse


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_YAML + 1)
    except (OSError, ValueError) as error:
        raise InvalidOption(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    values = _load_yaml(data, str(path))
    if not isinstance(values, dict):
        raise InvalidOption(f"{path} holds {kind_of(values)}; expected a mapping of option names to values")
    return values


def read_value(text: str) -> Any:
    """Return the value of a YAML scalar, list or mapping."""
    return _load_yaml(text.encode("utf-8", "replace"), shown(text))


MAX_YAML, MAX_DEPTH = 1_000_000, 50
"""Largest YAML in bytes, and deepest nesting; configurations have some kilobytes and four levels."""


def _load_yaml(data: bytes, where: str) -> Any:
    """Return the value of a YAML document without aliases: with them a few lines stand for gigabytes."""
    yaml = _yaml()
    if len(data) > MAX_YAML:
        raise InvalidOption(f"{where} has more than {MAX_YAML // 1000} kB; expected a training configuration in YAML")
    depth = 0
    try:
        for event in yaml.parse(data, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise InvalidOption(f"{where}: aliases (*{event.anchor}) are not supported; write the value again")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise InvalidOption(f"{where} is nested in more than {MAX_DEPTH} levels")
        return yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeError, ValueError, OverflowError, TypeError, RecursionError) as error:
        if isinstance(error, InvalidOption):
            raise
        raise InvalidOption(f"cannot read {where} as YAML: {' '.join(str(error).split())[:300]}") from error


def to_yaml(values: dict[str, Any]) -> str:
    return str(_yaml().safe_dump(values, sort_keys=False, allow_unicode=True))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise InvalidOption("YAML needs PyYAML; install it with `pip install vitrail[train]`") from error
    return yaml
