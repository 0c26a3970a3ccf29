"""Time merged models of two source trees, interleaved: has a change of the code made them slower?

    git worktree add ../before v0.3.0
    python benchmarks/two_trees.py ../before/src src --rows dinov2-l-518 training

Runs of different days or machines differ by more than a change of the code does, most of all where launches from
Python bound the time. So both trees run on one machine, in alternating processes, each in plain eager mode; the table
has the median of every process, in order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS: dict[str, dict[str, Any]] = {
    "vit-b-224": {"model": "vit_base_patch16_224", "size": 224, "batch": 256, "r": 16},
    "vit-l-384": {"model": "vit_large_patch16_384", "size": 384, "batch": 64, "r": 23},
    "dinov2-l-518": {"model": "vit_large_patch14_reg4_dinov2", "size": 518, "batch": 16, "r": 50},
    "training": {"model": "vit_large_patch16_224", "size": 224, "batch": 128, "r": 8, "train": True},
    "small": {"model": "vit_tiny_patch16_224", "size": 224, "batch": 2, "r": 8},
}
"""What to time: those rows of ``h200.py``, and a small one to try the script on a CPU."""


def say(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def measure(row: dict[str, Any], device: str, steps: int) -> list[float]:
    """Return the milliseconds of each step of a merged model, by the ``vitrail`` on this process's path."""
    import timm
    import torch

    import vitrail

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = timm.create_model(row["model"]).to(device, dtype)
    images = torch.randn(row["batch"], 3, row["size"], row["size"], device=device, dtype=dtype)
    model.train(bool(row.get("train")))
    vitrail.merge(model, r=row["r"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda") if row.get("train") else None

    def step() -> None:
        if optimizer is None:
            with torch.inference_mode():
                model(images)
            return
        optimizer.zero_grad(set_to_none=True)
        model(images).float().square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    return [milliseconds(step, device) for _ in range(steps)]


def milliseconds(step: Callable[[], None], device: str) -> float:
    """Return the duration of a step from an idle device to its end; by this script, so that any tree can be timed."""
    import torch

    if device != "cuda":
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    step()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after))


def main(arguments: list[str]) -> int:
    """Time the rows, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, type=Path, metavar="SRC", help="folders that hold the package, old and new")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["dinov2-l-518", "training"])
    parser.add_argument("--rounds", type=int, default=3, help="processes for each tree and row (3)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps in each process (30)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--child", choices=ROWS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        say(json.dumps(measure(ROWS[options.child], options.device, options.steps)))
        return 0
    for tree in options.trees:
        if not (tree / "vitrail").is_dir():
            parser.error(f"{tree} does not hold the package vitrail; name the folder src of a checkout")
    for row in options.rows:
        found: dict[Path, list[float]] = {tree: [] for tree in options.trees}
        for _ in range(options.rounds):
            for tree in options.trees:
                command = [sys.executable, __file__, *map(str, options.trees), "--child", row]
                command += ["--device", options.device, "--steps", str(options.steps)]
                path = os.pathsep.join([str(tree.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
                environment = {**os.environ, "PYTHONPATH": path}
                run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
                found[tree].append(statistics.median(json.loads(run.stdout.decode().splitlines()[-1])))
        for tree, times in found.items():
            say(f"{row:14} {tree!s:30} " + "  ".join(f"{time:8.2f}" for time in times) + " ms")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
