"""Write clips of moving shapes, which ``vitrail:video`` is trained and tested on, as parquet files.

    python tools/moving_shapes.py moving-shapes-train.parquet --count 8000 --seed 1
    python tools/moving_shapes.py moving-shapes-test.parquet --count 1500 --seed 2

Each clip shows one of six shapes that stands still or moves in one of four directions, for two seconds (16 frames of
48 × 48 pixels, H.264). Columns: ``video``, ``label`` (shape and motion, 30 classes), ``shape``, ``motion``, ``color``.
Needs PyAV and pyarrow.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail._atomic_files import temporary_files

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments.common.shapes import COLORS, MOTIONS, SHAPES, render_clips

FRAMES, SIDE, RATE, TEXTURE = 16, 48, 8, 0.3
CHUNK = 500
"""Clips rendered at once."""


def label_of(shape: int, motion: int) -> str:
    """Return the class of a clip, such as ``disc left`` or ``star still``."""
    return f"{SHAPES[shape]} {MOTIONS[motion]}"


def encode(frames: Tensor) -> bytes:
    """Return a clip (3, T, H, W) in uint8 as an MP4 file."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=RATE, options={"crf": "23", "threads": "1"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[-2:], "yuv420p"
        for number, values in enumerate(frames.permute(1, 2, 3, 0).contiguous().numpy()):
            frame = av.VideoFrame.from_ndarray(values, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield clips with their labels; every pair of shape and motion occurs equally often in each chunk."""
    for part in range(0, count, CHUNK):
        drawn = render_clips(
            min(CHUNK, count - part), frames=FRAMES, side=SIDE, texture=TEXTURE, seed=1000 * seed + part // CHUNK
        )
        assert drawn.motion is not None
        labels = zip(drawn.shape, drawn.motion, drawn.color, strict=True)
        for number, (clip, found) in enumerate(zip(drawn.images, labels, strict=True), part):
            shape, motion, color = map(int, found)
            yield {
                "video": {"bytes": encode(clip), "path": f"{number}.mp4"},
                "label": label_of(shape, motion), "shape": SHAPES[shape], "motion": MOTIONS[motion],
                "color": COLORS[color],
            }  # fmt: skip


def main() -> int:
    """Run the command line."""
    import pyarrow
    from pyarrow import parquet

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="parquet file to write")
    parser.add_argument("--count", type=int, default=8000, help="number of clips")
    parser.add_argument("--seed", type=int, default=1, help="random seed; another one for another part of the data")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    with temporary_files(given.out) as (path,):
        parquet.write_table(pyarrow.Table.from_pylist(list(rows(given.count, given.seed))), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
