"""The files of the page, and its sample images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitrail.data import samples
from vitrail.data.sample_images import drawings
from vitrail.drawing import theme

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
}
"""Content types by ending."""


def page_files() -> dict[str, bytes]:
    """Return the files that the server serves, by name."""
    files = own_files()
    files["backend.json"] = b'{"backend": "server"}'
    return files | sample_files()


def own_files() -> dict[str, bytes]:
    """Return the files of the page itself, by name; its style sheet starts with the palette."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in TYPES}
    return files | {"style.css": theme.css().encode() + files["style.css"]}


def sample_files() -> dict[str, bytes]:
    """Return the sample images by name."""
    return {f"samples/{path.name}": path.read_bytes() for path in _samples().values()}


def sample_list() -> list[dict[str, Any]]:
    """Return the names of the sample images, and their files."""
    return [{"name": name, "file": f"samples/{path.name}"} for name, path in _samples().items()]


def _samples() -> dict[str, Path]:
    return {**drawings(), **samples()}
