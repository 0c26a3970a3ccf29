"""Small files of text, read whole: configurations, labels, reports."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_TEXT = 200_000_000
"""Largest file of text that is read whole, in bytes; a report of very many images has some megabytes."""


def read_text(path: Path, most: int = MAX_TEXT) -> str:
    """Return the text of a regular file; raise ``OSError`` for anything else, such as a device without an end."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most / 1e6:g} MB", str(path))
        return file.read().decode("utf-8")
