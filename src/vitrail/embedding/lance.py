"""Lance datasets: features in a directory of columns, for random access and search by vectors (extra ``lance``)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from vitrail.embedding.storage import LocalStorage, Storage, explained
from vitrail.embedding.table import KEY, arrow
from vitrail.errors import EmbeddingError

ENDING = ".lance"


def library() -> Any:
    """Import Lance, or raise with the extra that installs it."""
    try:
        return import_module("lance")
    except ImportError as error:
        raise EmbeddingError("Lance datasets need Lance; pip install vitrail[lance]") from error


def find_lance(storage: Storage, name: str) -> Path | None:
    """Return the directory of a Lance dataset; None if there is none of this name."""
    if not name.lower().endswith(ENDING) or not isinstance(storage, LocalStorage):
        return None
    path = Path(storage.path, name)
    return path if path.is_dir() else None


def write_lance(path: Path, tables: Iterable[Any], schema: Any, settings: Mapping[str, Any]) -> None:
    """Write tables as one dataset with the settings in its metadata; the dataset appears whole or not at all."""
    pa, lance = arrow(), library()
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False)
    batches = (batch for table in tables for batch in table.to_batches())
    with explained(str(path)), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
        folder = Path(directory)
        reader = pa.RecordBatchReader.from_batches(schema.with_metadata({KEY: text.encode()}), batches)
        lance.write_dataset(reader, str(folder / "new"))
        if path.exists():
            path.replace(folder / "old")
        (folder / "new").replace(path)


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a dataset's metadata."""
    return _open(path)[1]


def count_rows(path: Path) -> int:
    """Return the number of rows of a dataset."""
    return int(_open(path)[0].count_rows())


def read_lance(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return table and settings of a dataset."""
    dataset, settings = _open(path)
    return dataset.to_table().replace_schema_metadata(None), settings


def _open(path: Path) -> tuple[Any, dict[str, Any]]:
    lance = library()
    try:
        dataset = lance.dataset(str(path))
        settings = json.loads((dataset.schema.metadata or {})[KEY])
        if not isinstance(settings, dict) or settings.get("format") != 1 or "columns" not in settings:
            raise KeyError("settings")
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise EmbeddingError(f"{path} is not a dataset of vitrail embed, or is damaged ({why})") from error
    return dataset, settings
