"""Picture files as a collection's source, classes by folders; and parquet files told apart from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vitrail.data.decode import EXTENSIONS, read_image
from vitrail.data.sample import Sample, clean
from vitrail.errors import InvalidOption


class PictureFiles:
    """Picture files, maybe in class folders."""

    has_masks = False
    has_boxes = False

    def __init__(self, paths: Sequence[Path], root: Path | None = None) -> None:
        self.paths = paths
        folders = _class_folders(paths, root)
        self.label_names = None if folders is None else tuple(sorted(set(folders)))
        numbers = {name: number for number, name in enumerate(self.label_names or ())}
        self.labels: list[int | None] = [None] * len(paths) if folders is None else [numbers[name] for name in folders]
        alike = Counter(path.name for path in paths)
        self.names = [clean(_called(path, root, alike[path.name] == 1)) for path in paths]

    def read(self, row: int) -> Sample:
        """Read one picture."""
        return Sample(read_image(self.paths[row]), self.names[row], self.labels[row])


def find_tables(given: Sequence[Path]) -> list[Path]:
    """Find parquet files: those named, and those of a folder that has no pictures."""
    found: list[Path] = []
    others: list[Path] = []
    for path in given:
        inside = _tables_under(path) if path.is_dir() else [path] if is_table(path) else []
        found += inside
        others += [] if inside else [path]
    if found and others:
        raise InvalidOption(
            f"{found[0]} is a parquet file, and {others[0]} is not. Expected pictures or parquet files, not both at "
            "once. Look at them one after the other."
        )
    return found


def is_table(path: Path) -> bool:
    """Whether a file is a parquet file, by its name or else by its first bytes."""
    if path.suffix.lower() in (".parquet", ".pq"):
        return True
    if path.suffix.lower() in EXTENSIONS or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False


def _tables_under(folder: Path) -> list[Path]:
    tables = sorted(path for path in folder.rglob("*.parquet") if path.is_file())
    has_pictures = bool(tables) and any(path.suffix.lower() in EXTENSIONS for path in folder.rglob("*"))
    return [] if has_pictures else tables


def _class_folders(paths: Sequence[Path], root: Path | None) -> list[str] | None:
    """Give the folder of each picture where a folder holds two or more class folders, and nothing else."""
    if root is None or any(path.parent.parent != root for path in paths):
        return None
    folders = [clean(path.parent.name) for path in paths]
    return folders if len(set(folders)) > 1 else None


def _called(path: Path, root: Path | None, unique: bool) -> str:
    if root is not None:
        return path.relative_to(root).as_posix()
    return path.name if unique else str(path)
