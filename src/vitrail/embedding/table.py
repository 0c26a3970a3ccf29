"""``Embeddings``: a table of features with its settings, in Parquet files and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from vitrail._arguments import checked
from vitrail._checks import as_path
from vitrail.embedding.embedder import Column
from vitrail.embedding.storage import Storage, open_storage, split
from vitrail.errors import EmbeddingError

KEY = b"vitrail"
"""Metadata of a Parquet file with the settings, as JSON."""

INDEX, NAME = "index", "name"
"""Columns with the position of each sample in the data, and its file name."""


def arrow() -> Any:
    """Import pyarrow, or raise with the extra that installs it."""
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise EmbeddingError("tables of embeddings need pyarrow; pip install vitrail[data]") from error


@dataclass(frozen=True)
class Embeddings:
    """Features of a dataset: one row for each readable sample, in the order of the data.

    >>> found = vitrail.read_embeddings("features.parquet")     # doctest: +SKIP
    >>> found["class"].shape, found.names[0]                    # doctest: +SKIP
    ((9469, 384), 'n01440764/ILSVRC2012_val_00000293.JPEG')

    Attributes:
        table: a pyarrow table with the columns ``index`` (position in the data), ``name`` and the features.
        settings: model, weights' digest, merge setting, input and versions, as plain data.
        skipped: samples that could not be read: index, name and reason.
    """

    table: Any
    settings: dict[str, Any]
    skipped: tuple[tuple[int, str, str], ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        columns = ", ".join(f"{name} {tuple(one['shape'])}" for name, one in self.settings["columns"].items())
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        return f"Embeddings({len(self)} rows: {columns}{skipped})"

    def __getitem__(self, column: str) -> np.ndarray:
        return self.to_numpy(column)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(self.settings["columns"])

    @property
    def names(self) -> list[str]:
        """File name of each row."""
        return list(self.table.column(NAME).to_pylist())

    @property
    def indices(self) -> np.ndarray:
        """Position of each row in the data."""
        found: np.ndarray = self.table.column(INDEX).to_numpy()
        return found

    def to_numpy(self, column: str | None = None) -> np.ndarray:
        """Return a column of features (rows, …) as one array; without a name, the only one."""
        if column is None:
            if len(self.columns) != 1:
                raise EmbeddingError(f"there are several columns ({', '.join(self.columns)}); name one")
            (column,) = self.columns
        if column not in self.settings["columns"]:
            raise EmbeddingError(f"there is no column {column!r}; expected one of {', '.join(self.columns)}")
        shape = self.settings["columns"][column]["shape"]
        values = self.table.column(column)
        if not shape:
            return np.asarray(values.to_numpy(zero_copy_only=False) if hasattr(values, "chunks") else values)
        parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in values.chunks]
        flat = np.concatenate(parts) if parts else np.empty(0, self.settings["columns"][column]["dtype"])
        return flat.reshape(len(self), *shape)

    def to_pandas(self) -> Any:
        """Return a pandas data frame; features of a row are one array in a cell."""
        return self.table.to_pandas()


def make_table(
    columns: Sequence[Column], indices: Sequence[int], names: Sequence[str], values: Mapping[str, np.ndarray]
) -> Any:
    """Return a pyarrow table of rows of features."""
    pa = arrow()
    arrays = [pa.array(indices, pa.int64()), pa.array(names, pa.string())]
    for column in columns:
        one = values[column.name]
        if column.shape:
            flat = pa.array(np.ascontiguousarray(one).reshape(-1), getattr(pa, column.dtype)())
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, column.width))
        else:
            arrays.append(pa.array(one.tolist() if column.dtype == "string" else one, getattr(pa, column.dtype)()))
    return pa.table(arrays, schema=schema_of(columns))


def schema_of(columns: Sequence[Column]) -> Any:
    """Return the Arrow schema of a table."""
    pa = arrow()
    fields = [pa.field(INDEX, pa.int64(), nullable=False), pa.field(NAME, pa.string(), nullable=False)]
    for column in columns:
        kind = getattr(pa, column.dtype)()
        if column.shape:
            kind = pa.list_(pa.field("item", kind, nullable=False), column.width)
        fields.append(pa.field(column.name, kind, nullable=False))
    return pa.schema(fields)


def to_parquet(table: Any, settings: Mapping[str, Any]) -> bytes:
    """Return a Parquet file; the same table and settings give the same bytes."""
    sink = arrow().BufferOutputStream()
    with parquet_writer(sink, table.schema, settings) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def parquet_writer(sink: Any, schema: Any, settings: Mapping[str, Any]) -> Any:
    """Return a writer of a Parquet file with the settings in its metadata; features are stored as they are."""
    arrow()
    parquet: Any = import_module("pyarrow.parquet")
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False)
    plain = dict.fromkeys((INDEX, NAME), "zstd")
    compression = {one: plain.get(one.split(".")[0], "none") for one in _leaves(schema)}
    return parquet.ParquetWriter(
        sink,
        schema.with_metadata({KEY: text.encode()}),
        compression=compression,
        use_dictionary=[NAME],
        write_statistics=[INDEX],
    )


def _leaves(schema: Any) -> list[str]:
    """Return the paths of a schema's columns as Parquet spells them."""
    lists = arrow().types.is_fixed_size_list
    return [f"{one.name}.list.element" if lists(one.type) else one.name for one in schema]


@checked
def read_embeddings(paths: Any) -> Embeddings:
    """Read what ``vitrail embed`` or ``vitrail predict`` wrote, as one table in the order of the files.

    Args:
        paths: a Parquet file, a directory of ``vitrail embed``, an ``.npy`` file, a Lance dataset, or a list of
            these, also (but for Lance) ``s3://`` and others that fsspec opens.

    Raises:
        EmbeddingError: a file is missing or damaged, not finished, or its settings differ from the others'.
    """
    several = paths if isinstance(paths, list | tuple) else [paths]
    given = [str(one) for one in several if as_path("paths", one)]
    if not given:
        raise EmbeddingError("no files were given; pass a Parquet file or a directory of vitrail embed")
    found = [_read(one) for one in given]
    first = found[0]
    for path, one in zip(given[1:], found[1:], strict=True):
        difference = first_difference(comparable(first.settings), comparable(one.settings))
        if difference is not None:
            raise EmbeddingError(
                f"{path} and {given[0]} were made with different settings and cannot be mixed: {difference}. Embed one "
                "of them again"
            )
    if len(found) == 1:
        return first
    tables = arrow().concat_tables([one.table for one in found])
    return Embeddings(tables, first.settings, tuple(entry for one in found for entry in one.skipped))


def _read(path: str) -> Embeddings:
    from vitrail.embedding.lance import find_lance
    from vitrail.embedding.output import read_output

    storage, name = split(path)
    named = bool(name) and (storage.size(name) is not None or find_lance(storage, name) is not None)
    return read_output(storage, name) if named else read_output(open_storage(path), "")


@contextmanager
def opened_parquet(storage: Storage, name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Open a Parquet file with settings; any damage, also inside the block, is an `EmbeddingError`."""
    pa, path = arrow(), f"{storage.path}/{name}"
    parquet: Any = import_module("pyarrow.parquet")
    stream = storage.open(name)
    if stream is None:
        raise EmbeddingError(f"{path}: there is no such file; check the path")
    with stream:
        try:
            file = parquet.ParquetFile(stream)
            settings = json.loads((file.schema_arrow.metadata or {})[KEY])
            if not isinstance(settings, dict) or settings.get("format") != 1 or "columns" not in settings:
                raise KeyError("settings")
            yield file, settings
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise EmbeddingError(
                f"{path} is not a file of vitrail embed, or is damaged ({why}); embed the data again"
            ) from error


def read_parquet(storage: Storage, name: str) -> tuple[Any, dict[str, Any]]:
    """Return table and settings of a Parquet file."""
    with opened_parquet(storage, name) as (file, settings):
        return file.read().replace_schema_metadata(None), settings


def comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that must be equal for rows to be compared: without the data and versions."""
    return {name: value for name, value in settings.items() if name not in ("data", "versions")}


def first_difference(before: Any, now: Any, name: str = "") -> str | None:
    """Describe the first difference between two sets of plain values; None if they are equal."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted({*before, *now}):
            inner = f"{name}.{key}" if name else str(key)
            if key not in before or key not in now:
                one, other = before.get(key, "nothing"), now.get(key, "nothing")
                return f"{inner} is {_shown(one)} in one, and {_shown(other)} in the other"
            found = first_difference(before[key], now[key], inner)
            if found is not None:
                return found
        return None
    return None if before == now else f"{name} is {_shown(before)} in one, and {_shown(now)} in the other"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= 100 else f"{text[:97]}..."
