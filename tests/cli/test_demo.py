"""``vitrail demo``: sheets and files show the model's predictions, merged and unmerged."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitrail
from tests.training.toys import FIELDS, make_photos
from vitrail.cli import app
from vitrail.cli._shared.summary import Summary
from vitrail.cli.demo import DARKEST, STRENGTHS, distinct, over, run_demo
from vitrail.data import read_image, to_tensor
from vitrail.data.sample_files import drawings
from vitrail.errors import InvalidOption, ModelLoadError
from vitrail.training import train

SHAPES = {"wide": (60, 40), "tall": (30, 70)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that learned three colors, with a class token and two registers."""
    folder = tmp_path_factory.mktemp("run")
    photos = make_photos(folder / "photos")
    options = {"width": 32, "depth": 4, "heads": 2}
    return train(data=str(photos), out=str(folder / "run"), **{**FIELDS, "options": options}).folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for name, (width, height) in SHAPES.items():
        pixels = draw.normal((150, 60, 60), 60, (height, width, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return folder


@pytest.fixture(scope="module")
def shown(run: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Summary]]:
    out = tmp_path_factory.mktemp("out")
    return out, run_demo(out, str(run), [photos])


def own_answer(model: torch.nn.Module, path: Path) -> list[tuple[str, float]]:
    """The classes by probability, by plain calls."""
    batch = to_tensor([read_image(path)], vitrail.adapters.input_spec(model))
    with torch.no_grad():
        likely = model(batch)[0].double().softmax(0)
    names = vitrail.class_names(model)["label"]
    return sorted(zip(names, likely.tolist(), strict=True), key=lambda pair: -pair[1])


def test_predictions_are_those_of_the_model_and_of_the_merged_model(
    run: Path, photos: Path, shown: tuple[Path, list[Summary]]
) -> None:
    out, _ = shown
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["classes"] == {"label": ["blue", "green", "red"]}
    model = vitrail.load_model(str(run))
    for (strength, keep), found in zip(STRENGTHS.items(), summary["runs"], strict=True):
        same = []
        for name, result in zip(sorted(SHAPES), found["pictures"], strict=True):
            assert result["picture"] == f"{name}, {strength}"
            before = own_answer(model, photos / f"{name}.png")
            with vitrail.merge(model, keep=keep) as merging:
                after = own_answer(model, photos / f"{name}.png")
                assert found["cost"]["tokens_after"] == merging.tokens_per_layer()
                assert found["cost"]["flops_after"] == merging.flops()
                assert found["cost"]["flops_before"] == merging.flops(merged=False)
            for expected, guesses in ((before, result["guesses_before"]), (after, result["guesses_after"])):
                assert [guess["name"] for guess in guesses["label"]] == [name for name, _ in expected]
                shares = [guess["probability"] for guess in guesses["label"]]
                assert shares == pytest.approx([share for _, share in expected], abs=1e-6)
            same.append(before[0][0] == after[0][0])
            assert result["same_top1"] == same[-1]
        assert summary["agreement"][strength] == sum(same) / len(same)


def test_all_outputs_are_present(
    run: Path, shown: tuple[Path, list[Summary]], photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, runs = shown
    assert sorted(path.name for path in out.iterdir()) == [
        *("report.html", "report.json", "summary.json", "summary.md", "tall-sheet.png", "wide-sheet.png")
    ]
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert [one["name"] for one in report["images"]] == ["tall.png", "wide.png"]
    first = runs[0].pictures[0].guesses_before["label"][0]
    text = (out / "summary.md").read_text(encoding="utf-8")
    assert f"| tall | {first.name} {first.probability:.0%} |" in text


def test_a_larger_weight_is_lighter_on_any_background() -> None:
    """A quarter more weight on black must not look like less than what lies on white."""
    image = Image.fromarray(np.array([[255, 0]], dtype=np.uint8)).convert("RGB")
    for small in (0.0, 0.25, 0.5):
        light, dark = np.asarray(over(image, np.array([[small, 1.0]])).convert("L"))[0].astype(int)
        assert dark > light, small


def test_a_map_runs_from_violet_to_yellow_over_the_light_of_the_image() -> None:
    black_and_white = Image.fromarray(np.array([[0, 255], [0, 255]], dtype=np.uint8)).convert("RGB")
    made = np.asarray(over(black_and_white, np.array([[0.0, 0.0], [0.2, 0.2]])))
    dark, bright = np.array([68, 1, 84]), np.array([253, 231, 37])
    for row, color in ((0, dark), (1, bright)):
        assert made[row, 1].tolist() == color.tolist()
        assert made[row, 0].tolist() == np.rint(DARKEST * color).tolist()


def test_tokens_with_alike_maps_share_one() -> None:
    spot, other = np.array([[1.0, 0.1], [0.0, 0.0]]), np.array([[0.0, 0.0], [0.2, 1.0]])
    maps = {"class": spot, "register 1": spot + 0.01, "register 2": other, "register 3": 2 * other}
    assert distinct(maps) == {"class": "class, 1 alike", "register 2": "register 2, 1 alike"}
    assert distinct({"class": spot, "task": other}) == {"class": "class", "task": "task"}


def test_drawings_are_images_that_differ_and_stay_the_same() -> None:
    made = {name: read_image(path) for name, path in drawings().items()}
    sizes = {"golf-ball": (480, 480), "parachute": (420, 540), "church": (600, 420)}
    sizes |= dict.fromkeys(("gas-pump", "cassette-player", "garbage-truck"), (384, 384))
    assert {name: image.size for name, image in made.items()} == sizes
    assert np.asarray(made["church"])[300, 233].tolist() == [64, 62, 82]  # the door


def test_the_command_takes_a_model_images_and_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("vitrail.cli.demo.run_demo", lambda *args: calls.append(args) or [])
    assert CliRunner().invoke(app, ["demo"]).exit_code == 0
    words = ["demo", "--model", "runs/one", "--images", "a", "--images", "b.png", "-o", "elsewhere"]
    assert CliRunner().invoke(app, words).exit_code == 0
    former = CliRunner().invoke(app, ["demo", "--pictures", "a"])
    assert former.exit_code == 0
    assert "--pictures is deprecated" in former.stderr
    assert "--pictures" not in CliRunner().invoke(app, ["demo", "--help"]).stdout
    assert calls == [
        (Path("demo"), "vitrail:tiny", None),
        (Path("elsewhere"), "runs/one", [Path("a"), Path("b.png")]),
        (Path("demo"), "vitrail:tiny", [Path("a")]),
    ]


def test_what_cannot_be_read_is_skipped_with_exit_code_1(run: Path, photos: Path, tmp_path: Path) -> None:
    """One file is no image, another is cut off, which shows only when it is decoded."""
    (tmp_path / "text.png").write_text("no image")
    whole = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(whole, "JPEG", quality=95)
    (tmp_path / "cut.jpg").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    words = [*("--images", str(photos / "wide.png")), *("--images", str(tmp_path / "text.png"))]
    words += ["--images", str(tmp_path / "cut.jpg"), "--model", str(run), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["demo", *words])
    assert result.exit_code == 1, result.stderr
    assert "2 of 3 images could not be read" in " ".join(result.stderr.split())
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    names = sorted(Path(one["picture"]).name for one in summary["runs"][0]["skipped"])
    assert names == ["cut.jpg", "text.png"]
    assert len(list((tmp_path / "out").glob("*-sheet.png"))) == 1


def test_sheets_of_the_samples_are_named_after_them(run: Path, tmp_path: Path) -> None:
    run_demo(tmp_path, str(run), None)
    names = sorted(drawings())
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [f"{name}-sheet.png" for name in names]


def test_mistakes_are_explained(run: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["demo", "--model", str(run), "-o", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "could not be made" in result.stderr
    vitrail.create_model("vit_tiny_patch16", width=32, depth=1, heads=2).save_pretrained(tmp_path / "nameless")
    with pytest.raises(InvalidOption, match="with class names"):
        run_demo(tmp_path / "out", str(tmp_path / "nameless"), [photos])
    with pytest.raises(ModelLoadError, match="none holds no model; expected a run directory"):
        run_demo(tmp_path / "out", str(tmp_path / "none"), [photos])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "hf:a/b"])
def test_models_without_class_names_are_refused_before_any_download(
    name: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.cli.demo.load", lambda *args, **options: pytest.fail("loaded"))
    result = CliRunner().invoke(app, ["demo", "--model", name, "--images", str(photos), "-o", str(tmp_path / "o")])
    assert result.exit_code == 2
    output = " ".join(result.stderr.split())
    assert output.startswith(f"Error: {name}: the demo shows models that vitrail train saved")
    assert "--random-weights" not in output  # the demo has no such option


def test_the_embedded_model_is_the_default(
    run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vitrail.adapters.saved.EMBEDDED, "tiny", tmp_path / "none")
    with pytest.raises(ModelLoadError, match="vitrail:tiny is not part of this installation"):
        run_demo(tmp_path / "out", "vitrail:tiny", [photos])
    monkeypatch.setitem(vitrail.adapters.saved.EMBEDDED, "tiny", run / "last")
    runs = run_demo(tmp_path / "out", "vitrail:tiny", [photos / "wide.png"])
    assert [run.model for run in runs] == ["vitrail:tiny"] * len(STRENGTHS)


def test_strengths_that_a_shallow_model_cannot_have_are_left_out(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = [vitrail.TokenSpec("colour", vitrail.Role.TASK, classes=2)]
    sizes = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "num_classes": 0}
    vitrail.create_model("vit_tiny_patch16", tokens=tokens, **sizes).save_pretrained(tmp_path)
    (tmp_path / "labels.json").write_text('{"classes": {"colour": ["red", "blue"]}}', encoding="utf-8")
    runs = run_demo(tmp_path / "out", str(tmp_path), [photos / "wide.png"])
    assert [run.cost.tokens_after[-1] for run in runs] == [9, 5]
    assert {guess.name for guess in runs[0].pictures[0].guesses_after["colour"]} == {"red", "blue"}
    assert "Note: keep 10 % is left out: keep=0.1 would leave 2 of 16 patches" in capsys.readouterr().err
