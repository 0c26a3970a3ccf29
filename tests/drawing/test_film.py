"""Stained glass of clips: one color for a group through time; films and filmstrips of the right frames."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.media_files import shade, write_clip
from vitrail.data import Clip, InputSpec
from vitrail.drawing import draw_groups, stained_glass
from vitrail.drawing.film import Film, film, filmstrip, stained_film
from vitrail.drawing.glass import paint
from vitrail.errors import InvalidOption, UnsupportedInput


def test_a_group_has_one_color_over_all_frames() -> None:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (4, 8, 12, 3), dtype=np.uint8)
    groups = draw.integers(0, 5, (2, 2, 3))  # a step in time holds two frames
    painted = np.stack(paint([Image.fromarray(one) for one in pixels], groups[[0, 0, 1, 1]], lead=0))
    cells = groups[[0, 0, 1, 1]].repeat(4, 1).repeat(4, 2)
    for group in np.unique(groups):
        expected = pixels[cells == group].mean(0)
        assert np.abs(painted[cells == group] - expected).max() <= 0.5
    drawn = stained_film([Image.fromarray(one) for one in pixels], groups)
    assert [frame.size for frame in drawn] == [(12, 8)] * 4


def test_one_frame_is_an_image() -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 96, 3), dtype=np.uint8))
    groups = np.random.default_rng(1).integers(0, 4, (4, 6))
    assert stained_film([image], groups[None])[0] == stained_glass(image, groups)


def test_filmstrip_shows_eight_frames_with_their_times() -> None:
    frames = [Image.new("RGB", (30, 20), (10 * number, 0, 0)) for number in range(16)]
    groups, times = np.arange(8 * 2 * 3).reshape(8, 2, 3), [number / 4 for number in range(16)]
    strip = np.asarray(filmstrip(frames, groups, times))
    assert strip.shape[1] == 12 + 8 * 312
    above = [int(strip[2 * 12 + 20 + 50, 12 + 312 * column + 150, 0]) for column in range(8)]
    assert above == [10 * number for number in range(1, 16, 2)]


def test_a_film_runs_at_the_speed_of_the_clip(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="clips need PyAV")
    clip, spec = Clip(write_clip(tmp_path / "clip.mp4", count=20)), InputSpec((4, 16, 16), modality="video")
    drawings = draw_groups(clip, np.arange(2 * 2 * 2).reshape(2, 2, 2), spec)
    assert list(drawings) == ["filmstrip", "glass"]
    made = drawings["glass"]
    assert isinstance(made, Film)
    assert made.rate == pytest.approx(2.0)  # four frames in 1.9 seconds; at least two in a second
    file = io.BytesIO()
    made.save(file)
    written = Clip(file.getvalue(), "film")
    assert written.timeline().count == 4
    left = [np.asarray(frame)[200:280, 200:280].mean() for frame in written.frames(range(4))]
    assert left == pytest.approx([shade(index, 20) for index in (0, 6, 13, 19)], abs=6)


def test_what_is_no_clip() -> None:
    with pytest.raises(UnsupportedInput, match=r"expected integers \(t, h, w\)"):
        stained_film([Image.new("RGB", (8, 8))], np.zeros((2, 2), int))
    with pytest.raises(InvalidOption, match="all of one size"):
        film([Image.new("RGB", (8, 8))] * 0, np.zeros((1, 2, 2), int), [])
