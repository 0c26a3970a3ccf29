"""The files of the page, and its samples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitrail.drawing import theme
from vitrail.web.samples import samples_of

FOLDER = Path(__file__).parent / "page"
"""HTML, CSS and JavaScript, written by hand; ``vendor`` has ONNX Runtime Web for static pages."""

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".mp4": "video/mp4",
    ".wav": "audio/wav",
}
"""Content types by ending."""


def page_files(modalities: Iterable[str]) -> dict[str, bytes]:
    """Return the files that the server serves, by name, with samples of some modalities."""
    files = own_files()
    files["backend.json"] = b'{"backend": "server"}'
    return files | sample_files(modalities)


def own_files() -> dict[str, bytes]:
    """Return the files of the page itself, by name; its style sheet starts with the palette."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in TYPES}
    return files | {"style.css": theme.css().encode() + files["style.css"]}


def sample_files(modalities: Iterable[str]) -> dict[str, bytes]:
    """Return the samples of some modalities, and their thumbnails, by name."""
    samples = [one for modality in modalities for one in samples_of(modality)]
    return {name: data for one in samples for name, data in ((one.file, one.data), (one.thumbnail, one.small))}


def sample_list(modalities: Iterable[str]) -> list[dict[str, Any]]:
    """Return name, modality, file and thumbnail of the samples of some modalities."""
    return [
        {"name": one.name, "modality": modality, "file": one.file, "thumbnail": one.thumbnail}
        for modality in modalities
        for one in samples_of(modality)
    ]
