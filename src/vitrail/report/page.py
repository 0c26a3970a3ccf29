"""What is saved as a page for people, with its values beside it for programs."""

from __future__ import annotations

import json
import os
from pathlib import Path

from vitrail._atomic_files import drafts
from vitrail.analysis.result import Result
from vitrail.errors import ReportError


class Page(Result):
    """Mixin of results that are read as a page."""

    def to_html(self) -> str:
        """Give one page that needs nothing else: no network, no scripts."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Give the values as JSON."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write the page, and the values as JSON beside it: both or none, and give their paths.

        Files that exist are replaced, and only by complete ones.
        """
        page = Path(path)
        if page.suffix.lower() not in (".html", ".htm"):
            raise ReportError(f"a report is saved as a page, such as report.html (its JSON goes beside it); got {page}")
        files = {page.with_suffix(".json"): self.to_json(), page: self.to_html()}
        try:
            with drafts(*files) as hidden:
                for draft, text in zip(hidden, files.values(), strict=True):
                    draft.write_bytes(text.encode())
        except OSError as error:
            raise ReportError(
                f"{error.filename or page} could not be written ({error.strerror or error}); expected a folder that "
                "exists, with space, that may be written to. What was there before is unchanged"
            ) from error
        return page, page.with_suffix(".json")
