"""``vitrail embed`` and ``vitrail predict`` from the command line."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import vitrail
from tests.embedding.models import write_photos
from vitrail.cli import app


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", 7)


def run(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, args)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def test_features_and_how_fast(saved_vit: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.parquet"
    code, text = run("embed", f"hf:{saved_vit}", photos, "-o", out, "--merge", "r=2", "--tokens", "class,mean", "-b", 3)
    assert code == 0, text
    assert "7 images in" in text
    assert "the run is bound by" in text
    assert f"Written: {out}, 7 rows" in text
    found = vitrail.read_embeddings(out)
    assert found.settings["changes"]["merge"]["r"] == 2
    assert found.settings["model"] == f"hf:{saved_vit}"
    model = vitrail.load_model(f"hf:{saved_vit}")
    vitrail.merge(model, r=2)
    expected = vitrail.embed(model, str(photos), tokens="class,mean", batch=3)
    assert (found["mean"] == expected["mean"]).all()
    code, text = run("embed", f"hf:{saved_vit}", photos, "-o", out, "--merge", "r=2", "--tokens", "class,mean", "-b", 3)
    assert code == 0, text
    assert "images in" not in text  # nothing was left to do


def test_saved_settings_and_tune_results(saved_vit: Path, photos: Path, tmp_path: Path) -> None:
    model = vitrail.load_model(f"hf:{saved_vit}")
    vitrail.merge(model, keep=0.5).save(tmp_path / "settings")
    code, text = run("embed", f"hf:{saved_vit}", photos, "-o", tmp_path / "a/", "--merge", tmp_path / "settings")
    assert code == 0, text
    assert vitrail.read_embeddings(tmp_path / "a").settings["changes"]["merge"]["keep"] == 0.5
    code, text = run("embed", "vitrail:tiny", photos, "-o", tmp_path / "b/", "--merge", tmp_path / "settings")
    assert code == 2
    assert "do not fit" in text
    assert not (tmp_path / "b").exists()


def test_labels_and_broken_images(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 7, broken=(1, 4))
    code, text = run("predict", "vitrail:tiny", photos, "-o", tmp_path / "a.csv", "--top", 2)
    assert code == 1
    assert "2 images could not be read; a.skipped.csv" in text
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["000.png", "002.bmp", "003.png", "005.bmp", "006.png"]
    classes = next(iter(vitrail.class_names(vitrail.load_model("vitrail:tiny")).values()))
    assert all(row["class_1"] in classes for row in rows)
    assert all(float(row["probability_1"]) >= float(row["probability_2"]) for row in rows)


NONE = "{tmp}/none"
CASES: dict[str, tuple[list[str], str]] = {
    "no such data": (["embed", "{model}", NONE, "-o", "{tmp}/a.parquet"], "no such file"),
    "an empty folder": (["embed", "{model}", "{tmp}/empty", "-o", "{tmp}/a.parquet"], "no images found"),
    "a directory of something else": (["embed", "{model}", "{photos}", "-o", "{photos}"], "not empty"),
    "an output below a file": (["embed", "{model}", "{photos}", "-o", "{photos}/000.png/a.parquet"], "written"),
    "an ending": (["embed", "{model}", "{photos}", "-o", "{tmp}/a.txt"], "ends in"),
    "a class token": (
        ["embed", "{siglip}", "{photos}", "-o", "{tmp}/a.parquet", "--tokens", "class"],
        "no class token",
    ),
    "a block": (["embed", "{model}", "{photos}", "-o", "{tmp}/a.parquet", "--tokens", "mean@9"], "blocks 0 to 1"),
    "merge": (["embed", "{model}", "{photos}", "-o", "{tmp}/a.parquet", "--merge", "rr=8"], "unknown key 'rr'"),
    "merge of a file": (
        ["embed", "{model}", "{photos}", "-o", "{tmp}/a.parquet", "--merge", "no.json"],
        "no such file",
    ),
    "a convnet": (
        ["embed", "timm:resnet18", "{photos}", "-o", "{tmp}/a.parquet", "--random-weights"],
        "not a supported",
    ),
    "no classes": (["predict", "{siglip}", "{photos}", "-o", "{tmp}/a.csv"], "no classes"),
    "features as text": (["embed", "{model}", "{photos}", "-o", "{tmp}/a.csv"], "predictions"),
}


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a small tower without a class token."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    folder = tmp_path_factory.mktemp("siglip")
    SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=16, patch_size=4)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_done(name: str, saved_vit: Path, siglip: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    args, words = CASES[name]
    places = {"model": f"hf:{saved_vit}", "siglip": f"hf:{siglip}", "photos": photos, "tmp": tmp_path}
    code, text = run(*(arg.format(**places) for arg in args))
    assert code == 2, text
    assert words in text
    assert "Traceback" not in text
    assert len(list(photos.iterdir())) == 7
    assert not list(tmp_path.glob("a.*"))


def test_an_interrupt_keeps_what_is_done(
    saved_vit: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.cli._shared import whole_datasets

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(whole_datasets.Shown, "update", stop)
    args = ("embed", f"hf:{saved_vit}", photos, "-o", tmp_path / "a.parquet")
    code, text = run(*args)
    assert code == 130
    assert "run the same command again" in text
    monkeypatch.undo()
    assert run(*args)[0] == 0
    assert len(vitrail.read_embeddings(tmp_path / "a.parquet")) == 7
