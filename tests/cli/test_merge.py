"""``vitrail merge``: files, output and errors."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

import vitrail
from tests.cli.words import one_line
from vitrail.cli import app
from vitrail.data import InputSpec, read_image, to_tensor
from vitrail.drawing import stained_glass
from vitrail.drawing.groups import enlarged
from vitrail.errors import UnsupportedInput

MODEL = "timm:vit_tiny_patch16_224"
TINY = ("--size", "64", "--random-weights", "--device", "cpu")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, (height, width) in {"a": (50, 80), "b": (64, 64)}.items():
        coarse = Image.fromarray(generator.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize((width, height)).save(folder / f"{name}.png")
    return folder


# ---------------------------------------------------------------- good use


def test_a_trained_model_names_its_classes(photos: Path, tmp_path: Path) -> None:
    tokens = [vitrail.TokenSpec("cls", vitrail.Role.CLASS), vitrail.TokenSpec("shape", vitrail.Role.TASK, classes=4)]
    sizes = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "num_classes": 2}
    torch.manual_seed(0)
    model = vitrail.create_model("vit_tiny_patch16", tokens=tokens, **sizes).eval()
    model.save_pretrained(tmp_path / "model")
    classes = {"label": ["cat", "dog"], "shape": ["disc", "ring", "star", "bar"]}
    (tmp_path / "model" / "labels.json").write_text(json.dumps({"classes": classes}), encoding="utf-8")
    result = run("merge", f"vitrail:{tmp_path / 'model'}", photos / "a.png", "-r", "4", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["pictures"][0]
    batch = to_tensor([read_image(photos / "a.png")], vitrail.adapters.input_spec(model))
    predicted = {}
    for when, r in (("before", 0), ("after", 4)):
        with vitrail.merge(model, r=r), torch.no_grad():
            output = model(batch)
        for name, logits in (("label", output.logits), ("shape", output.by_role["shape"])):
            likely, places = logits[0].double().softmax(0).sort(descending=True)
            guesses = found[f"guesses_{when}"][name]
            assert [one["name"] for one in guesses] == [classes[name][place] for place in places[:3]]
            assert [one["probability"] for one in guesses] == pytest.approx(likely[:3].tolist(), abs=1e-6)
            predicted[when, name] = guesses[0]["name"]
    before, after = (", ".join(predicted[when, name] for name in classes) for when in ("before", "after"))
    words = f"same: {before}" if before == after else f"{before} → {after}"
    assert words in (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")


def test_all_files_are_written_with_correct_values(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    result = run("merge", MODEL, photos, "-r", "1", "-o", out, *TINY)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == [
        *("a-glass.png", "a-side-by-side.png", "b-glass.png", "b-side-by-side.png"),
        *("summary.json", "summary.md"),
    ]
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["vitrail"] == vitrail.__version__
    assert summary["weights"] == "random"
    assert summary["input_size"] == [64, 64]
    assert summary["merging"]["r"] == 1
    assert summary["cost"]["tokens_before"] == [17] * 12
    assert summary["cost"]["tokens_after"] == list(range(16, 4, -1))
    assert [entry["picture"] for entry in summary["pictures"]] == ["a.png", "b.png"]
    assert summary["skipped"] == []

    # The same, by hand.
    torch.manual_seed(0)
    model = vitrail.load_model(MODEL, pretrained=False, img_size=(64, 64))
    for entry in summary["pictures"]:
        image = read_image(photos / entry["picture"])
        batch = to_tensor([image], InputSpec((64, 64)))
        with torch.inference_mode():
            before = model(batch)[0]
            with vitrail.merge(model, r=1) as merging, merging.track() as trace:
                after = model(batch)[0]
        assert summary["cost"]["flops_after"] == merging.flops()
        assert summary["cost"]["flops_before"] == merging.flops(merged=False)
        assert entry["cosine"] == pytest.approx(torch.cosine_similarity(before, after, dim=0).item(), abs=1e-5)
        assert entry["same_top1"] == bool(before.argmax() == after.argmax())
        assert entry["panes"] == 4
        assert entry["seconds_before"] > 0
        assert entry["seconds_after"] > 0
        glass = read_image(out / entry["files"]["glass"])
        large = enlarged(image)
        assert max(large.size) == 768
        assert glass == stained_glass(large, trace.groups[0].reshape(4, 4))
        sheet, margin = np.asarray(read_image(out / entry["files"]["side-by-side"])), round(0.04 * min(large.size))
        assert (sheet[margin : margin + large.height, margin : margin + large.width] == np.asarray(large)).all()

    text = (out / "summary.md").read_text(encoding="utf-8")
    assert "| a.png | 4 | 17 → 5 |" in text
    assert "16 15 14 13 12 11 10 9 8 7 6 5 tokens" in text
    assert "a.png" in result.stdout
    assert str(out.resolve()) in result.stdout
    assert "random weights" in result.stderr


def test_pretrained_transformers_directory(photos: Path, saved_vit: Path, tmp_path: Path) -> None:
    result = run("merge", f"hf:{saved_vit}", photos / "a.png", "--keep", "0.5", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["weights"] == "pretrained"
    assert summary["cost"]["tokens_before"] == [17, 17]
    assert summary["cost"]["tokens_after"][-1] == 9
    assert summary["pictures"][0]["panes"] == 8
    assert summary["pictures"][0]["same_top1"] in (True, False)
    assert "random" not in result.output


def test_features_have_no_top1(photos: Path, tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(tmp_path / "vit")
    result = run("merge", f"hf:{tmp_path / 'vit'}", photos / "a.png", "-r", "2", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    entry = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["pictures"][0]
    assert entry["same_top1"] is None
    assert -1 <= entry["cosine"] <= 1


def test_options_reach_the_merging(photos: Path, tmp_path: Path) -> None:
    flags = ("--schedule", "decreasing", "--order", "original", "--no-proportional")
    result = run("merge", MODEL, photos / "a.png", "-r", "1", "-o", tmp_path, *flags, *TINY)
    assert result.exit_code == 0, result.output
    merging = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["merging"]
    assert (merging["schedule"], merging["order"], merging["proportional"]) == ("decreasing", "original", False)


def test_settings_are_named_as_for_other_commands(photos: Path, tmp_path: Path) -> None:
    summaries = []
    for name, arguments in {
        "text": ("--merge", "r=1,order=original"),
        "one": ("-r", "1", "--order", "original"),
    }.items():
        result = run("merge", MODEL, photos / "a.png", *arguments, "-o", tmp_path / name, *TINY)
        assert result.exit_code == 0, result.output
        summaries.append(json.loads((tmp_path / name / "summary.json").read_text(encoding="utf-8")))
    assert summaries[0]["merging"] == summaries[1]["merging"]
    assert summaries[0]["cost"]["tokens_after"] == summaries[1]["cost"]["tokens_after"]


def test_r_per_layer_and_other_sizes(photos: Path, tmp_path: Path) -> None:
    r = ",".join(["2"] + ["0"] * 11)
    arguments = ("-r", r, "--size", "32x64", "--random-weights", "--schedule", "0")
    result = run("merge", MODEL, photos / "a.png", "-o", tmp_path, *arguments)
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["input_size"] == [32, 64]
    assert summary["cost"]["tokens_after"] == [7] * 12


def test_too_many_merges_are_one_note(photos: Path, tmp_path: Path) -> None:
    result = run("merge", MODEL, photos, "-r", "4", "-o", tmp_path, *TINY)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("merges were requested") == 1


def test_images_of_one_name_and_images_in_the_output_directory_stay_distinct(photos: Path) -> None:
    (photos / "more").mkdir()
    Image.new("RGB", (8, 8), "red").save(photos / "more" / "a.png")
    Image.new("RGB", (9, 9), "blue").save(photos / "b-glass.png")
    result = run("merge", MODEL, photos, "-r", "1", "-o", photos, *TINY)
    assert result.exit_code == 0, result.output
    names = {path.name for path in photos.iterdir()}
    assert {"a-glass.png", "more-a-glass.png", "b-2-glass.png", "b-glass-glass.png"} <= names
    images = json.loads((photos / "summary.json").read_text(encoding="utf-8"))["pictures"]
    assert {"a.png", "more/a.png", "b.png"} <= {entry["picture"] for entry in images}
    assert read_image(photos / "b-glass.png").size == (9, 9)


# ---------------------------------------------------------------- mistakes


def test_bad_images_among_good_ones_are_reported_and_skipped(photos: Path, tmp_path: Path) -> None:
    (photos / "aa.png").write_bytes((photos / "a.png").read_bytes()[:60])
    out = tmp_path / "out"
    result = run("merge", MODEL, photos, "-r", "1", "-o", out, *TINY)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    message = one_line(result.stderr)
    assert f"Skipped {photos / 'aa.png'}: " in message
    assert "1 of 3 images could not be read" in message
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert [entry["picture"] for entry in summary["pictures"]] == ["a.png", "b.png"]
    assert [entry["picture"] for entry in summary["skipped"]] == [str(photos / "aa.png")]
    assert "- Skipped: " in (out / "summary.md").read_text(encoding="utf-8")
    assert (out / "b-glass.png").exists()


def test_only_bad_images_are_an_error(photos: Path, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (photos / name).write_bytes(b"")
    result = run("merge", MODEL, photos, "-r", "1", "-o", tmp_path / "out", *TINY)
    assert result.exit_code == 2
    assert "none of the 2 images could be read" in one_line(result.stderr)
    result = run("merge", MODEL, photos / "a.png", "-r", "1", "-o", tmp_path / "out", *TINY)
    assert result.exit_code == 2
    assert f"Error: {photos / 'a.png'}: the file is empty" in one_line(result.stderr)
    assert not (tmp_path / "out" / "summary.json").exists()


MISTAKES = {
    "unknown library": (("nolib:vit", "PHOTOS", "-r", "1"), "timm:NAME"),
    "unknown model": (("timm:no_such_model", "PHOTOS", "-r", "1"), "no_such_model"),
    "not a transformer": (("timm:resnet18", "PHOTOS", "-r", "1", "--random-weights"), "ResNet"),
    "negative r": ((MODEL, "PHOTOS", "-r", "-1", *TINY), "'-1' is not a number of tokens"),
    "r is a word": ((MODEL, "PHOTOS", "-r", "many", *TINY), "'many' is not a number of tokens"),
    "r of the wrong length": ((MODEL, "PHOTOS", "-r", "1,1", *TINY), "12"),
    "r and keep": ((MODEL, "PHOTOS", "-r", "1", "--keep", "0.5", *TINY), "one of -r, --keep, --gflops and --merge"),
    "nothing to merge by": ((MODEL, "PHOTOS", *TINY), "one of -r, --keep, --gflops and --merge"),
    "two settings": ((MODEL, "PHOTOS", "--merge", "r=1", "-r", "1", *TINY), "--merge replaces -r"),
    "a setting and an option": (
        (MODEL, "PHOTOS", "--merge", "r=1", "--method", "random", *TINY),
        "--merge replaces -r",
    ),
    "keep out of range": ((MODEL, "PHOTOS", "--keep", "1.5", *TINY), "1.5"),
    "budget out of reach": ((MODEL, "PHOTOS", "--gflops", "0.0001", *TINY), "gflops"),
    "unknown schedule": ((MODEL, "PHOTOS", "-r", "1", "--schedule", "odd", *TINY), "odd"),
    "unknown order": ((MODEL, "PHOTOS", "-r", "1", "--order", "odd", *TINY), "odd"),
    "unknown device": ((MODEL, "PHOTOS", "-r", "1", "--device", "abacus"), "abacus"),
    "size is a word": ((MODEL, "PHOTOS", "-r", "1", "--size", "big"), "'big' is not a size"),
    "size is too large": ((MODEL, "PHOTOS", "-r", "1", "--size", "9999"), "'9999' is not a size"),
    "size is not whole patches": (
        (MODEL, "PHOTOS", "-r", "1", "--size", "100", "--random-weights"),
        "size 100x100 is not a whole number of patches",
    ),
    "size is below a patch": ((MODEL, "PHOTOS", "-r", "1", "--size", "8", "--random-weights"), "8x8"),
    "no images there": ((MODEL, "EMPTY", "-r", "1", *TINY), "no images found"),
    "missing image": ((MODEL, "PHOTOS/c.png", "-r", "1", *TINY), "no such file"),
    "output is a file": ((MODEL, "PHOTOS", "-r", "1", "-o", "PHOTOS/a.png", *TINY), "could not be made"),
    "no such option": ((MODEL, "PHOTOS", "-r", "1", "--frobnicate"), "--frobnicate"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_explained(photos: Path, tmp_path: Path, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.adapters.hub.unreachable", lambda: None)  # tests do not ask the network
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    arguments, expected = MISTAKES[mistake]
    places = {"PHOTOS": str(photos), "EMPTY": str(tmp_path / "empty")}
    result = run("merge", *(re.sub("PHOTOS|EMPTY", lambda found: places[found[0]], text) for text in arguments))
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert expected in one_line(result.stderr)
    assert result.stdout == ""
    assert not (tmp_path / "glass").exists()


def test_cuda_is_refused_where_there_is_none(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("merge", MODEL, photos, "-r", "1", "-o", tmp_path, "--random-weights", "--device", "cuda")
    assert result.exit_code == 2
    assert "no CUDA device" in result.stderr


def test_a_size_that_the_model_rejects_is_explained(photos: Path, saved_vit: Path, tmp_path: Path) -> None:
    result = run("merge", f"hf:{saved_vit}", photos, "-r", "1", "--size", "64", "-o", tmp_path)
    assert result.exit_code == 2
    assert "does not take images of 64 × 64" in result.stderr


def test_an_output_independent_of_the_image_is_explained() -> None:
    from vitrail.cli._shared.prediction import _values

    with pytest.raises(UnsupportedInput, match=r"dict.*logits"):
        _values(torch.nn.Identity(), {})


def test_a_bug_is_not_hidden(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("vitrail.cli.merge.predict", broken)
    assert isinstance(run("merge", MODEL, photos, "-r", "1", "-o", tmp_path, *TINY).exception, ZeroDivisionError)


@pytest.mark.parametrize("method", ["threshold", "ats", "mutual", "local_global", "identical"])
def test_methods_that_decide_per_image_are_counted_per_image(photos: Path, tmp_path: Path, method: str) -> None:
    out = tmp_path / "glass"
    result = run("merge", "vitrail:tiny", photos, "--method", method, "-o", out)
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())
    model = vitrail.load_model("vitrail:tiny")
    tokens, flops = [], []
    with vitrail.merge(model, method=method) as merging, merging.track() as trace:
        for name in sorted(path for path in photos.iterdir()):
            merging.draw(name)
            tokens.append(trace.tokens_per_layer[0].tolist())
            flops.append(int(trace.flops[0]))
    assert summary["cost"]["tokens_after"] == [round(sum(layer) / len(tokens)) for layer in zip(*tokens, strict=True)]
    assert summary["cost"]["flops_after"] == round(sum(flops) / len(flops))
    ends = {f"→ {each[-1]}" for each in tokens}
    assert all(end in (out / "summary.md").read_text() for end in ends)


@pytest.mark.parametrize(("model", "library", "names"), [
    ("vitrail:tiny", "PIL", ["astronaut.jpg", "chelsea.jpg", "coffee.jpg"]),
    ("vitrail:audio", "soundfile", ["nine.wav", "seven.wav", "three.wav"]),
    ("vitrail:video", "av", ["blue-disc-left.mp4", "green-square-left.mp4", "purple-square-up.mp4"]),
])  # fmt: skip
def test_samples_of_the_medium_are_merged_without_data(
    tmp_path: Path, model: str, library: str, names: list[str]
) -> None:
    pytest.importorskip(library)
    result = run("merge", model, "-r", "8", "-o", tmp_path / "glass")
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "glass" / "summary.json").read_text())
    assert [one["picture"] for one in summary["pictures"]] == names
    layers = len(summary["cost"]["tokens_before"])
    assert summary["cost"]["tokens_after"][-1] == summary["cost"]["tokens_before"][-1] - 8 * layers
    assert all(file.endswith((".png", ".mp4")) for one in summary["pictures"] for file in one["files"].values())
