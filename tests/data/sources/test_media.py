"""Clips and sounds from folders, class folders and parquet files."""

from pathlib import Path

import pytest
import torch

from tests.data.files import encoded
from tests.data.media_files import DIGITS, real_digits, tone, write_clip, write_sound
from vitrail.data import Clip, InputSpec, Sound, Spectrogram, open_dataset
from vitrail.errors import ImageError, InvalidOption, MediaError, UnsupportedInput

VIDEO = InputSpec((2, 16, 16), modality="video")
AUDIO = InputSpec((20, 32), (0.0,), (1.0,), "audio", scale=1)


def class_folders(root: Path) -> Path:
    for number in range(6):
        write_sound(root / ("low" if number % 2 else "high") / f"{number}.wav", tone(300 if number % 2 else 3000, 0.2))
    return root


def test_class_folders_of_sounds(tmp_path: Path) -> None:
    dataset = open_dataset(class_folders(tmp_path), labeled=True)
    assert (dataset.modality, len(dataset), dataset.classes) == ("audio", 6, {"label": ("high", "low")})
    assert dataset.labels[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert isinstance(dataset[0].image, Sound)
    decoded = dataset.decoded(AUDIO, measure=True)
    assert decoded.tensor_spec == ((1, 20, 32), torch.float32)
    assert torch.equal(decoded.tensor(0, 1), dataset[0].image.values(AUDIO))
    spec = decoded.statistics()
    values = torch.stack([decoded.tensor(index, 1) for index in range(6)]).double()
    assert spec is not None
    assert spec.mean[0] == pytest.approx(values.mean().item())
    assert spec.std[0] == pytest.approx(values.std(correction=0).item())
    (batch,) = decoded.batches(spec, 6)
    assert batch.images.mean().item() == pytest.approx(0, abs=1e-4)


def test_a_clip_a_folder_of_clips_and_gifs(tmp_path: Path) -> None:
    for name in ("a.mp4", "b.avi", "c.gif"):
        write_clip(tmp_path / name)
    assert open_dataset(tmp_path / "a.mp4").modality == "video"
    assert [open_dataset(tmp_path / "c.gif", modality=one).modality for one in (None, "video")] == ["image", "video"]
    dataset = open_dataset(tmp_path, modality="video")
    assert dataset.names == ("a.mp4", "b.avi", "c.gif")
    assert isinstance(dataset[2].image, Clip)
    (batch,) = dataset.batches(VIDEO, 8)
    assert batch.images.shape == (3, 3, 2, 16, 16)
    assert torch.equal(batch.images[0], dataset[0].image.tensor(VIDEO))


def test_kinds_are_not_mixed(tmp_path: Path) -> None:
    clip, sound = write_clip(tmp_path / "a.mp4"), write_sound(tmp_path / "b.wav", tone(300))
    with pytest.raises(InvalidOption, match="one kind"):
        open_dataset([clip, sound])
    assert open_dataset([clip, tmp_path / "c.mp4"][:1]).modality == "video"
    with pytest.raises(InvalidOption, match="modality"):
        open_dataset(tmp_path, modality="smell")
    with pytest.raises(ImageError, match="no images found"):
        open_dataset(tmp_path, modality="image")
    with pytest.raises(UnsupportedInput, match="the data is video, and the model takes audio"):
        open_dataset(clip).decoded(AUDIO)


def test_broken_files_are_skipped_and_named(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4")
    (tmp_path / "b.mp4").write_bytes(b"no clip")
    dataset = open_dataset(tmp_path)
    (batch,) = dataset.batches(VIDEO, 8)
    assert batch.names == ("a.mp4",)
    ((name, why),) = dataset.skipped
    assert name == "b.mp4"
    assert "not a video clip" in why


def test_missing_library_is_one_error_for_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_clip(tmp_path / "a.mp4")
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MediaError, match=r"vitrail\[video\]"):
        open_dataset(tmp_path)


def test_parquet_with_sounds(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="parquet files need it")
    from pyarrow import parquet

    sound = write_sound(tmp_path / "a.wav", tone(500)).read_bytes()
    rows = [{"audio": {"bytes": sound, "path": f"{n}.wav"}, "digit": n, "speaker": "ab"[n % 2]} for n in range(3)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    dataset = open_dataset(tmp_path / "a.parquet", labels=["digit", "speaker"])
    assert (dataset.modality, dataset.names) == ("audio", ("0.wav", "1.wav", "2.wav"))
    assert dataset.classes == {"digit": ("0", "1", "2"), "speaker": ("a", "b")}
    assert dataset[1].image.seconds == 0.5
    rows = [{**row, "image": {"bytes": encoded(1), "path": "a.png"}} for row in rows]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    assert open_dataset(tmp_path / "b.parquet", modality="audio").modality == "audio"
    with pytest.raises(ImageError, match="no column holds video clips"):
        open_dataset(tmp_path / "b.parquet", modality="video")


@real_digits
def test_spoken_digits() -> None:
    dataset = open_dataset(DIGITS, labels=["digit", "speaker"], labeled=True)
    assert (dataset.modality, len(dataset)) == ("audio", 300)
    assert [len(names) for names in dataset.classes.values()] == [10, 6]
    spec = InputSpec((40, 64), (0.0,), (1.0,), "audio", scale=1, sampling=Spectrogram(8000, 0.032, 0.0125))
    values = dataset.select([0, 150]).decoded(spec)
    assert values.tensor(0, 1).isfinite().all()
