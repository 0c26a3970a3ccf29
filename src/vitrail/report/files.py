"""Whole files or none."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from vitrail.errors import ReportError


def write_whole(files: Mapping[Path, bytes]) -> None:
    """Write several files so that a failure leaves what was there.

    All are written under temporary names in their folders first, and take their names when all are complete.
    """
    drafts: dict[Path, Path] = {}
    try:
        for path, content in files.items():
            draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            drafts[path] = draft
            with draft.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path in drafts:
            if path.is_dir():
                raise IsADirectoryError(21, "it is a folder", str(path))
        for path, draft in drafts.items():
            draft.replace(path)
    except OSError as error:
        named = {str(draft): path for path, draft in drafts.items()}
        where = named.get(str(error.filename), error.filename or next(iter(files)))
        raise ReportError(
            f"{where} could not be written ({error.strerror or error}); expected a folder that "
            "exists, with space, that may be written to. What was there before is unchanged"
        ) from error
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
