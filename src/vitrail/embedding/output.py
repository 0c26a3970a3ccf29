"""Results on disk: shards with a done-marker each, and what is made of them at the end.

    features.parquet, .npy, .csv     one file; shards are in features.parquet.parts/ until it is complete
    features.lance                   a Lance dataset, likewise
    features/                        a directory; the shards stay, as part-00000.parquet, …

A directory of shards has ``job.json`` (settings and number of shards), ``part-00000.parquet`` and, written after it,
``part-00000.json``: the marker, with the number of rows and the samples that could not be read. A run that is killed
computes again what has no marker. Batches never span shards, and the metadata has no times, so that the result is the
same file byte for byte, however often it was interrupted.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from vitrail.embedding import lance
from vitrail.embedding.embedder import Column
from vitrail.embedding.storage import LocalStorage, Storage, absolute, open_storage, split
from vitrail.embedding.table import (
    INDEX,
    NAME,
    Embeddings,
    arrow,
    first_difference,
    make_table,
    opened_parquet,
    parquet_writer,
    read_parquet,
    schema_of,
    to_parquet,
)
from vitrail.errors import EmbeddingError

JOB, COMPLETE, SKIPPED = "job.json", "complete.json", "skipped.csv"

SHARD_BYTES = 128_000_000
"""About the largest shard, in bytes; at least 64 rows."""

SHARD_ROWS = 4096
"""Most rows of a shard."""

Skipped = tuple[int, str, str]
"""A sample that could not be read: index, name and reason."""


class Marker(NamedTuple):
    """A finished shard: rows, size of its file, and samples that could not be read."""

    rows: int
    nbytes: int
    skipped: tuple[Skipped, ...]


def rows_of(shard: int, rows: int, total: int) -> range:
    """Return the indices of the samples of a shard."""
    return range(shard * rows, min((shard + 1) * rows, total))


def shard_rows(columns: Sequence[Column]) -> int:
    """Return how many rows a shard has."""
    return max(64, min(SHARD_ROWS, SHARD_BYTES // max(sum(column.nbytes for column in columns), 1)))


@dataclass(frozen=True)
class Output:
    """A result to be written: where, how, and the directory of its shards.

    Attributes:
        path: as the user named it.
        kind: ``parquet``, ``npy``, ``csv``, ``lance``, or ``directory``.
        folder: where the result is.
        name: its name there; empty for a directory.
        work: the directory of its shards.
    """

    path: str
    kind: str
    folder: Storage
    name: str
    work: Storage

    @classmethod
    def of(cls, path: Any) -> Output:
        """Return the output of a path, by its ending."""
        text = absolute(str(path))
        folder, name = split(text)
        endings = {".parquet": "parquet", ".pq": "parquet", ".npy": "npy", ".csv": "csv", lance.ENDING: "lance"}
        kind = next((kind for ending, kind in endings.items() if name.lower().endswith(ending)), None)
        if kind is None:
            if "." in name.lstrip(".") and not text.endswith("/") and not open_storage(text).names():
                raise EmbeddingError(
                    f"{text}: expected a file that ends in {', '.join(endings)}, or a directory, whose name ends in /"
                )
            whole = open_storage(text)
            return cls(text, "directory", whole, "", whole)
        return cls(text, kind, folder, name, folder.inside(f"{name}.parts"))

    @property
    def lance(self) -> Path:
        """The directory of a Lance dataset."""
        return Path(self.folder.path, self.name)

    @property
    def exists(self) -> bool:
        """Whether there is something of this name, finished or not ours."""
        if self.kind == "directory":
            return self.work.size(COMPLETE) is not None
        return self.folder.size(self.name) is not None or lance.find_lance(self.folder, self.name) is not None

    def check(self, columns: Sequence[Column]) -> None:
        """Raise if columns do not fit the kind of file, or a library for it is missing."""
        arrow()
        if self.kind == "lance":
            lance.library()
            if not isinstance(self.folder, LocalStorage):
                raise EmbeddingError(
                    f"{self.path}: a Lance dataset is written to a local directory; write shards of Parquet there "
                    "(a name that ends in /), and convert them"
                )
        if self.kind == "npy" and (len(columns) != 1 or not columns[0].shape):
            names = ", ".join(column.name for column in columns)
            raise EmbeddingError(f"{self.path}: an .npy file holds one column of features, not {names}; use .parquet")
        if self.kind == "csv" and any(column.shape for column in columns):
            raise EmbeddingError(f"{self.path}: a .csv file holds predictions, not features; use .parquet or .npy")


class Job:
    """The shards of one result, some of which may be done.

    Attributes:
        output: where they are.
        settings: what decides about the values, for the metadata.
        columns: columns of the table.
        total: number of samples.
        rows: samples in a shard, readable or not.
    """

    def __init__(
        self,
        output: Output,
        settings: Mapping[str, Any],
        columns: Sequence[Column],
        total: int,
        rows: int | None = None,
    ) -> None:
        self.output, self.settings, self.columns = output, dict(settings), tuple(columns)
        self.total, self.rows = total, rows or shard_rows(columns)

    @property
    def count(self) -> int:
        """Number of shards."""
        return -(-self.total // self.rows)

    def indices(self, shard: int) -> range:
        """Return the indices of the samples of a shard."""
        return rows_of(shard, self.rows, self.total)

    def start(self, *, overwrite: bool = False) -> bool:
        """Create the directory of shards, or take up the one that is there; return whether all is done already.

        Raises:
            EmbeddingError: there is a result of other settings, or something else, or it cannot be written.
        """
        output = self.output
        output.check(self.columns)
        if not overwrite and self._is_complete():
            return True
        if overwrite:
            self._remove()
        output.folder.create()
        output.work.create()
        present = _parse_json(output.work.read(JOB))
        mine = {"format": 1, "settings": self.settings, "rows": self.rows, "total": self.total}
        if present is None:
            taken = [name for name in output.work.names() if not name.startswith(".")]
            if taken:
                raise EmbeddingError(
                    f"{output.work.path} is not empty and holds no shards of Vitrail ({taken[0]}), so that nothing was "
                    "changed. Name another output with -o"
                )
            output.work.write(JOB, _to_json(mine))
        else:
            difference = first_difference(present, mine)
            if difference is not None:
                raise EmbeddingError(self._other(f"shards of another run in {output.work.path}", difference))
        return False

    def _is_complete(self) -> bool:
        """Return whether the result is there; raise if what is there is of other settings."""
        output = self.output
        if not output.exists:
            return False
        if output.kind == "directory":
            present = _parse_json(output.work.read(JOB)) or {}
            found = present.get("settings")
        elif output.kind == "lance":
            found = lance.read_settings(output.lance)
        elif output.kind == "parquet":
            with opened_parquet(output.folder, output.name) as (_, found):
                pass
        else:
            found = read_output(output.folder, output.name).settings
        difference = first_difference(found, self.settings)
        if difference is not None:
            raise EmbeddingError(self._other(f"{output.path} has another result", difference))
        if output.kind != "directory":
            output.work.discard()
        return True

    def _other(self, what: str, difference: str) -> str:
        return (
            f"{what}, so that nothing was changed: {difference}. Name another output with -o, or replace it with "
            "overwrite=True (--overwrite)"
        )

    def _remove(self) -> None:
        output = self.output
        if output.kind == "lance" and output.exists:
            lance.read_settings(output.lance)  # a directory of somebody else is not replaced
        if output.kind != "directory":
            output.work.discard()
            return
        names = output.work.names()
        if names and JOB not in names:
            raise EmbeddingError(f"{output.path} is not empty and holds no shards of Vitrail; nothing was changed")
        for name in (COMPLETE, *(name for name in names if name.startswith("part-")), SKIPPED, JOB):
            output.work.delete(name)

    def marker(self, shard: int) -> Marker | None:
        """Return the marker of a finished shard; None if it has to be computed."""
        values = _parse_json(self.output.work.read(f"{_part(shard)}.json"))
        try:
            assert values is not None
            found = Marker(
                int(values["rows"]),
                int(values["bytes"]),
                tuple((int(i), str(n), str(r)) for i, n, r in values["skipped"]),
            )
        except (AssertionError, KeyError, TypeError, ValueError):
            return None
        size = self.output.work.size(f"{_part(shard)}.parquet")
        return found if size == found.nbytes else None

    def pending(self) -> list[int]:
        """Return the shards that have to be computed."""
        return [shard for shard in range(self.count) if self.marker(shard) is None]

    def write(self, shard: int, table: Any, skipped: Sequence[Skipped]) -> None:
        """Write a shard, and then its marker."""
        data = to_parquet(table, self.settings)
        self.output.work.write(f"{_part(shard)}.parquet", data)
        values = {"rows": table.num_rows, "bytes": len(data), "skipped": [list(one) for one in skipped]}
        self.output.work.write(f"{_part(shard)}.json", _to_json(values))

    def finish(self) -> tuple[int, tuple[Skipped, ...]]:
        """Make the result of the shards; return its number of rows, and the samples that could not be read."""
        markers = [self.marker(shard) for shard in range(self.count)]
        if None in markers:
            raise EmbeddingError(
                f"{self.output.path}: {markers.count(None)} of {len(markers)} shards are missing; run the command again"
            )
        rows = sum(one.rows for one in markers if one)
        skipped = tuple(entry for one in markers if one for entry in one.skipped)
        output = self.output
        if output.kind == "directory":
            write_skipped(output.work, SKIPPED, skipped)
            output.work.write(COMPLETE, _to_json({"rows": rows, "skipped": len(skipped)}))
            return rows, skipped
        write_skipped(output.folder, skipped_name(output.name), skipped)
        if output.kind == "lance":
            lance.write_lance(output.lance, self.tables(), schema_of(self.columns), self.settings)
        else:
            with output.folder.writing(output.name) as stream:
                WRITERS[output.kind](self, rows, stream)
        if output.kind == "npy":
            self._write_beside(rows)
        output.work.discard()
        return rows, skipped

    def result(self) -> tuple[int, tuple[Skipped, ...]]:
        """Return the number of rows of a complete result, and the samples that could not be read."""
        output = self.output
        if output.kind == "directory":
            about = _parse_json(output.work.read(COMPLETE)) or {}
            return int(about.get("rows", 0)), _parse_skipped(output.work.read(SKIPPED))
        if output.kind == "parquet":
            with opened_parquet(output.folder, output.name) as (file, _):
                return int(file.metadata.num_rows), read_skipped(output.folder, output.name)
        if output.kind == "lance":
            return lance.count_rows(output.lance), read_skipped(output.folder, output.name)
        return len(read_output(output.folder, output.name)), read_skipped(output.folder, output.name)

    def tables(self) -> Iterator[Any]:
        """Yield the table of each shard."""
        for shard in range(self.count):
            yield read_parquet(self.output.work, f"{_part(shard)}.parquet")[0]

    def _write_beside(self, rows: int) -> None:
        """Write settings, names and indices beside an array."""
        values: dict[str, Any] = {"settings": self.settings, INDEX: [], NAME: []}
        for table in self.tables():
            values[INDEX] += table.column(INDEX).to_pylist()
            values[NAME] += table.column(NAME).to_pylist()
        self.output.folder.write(f"{self.output.name}.json", _to_json(values))


def _write_parquet(job: Job, rows: int, stream: IO[bytes]) -> None:
    with parquet_writer(stream, schema_of(job.columns), job.settings) as writer:
        for table in job.tables():
            writer.write_table(table)


def _write_array(job: Job, rows: int, stream: IO[bytes]) -> None:
    (column,) = job.columns
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(column.dtype)), "fortran_order": False}
    np.lib.format.write_array_header_2_0(stream, {**header, "shape": (rows, *column.shape)})
    for table in job.tables():
        stream.write(Embeddings(table, job.settings).to_numpy().tobytes())


def _write_csv(job: Job, rows: int, stream: IO[bytes]) -> None:
    text = io.TextIOWrapper(stream, "utf-8", newline="")
    rows_of = csv.writer(text)
    rows_of.writerow([INDEX, NAME, *(column.name for column in job.columns)])
    for table in job.tables():
        rows_of.writerows(zip(*(column.to_pylist() for column in table.columns), strict=True))
    text.flush()
    text.detach()


WRITERS: dict[str, Callable[[Job, int, IO[bytes]], None]] = {
    "parquet": _write_parquet,
    "npy": _write_array,
    "csv": _write_csv,
}
"""Writes the shards of a job as one file, by its kind."""


def read_output(storage: Storage, name: str) -> Embeddings:
    """Return a finished result: a directory of shards, or a file in a directory."""
    path = f"{storage.path}/{name}".rstrip("/")
    dataset = lance.find_lance(storage, name)
    if dataset is not None:
        return Embeddings(*lance.read_lance(dataset), read_skipped(storage, name))
    if name.endswith(".npy"):
        return _read_array(storage, name)
    if name.endswith(".csv"):
        raise EmbeddingError(
            f"{path} is there already, and a .csv file has no settings to compare. Name another file, or replace it "
            "with overwrite=True (--overwrite)"
        )
    if name:
        return Embeddings(*read_parquet(storage, name), read_skipped(storage, name))
    present = _parse_json(storage.read(JOB))
    if present is None:
        raise EmbeddingError(f"{path}: there is no such file, and it is no directory of vitrail embed; check the path")
    rows, total = present.get("rows"), present.get("total")
    if storage.size(COMPLETE) is None or not isinstance(rows, int) or not isinstance(total, int):
        done = sum(one.startswith("part-") and one.endswith(".json") for one in storage.names())
        count = -(-total // rows) if isinstance(rows, int) and isinstance(total, int) else "its"
        raise EmbeddingError(f"{path} is not finished: {done} of {count} shards are done; run the same command again")
    parts = [_part(shard) for shard in range(-(-total // rows))]
    found = [read_parquet(storage, f"{one}.parquet") for one in parts]
    tables = arrow().concat_tables([table for table, _ in found])
    return Embeddings(tables, found[0][1], _parse_skipped(storage.read(SKIPPED)))


def _read_array(storage: Storage, name: str) -> Embeddings:
    path = f"{storage.path}/{name}"
    beside, data = _parse_json(storage.read(f"{name}.json")), storage.read(name)
    try:
        if beside is None or data is None:
            raise KeyError("the file or the .json beside it is missing")
        values = np.load(io.BytesIO(data), allow_pickle=False)
        ((column, about),) = beside["settings"]["columns"].items()
        one = Column(column, tuple(about["shape"]), about["dtype"])
        table = make_table([one], beside[INDEX], beside[NAME], {column: values})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EmbeddingError(f"{path} is not a file of vitrail embed, or is damaged ({error})") from error
    return Embeddings(table, beside["settings"], read_skipped(storage, name))


def skipped_name(name: str) -> str:
    """Return the name of the side file of a result, with the samples that could not be read."""
    return f"{name.rpartition('.')[0]}.{SKIPPED}"


def read_skipped(storage: Storage, name: str) -> tuple[Skipped, ...]:
    """Read the side file of a result."""
    return _parse_skipped(storage.read(skipped_name(name)))


def write_skipped(storage: Storage, name: str, skipped: Sequence[Skipped]) -> None:
    """Write the side file with the samples that could not be read; delete it if there are none."""
    if not skipped:
        storage.delete(name)
        return
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow([INDEX, NAME, "reason"])
    rows.writerows(skipped)
    storage.write(name, text.getvalue().encode())


def _parse_skipped(data: bytes | None) -> tuple[Skipped, ...]:
    rows = csv.reader(io.StringIO((data or b"").decode("utf-8", "replace"), newline=""))
    return tuple((int(row[0]), row[1], row[2]) for row in rows if len(row) == 3 and row[0].isdigit())


def _part(shard: int) -> str:
    return f"part-{shard:05d}"


def _to_json(values: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(values, ensure_ascii=False)}\n".encode()


def _parse_json(data: bytes | None) -> dict[str, Any] | None:
    try:
        found = json.loads(data or b"null")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
