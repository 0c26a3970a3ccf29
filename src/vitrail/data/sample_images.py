"""Sample images that come with the package: photographs and drawings (see ``samples/SOURCES.md``).

The drawings show six of ImageNet's classes, whose photographs may not be redistributed. They are drawings: a model's
answer to them is not its answer to photographs.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "samples"
DRAWN = ("golf-ball", "parachute", "church", "gas-pump", "cassette-player", "garbage-truck")


def samples() -> dict[str, Path]:
    """Return the paths of the sample images by name: astronaut, chelsea (a cat) and coffee.

    Example:
        >>> sorted(samples())
        ['astronaut', 'chelsea', 'coffee']
    """
    return {path.stem: path for path in sorted(FOLDER.glob("*.jpg"))}


def drawings() -> dict[str, Path]:
    """Return the paths of the drawings by name."""
    return {name: FOLDER / "drawn" / f"{name}.png" for name in DRAWN}
