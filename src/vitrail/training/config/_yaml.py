"""Reading and writing YAML, with errors that name the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitrail.errors import InvalidOption


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file."""
    yaml = _import()
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidOption(f"cannot read {path} as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise InvalidOption(f"{path} holds a {type(values).__name__}; expected a mapping of option names to values")
    return values


def read_value(text: str) -> Any:
    """Return the value of a YAML scalar, list or mapping."""
    yaml = _import()
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidOption(f"cannot read {text!r} as YAML: {' '.join(str(error).split())}") from error


def to_yaml(values: dict[str, Any]) -> str:
    return str(_import().safe_dump(values, sort_keys=False, allow_unicode=True))


def _import() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise InvalidOption("YAML needs PyYAML; install it with `pip install vitrail[train]`") from error
    return yaml
