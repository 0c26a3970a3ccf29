"""Recordings: video clips and sounds, decoded when they are read."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from vitrail.data.media.modality import MODALITIES
from vitrail.data.spec import InputSpec
from vitrail.errors import MediaError, UnsupportedInput

Content = Path | bytes


class Recording(ABC):
    """A clip or a sound: a file or its bytes, and a name for messages. Nothing is decoded before it is read."""

    modality: ClassVar[str]
    noun: ClassVar[str]

    def __init__(self, content: Content | str | os.PathLike[str], name: str | None = None) -> None:
        self.content: Content = content if isinstance(content, bytes) else Path(content)
        self.name = str(content) if name is None and not isinstance(content, bytes) else name or f"a {self.noun}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @abstractmethod
    def check(self) -> None:
        """Raise ``MediaError`` unless the file's header is that of a readable recording."""

    @abstractmethod
    def values(self, spec: InputSpec) -> Tensor:
        """Read what a model sees of it, before normalization: (C, *spec.size)."""

    def tensor(self, spec: InputSpec) -> Tensor:
        """Read it as one input of a model, normalized and in the order of its axes, in float32."""
        if spec.modality != self.modality:
            takes = MODALITIES[spec.modality].plural
            raise UnsupportedInput(
                f"{self.name} is a {self.noun}, and the model takes {takes}; give it {takes}, or use a model for "
                f"modality {self.modality!r}"
            )
        return spec.normalize(self.values(spec)[None])[0]

    def opened(self) -> Any:
        """Return the file or its bytes as a library opens it; raise if there is nothing to open."""
        if isinstance(self.content, bytes):
            if not self.content:
                raise MediaError(f"{self.name}: the {self.noun} is empty; fetch or export it again")
            return io.BytesIO(self.content)
        path = self.content
        if not path.exists():
            raise MediaError(f"{path}: there is no such file; expected a {self.noun}. Check the path")
        if not path.is_file():
            raise MediaError(f"{path}: not a file; expected a {self.noun}. Name a file")
        if path.stat().st_size == 0:
            raise MediaError(f"{path}: the file is empty; expected a {self.noun}. Fetch or export it again")
        return str(path)


def library(module: str, what: str, extra: str, package: str) -> Any:
    """Import an optional library, or raise with the extra that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MediaError(f"{what} needs {package}; pip install vitrail[{extra}]") from error


def reason(error: BaseException) -> str:
    """Return the reason of an error in a few words, without the path."""
    text = getattr(error, "strerror", None) or getattr(error, "error_string", None) or str(error)
    return str(text).splitlines()[0].strip() if str(text).strip() else type(error).__name__
