"""Progress of a run: events for a callback, a JSON Lines log, and TensorBoard."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail._arguments import checked
from vitrail._atomic_files import write_bytes
from vitrail.errors import InvalidOption, TrainingError, VitrailWarning
from vitrail.training.objective.objective import Terms

Kind = Literal["start", "note", "reading", "train", "epoch", "evaluating", "evaluation", "saved"]


@dataclass(frozen=True)
class Event:
    """Progress of a stage, with values, or a message; the text of an epoch is what its samples are called."""

    kind: Kind
    done: int = 0
    total: int | None = None
    values: dict[str, Any] = field(default_factory=dict)
    text: str = ""


OnEvent = Callable[[Event], None]


class Meter:
    """Running means of the losses, kept on the device so that steps do not wait for it.

    It also remembers the first step in which each loss was not finite.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.names: tuple[str, ...] = ()
        self._sums = torch.zeros(0, dtype=torch.float64, device=device)
        self._bad = torch.zeros(0, dtype=torch.int64, device=device)
        self._count = 0

    @torch.no_grad()
    def add(self, terms: Terms, step: int) -> None:
        """Add the losses of a batch, or of a part of it."""
        values = torch.stack([terms.total.detach(), *(part.detach() for part in terms.parts.values())]).double()
        if not self.names:
            self.names = ("loss", *terms.parts)
            self._sums = torch.zeros_like(values)
            self._bad = torch.full_like(values, -1, dtype=torch.int64)
        self._sums += values
        self._bad = torch.where((self._bad < 0) & ~values.isfinite(), step, self._bad)
        self._count += 1

    def first_nonfinite(self) -> tuple[int, list[str]] | None:
        """Return the first step that was not finite and its terms, or None. Synchronizes with the device."""
        bad = {name: step for name, step in zip(self.names, self._bad.tolist(), strict=True) if step >= 0}
        if not bad:
            return None
        first = min(bad.values())
        return first, [name for name, step in bad.items() if step == first and (name != "loss" or len(bad) == 1)]

    def means(self, reduce: Callable[[Tensor], object]) -> dict[str, float]:
        """Return the means since the last reset, over all ranks (``reduce`` sums). Synchronizes with the device."""
        if not self._count:
            return {}
        sums = torch.cat([self._sums, self._sums.new_tensor([self._count])])
        reduce(sums)
        *values, count = sums.tolist()
        return {name: value / count for name, value in zip(self.names, values, strict=True)}

    def reset(self) -> None:
        self._sums = torch.zeros_like(self._sums)
        self._count = 0

    def to_dict(self) -> dict[str, Any]:
        return {"names": list(self.names), "sums": self._sums.tolist(), "count": self._count}

    def restore(self, values: Mapping[str, Any]) -> None:
        self.names, self._count = tuple(values["names"]), values["count"]
        self._sums = torch.tensor(values["sums"], dtype=torch.float64, device=self._device)
        self._bad = torch.full((len(self.names),), -1, dtype=torch.int64, device=self._device)


class Log:
    """A JSON Lines file and, optionally, TensorBoard. Failure to write is a warning, once."""

    def __init__(self, path: Path | None, tensorboard: Path | None = None) -> None:
        self._path = path
        self._warned = False
        self._folder = tensorboard
        self._board: Any = None

    def write(self, kind: str, **values: Any) -> None:
        """Write a line; TensorBoard uses the value of ``step``."""
        if self._path is None:
            return
        line = json.dumps({"kind": kind, **values}, ensure_ascii=False) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            if not self._warned:
                self._warned = True
                text = f"cannot write {self._path} ({error.strerror or error}); training continues"
                warnings.warn(text, VitrailWarning, stacklevel=2)
        if self._folder is not None:
            self._board = self._board or tensorboard_writer()(str(self._folder))
            for name, value in _numbers(kind, values):
                self._board.add_scalar(name, value, values.get("step", 0))
            self._board.flush()

    def trim(self, step: int) -> None:
        """Remove lines after a step, and incomplete lines."""
        if self._path is None or not self._path.exists():
            return
        lines = [json.dumps(line, ensure_ascii=False) for line in read_log(self._path) if line.get("step", 0) <= step]
        write_bytes(self._path, "".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


@checked
def read_log(path: str | Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of a log, optionally of one kind (``epoch``, ``evaluation``, ``start`` …), if complete."""
    found = []
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TrainingError(f"{path} could not be read ({error.strerror or error}); give a run's log.jsonl") from error
    for line in text.splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict) and kind in (None, line.get("kind"))]


def tensorboard_writer() -> Any:
    """Return TensorBoard's writer class; raise `InvalidOption` if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InvalidOption(
            "tensorboard=True needs TensorBoard; install it with `pip install vitrail[train]`, or use log.jsonl, which "
            "has the same values"
        ) from error
    return SummaryWriter


def _numbers(name: str, values: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested values, each with its path."""
    if isinstance(values, Mapping):
        for key in (key for key in values if key != "step"):
            yield from _numbers(f"{name}/{key}", values[key])
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield name, float(values)
