"""Sources of samples, one file for each data format, and the choice between them.

To add a format, derive a class from :class:`~vitrail.data.sources.base.Source` in a file of its own, and choose it in
:func:`open_source`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from glob import has_magic
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitrail._checks import as_path
from vitrail.data.decode import EXTENSIONS, find_images, has_images
from vitrail.data.labels.masks import FOREGROUND, PixelReader
from vitrail.data.media.modality import MODALITIES
from vitrail.data.media.registry import MEDIA, check_modality, endings_of, modality_of
from vitrail.data.remote import find_remote, is_remote
from vitrail.data.sources.arrays import Arrays
from vitrail.data.sources.base import Labels, Source, distinct, matching
from vitrail.data.sources.folder import FolderSource
from vitrail.data.sources.hub import HubSource, open_hub
from vitrail.data.sources.parquet import ParquetSource, is_parquet, label_table
from vitrail.data.sources.shards import ShardSource, find_shards
from vitrail.data.sources.table import TABLES, TableSource, read_csv
from vitrail.data.sources.torch_dataset import TorchSource, open_torchvision
from vitrail.errors import InvalidOption

__all__ = ["Arrays", "Labels", "Source", "are_paths", "open_source"]

PathLike = str | os.PathLike[str]


def open_source(
    source: Any,
    columns: Sequence[str] = (),
    modality: str | None = None,
    masks: PathLike | None = None,
    reader: PixelReader = FOREGROUND,
) -> Source:
    """Open any source of samples.

    ``columns`` names the labels of a torch dataset that has several. ``modality`` says what files hold; by default what
    their endings say, and in a folder images if there are any, else clips, else sounds. ``masks`` is a folder with the
    masks or depth maps of images, which ``reader`` reads.
    """
    check_modality(modality)
    if masks is not None:
        as_path("masks", masks)
    if masks is not None and not are_paths(source):
        raise InvalidOption(f"masks={os.fspath(masks)!r} is a folder of masks for a folder of images; leave it out")
    if isinstance(source, Source):
        return source
    if isinstance(source, Tensor | np.ndarray):
        return Arrays(source)
    if hasattr(source, "features") and hasattr(source, "cast_column"):
        return HubSource(source)
    if isinstance(source, list | tuple | Mapping) and not source:
        raise InvalidOption(
            f"{source!r} holds no images; expected an image file, a folder, or another source of images"
        )
    if not are_paths(source):
        return TorchSource(source, columns)
    given = [source] if isinstance(source, str | os.PathLike) else list(source)
    if any(os.fspath(path) == "" for path in given):
        raise InvalidOption("an empty path; expected an image file, a folder, or another source of images")
    if len(given) == 1:
        kind, _, rest = os.fspath(given[0]).partition(":")
        if kind == "hf":
            return open_hub(rest)
        if kind == "torchvision":
            return open_torchvision(rest, columns)
        if kind == "wds" and not is_remote(rest):
            return ShardSource(find_shards(rest))
    remote = [os.fspath(path).removeprefix("wds:") for path in given]
    if any(map(is_remote, remote)):
        if masks is not None:
            raise InvalidOption(f"masks={os.fspath(masks)!r} is for images on this machine; copy them first")
        return _open_remote(remote, modality or "image", reader)
    for path in given:
        as_path("data", path)
    return _open_files(given, modality, reader, None if masks is None else as_path("masks", masks))


def _open_remote(given: Sequence[str], modality: str, reader: PixelReader) -> Source:
    """Open parquet files, shards, or images of a remote store, by their endings."""
    if not all(map(is_remote, given)):
        raise InvalidOption("some paths are of this machine and others remote; open them one after the other")
    tables, endings = (".parquet", ".pq"), MEDIA[modality].extensions
    files = [file for url in given for file in find_remote(url, {*tables, ".tar", *endings})]
    kinds = {file.suffix.lower() if file.suffix.lower() in (*tables, ".tar") else modality for file in files}
    if len(kinds) > 1:
        raise InvalidOption(
            f"{given[0]} holds files of several kinds ({', '.join(sorted(kinds))}); name those of one kind"
        )
    if kinds <= set(tables):
        return ParquetSource(files, modality, reader)  # type: ignore[arg-type]
    if kinds == {".tar"}:
        return ShardSource(files)  # type: ignore[arg-type]
    return FolderSource(files, None, modality)  # type: ignore[arg-type]


def are_paths(source: Any) -> bool:
    """Return whether a source is a path, or a list of paths."""
    if isinstance(source, list | tuple):
        return bool(source) and all(isinstance(one, str | os.PathLike) for one in source)
    return isinstance(source, str | os.PathLike)


def _open_files(
    given: Sequence[PathLike], modality: str | None, reader: PixelReader, masks_folder: Path | None
) -> Source:
    """Open label files, parquet files, shards, or files of one medium, by what the paths are."""
    if all(os.fspath(path).endswith(".tar") or any(Path(path).glob("*.tar")) for path in given):
        return ShardSource(distinct(shard for path in given for shard in find_shards(os.fspath(path))))
    paths: list[Path] = []
    for path in given:
        pattern = has_magic(os.fspath(path)) and not Path(path).exists()
        paths += (matching(os.fspath(path)) if pattern else []) or [Path(path)]
    tables = _find_tables(paths)
    listed = _read_labels(paths, tables)
    if masks_folder is not None and (tables or listed is not None):
        raise InvalidOption(
            f"masks={str(masks_folder)!r}: {paths[0]} is a table; name {reader.noun}s in a column instead"
        )
    if listed is not None:
        return TableSource(paths[0], listed, lambda files: modality or _modality(files), reader)
    if tables:
        return ParquetSource(tables, modality, reader)
    root = paths[0] if len(paths) == 1 and paths[0].is_dir() else None
    modality = modality or _modality(paths)
    noun, extensions = MODALITIES[modality].noun, MEDIA[modality].extensions
    files = find_images(paths, extensions, noun)
    for path in map(Path, given):
        if len(given) > 1:
            _check_holds_files(path, extensions, noun)
    return FolderSource(files, root, modality, reader, masks_folder)


def _read_labels(paths: Sequence[Path], tables: Sequence[Path]) -> dict[str, list[Any]] | None:
    """Return the columns of a label file; None if the paths are other files."""
    is_csv = [path.suffix.lower() in TABLES and not path.is_dir() for path in paths]
    if any(is_csv):
        if len(paths) > 1:
            raise InvalidOption(f"{paths[is_csv.index(True)]} is a label file; open it alone")
        return read_csv(paths[0])
    if not tables:
        return None
    found = label_table(tables[0])
    if found is not None and tables != paths[:1]:
        raise InvalidOption(f"{tables[0]} is a label file; open it alone")
    return found


def _modality(paths: Sequence[Path]) -> str:
    """Return what files hold, by their endings; raise if named files are of several kinds.

    A GIF among clips is a clip, and one alone an image. Of a folder, images come first, then clips, then sounds.
    """
    named = {modality: path for path in paths if not path.is_dir() and (modality := modality_of(path)) is not None}
    clear = {modality: path for path in paths if not path.is_dir() and (modality := modality_of(path, sure=True))}
    named = clear or named
    if len(named) > 1:
        (one, first), (other, second) = list(named.items())[:2]
        raise InvalidOption(
            f"{first} holds {one}, and {second} holds {other}; open files of one kind, or choose it with modality="
        )
    if named:
        return next(iter(named))
    folders = [path for path in paths if path.is_dir()]
    for endings in (endings_of, lambda modality: MEDIA[modality].extensions):
        found = next((one for one in MEDIA if any(has_images(folder, endings(one)) for folder in folders)), None)
        if found is not None:
            return found
    return "image"


def _check_holds_files(path: Path, extensions: Collection[str], noun: str) -> None:
    """Raise for a path among several, some of which hold images, that is a shard or a folder without images."""
    if path.suffix == ".tar" or (path.is_dir() and any(path.glob("*.tar")) and not has_images(path, extensions)):
        raise InvalidOption(
            f"{path} holds WebDataset shards, and other paths hold {noun}s; open {noun}s and shards one after the other"
        )
    if path.is_dir() and not has_images(path, extensions):
        raise InvalidOption(
            f"{path} is a folder without {noun}s, among other paths with {noun}s; expected files that end in "
            f"{', '.join(sorted(extensions))}. Leave it out, or name the folder that holds the {noun}s"
        )


def _find_tables(paths: Sequence[Path]) -> list[Path]:
    """Find parquet files: those named, and those of a folder without images."""
    found: list[Path] = []
    others: list[Path] = []
    for path in paths:
        inside = [path] if is_parquet(path) else []
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*.parquet") if file.is_file())
            if inside and any(file.suffix.lower() in EXTENSIONS for file in path.rglob("*")):
                inside = []
        found += inside
        others += [] if inside else [path]
    if found and others:
        raise InvalidOption(
            f"{found[0]} is a parquet file, and {others[0]} is not; open images and parquet files one after the other"
        )
    return distinct(found)
