"""``Settings``: changes of a model as plain values and tensors, and their files.

    vitrail.json                  {"format": 1, "vitrail": …, "base": …, "changes": …, "tensors": …}
    vitrail-<digest>.safetensors  parameters of learned methods, restorers, foresight and added tokens, if there are any

The tensors are written first, under a name that has their digest, and ``vitrail.json`` names them: whenever a process
is killed, the directory holds the old settings or the new ones. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail._atomic_files import write_bytes
from vitrail.errors import ModelLoadError
from vitrail.surgery.saving.base import Base

FILE = "vitrail.json"
FORMAT = 1
TOKENS = "tokens"
CHANGES = (TOKENS, "merge", "registers")
"""Changes by name, in the order in which they are applied."""

MOST_BYTES = 64_000_000
"""Largest JSON that is read."""

_TENSORS = re.compile(r"vitrail-[0-9a-f]{16}\.safetensors")


@dataclass(frozen=True)
class Settings:
    """Changes of a model: :func:`vitrail.surgery.saving.apply` makes them again.

    Attributes:
        changes: options by change: ``merge``, ``tokens`` (added ones), ``registers`` (at test time).
        tensors: their parameters, by ``CHANGE.PART.NAME``.
        base: the model that they were saved for; None fits any that takes the options.
        source: where they were read from, for messages.
    """

    changes: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    base: Base | None = None
    source: str = "settings"

    @property
    def label(self) -> dict[str, Any]:
        """The settings as plain values that identify them: options, and a digest of the tensors."""
        label = {name: {key: _plain(one) for key, one in values.items()} for name, values in self.changes.items()}
        return {**label, "tensors": self._named()[0]} if self.tensors else label

    def of(self, change: str) -> dict[str, Tensor]:
        """Return the tensors of one change, by ``PART.NAME``."""
        prefix = f"{change}."
        return {name.removeprefix(prefix): one for name, one in self.tensors.items() if name.startswith(prefix)}

    def write(self, folder: str | Path) -> None:
        """Write the files into a directory, which is created if needed; others in it stay."""
        from vitrail import __version__

        folder = Path(folder)
        values: dict[str, Any] = {
            "format": FORMAT,
            "vitrail": __version__,
            "base": None if self.base is None else self.base.to_dict(),
            "changes": {name: dict(options) for name, options in self.changes.items()},
            "tensors": None,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.tensors:
                values["tensors"], data = self._named()
                write_bytes(folder / values["tensors"], data)
            write_bytes(folder / FILE, f"{json.dumps(values, indent=2, allow_nan=False)}\n".encode())
            for other in folder.glob("vitrail-*.safetensors"):
                if _TENSORS.fullmatch(other.name) and other.name != values["tensors"]:
                    with suppress(OSError):
                        other.unlink()
        except OSError as error:
            raise ModelLoadError(
                f"could not write {folder / FILE} ({error.strerror or error}); choose a writable directory"
            ) from error

    def _named(self) -> tuple[str, bytes]:
        """Return the tensors' file, and its name."""
        from safetensors.torch import save

        tensors = {name: one.detach().cpu().contiguous().clone() for name, one in sorted(self.tensors.items())}
        data = save(tensors, metadata={"format": "pt"})
        return f"vitrail-{hashlib.sha256(data).hexdigest()[:16]}.safetensors", data

    @classmethod
    def read(cls, path: str | Path) -> Settings:
        """Read settings from a directory, or from its ``vitrail.json``; any damage is a ``ModelLoadError``."""
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        values = read_json(path)
        if values.get("format") != FORMAT or "changes" not in values:
            raise ModelLoadError(
                f"{path} has format {values.get('format')!r:.40}; this version of Vitrail reads format {FORMAT}. Read "
                "it with the version that wrote it, or save the settings again"
            )
        try:
            base = None if values.get("base") is None else Base.from_dict(values["base"])
            changes = _checked_changes(values["changes"])
        except (TypeError, ValueError, AttributeError) as error:
            raise damaged(path, error) from error
        made = cls(changes, base=base, source=str(path))
        return made if values.get("tensors") is None else replace(made, tensors=_read_tensors(path, values["tensors"]))


def _plain(value: Any) -> Any:
    """Return an option as plain data; the path of a trained method as text."""
    return str(value) if isinstance(value, Path) else value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise ``ModelLoadError`` if there is none."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES // 10**6} MB")
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelLoadError(
            f"{path}: there is no such file; expected one that merging.save or save_pretrained of a merged model wrote"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"{path} could not be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise damaged(path, error) from error
    if not isinstance(values, dict):
        raise damaged(path, "not an object")
    return values


def damaged(path: Path, why: object) -> ModelLoadError:
    """Return the error for a file that is not what it should be."""
    text = " ".join(str(why).split())[:200]
    return ModelLoadError(f"{path} is not a file of settings, or is damaged ({text}); save the settings again")


def _checked_changes(changes: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(changes, dict) or not all(isinstance(one, dict) for one in changes.values()):
        raise ValueError("changes are not objects")
    if unknown := [name for name in changes if name not in CHANGES]:
        raise ValueError(f"unknown change {unknown[0]!r:.40}; this version knows {', '.join(CHANGES)}")
    return changes


def _read_tensors(path: Path, name: Any) -> dict[str, Tensor]:
    """Read the file of tensors beside ``vitrail.json``; its name has its digest."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not isinstance(name, str) or not _TENSORS.fullmatch(name):
        raise damaged(path, f"tensors: {name!r:.80} is not the name of a file")
    file = path.with_name(name)
    try:
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest()[:16] != name.removeprefix("vitrail-").removesuffix(".safetensors"):
            raise ValueError("its content is not what was written")
        return load(data)
    except OSError as error:
        raise ModelLoadError(
            f"{path} needs {name} beside it, which could not be read ({error.strerror or error}); copy both files"
        ) from error
    except (ValueError, SafetensorError) as error:
        raise damaged(file, error) from error
