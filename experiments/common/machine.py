"""Time, memory, device and versions of a run."""

from __future__ import annotations

import gc
import platform
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch

import vitrail
from vitrail.training import read_log

ROOT = Path(__file__).resolve().parents[2]


class Stopwatch:
    """Context manager that measures the time and the peak memory of a training run."""

    def __enter__(self) -> Self:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds = time.perf_counter() - self._start

    def measured(self, folder: Path) -> dict[str, Any]:
        """Return total seconds, training throughput (median epoch) and peak memory.

        Memory that is still allocated after the run is subtracted: libraries keep some from their first use on.
        """
        gc.collect()
        peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() if torch.cuda.is_available() else None
        epochs = read_log(folder / "log.jsonl", "epoch")
        throughputs = sorted(line["images_per_s"] for line in epochs)
        return {
            "seconds": max(self._seconds, epochs[-1]["seconds"]),  # a resumed run counts the time before it
            "train_images_per_s": throughputs[len(throughputs) // 2],
            "peak_bytes": peak,
        }


@cache
def machine_info() -> dict[str, Any]:
    """Return the device name and the versions of Python, torch and Vitrail."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "vitrail": vitrail.__version__}
    return {"device": device, "versions": versions}


@cache
def git_commit() -> str | None:
    """Return the short commit hash, with ``-dirty`` if source files changed; None outside a checkout."""
    try:
        commit, changed = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "src", "experiments/common"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}-dirty" if changed else commit
