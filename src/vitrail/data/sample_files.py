"""Sample images, sounds and clips that come with the package (see ``samples/SOURCES.md``).

The drawings show six of ImageNet's classes, whose photographs may not be redistributed. They are drawings: a model's
answer to them is not its answer to photographs.
"""

from __future__ import annotations

from pathlib import Path

from vitrail._checks import check_choice

FOLDER = Path(__file__).parent / "samples"
FILES = {"image": "*.jpg", "audio": "spoken/*.wav", "video": "moving/*.mp4"}
"""Where the samples of each modality are."""

DRAWN = ("golf-ball", "parachute", "church", "gas-pump", "cassette-player", "garbage-truck")


def samples(modality: str = "image") -> dict[str, Path]:
    """Return the paths of the samples of a modality by name.

    Images are astronaut, chelsea (a cat) and coffee; ``"audio"`` has spoken digits, ``"video"`` clips of moving shapes.

    Example:
        >>> sorted(samples())
        ['astronaut', 'chelsea', 'coffee']
        >>> sorted(samples("audio"))
        ['nine', 'seven', 'three']
    """
    check_choice("modality", modality, FILES)
    return {path.stem: path for path in sorted(FOLDER.glob(FILES[modality]))}


def drawings() -> dict[str, Path]:
    """Return the paths of the drawings by name."""
    return {name: FOLDER / "drawn" / f"{name}.png" for name in DRAWN}
