"""A Ray cluster of two workers: the same results as one process, also when a worker is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.embedding.models import small_vit, write_photos
from vitrail.data import Sample, Source, read_image
from vitrail.embedding import output as output_module
from vitrail.embedding import run as run_module
from vitrail.embedding import survey_norms
from vitrail.errors import EmbeddingError
from vitrail.training import evaluate

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class SmallJob(output_module.Job):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args, rows=6)


class DeadlySource(Source):
    """Photos, of which the one in the middle kills the process that reads it, the first time."""

    def __init__(self, folder: Path, flag: Path) -> None:
        self.paths = sorted(folder.iterdir())
        self.names = [path.name for path in self.paths]
        self._flag, self._owner = flag, os.getpid()

    def read(self, row: int) -> Sample:
        if row == 9 and os.getpid() != self._owner and not self._flag.exists():
            self._flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Sample(read_image(self.paths[row]), self.names[row])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, object_store_memory=200_000_000, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", broken=(3, 8))


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "Job", SmallJob)


def test_the_same_file_as_one_process(cluster: Any, photos: Path, tmp_path: Path) -> None:
    model = small_vit()
    vitrail.merge(model, r=2)
    options = {"batch": 4, "tokens": "class,mean@0"}
    found = vitrail.embed(model, str(photos), tmp_path / "a.parquet", engine="ray", actors=2, **options)
    vitrail.embed(model, str(photos), tmp_path / "b.parquet", **options)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert (tmp_path / "a.skipped.csv").read_bytes() == (tmp_path / "b.skipped.csv").read_bytes()
    assert [entry[0] for entry in found.skipped] == [3, 8]
    found = vitrail.predict(model, str(photos), tmp_path / "a.csv", engine="ray", actors=2, batch=4)
    vitrail.predict(model, str(photos), tmp_path / "b.csv", batch=4)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_a_killed_worker_loses_and_doubles_nothing(cluster: Any, photos: Path, tmp_path: Path) -> None:
    flag = tmp_path / "killed"
    source = vitrail.data.open_dataset(DeadlySource(photos, flag), labels=None)
    states: list[Any] = []
    vitrail.embed(
        small_vit(), source, tmp_path / "a.parquet", engine="ray", actors=2, batch=4, workers=0, progress=states.append
    )
    assert flag.exists()
    assert states[-1].done == 20
    vitrail.embed(small_vit(), source, tmp_path / "b.parquet", batch=4)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_a_run_of_one_process_is_finished_by_the_cluster(cluster: Any, photos: Path, tmp_path: Path) -> None:
    def stop(state: Any) -> None:
        if state.done > 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vitrail.embed(small_vit(), str(photos), tmp_path / "a/", batch=4, progress=stop)
    states: list[Any] = []
    vitrail.embed(small_vit(), str(photos), tmp_path / "a/", batch=4, engine="ray", actors=1, progress=states.append)
    vitrail.embed(small_vit(), str(photos), tmp_path / "b/", batch=4)
    assert states[-1].images < 18
    for path in (tmp_path / "b").iterdir():
        assert (tmp_path / "a" / path.name).read_bytes() == path.read_bytes()


def test_errors_of_workers_are_ours(cluster: Any, photos: Path, tmp_path: Path) -> None:
    model = small_vit()
    with torch.no_grad():
        model.norm.weight.fill_(1e6)
    with pytest.raises(vitrail.errors.UnsupportedInput, match="float32"):
        vitrail.embed(model, str(photos), tmp_path / "a.parquet", engine="ray", actors=1, batch=4)
    with pytest.raises(EmbeddingError, match="pass out="):
        vitrail.embed(model, str(photos), engine="ray")


def test_norms_add_up_exactly(cluster: Any, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.embedding import norm_survey

    monkeypatch.setattr(norm_survey, "ROWS", 1000)
    whole = survey_norms(small_vit(), str(photos), batch=4)
    monkeypatch.setattr(norm_survey, "ROWS", 6)
    parts = survey_norms(small_vit(), str(photos), batch=4, engine="ray", actors=2)
    assert parts.to_dict() == whole.to_dict()


def test_evaluation_adds_up(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.training.evaluation import sharded

    monkeypatch.setattr(sharded, "ROWS", 8)
    for name in ("a", "b", "c"):
        write_photos(tmp_path / "data" / name, 8, broken=(2,) if name == "b" else ())
    model = small_vit(num_classes=3)
    options: dict[str, Any] = {"batch": 4, "look": 0, "seconds": 0, "merge": "r=2", "max_unreadable": 0.1}
    one = evaluate(model, str(tmp_path / "data"), **options)
    many = evaluate(model, str(tmp_path / "data"), engine="ray", actors=2, **options)
    assert many.count == one.count == 23
    assert many.accuracy == one.accuracy
    assert many.merge == one.merge
    assert all(torch.equal(many.confusion[name], one.confusion[name]) for name in one.confusion)
    assert many.loss == pytest.approx(one.loss)
    np.testing.assert_array_equal(many.right["fused"], one.right["fused"])


def test_norms_from_the_command_line(cluster: Any, photos: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from vitrail.cli import app

    args = ["inspect", "vitrail:tiny", str(photos), "--limit", "0", "--engine", "ray", "--actors", "1"]
    result = CliRunner().invoke(app, [*args, "-o", str(tmp_path / "norms.json")])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "norms.json").read_text())
    expected = survey_norms(vitrail.load_model("vitrail:tiny"), str(photos), batch=16)
    assert (found["num_images"], found["verdict"]) == (18, expected.verdict)
    means = [one["mean"] for one in found["per_layer"]]  # an actor may have another number of threads
    assert means == pytest.approx([one.mean for one in expected.per_layer], rel=1e-6)
    result = CliRunner().invoke(app, [*args, "-o", str(tmp_path / "a.html")])
    assert result.exit_code == 2
    assert "norms.json" in result.output
