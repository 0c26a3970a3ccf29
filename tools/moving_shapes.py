"""Render clips of moving shapes, which ``vitrail:video`` is trained and tested on, and the sample clips.

    python tools/moving_shapes.py moving-shapes-train.parquet --count 4000 --seed 1
    python tools/moving_shapes.py moving-shapes-test.parquet --count 1000 --seed 2
    python tools/moving_shapes.py clips --count 30 --seed 3 --side 160  # the sample clips are the first three

Each clip shows one of six shapes that stands still or moves in one of four directions, for two seconds (16 frames,
H.264). A parquet file has the columns ``video``, ``shape``, ``motion`` and ``color``; in a directory these are the name
of each file. Needs PyAV, and pyarrow for parquet.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail._atomic_files import temporary_files, write_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments.common.shapes import COLORS, MOTIONS, SHAPES, render_clips

FRAMES, SIDE, RATE, TEXTURE = 16, 48, 8, 0.3
CHUNK = 500
"""Clips rendered at once."""


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


def rows(count: int, seed: int, side: int = SIDE) -> Iterator[dict[str, Any]]:
    """Yield clips with their labels; every pair of shape and motion occurs equally often in each chunk."""
    for first in range(0, count, CHUNK):
        own = 1000 * seed + first // CHUNK
        drawn = render_clips(min(CHUNK, count - first), frames=FRAMES, side=side, texture=TEXTURE, seed=own)
        assert drawn.motion is not None, "clips have motions"
        labels = zip(drawn.shape, drawn.motion, drawn.color, strict=True)
        for number, (clip, (shape, motion, color)) in enumerate(zip(drawn.images, labels, strict=True), first):
            yield {
                "video": {"bytes": encode(clip), "path": f"{number}.mp4"},
                "shape": SHAPES[shape],
                "motion": MOTIONS[motion],
                "color": COLORS[color],
            }


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="parquet file, or a directory of clips")
    parser.add_argument("--count", type=int, default=4000, help="number of clips")
    parser.add_argument("--seed", type=int, default=1, help="random seed; another one for another part of the data")
    parser.add_argument("--side", type=int, default=SIDE, help="height and width in pixels")
    given = parser.parse_args()
    clips = rows(given.count, given.seed, given.side)
    if given.out.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        with temporary_files(given.out) as (path,):
            parquet.write_table(pyarrow.Table.from_pylist(list(clips)), path)
    else:
        given.out.mkdir(parents=True, exist_ok=True)
        for clip in clips:
            name = "-".join(clip[column] for column in ("color", "shape", "motion"))
            write_bytes(given.out / f"{name}.mp4", clip["video"]["bytes"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
