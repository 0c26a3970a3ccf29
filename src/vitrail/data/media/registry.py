"""Media by modality: their files, and how a recording is made. To add one, add an entry to ``MEDIA``."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.data import decode
from vitrail.data.media import audio, video
from vitrail.data.media.modality import MODALITIES
from vitrail.data.media.recording import Recording
from vitrail.errors import InvalidOption


@dataclass(frozen=True)
class Medium:
    """Files of one modality.

    Attributes:
        extensions: endings of their files.
        columns: names of columns of a table that hold them.
        make: returns a recording of a file or its bytes; None for images, which are decoded at once.
        require: imports the library that decodes them, or raises.
    """

    extensions: Collection[str]
    columns: Collection[str]
    make: Callable[..., Recording] | None = None
    require: Callable[[], Any] = lambda: None


MEDIA = {
    "image": Medium(decode.EXTENSIONS, ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")),
    "video": Medium(video.EXTENSIONS, ("video", "clip", "mp4", "avi"), video.Clip, video.require),
    "audio": Medium(audio.EXTENSIONS, ("audio", "sound", "wav", "mp3", "flac"), audio.Sound, audio.require),
}
"""Media by modality; a file that may be of several is of the first."""


def recording(modality: str, content: Path | bytes, name: str | None = None) -> Recording:
    """Return a clip or a sound."""
    make = MEDIA[modality].make
    assert make is not None
    return make(content, name)


def read_recordings(modality: str, samples: Any) -> list[Recording]:
    """Return one clip or sound, or several, each as it is or as the path of a file."""
    several = list(samples) if isinstance(samples, list | tuple) else [samples]
    noun, kind = MODALITIES[modality].noun, MEDIA[modality].make
    wrong = [one for one in several if not isinstance(one, str | os.PathLike | Recording)]
    if wrong or not several:
        got = type(wrong[0]).__name__ if wrong else "none"
        raise InvalidOption(f"expected {noun}s, or paths of their files; got {got}")
    require(modality)
    assert kind is not None
    return [one if isinstance(one, Recording) else kind(one) for one in several]


def require(modality: str) -> None:
    """Import the library that decodes a medium, or raise with the extra that installs it."""
    MEDIA[modality].require()


def modality_of(path: Path, *, sure: bool = False) -> str | None:
    """Return the modality of a file by its ending; None if unknown, or with ``sure`` if there are several."""
    ending = path.suffix.lower()
    known = [name for name, medium in MEDIA.items() if ending in medium.extensions]
    return known[0] if known and not (sure and len(known) > 1) else None


def endings_of(modality: str) -> frozenset[str]:
    """Return the endings that only files of a modality have."""
    others = (medium.extensions for name, medium in MEDIA.items() if name != modality)
    return frozenset(MEDIA[modality].extensions).difference(*others)


def check_modality(modality: str | None) -> None:
    """Raise unless a modality is known, or None."""
    if modality is not None and modality not in MEDIA:
        raise InvalidOption(f"modality={modality!r}: expected one of {', '.join(MEDIA)}")
