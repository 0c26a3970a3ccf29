"""The one parser of ``--merge``: short text, the JSON of ``vitrail tune``, or a directory or file of settings."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.errors import InvalidOption
from vitrail.merging import METHODS
from vitrail.surgery.merging.trained_methods import method_file
from vitrail.surgery.saving.settings import FILE, Settings, damaged, read_json

EXPECTED = "text such as 'r=8' or 'keep=0.5,method=energy', the JSON of vitrail tune, or a directory of merging.save"
AMOUNTS = ("r", "keep", "gflops")
KEYS = (*AMOUNTS, "schedule", "proportional", "order", "unmerge", "method", "restore")
"""Options of `vitrail.merge` that text may name."""


def read_settings(given: str | Path | Mapping[str, Any] | Settings) -> Settings:
    """Return settings from what ``--merge`` takes.

    Args:
        given: short text (``"r=8"``, ``"keep=0.5,schedule=decreasing"``, ``"r=8/8/4"`` for each layer), options of
            `vitrail.merge`, the JSON of ``vitrail tune``, a directory with ``vitrail.json`` or that file, or the
            directory of a run that trained a merging method.

    Raises:
        InvalidOption: text that is none of these.
        ModelLoadError: a file is missing or damaged.
    """
    if isinstance(given, Settings):
        return given
    if isinstance(given, Mapping):
        return Settings({"merge": _with_path(check_amounts(given))}, source="merge options")
    if isinstance(given, str) and not given.strip():
        raise InvalidOption(f"merge={given!r}: expected {EXPECTED}")
    path = Path(given)
    if isinstance(given, str) and not _is_path(given):
        return Settings({"merge": _with_path(check_amounts(parse_options(given)))}, source=repr(given))
    if path.suffix == ".json" and path.name != FILE and not path.is_dir():
        return _read_json(path)
    if path.is_dir() and not (path / FILE).is_file() and method_file(path) is not None:
        return Settings({"merge": {"method": path}}, source=str(path))
    return Settings.read(path)


def parse_options(text: str, keys: tuple[str, ...] = KEYS) -> dict[str, Any]:
    """Return the options in text such as ``"r=8,schedule=decreasing,method=dtem,method.reconstruction=0.1"``."""
    pairs = dict(_parse_pair(part) for part in text.split(",") if part.strip())
    inner = {name.removeprefix("method."): value for name, value in pairs.items() if name.startswith("method.")}
    options = {name: value for name, value in pairs.items() if not name.startswith("method.")}
    if inner and "method" not in options:
        raise InvalidOption(f"merge: options of a method need its name too, such as method=dtem; got {list(pairs)}")
    check_keys(options, keys)
    return {**options, "method": {"name": options["method"], **inner}} if inner else options


def check_keys(options: Mapping[str, Any], keys: tuple[str, ...] = KEYS) -> None:
    """Raise for a key that is none of these."""
    from difflib import get_close_matches

    for name in options:
        if name not in keys:
            close = get_close_matches(str(name), keys, 1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            raise InvalidOption(f"merge: unknown key {name!r}; expected {', '.join(keys)}{hint}")


def check_amounts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with exactly one amount, or with a method, which may decide by itself."""
    amounts = [name for name in AMOUNTS if options.get(name) is not None]
    if len(amounts) > 1 or not (amounts or options.get("method") is not None or options.get("shorten") is not None):
        raise InvalidOption(f"merge={dict(options)!r}: expected exactly one of r, keep and gflops")
    return dict(options)


def _with_path(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of the user's own, in which the name of a method may be the path of a trained one."""
    method = options.get("method")
    is_path = isinstance(method, str) and method not in METHODS and method_file(method) is not None
    return {**options, "method": Path(method)} if is_path else dict(options)  # type: ignore[arg-type]


def _is_path(text: str) -> bool:
    """Return whether text names a file or directory, whether it exists or not."""
    if "=" in text and not Path(text).exists():
        return False
    if "=" not in text and not Path(text).exists() and "/" not in text and not text.endswith(".json"):
        raise InvalidOption(
            f"merge: {text!r} has no value, and there is no such file or directory; expected {EXPECTED}: name=value "
            "pairs separated by commas, as in r=8"
        )
    return True


def _read_json(path: Path) -> Settings:
    """Read the result of ``vitrail.tune``, or settings under another name."""
    values = read_json(path)
    if "changes" in values:
        return Settings.read(path)
    config = values.get("config")
    if values.get("format") != 1 or not isinstance(config, dict):
        raise damaged(path, f"it has neither 'changes' nor the 'config' of vitrail tune: {', '.join(list(values)[:5])}")
    return Settings({"merge": _with_path(config)}, source=str(path))


def _parse_pair(text: str) -> tuple[str, Any]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise InvalidOption(f"merge: {text!r} has no value; expected name=value pairs separated by commas, as in r=8")
    if name == "method":  # may be a path
        return name, value
    values = [_parse_scalar(part) for part in value.split("/")]
    return name, values if len(values) > 1 else values[0]


def _parse_scalar(text: str) -> Any:
    try:
        return ast.literal_eval(text.title() if text.lower() in ("true", "false") else text)
    except (SyntaxError, ValueError):
        return text
