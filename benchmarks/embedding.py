"""Throughput of embedding a dataset, against the model's alone and the decoder's alone, in wall and processor time.

    python benchmarks/embedding.py timm:vit_tiny_patch16_224 images.parquet --limit 256

The command can be no faster than the slower of its two parts. Where both share the same cores, as on a machine without
a GPU, it can be no faster than both one after the other: that bound is in processor time, which a busy machine does not
change. Rounds are interleaved; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import vitrail
from vitrail.data import open_dataset
from vitrail.embedding import Embedder
from vitrail.embedding.reading import Preparation, Reader


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall and processor time that work takes."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("data")
    options.add_argument("--limit", type=int, default=256)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--threads", type=int, default=None)
    options.add_argument("--merge", default=None)
    given = options.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model = vitrail.load_model(given.model, pretrained=given.model.startswith("vitrail:"))
    if given.merge:
        vitrail.surgery.saving.apply(vitrail.surgery.saving.read_settings(given.merge), model)
    data = open_dataset(given.data, labels=None, limit=given.limit)
    core = Embedder(model)
    parts = [range(start, min(start + given.batch, given.limit)) for start in range(0, given.limit, given.batch)]
    height, width = core.spec.size
    images = torch.randint(0, 255, (given.batch, 3, height, width), dtype=torch.uint8)

    def run_model() -> None:
        for part in parts:
            core(images[: len(part)])

    def decode() -> None:
        for _ in Reader(data, Preparation(core.spec)).batches(parts):
            pass

    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        core(images)

        def embed() -> None:
            vitrail.embed(model, data, Path(folder) / "a.parquet", overwrite=True, batch=given.batch)

        works = {"model": run_model, "decoding": decode, "command": embed}
        for _ in range(given.rounds):
            rounds.append({name: timed(work) for name, work in works.items()})
    wall, processor = (
        {name: statistics.median(one[name][place] for one in rounds) / given.limit for name in works}
        for place in (0, 1)
    )
    lines = [
        f"{name:10} {1 / wall[name]:8.1f} images/s   {processor[name] * 1e3:7.2f} ms of processor time per image"
        for name in works
    ]
    slower = max(wall["model"], wall["decoding"])
    both = processor["model"] + processor["decoding"]
    lines.append(f"command / slower part, wall time: {slower / wall['command']:.2f}")
    lines.append(f"both parts / command, processor time: {both / processor['command']:.2f}")
    about = {"model": given.model, "merge": given.merge, "batch": given.batch, "images": given.limit}
    lines.append(json.dumps({**about, "wall_s": wall, "processor_s": processor}))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
