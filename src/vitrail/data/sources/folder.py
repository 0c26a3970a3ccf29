"""Files of images, clips or sounds, with class folders as labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vitrail.data.decode import decode_image, find_images, read_image
from vitrail.data.labels.masks import FOREGROUND, PixelReader
from vitrail.data.media.registry import recording, require
from vitrail.data.remote import RemoteFile
from vitrail.data.sample import Sample
from vitrail.data.sources.base import LABEL, Labels, Source, clean, number_classes
from vitrail.errors import ImageError, InvalidOption


class FolderSource(Source):
    """Files. If ``root`` holds two or more class folders and nothing else, their names are the labels.

    ``modality`` says what the files hold. Clips and sounds are decoded when their values are read. ``masks_folder``
    holds the masks of images: files of the same names, apart from the ending, in the same subfolders.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        root: Path | None = None,
        modality: str = "image",
        masks: PixelReader = FOREGROUND,
        masks_folder: Path | None = None,
    ) -> None:
        self.paths: Sequence[Path] = paths
        self._reader = masks
        self._masks = None if masks_folder is None else _find_masks(paths, root, masks_folder, masks)
        self.has_masks = self._masks is not None
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
            image, mask = read_image(path), None
            if self._masks is not None:
                file = self._masks.get(path)
                if file is None:
                    raise ImageError(f"{path}: there is no {self._reader.noun} of this name in the folder of masks")
                mask = self._reader.read(file.read_bytes(), self._reader.noun, image.size, str(path))
            return Sample(image, self.names[row], None, mask)
        return Sample(recording(self.modality, path), self.names[row])


def _find_masks(paths: Sequence[Path], root: Path | None, folder: Path, reader: PixelReader) -> dict[Path, Path]:
    """Return the mask, or the depth map, of each image that has one."""
    if not folder.is_dir():
        raise ImageError(
            f"masks={str(folder)!r}: there is no such folder; expected one with the {reader.noun}s of the images"
        )
    arrays = sorted(folder.rglob("*.npy")) if reader.arrays else []
    files = arrays or find_images(folder)
    masks = {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}
    names = {path: path.stem if root is None else path.relative_to(root).with_suffix("").as_posix() for path in paths}
    found = {path: masks[name] for path, name in names.items() if name in masks}
    if not found:
        raise ImageError(
            f"masks={str(folder)!r}: none of the {len(paths)} images has a {reader.noun} there, such as "
            f"{next(iter(names.values()))}{files[0].suffix}; expected files of the same names, in the same subfolders"
        )
    return found


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
