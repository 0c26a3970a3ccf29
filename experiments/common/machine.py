"""What a run took, and on what."""

from __future__ import annotations

import gc
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
import typer

import vitrail
from vitrail.errors import VitrailError
from vitrail.training import read_log

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = "train,plot,data,timm"
"""What studies need beside Vitrail itself."""
PLAIN = (VitrailError, OSError, ModuleNotFoundError)
"""What is wrong with what was asked for, or where; it is told without a traceback."""


class Stopwatch:
    """Measures the time and the memory of a training run, from its first line to its last."""

    def __enter__(self) -> Self:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._begun = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds = time.perf_counter() - self._begun

    def found(self, folder: Path) -> dict[str, Any]:
        """Give seconds in all, pictures per second of training (the median epoch's), and the peak of memory.

        What is on the device after a run is not the run's: libraries keep some memory from the first time on.
        """
        gc.collect()
        peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() if torch.cuda.is_available() else None
        epochs = read_log(folder / "log.jsonl", "epoch")
        speeds = sorted(line["images_per_s"] for line in epochs)
        return {
            "seconds": max(self._seconds, epochs[-1]["seconds"]),  # of a run that went on, the time before counts, too
            "train_images_per_s": speeds[len(speeds) // 2],
            "peak_bytes": peak,
        }


@cache
def machine() -> dict[str, Any]:
    """Name the device and the versions."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "vitrail": vitrail.__version__}
    return {"device": device, "versions": versions}


@cache
def commit() -> str | None:
    """Give the commit, with a sign where files have changed since; None outside of a checkout."""
    try:
        found, changed = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "src", "experiments/common"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{found}-dirty" if changed else found


def told(error: VitrailError | OSError | ModuleNotFoundError, options: str) -> str:
    """Say what is wrong; of the system's own errors, with which file, and which options would name another one."""
    if isinstance(error, VitrailError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed, and studies need it: pip install -e '.[{EXTRAS}]', in the checkout"
    expected = f"Expected a place that can be written to; name another one with {options}"
    return f"{error.filename}: {error.strerror}. {expected}"


@contextmanager
def ending_plainly(options: str) -> Iterator[None]:
    """End a command with what is wrong, as :func:`told` says it, and 2 instead of a traceback."""
    try:
        yield
    except PLAIN as error:
        typer.echo(told(error, options), err=True)
        raise typer.Exit(2) from error
