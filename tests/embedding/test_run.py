"""Whole datasets: order and names kept, broken images listed, killed runs finished, other settings refused."""

from __future__ import annotations

import csv
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

import vitrail
from tests.embedding.models import small_vit, write_photos, write_table
from vitrail.data import read_image
from vitrail.data.decode import center_crop
from vitrail.embedding import output as output_module
from vitrail.embedding import run as run_module
from vitrail.embedding import storage as storage_module
from vitrail.errors import EmbeddingError, ImageError, InvalidOption, VitrailError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos")


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use shards of 6 samples."""
    monkeypatch.setattr(run_module, "Job", SmallJob)


class SmallJob(output_module.Job):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args, rows=6)


def embedded(photos: Path, out: Path | str | None = None, **options: Any) -> vitrail.Embeddings:
    return vitrail.embed(small_vit(), str(photos), out, **{"batch": 4, "dtype": "float32", **options})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def test_rows_are_those_of_single_images(photos: Path) -> None:
    model = small_vit()
    vitrail.merge(model, r=2)
    found = vitrail.embed(model, str(photos), tokens="class", dtype="float32", exact_decoding=True, batch=3)
    files = sorted(photos.iterdir())
    assert found.names == [path.name for path in files]
    assert found.indices.tolist() == list(range(len(files)))
    spec = vitrail.adapters.input_spec(model)
    for path, row in zip(files, found.to_numpy(), strict=True):
        image = np.array(center_crop(read_image(path), (16, 16)))
        x = spec.normalize(torch.from_numpy(image).permute(2, 0, 1)[None])
        expected = model.forward_output(x).features[0, 0].detach()
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-5)
    recording = vitrail.record(model, str(photos), "tokens", 0)  # stretches whole images
    whole = vitrail.embed(model, str(photos), tokens="patches@0", dtype="float32", exact_decoding=True, fit="stretch")
    np.testing.assert_allclose(whole.to_numpy(), recording.tokens[0][:, recording.layout.patches], rtol=1e-2, atol=0.05)


def test_every_output_holds_the_same(photos: Path, tmp_path: Path, small_shards: None) -> None:
    memory = embedded(photos)
    for name in ("a.parquet", "a.npy", "folder/", "deep/er"):
        found = embedded(photos, f"{tmp_path}/{name}")
        np.testing.assert_array_equal(found.to_numpy(), memory.to_numpy())
        assert found.names == memory.names
        assert found.settings == memory.settings
        again = vitrail.read_embeddings(tmp_path / name)
        np.testing.assert_array_equal(again["class"], memory["class"])
    assert len(list((tmp_path / "folder").glob("part-*.parquet"))) == 4
    assert not (tmp_path / "a.parquet.parts").exists()
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), memory.to_numpy())


def test_data_frame(photos: Path) -> None:
    pytest.importorskip("pandas")
    memory = embedded(photos)
    frame = memory.to_pandas()
    assert list(frame.columns) == ["index", "name", "class"]
    np.testing.assert_array_equal(np.stack(frame["class"]), memory.to_numpy())


def test_settings_are_in_the_metadata(photos: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    model = small_vit()
    vitrail.merge(model, r=2)
    vitrail.embed(model, str(photos), tmp_path / "a.parquet", tokens="class,patches@0", name="mine")
    table = pq.read_table(tmp_path / "a.parquet")  # without Vitrail
    assert table.column("class").type.list_size == 16
    found = vitrail.read_embeddings(tmp_path / "a.parquet")
    settings = found.settings
    assert settings["model"] == "mine"
    assert settings["weights"] == vitrail.surgery.saving.weights_hash(small_vit())
    assert settings["changes"]["merge"]["r"] == 2
    assert settings["versions"]["vitrail"] == vitrail.__version__
    assert settings["columns"]["patches_0"] == {"shape": [16, 16], "dtype": "float16"}
    assert found["patches_0"].shape == (20, 16, 16)
    assert found["patches_0"].dtype == np.float16


def test_broken_images_are_listed_beside(tmp_path: Path, small_shards: None) -> None:
    photos = write_photos(tmp_path / "photos", broken=(2, 7, 19))
    for out, beside in (("a.parquet", "a.skipped.csv"), ("folder/", "folder/skipped.csv"), ("a.npy", "a.skipped.csv")):
        found = embedded(photos, f"{tmp_path}/{out}")
        assert found.indices.tolist() == [number for number in range(20) if number not in (2, 7, 19)]
        assert [entry[:2] for entry in found.skipped] == [(2, "002.bmp"), (7, "007.jpg"), (19, "019.jpg")]
        with (tmp_path / beside).open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["name"] for row in rows] == ["002.bmp", "007.jpg", "019.jpg"]
        assert "empty" in rows[0]["reason"]
    memory = embedded(photos)
    assert memory.skipped == found.skipped
    np.testing.assert_array_equal(memory.to_numpy(), found.to_numpy())


def test_a_shard_or_dataset_without_a_readable_image(tmp_path: Path, small_shards: None) -> None:
    photos = write_photos(tmp_path / "photos", 14, broken=tuple(range(6, 12)))
    assert embedded(photos, tmp_path / "a.parquet").indices.tolist() == [*range(6), 12, 13]
    photos = write_photos(tmp_path / "none", 7, broken=tuple(range(7)))
    with pytest.raises(ImageError, match="none of the 7"):
        embedded(photos)
    with pytest.raises(ImageError, match="none of the 7"):
        embedded(photos, tmp_path / "b.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match="no images found"):
        embedded(tmp_path / "empty")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(write: Callable[..., Any], count: int, *, after: bool) -> Callable[..., Any]:
    """Return a function that kills the process at its ``count``-th call, before or after it works."""
    calls = 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not after:
            die()
        result = write(*args, **options)
        if calls == count:
            die()
        return result

    return wrapped


MOMENTS: dict[str, Callable[[], None]] = {
    "before the first shard": lambda: patch(storage_module.LocalStorage, "write", 1, after=True),
    "between a shard and its marker": lambda: patch(storage_module.LocalStorage, "write", 4, after=True),
    "before a shard": lambda: patch(storage_module.LocalStorage, "write", 6, after=False),
    "inside a write": lambda: patch(storage_module, "write_bytes", 5, after=False),
    "in the model": lambda: patch(run_module, "make_table", 4, after=True),
    "while the file is made": lambda: patch(output_module, "read_parquet", 3, after=True),
    "before shards are deleted": lambda: patch(storage_module.LocalStorage, "discard", 1, after=False),
    "while shards are deleted": lambda: patch(Path, "unlink", 14, after=False),
}


def patch(owner: Any, name: str, count: int, *, after: bool) -> None:
    setattr(owner, name, kill_at(getattr(owner, name), count, after=after))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_is_finished_with_the_same_contents(moment: str, tmp_path: Path, small_shards: None) -> None:
    photos = write_photos(tmp_path / "photos", broken=(3, 8))
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about threads
        child = os.fork()
    if child == 0:
        try:
            MOMENTS[moment]()
            embedded(photos, folder / "a.parquet", workers=0)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    computed: list[Any] = []
    found = embedded(photos, folder / "a.parquet", progress=computed.append)
    embedded(photos, whole / "a.parquet")
    left = {name: data for name, data in contents(folder).items() if not name.startswith(".")}
    assert left == contents(whole)
    assert found.indices.tolist() == [number for number in range(20) if number not in (3, 8)]
    if moment in ("before a shard", "while the file is made"):
        assert sum(one.images for one in computed[-1:]) < 18  # not all again


def test_a_finished_run_is_not_repeated(photos: Path, tmp_path: Path) -> None:
    first = embedded(photos, tmp_path / "a.parquet")
    before = (tmp_path / "a.parquet").stat().st_mtime_ns
    again = embedded(photos, tmp_path / "a.parquet", progress=lambda state: pytest.fail("computed again"))
    assert (tmp_path / "a.parquet").stat().st_mtime_ns == before
    np.testing.assert_array_equal(again.to_numpy(), first.to_numpy())


def test_a_damaged_shard_is_computed_again(photos: Path, tmp_path: Path, small_shards: None) -> None:
    expected = embedded(photos, tmp_path / "whole/")
    embedded(photos, tmp_path / "a/")
    (tmp_path / "a" / "complete.json").unlink()
    part = tmp_path / "a" / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:-7])
    (tmp_path / "a" / "part-00002.json").write_text("{")
    with pytest.raises(EmbeddingError, match="not finished"):
        vitrail.read_embeddings(tmp_path / "a")
    np.testing.assert_array_equal(embedded(photos, tmp_path / "a/").to_numpy(), expected.to_numpy())


@pytest.mark.parametrize("name", ["a.parquet", "a/", "a.npy"])
def test_results_of_other_settings_are_kept(name: str, photos: Path, tmp_path: Path) -> None:
    out = f"{tmp_path}/{name}"
    first = embedded(photos, out)
    model = small_vit()
    vitrail.merge(model, r=2)
    options = {"dtype": "float32", "batch": 4}
    with pytest.raises(EmbeddingError, match=r"changes\.merge.*--overwrite"):
        vitrail.embed(model, str(photos), out, **options)
    np.testing.assert_array_equal(vitrail.read_embeddings(out).to_numpy(), first.to_numpy())
    replaced = vitrail.embed(model, str(photos), out, overwrite=True, **options)
    assert not np.array_equal(replaced.to_numpy(), first.to_numpy())


def test_shards_of_other_settings_are_kept(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded(photos, tmp_path / "a.parquet", progress=stop)
    with pytest.raises(EmbeddingError, match=r"nothing was changed.*dtype"):
        embedded(photos, tmp_path / "a.parquet", dtype="float16")
    assert len(embedded(photos, tmp_path / "a.parquet")) == 20


def test_what_is_not_ours_is_kept(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.parquet").write_text("my notes")
    with pytest.raises(EmbeddingError, match="not a file of vitrail embed"):
        embedded(photos, tmp_path / "notes.parquet")
    with pytest.raises(EmbeddingError, match="not empty"):
        embedded(photos, photos)
    with pytest.raises(EmbeddingError, match="not empty"):
        embedded(photos, f"{photos}/", overwrite=True)
    assert len(list(photos.iterdir())) == 20
    with pytest.raises(EmbeddingError, match="ends in"):
        embedded(photos, tmp_path / "a.txt")
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddingError, match="could not be read or written"):
        embedded(photos, tmp_path / "file" / "a.parquet")
    with pytest.raises(EmbeddingError, match="one column"):
        embedded(photos, tmp_path / "a.npy", tokens="class,mean")
    with pytest.raises(EmbeddingError, match="predictions"):
        embedded(photos, tmp_path / "a.csv")


def test_two_runs_at_once(photos: Path, tmp_path: Path) -> None:
    def second(_: Any) -> None:
        with pytest.raises(EmbeddingError, match="in use"):
            embedded(photos, tmp_path / "a.parquet")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded(photos, tmp_path / "a.parquet", progress=second)


def test_files_of_different_settings_are_not_mixed(photos: Path, tmp_path: Path) -> None:
    one = embedded(photos, tmp_path / "a.parquet")
    other = write_photos(tmp_path / "others", 5)
    two = embedded(other, tmp_path / "b.parquet")
    both = vitrail.read_embeddings([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    np.testing.assert_array_equal(both.to_numpy(), np.concatenate([one.to_numpy(), two.to_numpy()]))
    embedded(other, tmp_path / "c.parquet", fit="stretch")
    with pytest.raises(EmbeddingError, match=r"cannot be mixed.*input\.fit"):
        vitrail.read_embeddings([tmp_path / "a.parquet", tmp_path / "c.parquet"])
    with pytest.raises(EmbeddingError, match="no such file"):
        vitrail.read_embeddings(tmp_path / "none.parquet")
    with pytest.raises(EmbeddingError, match="no column"):
        both["mean"]
    (tmp_path / "b.parquet").write_bytes((tmp_path / "b.parquet").read_bytes()[:-30])
    with pytest.raises(EmbeddingError, match="damaged"):
        vitrail.read_embeddings(tmp_path / "b.parquet")


def test_predictions_to_files(photos: Path, tmp_path: Path) -> None:
    classes = ["ant", "bee", "cow", "dog", 'elk, "big"']
    found = vitrail.predict(small_vit(), str(photos), tmp_path / "a.csv", top=2, classes=classes)
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    memory = vitrail.predict(small_vit(), str(photos), top=2, classes=classes)
    assert [row["class_1"] for row in rows] == memory.to_numpy("class_1").tolist()
    assert [row["name"] for row in rows] == memory.names == found.names
    np.testing.assert_allclose([float(row["probability_2"]) for row in rows], memory["probability_2"])
    table = vitrail.predict(small_vit(), str(photos), tmp_path / "a.parquet", top=2, classes=classes)
    assert table["class_2"].tolist() == memory["class_2"].tolist()
    assert table.settings["classes"] == {"label": classes}


def test_data_and_results_on_a_remote_store(tmp_path: Path, small_shards: None) -> None:
    photos = write_photos(tmp_path / "photos", broken=(4,))
    table = write_table(tmp_path / "images.parquet", photos)
    memory = fsspec.filesystem("memory")
    memory.pipe("/data/images.parquet", table.read_bytes())
    for path in photos.iterdir():
        memory.pipe(f"/loose/{path.name}", path.read_bytes())
    try:
        expected = embedded(table)
        found = embedded("memory://data/images.parquet", "memory://out/a.parquet")  # type: ignore[arg-type]
        np.testing.assert_array_equal(found.to_numpy(), expected.to_numpy())
        assert found.names == expected.names
        assert [entry[0] for entry in found.skipped] == [4]
        again = embedded("memory://data/images.parquet", "memory://out/folder/")  # type: ignore[arg-type]
        np.testing.assert_array_equal(again.to_numpy(), expected.to_numpy())
        loose = embedded("memory://loose", f"file://{tmp_path}/a.parquet")  # type: ignore[arg-type]
        np.testing.assert_array_equal(loose.to_numpy(), expected.to_numpy())
        assert memory.find("/out") == ["/out/a.parquet", "/out/a.skipped.csv"] + [
            f"/out/folder/{name}" for name in sorted(contents_of(memory))
        ]
        with pytest.raises(ImageError, match="no such file"):
            embedded("memory://nothing")  # type: ignore[arg-type]
        with pytest.raises(ImageError, match="cannot be opened"):
            embedded("nosuchstore://bucket/a.parquet")  # type: ignore[arg-type]
    finally:
        for name in ("/data", "/loose", "/out"):
            memory.rm(name, recursive=True)


def contents_of(memory: Any) -> list[str]:
    return [path.rpartition("/")[2] for path in memory.find("/out/folder")]


def test_progress_splits_decoding_and_model(photos: Path) -> None:
    states: list[vitrail.embedding.Progress] = []
    embedded(photos, workers=1, progress=states.append)
    assert [one.done for one in states] == [4, 8, 12, 16, 20]
    last = states[-1]
    assert last.images == last.total == 20
    assert 0 < last.model_seconds + last.waiting_seconds <= last.seconds * 1.01
    assert last.decoding_seconds > 0
    assert last.images_per_s <= min(last.model_per_s, last.decoding_per_s) * 1.5


def test_options_that_are_none(photos: Path) -> None:
    for options in ({"fit": "pad"}, {"batch": 0}, {"workers": -1}, {"engine": "spark"}, {"dtype": "int8"}):
        with pytest.raises(InvalidOption):
            embedded(photos, **options)
    with pytest.raises(EmbeddingError, match="pass out="):
        embedded(photos, engine="ray")
    with pytest.raises(VitrailError, match="patches"):
        embedded(photos, size=(17, 16))
    assert embedded(photos, size=(32, 16), tokens="patches").to_numpy().shape == (20, 32, 16)


@pytest.mark.slow
def test_worker_processes_read_the_same(photos: Path) -> None:
    from vitrail.data import open_dataset
    from vitrail.embedding.reading import Preparation, Reader

    dataset = open_dataset(str(photos))
    spec = vitrail.adapters.input_spec(small_vit())
    parts = [range(8), range(8, 20)]
    threads = list(Reader(dataset, Preparation(spec), 2).batches(parts))
    processes = list(Reader(dataset, Preparation(spec), 2, processes=True).batches(parts))
    for one, other in zip(threads, processes, strict=True):
        assert torch.equal(one.images, other.images)
        assert one.indices == other.indices
