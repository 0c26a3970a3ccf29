"""Clips: the right frames, one at a time, of every container; broken files have one clear error."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.media_files import CLIPS, real_clips, shade, tone, write_clip, write_sound
from vitrail.data import Clip, FrameSampling, InputSpec
from vitrail.data.media import video as module
from vitrail.errors import MediaError, UnsupportedInput

av = pytest.importorskip("av", reason="clips need PyAV")


@pytest.mark.parametrize("ending", ["mp4", "avi", "gif", "mkv"])
def test_frames_of_every_container(ending: str, tmp_path: Path) -> None:
    clip = Clip(write_clip(tmp_path / f"clip.{ending}"))
    timeline = clip.timeline()
    assert timeline.count == 12
    assert timeline.seconds == pytest.approx(1.2, abs=0.02)
    indices = [0, 0, 3, 7, 11]
    means = [np.asarray(image).mean() for image in clip.frames(indices)]
    assert means == pytest.approx([shade(index, 12) for index in indices], abs=20 if ending == "gif" else 4)


def test_bytes_are_as_good_as_a_file(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "clip.mp4")
    spec = InputSpec((4, 16, 24), modality="video")
    assert torch.equal(Clip(path).values(spec), Clip(path.read_bytes(), "clip").values(spec))


@pytest.mark.parametrize("ending", ["mp4", "avi", "mkv"])
def test_seeking_finds_the_same_frames(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = Clip(write_clip(tmp_path / f"clip.{ending}", count=40))
    indices = [1, 2, 17, 18, 30, 39]
    expected = [np.asarray(image) for image in clip.frames(indices)]
    monkeypatch.setattr(module, "SEEK_SECONDS", 0)
    for found, true in zip(clip.frames(indices), expected, strict=True):
        assert np.array_equal(np.asarray(found), true)


def test_values_are_centered_and_keep_the_aspect(tmp_path: Path) -> None:
    values = Clip(write_clip(tmp_path / "clip.mp4", size=(32, 64))).values(InputSpec((3, 16, 16), modality="video"))
    assert values.shape == (3, 3, 16, 16)
    assert values.dtype == torch.uint8
    assert values.float().mean((0, 2, 3)).tolist() == pytest.approx([shade(i, 12) for i in (0, 6, 11)], abs=4)


def test_one_frame_is_repeated(tmp_path: Path) -> None:
    values = Clip(write_clip(tmp_path / "clip.mp4", count=1)).values(InputSpec((4, 16, 16), modality="video"))
    assert all(torch.equal(values[:, 0], values[:, place]) for place in range(1, 4))


def test_only_wanted_frames_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames are turned into images as they come: most are decoded and let go."""
    made: list[int] = []
    upright = module._upright

    def counted(frame: Any) -> Any:
        made.append(frame.pts)
        return upright(frame)

    monkeypatch.setattr(module, "_upright", counted)
    Clip(write_clip(tmp_path / "clip.mp4", count=60)).values(InputSpec((3, 16, 16), modality="video"))
    assert len(made) == 3


class Held:
    """A decoded frame that tells how many are alive."""

    alive = 0
    most = 0

    def __init__(self, frame: Any) -> None:
        self._frame = frame
        Held.alive += 1
        Held.most = max(Held.most, Held.alive)

    def __del__(self) -> None:
        Held.alive -= 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._frame, name)


@pytest.mark.parametrize(("ending", "gap"), [("mkv", 10**4), ("avi", 50)])
def test_memory_does_not_grow_with_the_length(
    ending: str, gap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1500 frames, of which all or some are decoded, at most three are held at a time."""
    restart = module._Decoded._restart
    decoded: list[int] = []

    def counting(self: Any) -> None:
        restart(self)
        frames = self._frames
        self._frames = (decoded.append(1) or Held(frame) for frame in frames)  # type: ignore[func-returns-value]

    monkeypatch.setattr(module._Decoded, "_restart", counting)
    Held.alive = Held.most = 0
    clip = Clip(write_clip(tmp_path / f"long.{ending}", count=1500, size=(16, 16), gap=gap))
    values = clip.values(InputSpec((6, 16, 16), modality="video"))
    expected = [shade(index, 1500) for index in FrameSampling().choose(6, 1500, 10.0)]
    assert values.float().mean((0, 2, 3)).tolist() == pytest.approx(expected, abs=5)
    assert Held.most <= 3
    assert len(decoded) > 6
    assert gap > 1500 or len(decoded) < 500  # key frames are searched where there are some


def broken(folder: Path) -> dict[str, tuple[Path, str]]:
    whole = write_clip(folder / "whole.avi", count=60)
    files = {
        "empty": (b"", "empty"),
        "text": (b"no clip at all" * 99, "not a video clip"),
        "cut": (whole.read_bytes()[: whole.stat().st_size // 2], r"cut off"),
        "playlist": (b"#EXTM3U\n#EXTINF:1,\n" + str(whole).encode(), "not a video clip"),
    }
    made = {}
    for name, (data, words) in files.items():
        (folder / f"{name}.avi").write_bytes(data)
        made[name] = (folder / f"{name}.avi", words)
    made["missing"] = (folder / "missing.mp4", "no such file")
    made["folder"] = (folder, "not a file")
    return made


def test_broken_clips_have_one_clear_error(tmp_path: Path) -> None:
    for path, words in broken(tmp_path).values():
        with pytest.raises(MediaError, match=words) as caught:
            Clip(path).values(InputSpec((8, 16, 16), modality="video"))
        assert str(path) in str(caught.value)


def test_sound_is_no_clip(tmp_path: Path) -> None:
    path = write_sound(tmp_path / "sound.ogg", tone(500))
    with pytest.raises(MediaError, match="no video track"):
        Clip(path).check()


def test_no_frames(tmp_path: Path) -> None:
    path = tmp_path / "none.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        container.start_encoding()
    with pytest.raises(MediaError, match=r"no frames|not a video clip"):
        Clip(path).check()


def test_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_clip(tmp_path / "clip.mp4")
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MediaError, match=r"pip install vitrail\[video\]"):
        Clip(path).check()


def test_a_model_of_images_takes_no_clip(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="video clip, and the model takes images"):
        Clip(write_clip(tmp_path / "clip.mp4")).tensor(InputSpec((16, 16)))


@real_clips
def test_real_clips_show_the_frame_of_each_time() -> None:
    for path in sorted(CLIPS.iterdir()):
        with av.open(str(path)) as container:
            every = [(frame.pts, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
        times = [pts for pts, _ in every]
        clip = Clip(path)
        timeline = clip.timeline()
        indices = FrameSampling().choose(7, timeline.count, float(timeline.rate))
        for index, image in zip(indices, clip.frames(indices), strict=True):
            begun = [values for pts, values in every if pts <= timeline.within(index)]
            shown = begun[-1] if begun else every[0][1]
            if times == sorted(times):
                assert np.array_equal(np.asarray(image), shown), (path.name, index)
            else:  # wrong times: frames are shown in the order that they are decoded
                near = [values for _, values in every[max(index - 3, 0) : index + 3]]
                assert any(np.array_equal(np.asarray(image), one) for one in near), (path.name, index)
