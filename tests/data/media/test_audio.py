"""Sounds: channels, rates and parts; broken files have one clear error."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.media_files import tone, write_clip, write_sound
from vitrail.data import InputSpec, Sound, Spectrogram
from vitrail.errors import MediaError, UnsupportedInput

pytest.importorskip("soundfile", reason="sounds need soundfile")


@pytest.mark.parametrize(("ending", "close"), [("wav", 1e-4), ("flac", 1e-4), ("ogg", 0.05), ("mp3", 0.05)])
def test_samples_of_every_format(ending: str, close: float, tmp_path: Path) -> None:
    samples = tone(440)
    found = Sound(write_sound(tmp_path / f"a.{ending}", samples)).samples().numpy()
    assert abs(len(found) - len(samples)) <= 2400  # mp3 has whole frames alone
    middle = slice(2000, 6000)
    assert np.abs(found[middle] - samples[middle]).max() < close


def test_channels_are_averaged(tmp_path: Path) -> None:
    both = np.stack([tone(440), -0.5 * tone(440)], 1)
    found = Sound(write_sound(tmp_path / "stereo.wav", both)).samples()
    assert found.numpy() == pytest.approx(0.25 * tone(440), abs=1e-4)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000, 11025])
def test_another_rate_is_resampled(rate: int, tmp_path: Path) -> None:
    sound = Sound(write_sound(tmp_path / "tone.wav", tone(1000, 0.5, rate), rate))
    found = sound.samples(16000)
    assert (sound.rate, len(found)) == (rate, 8000)
    middle = slice(800, 7200)
    assert found[middle].numpy() == pytest.approx(tone(1000)[middle], abs=2e-3)


def test_frequencies_above_the_new_rate_are_removed_not_folded(tmp_path: Path) -> None:
    sound = Sound(write_sound(tmp_path / "tone.wav", tone(11000, 0.5, 44100), 44100))
    assert sound.samples(16000)[800:-800].abs().max() < 1e-3


@pytest.mark.parametrize("rate", [16000, 44100, 8000, 11025])
@pytest.mark.parametrize("place", ["center", "start"])
def test_a_part_equals_that_part_of_the_whole(rate: int, place: str, tmp_path: Path) -> None:
    noise = 0.1 * np.random.default_rng(0).standard_normal(2 * rate).astype(np.float32)
    sound = Sound(write_sound(tmp_path / "noise.wav", noise, rate))
    whole, part = sound.samples(16000), sound.samples(16000, 5001, place=place)
    first = (len(whole) - 5001) // 2 if place == "center" else 0
    assert len(part) == 5001
    assert torch.allclose(part, whole[first : first + 5001], atol=1e-6)


def test_spectrogram_of_a_long_sound_is_that_of_its_center(tmp_path: Path) -> None:
    long = np.concatenate([np.zeros(20000, np.float32), tone(1000), np.zeros(20000, np.float32)])
    spec = InputSpec((40, 32), (0.0,), (1.0,), "audio", scale=1)
    long_values = Sound(write_sound(tmp_path / "long.wav", long)).values(spec)
    short_values = Sound(write_sound(tmp_path / "short.wav", tone(1000))).values(spec)
    assert long_values.shape == (1, 40, 32)
    assert torch.allclose(long_values, short_values, atol=1e-2)


def test_tensor_is_normalized_and_in_the_models_order(tmp_path: Path) -> None:
    sound = Sound(write_sound(tmp_path / "a.wav", tone(1000)))
    spec = InputSpec((40, 32), (-3.0,), (2.0,), "audio", scale=1, sampling=Spectrogram.kaldi(), axes="TF")
    assert torch.allclose(sound.tensor(spec), (sound.values(spec)[0].T + 3) / 2)
    with pytest.raises(UnsupportedInput, match="is a sound, and the model takes video clips"):
        sound.tensor(InputSpec((2, 16, 16), modality="video"))


def test_broken_sounds_have_one_clear_error(tmp_path: Path) -> None:
    whole = write_sound(tmp_path / "whole.flac", 0.1 * np.random.default_rng(0).standard_normal(16000))
    for name, data, words in (
        ("empty.wav", b"", "empty"),
        ("text.wav", b"no sound at all" * 99, "not a sound"),
        ("cut.flac", whole.read_bytes()[: whole.stat().st_size // 3], r"cut off|damaged"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(MediaError, match=words) as caught:
            Sound(tmp_path / name).samples(8000)
        assert name in str(caught.value)
    silent = write_sound(tmp_path / "none.wav", np.zeros(0, np.float32))
    with pytest.raises(MediaError, match="no samples"):
        Sound(silent).check()
    import soundfile

    soundfile.write(tmp_path / "nan.wav", np.array([0.0, np.nan, 0.0], np.float32), 8000, subtype="FLOAT")
    with pytest.raises(MediaError, match="not finite"):
        Sound(tmp_path / "nan.wav").samples()


def test_wav_that_ends_early_is_cut_off_unless_written_as_a_stream(tmp_path: Path) -> None:
    whole = write_sound(tmp_path / "whole.wav", tone(440, seconds=1))
    data = bytearray(whole.read_bytes())
    (tmp_path / "cut.wav").write_bytes(data[: len(data) // 2])
    for read in (Sound(tmp_path / "cut.wav").check, lambda: Sound(tmp_path / "cut.wav").samples(8000)):
        with pytest.raises(MediaError, match="cut off"):
            read()
    place = data.index(b"data") + 4
    for length in (b"\xff\xff\xff\xff", b"\x00\xf0\xff\x7f"):  # FFmpeg's and SoX's, into a pipe
        data[place : place + 4] = length
        (tmp_path / "streamed.wav").write_bytes(data)
        assert torch.equal(Sound(tmp_path / "streamed.wav").samples(), Sound(whole).samples())


def test_clip_is_no_sound(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="not a sound"):
        Sound(write_clip(tmp_path / "clip.mp4")).check()


def test_a_rate_that_no_filter_can_hold_is_refused(tmp_path: Path) -> None:
    """Resampling from a prime rate needs a filter of some ten times as many values."""
    path = write_sound(tmp_path / "tone.wav", tone(1000, 0.5))
    data = bytearray(path.read_bytes())
    data[24:28] = (50_000_017).to_bytes(4, "little")
    for read in (Sound(bytes(data)).check, lambda: Sound(bytes(data)).samples(16000)):
        with pytest.raises(MediaError, match="50000017 samples per second"):
            read()


def test_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_sound(tmp_path / "a.wav", tone(440))
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(MediaError, match=r"pip install vitrail\[audio\]"):
        Sound(path).check()
