"""Media: which commands accept models of images, audio and video, and what they make of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

import vitrail
from tests.cli.words import one_line
from tests.data.media_files import tone, write_clip, write_sound
from vitrail.cli import app
from vitrail.cli._shared.media import MEDIA, check_accepted, find_readable, medium_of
from vitrail.data import Arrays, Clip, open_dataset
from vitrail.errors import ImageError, UnsupportedInput
from vitrail.models import create_model

MODELS: dict[str, dict[str, Any]] = {
    "audio": {"in_chans": 1, "image_size": (16, 24), "patch_size": 8},
    "video": {"image_size": (4, 16, 16), "patch_size": (2, 8, 8)},
}
SHAPES = {"audio": (1, 16, 24), "video": (3, 4, 16, 16)}


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A modality, and the directory of a model of it with random weights."""
    sizes = {"width": 16, "depth": 2, "heads": 1, "num_classes": 3}
    create_model("vit_tiny_patch16", **sizes, **MODELS[request.param]).save_pretrained(tmp_path / "model")
    return request.param, tmp_path / "model"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_specification_names_the_modality(saved: tuple[str, Path]) -> None:
    modality, folder = saved
    spec = vitrail.adapters.input_spec(vitrail.load_model(str(folder)))
    assert (spec.modality, spec.shape) == (modality, SHAPES[modality])


def test_bench_times_inputs_of_the_right_shape(saved: tuple[str, Path]) -> None:
    modality, folder = saved
    result = run(
        "bench", f"vitrail:{folder}", "--r", 1, "-b", 2, "--device", "cpu", "--seconds", "0.01", "--pretrained"
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout.splitlines()[-1])
    assert tuple(data["size"]) == SHAPES[modality][1:]
    with vitrail.merge(vitrail.load_model(str(folder)), r=1) as merging:
        assert data["tokens_per_layer"] == merging.tokens_per_layer()
        assert data["flops_after"] == merging.flops()
    assert f"{' × '.join(map(str, SHAPES[modality][1:]))}, batch 2" in result.stdout


def test_export_writes_a_program_for_the_right_shape(saved: tuple[str, Path], tmp_path: Path) -> None:
    modality, folder = saved
    out = tmp_path / "model.pt2"
    result = run("export", f"vitrail:{folder}", "--r", 1, "--batch", 2, "-o", out)
    assert result.exit_code == 0, result.output
    assert f"images 2 × {' × '.join(map(str, SHAPES[modality]))}" in result.stdout
    inputs = torch.randn(2, *SHAPES[modality])
    model = vitrail.load_model(str(folder))
    vitrail.merge(model, r=1)
    with torch.no_grad():
        assert torch.allclose(torch.export.load(out).module()(inputs), model(inputs), atol=1e-4)


ENDINGS = {"video": ".mp4", "audio": ".wav"}


def files_of(modality: str, folder: Path) -> Path:
    """Write three files of a modality, one of them damaged."""
    for name in ("a", "b"):
        if modality == "video":
            write_clip(folder / f"{name}.mp4", count=9, size=(48, 64))
        else:
            write_sound(folder / f"{name}.wav", tone(440, 0.2))
    (folder / f"damaged{ENDINGS[modality]}").write_bytes(b"no such thing" * 9)
    return folder


FILES = {"video": ("filmstrip.png", "glass.mp4"), "audio": ("glass.png",)}


def test_merge_draws_clips_and_sounds(saved: tuple[str, Path], tmp_path: Path) -> None:
    modality, folder = saved
    data, out = files_of(modality, tmp_path / "data"), tmp_path / "out"
    result = run("merge", f"vitrail:{folder}", data, "-r", 1, "--device", "cpu", "-o", out)
    assert result.exit_code == 1, result.output  # one was skipped
    assert "damaged" in one_line(result.stderr)
    expected = {f"{name}-{ending}" for name in "ab" for ending in FILES[modality]}
    assert {path.name for path in out.iterdir()} == expected | {"summary.json", "summary.md"}
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    first, model = summary["pictures"][0], vitrail.load_model(str(folder))
    spec = vitrail.adapters.input_spec(model)
    batch = next(open_dataset(data / Path(first["picture"]).name).batches(spec, 1)).images
    with torch.inference_mode():
        before = model(batch)
        with vitrail.merge(model, r=1) as merging, merging.track() as trace:
            after = model(batch)
    assert first["panes"] == trace.groups.unique().numel() == merging.layout.num_patches - 2
    assert first["cosine"] == pytest.approx(torch.cosine_similarity(before, after).item(), abs=1e-5)
    if modality == "video":  # four frames: each beside its stained glass
        film = Clip(out / "a-glass.mp4")
        assert film.timeline().count == 4
        assert film.frames([0])[0].size == (2 * 480 + 12, 480)
    else:
        with Image.open(out / "a-glass.png") as drawn:
            assert drawn.size == (1136, 836)


def test_merge_skips_what_cannot_be_decoded(saved: tuple[str, Path], tmp_path: Path) -> None:
    modality, folder = saved
    good = [files_of(modality, tmp_path / "data") / f"{name}{ENDINGS[modality]}" for name in "ab"]
    bad = tmp_path / f"bad{ENDINGS[modality]}"  # its header is that of a good file
    if modality == "audio":
        soundfile = pytest.importorskip("soundfile")
        soundfile.write(bad, tone(440, 0.2) * float("nan"), 16000, subtype="FLOAT")
    else:
        content = bytearray(good[0].read_bytes())
        start = content.index(b"mdat") + 4
        end = content.index(b"moov") - 4 if content.index(b"moov") > start else len(content)
        content[start:end] = bytes(end - start)
        bad.write_bytes(content)
    out = tmp_path / "out"
    result = run("merge", f"vitrail:{folder}", good[0], bad, good[1], "-r", 1, "--device", "cpu", "-o", out)
    assert result.exit_code == 1, result.output
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert [Path(one["picture"]).name for one in summary["pictures"]] == [path.name for path in good]
    assert [Path(one["picture"]).name for one in summary["skipped"]] == [bad.name]


def test_gifs_are_clips_for_a_model_of_clips(saved: tuple[str, Path], tmp_path: Path) -> None:
    modality, folder = saved
    if modality == "audio":
        pytest.skip("GIFs are images or clips")
    write_clip(tmp_path / "data" / "moving.gif")
    result = run("merge", f"vitrail:{folder}", tmp_path / "data", "-r", 1, "--device", "cpu", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "first frame" not in one_line(result.stderr)
    assert (tmp_path / "out" / "moving-filmstrip.png").is_file()
    write_clip(tmp_path / "data" / "other.mp4")
    assert open_dataset(sorted((tmp_path / "data").iterdir())).modality == "video"  # a GIF among clips
    assert open_dataset(tmp_path / "data").modality == "video"


def test_inspect_and_tune_read_clips_and_sounds(saved: tuple[str, Path], tmp_path: Path) -> None:
    modality, folder = saved
    data = files_of(modality, tmp_path / "data")
    result = run(
        "inspect", f"vitrail:{folder}", data, "--no-probes", "--device", "cpu", "-o", tmp_path / "report.json"
    )  # fmt: skip
    assert result.exit_code == 1, result.output  # one was skipped
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["data"]["images"] == 2
    assert report["layout"]["grid"] == list(vitrail.load_model(str(folder)).config.grid)
    again = [data / f"{name}{ENDINGS[modality]}" for name in "ab"]
    for number in range(3, 7):
        again.append((tmp_path / f"{number}").with_suffix(again[0].suffix))
        again[-1].write_bytes(again[0].read_bytes())
    result = run(
        "tune", f"vitrail:{folder}", *again, "--within", "cosine 0.1", "--seconds", 2, "--device", "cpu",
        "-o", tmp_path / "tune.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", ["merge", "inspect"])
def test_models_refuse_files_of_another_medium(saved: tuple[str, Path], command: str, tmp_path: Path) -> None:
    modality, folder = saved
    options = ("-r", 1) if command == "merge" else ()
    samples = Path(vitrail.__file__).parent / "data" / "samples" / "chelsea.jpg"
    result = run(command, f"vitrail:{folder}", samples, *options, "--device", "cpu", "-o", tmp_path / "out.html")
    assert result.exit_code == 2
    text = one_line(result.stderr)
    assert f"takes {MEDIA[modality].noun}" in text
    assert "the data holds images, such as chelsea.jpg" in text
    assert not (tmp_path / "out.html").exists()


def test_the_demo_is_for_images(saved: tuple[str, Path], tmp_path: Path) -> None:
    modality, folder = saved
    with pytest.raises(UnsupportedInput, match=f"takes {MEDIA[modality].noun}.*vitrail demo is for models that take"):
        check_accepted("model", vitrail.adapters.input_spec(vitrail.load_model(str(folder))), "demo")


def test_medium_of_a_dataset() -> None:
    assert medium_of(open_dataset()) is MEDIA["image"]
    for shape in SHAPES.values():
        arrays = open_dataset(Arrays(torch.randn(2, *shape)))
        assert medium_of(arrays) is MEDIA["array"]
        assert find_readable(arrays).indices == [0, 1]
        batch = MEDIA["array"].batch(arrays.read(0).image, arrays.statistics())
        assert batch.shape == (1, *shape)


def test_nothing_readable(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).touch()
    with pytest.raises(ImageError, match="none of the 2 images could be read"):
        find_readable(open_dataset(tmp_path))
