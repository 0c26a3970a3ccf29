"""``vitrail merge`` on unusual images: errors before the model is loaded, and notes about the rest."""

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from vitrail.cli import app

MODEL = "timm:vit_tiny_patch16_224"
TINY = ("--size", "32", "--random-weights", "--device", "cpu")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["merge", MODEL, *(str(argument) for argument in arguments), "-r", "0", *TINY])


def moving(path: Path, frames: int = 3) -> Path:
    images = [Image.new("RGB", (16, 16), (80 * number, 0, 0)) for number in range(frames)]
    images[0].save(path, save_all=True, append_images=images[1:])
    return path


def cut_off(path: Path) -> Path:
    Image.effect_noise((64, 64), 90).convert("RGB").save(path)
    path.write_bytes(path.read_bytes()[:1500])
    return path


def test_unreadable_images_are_found_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.cli.merge.load", lambda *args, **kwargs: pytest.fail("loaded"))
    result = run(cut_off(tmp_path / "a.jpg"))  # its header is good
    assert result.exit_code == 2
    assert "damaged or cut off" in result.stderr
    (tmp_path / "b.png").write_text("not an image")
    result = run(tmp_path / "b.png")
    assert result.exit_code == 2
    assert "not an image" in result.stderr
    (tmp_path / "c.png").touch()
    result = run(tmp_path / "b.png", tmp_path / "c.png")
    assert result.exit_code == 2
    assert result.stderr.count("Skipped") == 2
    assert "none of the 2 images could be read" in result.stderr


def test_damage_that_shows_only_later_is_skipped_then(tmp_path: Path) -> None:
    cut_off(tmp_path / "a.jpg")
    (tmp_path / "b.png").touch()
    Image.new("RGB", (16, 16)).save(tmp_path / "c.png")
    result = run(tmp_path, "-o", tmp_path / "out")
    assert result.exit_code == 1, result.output
    assert result.stderr.count("Skipped") == 2
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert {Path(entry["picture"]).name for entry in summary["skipped"]} == {"a.jpg", "b.png"}
    assert [entry["picture"] for entry in summary["pictures"]] == ["c.png"]

    (tmp_path / "c.png").unlink()
    cut_off(tmp_path / "d.jpg")
    result = run(tmp_path / "a.jpg", tmp_path / "d.jpg", "-o", tmp_path / "none")
    assert result.exit_code == 2
    assert "none of the 2 images could be read" in result.stderr
    assert not (tmp_path / "none" / "summary.json").exists()


def test_animations_are_noted_and_their_results_have_distinct_names(tmp_path: Path) -> None:
    moving(tmp_path / "anim.gif")
    moving(tmp_path / "anim.webp", 2)
    Image.new("RGB", (16, 16)).save(tmp_path / "still.png")
    result = run(tmp_path, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "Note: Only the first frame is used of 2 animations, such as anim.gif.\n" in result.stderr
    assert {path.name for path in (tmp_path / "out").glob("*-glass.png")} == {
        "anim.gif-glass.png",
        "anim.webp-glass.png",
        "still-glass.png",
    }
