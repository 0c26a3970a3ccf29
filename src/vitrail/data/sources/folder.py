"""Files of images, clips or sounds, with class folders as labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vitrail.data.decode import decode_image, read_image
from vitrail.data.media import recording, require
from vitrail.data.remote import RemoteFile
from vitrail.data.sample import Sample
from vitrail.data.sources.base import LABEL, Labels, Source, clean, number_classes
from vitrail.errors import ImageError, InvalidOption


class FolderSource(Source):
    """Files. If ``root`` holds two or more class folders and nothing else, their names are the labels.

    ``modality`` says what the files hold. Clips and sounds are decoded when their values are read.
    """

    def __init__(self, paths: Sequence[Path], root: Path | None = None, modality: str = "image") -> None:
        self.paths: Sequence[Path] = paths
        self.modality = modality
        if modality != "image":
            require(modality)
        self._folders = _class_folders(paths, root)
        alike = Counter(path.name for path in paths)
        self.names = [clean(_name(path, root, unique=alike[path.name] == 1)) for path in paths]

    def labels(self, column: str | None) -> Labels:
        if column not in (None, LABEL):
            raise InvalidOption(
                f"labels={column!r} names a column, and these are files, labeled by the names of their folders; "
                "leave it out (parquet files, shards and datasets may have several columns)"
            )
        return number_classes(self._folders or [None] * len(self))

    def read(self, row: int) -> Sample:
        path: Path | RemoteFile = self.paths[row]
        if isinstance(path, RemoteFile):
            data = _fetched(path)
            content = decode_image(data, path.url) if self.modality == "image" else None
            return Sample(content or recording(self.modality, data, path.url), self.names[row])
        if self.modality == "image":
            return Sample(read_image(path), self.names[row])
        return Sample(recording(self.modality, path), self.names[row])


def _fetched(file: RemoteFile) -> bytes:
    try:
        return file.read_bytes()
    except Exception as error:  # of any file system
        why = " ".join(str(error).split()) or type(error).__name__
        raise ImageError(f"{file}: could not be read ({why:.200}); check the address and your access") from error


def _class_folders(paths: Sequence[Path], root: Path | None) -> list[str] | None:
    """Return the class folder of each image; None unless all images are in two or more folders right below root."""
    if root is None or any(path.parent.parent != root for path in paths):
        return None
    folders = [clean(path.parent.name) for path in paths]
    return folders if len(set(folders)) > 1 else None


def _name(path: Path, root: Path | None, *, unique: bool) -> str:
    if root is not None:
        return path.relative_to(root).as_posix()
    return path.name if unique else str(path)
