"""The sample pictures that come with the package; ``samples/SOURCES.md`` says where they are from."""

from __future__ import annotations

from pathlib import Path


def samples() -> dict[str, Path]:
    """Give the sample pictures by name: astronaut, chelsea (a cat) and coffee.

    Example:
        >>> sorted(samples())
        ['astronaut', 'chelsea', 'coffee']
    """
    return {path.stem: path for path in sorted((Path(__file__).parent / "samples").glob("*.jpg"))}
