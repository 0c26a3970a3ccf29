"""Training on files of clips and sounds: sizes, sampling, evaluation, resuming, and what contradicts the data."""

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.data.media_files import CLIPS, DIGITS, real_clips, real_digits, tone, write_clip, write_sound
from tests.training.toys import FIELDS, same, weights
from vitrail.adapters import input_spec, load_model
from vitrail.cli import app
from vitrail.data import Arrays, FrameSampling, Spectrogram, open_dataset
from vitrail.errors import ImageError, InvalidOption, VitrailError
from vitrail.training import checkpoint, evaluate, load_trained, train

SMALL: dict[str, Any] = {
    name: value for name, value in FIELDS.items() if name not in ("image_size", "patch_size", "tokens")
}
SOUND = {**SMALL, "patch_size": 8, "epochs": 4, "batch_size": 8, "lr": 4e-3, "augment": "none"}
CLIP = {**SMALL, "image_size": (4, 16, 16), "patch_size": (2, 8, 8), "epochs": 1, "batch_size": 4}

TUNING = {name: value for name, value in CLIP.items() if name not in ("image_size", "patch_size", "options")}


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of low and high tones."""
    root = tmp_path_factory.mktemp("sounds")
    for number in range(32):
        high = number % 2
        hertz = (2000 if high else 300) * (1 + number / 100)
        rate = (8000, 11025)[number // 2 % 2]  # two rates, and some in stereo
        samples = tone(hertz, 0.3, rate)
        samples = np.stack([samples, 0.5 * samples], 1) if number % 5 == 0 else samples
        write_sound(root / ("high" if high else "low") / f"{number}.wav", samples, rate)
    return root


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clips")
    for number in range(8):
        write_clip(root / "ab"[number % 2] / f"{number}.mp4", count=6)
    return root


def test_sounds_are_learned_and_read_alike_afterwards(sounds: Path, tmp_path: Path) -> None:
    run = train(**SOUND | {"data": str(sounds), "out": str(tmp_path / "run"), "sampling": {"rate": 8000}})
    model, labels = load_trained(run.last)
    spec = labels.preprocessing
    assert spec is not None
    assert (spec.modality, spec.sampling) == ("audio", Spectrogram(8000))
    assert spec.size == (64, 32)  # 0.3 seconds are 31 frames: four patches
    assert model.config.image == (64, 32)
    found = evaluate(run.last, sounds, seconds=0, look=0)
    assert found.accuracy["fused"] == 1.0
    dataset = open_dataset(sounds, labeled=True)
    (batch,) = dataset.batches(spec, 32)
    with torch.no_grad():
        right = (model(batch.images).argmax(1) == dataset.labels[:, 0]).float().mean().item()
    assert right == found.accuracy["fused"]


def test_clips_train_resume_and_are_evaluated(clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**CLIP, "epochs": 2, "save_every": "1 steps", "keep": 9, "validation": "none"}
    fields |= {"sampling": {"frames": "segments"}}
    run = train(data=str(clips), out=str(tmp_path / "run"), **fields)
    stopped = tmp_path / "stopped"
    save = checkpoint.Checkpoints.save

    def interrupted(self: Any, step: int, *rest: Any, **more: Any) -> Any:
        made = save(self, step, *rest, **more)
        if step == 2:
            raise KeyboardInterrupt
        return made

    monkeypatch.setattr(checkpoint.Checkpoints, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(data=str(clips), out=str(stopped), **fields)
    monkeypatch.undo()
    train(out=str(stopped), resume=True)
    assert same(weights(run.last), weights(stopped / "last"))
    labels = load_trained(run.last)[1]
    assert labels.preprocessing is not None
    assert labels.preprocessing.sampling == FrameSampling("segments")
    assert labels.preprocessing.shape == (3, 4, 16, 16)
    assert evaluate(run.last, clips, merge={"r": 1}, seconds=0).count == 8
    again = train(**TUNING | {"data": str(clips), "out": str(tmp_path / "tuned"), "model": str(run.last)})
    assert load_trained(again.last)[1].preprocessing == labels.preprocessing


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modality": "audio"}, "no sounds found"),
        ({"sampling": {"fps": 2}}, "expected frames, rate"),
        ({"sampling": {"frames": "rate"}}, "rate=None"),
        ({"image_size": (5, 16, 16)}, "not a whole number of patches"),
        ({"patch_size": (8, 8), "image_size": None}, r"patch_size=\(8, 8\)"),
        ({"teacher": "timm:resnet18", "tokens": "cls,distillation"}, "is for images"),
        ({"recipe": "dino", "labels": "none", "augment": "light"}, "is for images"),
    ],
)
def test_runs_that_contradict_their_data(clips: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        train(**({"data": str(clips), "out": str(tmp_path / "run")} | CLIP | fields))
    assert not (tmp_path / "run").exists()


def test_models_and_data_of_other_modalities(clips: Path, sounds: Path, tmp_path: Path) -> None:
    run = train(data=str(clips), out=str(tmp_path / "run"), **CLIP)
    with pytest.raises(InvalidOption, match="takes video clips, and the data holds sounds"):
        train(**TUNING | {"data": str(sounds), "model": str(run.last), "out": str(tmp_path / "other")})
    with pytest.raises(InvalidOption, match="sampling"):
        train(data=[(np.zeros((16, 16, 3), np.uint8), n % 2) for n in range(8)], sampling={"rate": 3}, **FIELDS)


def test_files_without_content_are_skipped_and_counted(sounds: Path, tmp_path: Path) -> None:
    data = tmp_path / "sounds"
    shutil.copytree(sounds, data)
    write_sound(data / "low" / "silent.wav", np.zeros(0, np.float32), 8000)
    (data / "high" / "damaged.wav").write_bytes(b"RIFF no sound")
    with pytest.raises(ImageError, match="of 34 sounds cannot be read, and max_unreadable"):
        train(**SOUND | {"data": str(data), "out": str(tmp_path / "run"), "epochs": 1})
    assert not (tmp_path / "run").exists()
    notes: list[str] = []
    run = train(
        **SOUND | {"data": str(data), "out": str(tmp_path / "run"), "epochs": 1, "max_unreadable": 0.1},
        on_event=lambda event: notes.append(event.text) if event.kind == "note" else None,
    )
    assert any(
        "Skipped 2 unreadable sounds" in text and "silent.wav: the sound has no samples" in text for text in notes
    )
    assert evaluate(run.last, data, max_unreadable=0.1, seconds=0, look=0).count == 32


@real_digits
def test_spoken_digits_from_the_command_line(tmp_path: Path) -> None:
    result = run_command(
        "train", "--data", DIGITS, "--labels", "digit", "--share", 0.2, "--patch-size", 16, "--preset", "tiny",
        "--sampling", "{rate: 8000}", "--options", "{width: 32, depth: 1, heads: 2}", "--epochs", 1,
        "--batch-size", 16, "--device", "cpu", "-o", tmp_path / "run",
    )  # fmt: skip
    assert "10 classes" in result
    model, labels = load_trained(tmp_path / "run" / "last")
    assert labels.preprocessing is not None
    assert labels.preprocessing.modality == "audio"
    assert model.config.in_chans == 1
    assert "fused" in run_command("evaluate", tmp_path / "run" / "last", DIGITS, "--merge", "r=2", "--device", "cpu")


@real_clips
def test_real_clips_from_the_command_line(tmp_path: Path) -> None:
    for number, path in enumerate(sorted(CLIPS.iterdir())):
        for copy in range(2):
            target = tmp_path / "clips" / "ab"[number % 2] / f"{copy}-{path.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    run_command(
        "train", "--data", tmp_path / "clips", "--image-size", "4,32,32", "--patch-size", "2,16,16", "--preset", "tiny",
        "--options", "{width: 32, depth: 1, heads: 2}", "--epochs", 1, "--batch-size", 4, "--validation", "none",
        "--device", "cpu", "-o", tmp_path / "run",
    )  # fmt: skip
    run_command(
        "merge", f"vitrail:{tmp_path / 'run' / 'last'}", CLIPS, "-r", 1, "--limit", 1, "--device", "cpu",
        "-o", tmp_path / "glass",
    )  # fmt: skip
    assert len(list((tmp_path / "glass").glob("*-filmstrip.png"))) == 1


def run_command(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
COLORS = {"image_mean": [0.25, 0.5, 0.75], "image_std": [0.5, 0.25, 0.5], "rescale_factor": 1 / 255, "offset": False}


def save_foreign(kind: str, folder: Path) -> None:
    """Save a small model of transformers, with the preprocessing that it was made with."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    if kind == "AST":
        config = transformers.ASTConfig(**LAYERS, num_mel_bins=32, max_length=24, patch_size=8)
        transformers.ASTForAudioClassification(config).save_pretrained(folder)
        stored: dict[str, Any] = {"mean": -3.5, "std": 2.5, "sampling_rate": 8000}
    else:
        tubes = {"tubelet_size": 2, "patch_size": 8} if kind == "VideoMAE" else {"tubelet_size": [2, 8, 8]}
        config = getattr(transformers, f"{kind}Config")(**LAYERS, **tubes, image_size=16, num_frames=4)
        getattr(transformers, f"{kind}ForVideoClassification")(config).save_pretrained(folder)
        stored = COLORS
    (folder / "preprocessor_config.json").write_text(json.dumps(stored))


@pytest.mark.parametrize("kind", ["AST", "VideoMAE", "Vivit"])
def test_models_of_transformers_are_finetuned(kind: str, clips: Path, sounds: Path, tmp_path: Path) -> None:
    save_foreign(kind, tmp_path / "base")
    audio = kind == "AST"
    data, name = sounds if audio else clips, f"hf:{tmp_path / 'base'}"
    own = input_spec(load_model(name))
    fields = {**TUNING, "model": name, "data": str(data), "validation": "none", "augment": "light", "lr": 1e-3}
    run = train(**fields, out=str(tmp_path / "run"))
    trained, labels = load_trained(run.last)
    assert type(trained).__name__ == f"{kind}For{'Audio' if audio else 'Video'}Classification"
    assert labels.preprocessing == own == input_spec(trained)  # also where only the adapter is asked
    dataset = open_dataset(data, labeled=True)
    (batch,) = dataset.batches(own, 32)
    auto = import_module("transformers").AutoModelForAudioClassification
    if not audio:
        auto = import_module("transformers").AutoModelForVideoClassification
    theirs = auto.from_pretrained(run.last).eval()
    with torch.no_grad():
        right = (theirs(batch.images).logits.argmax(1) == dataset.labels[:, 0]).float().mean().item()
    assert evaluate(run.last, data, seconds=0, look=0).accuracy["fused"] == right
    base = load_model(name)
    assert not same(weights(tmp_path / "base"), weights(run.last)), "nothing was learned"
    assert {n for n, _ in trained.named_parameters()} == {n for n, _ in base.named_parameters()}
    again = train(**fields | {"model": str(run.last), "lr": 1e-12}, out=str(tmp_path / "again"))
    before, after = weights(run.last), weights(again.last)
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)  # of the heads, too


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("VideoMAE", {"image_size": (8, 16, 16)}, "4,16,16"),
        ("AST", {}, "takes sounds"),
        ("VideoMAE", {"data": np.zeros((8, 3, 4, 16, 16), np.uint8)}, "TCHW"),
    ],
)
def test_what_models_of_transformers_do_not_take(
    clips: Path, tmp_path: Path, kind: str, fields: dict[str, Any], message: str
) -> None:
    save_foreign(kind, tmp_path / "base")
    given = {**TUNING, "model": f"hf:{tmp_path / 'base'}", "data": str(clips), "validation": "none"} | fields
    if "data" in fields:
        given["data"] = Arrays(fields["data"], [0, 1] * 4)
    with pytest.raises(InvalidOption, match=message):
        train(**given, out=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
