"""Log-mel spectrograms: tones are in their band, silence is at the floor."""

import io
import math
import tarfile
import wave
from pathlib import Path

import pytest
import torch

from experiments.common.spectrograms import BANDS, FRAMES, RATE, mel_filters, read_digits, read_wave, spectrograms
from vitrail.data import open_dataset
from vitrail.errors import ImageError


def tone(hertz: float, seconds: float = 1.0) -> torch.Tensor:
    return 0.5 * torch.sin(2 * math.pi * hertz * torch.arange(int(RATE * seconds)) / RATE)


@pytest.mark.parametrize("hertz", [300.0, 1000.0, 3000.0])
def test_tone_is_in_its_band(hertz: float) -> None:
    (found,) = spectrograms([tone(hertz)])
    assert found.shape == (1, BANDS, FRAMES)
    mel = 2595 * math.log10(1 + hertz / 700)
    top = 2595 * math.log10(1 + RATE / 2 / 700)
    assert abs(found[0, :, FRAMES // 2].argmax().item() - (mel / top * (BANDS + 1) - 1)) <= 1


def test_short_recording_is_padded_with_silence() -> None:
    (found,) = spectrograms([tone(1000, 0.3)])
    energy = found[0].max(0).values
    assert (energy[:15] == -6).all()
    assert (energy[-15:] == -6).all()
    assert (energy[25:40] > 0).all()


def test_filters_cover_all_frequencies() -> None:
    sums = mel_filters().sum(0)
    assert (mel_filters().sum(1) > 0).all()
    assert (sums[2:-2] > 0).all()


def test_wave_files_round_trip() -> None:
    values = torch.tensor([0, 16384, -32768, 32767], dtype=torch.int16)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, RATE, 4, "NONE", ""))
        file.writeframes(values.numpy().astype("<i2").tobytes())
    assert read_wave(buffer.getvalue()).tolist() == [0, 0.5, -1, 32767 / 32768]


def test_damaged_files_are_reported(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the files are parquet")
    from pyarrow import parquet

    whole = {"audio": [{"bytes": b"RIFF", "path": "a.wav"}], "digit": [1], "speaker": ["x"]}
    for name, columns in {"no sound": whole, "no column": {"digit": [1], "speaker": ["x"]}}.items():
        parquet.write_table(arrow.table(columns), tmp_path / name)
    (tmp_path / "cut").write_bytes((tmp_path / "no sound").read_bytes()[:-20])
    for name in ("no sound", "no column", "cut"):
        with pytest.raises(ImageError, match=f"{name} is not .*Expected the columns"):
            read_digits(tmp_path / name)


def test_recordings_in_a_tar_file_have_their_labels(tmp_path: Path) -> None:
    recordings = {"3_anna_0.wav": tone(300), "7_ben_2.wav": tone(1000)}
    with tarfile.open(tmp_path / "digits.tar", "w") as tar:
        for name, samples in recordings.items():
            buffer = io.BytesIO()
            with wave.open(buffer, "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(RATE)
                file.writeframes((samples * 32768).to(torch.int16).numpy().tobytes())
            info = tarfile.TarInfo(name)
            info.size = len(buffer.getvalue())
            tar.addfile(info, io.BytesIO(buffer.getvalue()))
    found = open_dataset(read_digits(tmp_path / "digits.tar"), labels=("digit", "speaker"))
    assert found.classes == {"digit": ("3", "7"), "speaker": ("anna", "ben")}
    assert found.labels.tolist() == [[0, 0], [1, 1]]
    expected = spectrograms([(samples * 32768).to(torch.int16) / 32768 for samples in recordings.values()])
    assert torch.equal(torch.stack([found.tensor(row, 1) for row in range(2)]), expected)
