"""Runs that are killed again and again, and resumed: run as a script, it forks a child for each attempt.

A child is killed at its n-th operation on a file of the run directory, before it takes place (so also inside of a
checkpoint's write), or at any time. The script prints a JSON line with the number of kills and whether the weights are
those of a run that was never killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import PIL.PngImagePlugin
import safetensors.torch
import torch
import torch._dynamo
import yaml

from tests.training.toys import FIELDS, make_photos, same, weights
from vitrail.training import train

PRELOADED = (PIL.PngImagePlugin, safetensors.torch, yaml)
"""Modules that children would import one by one."""

OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree")
RANDOM = {"mixup": 0.2, "cutmix": 1.0, "augment": "medium", "drop_path": 0.2, "ema": 0.9, "validation": 0.25}


def fields(photos: Path, out: Path) -> dict[str, Any]:
    return {**FIELDS, **RANDOM, "data": str(photos), "out": str(out), "save_every": "1 steps", "keep_data": "device"}


def attempt(photos: Path, out: Path, kill_at: int | None) -> None:
    """Train or resume in this process; kill it at an operation on a file of the run."""
    seen, inside = [0], str(out)

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event in OPERATIONS and arguments and str(arguments[0]).startswith(inside):
            seen[0] += 1
            if seen[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    if kill_at is not None:
        sys.addaudithook(count)
    resumable = any(out.glob("checkpoints/step-*"))
    if resumable:
        train(out=str(out), resume=True)
    else:
        train(**fields(photos, out), overwrite=out.exists())


def in_child(photos: Path, out: Path, kill_at: int | None = None, after: float | None = None) -> int:
    """Fork a child for an attempt; return its exit status: 0, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            attempt(photos, out, kill_at)
            code = 0
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            sys.stderr.flush()
            os._exit(code)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(folder: Path, kills: int, seed: int, timed: bool) -> dict[str, Any]:
    draw, photos = random.Random(seed), folder / "photos"
    if not photos.exists():
        make_photos(photos)
    whole = folder / "whole"
    started = time.monotonic()
    if not whole.exists() and in_child(photos, whole):
        raise SystemExit("the run that is not killed failed")
    seconds = time.monotonic() - started
    done, runs, equal = 0, 0, 0
    while done < kills:
        out = folder / f"killed-{seed}-{runs}"
        runs += 1
        while True:
            # later operations belong to later checkpoints; a few attempts are killed before the first one
            place = None if timed else draw.randint(1, 60)
            after = draw.uniform(0.0, max(seconds, 0.3)) if timed else None
            last = done >= kills
            status = in_child(photos, out, None if last else place, None if last else after)
            if status == 0:
                break
            if status != -signal.SIGKILL:
                raise SystemExit(f"attempt {done} of {out.name} ended with {status}")
            done += 1
        equal += same(weights(out / "last"), weights(whole / "last"))
    return {"kills": done, "runs": runs, "equal": equal}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "timed")
    sys.stdout.write(f"{json.dumps(found)}\n")
