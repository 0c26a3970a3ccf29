"""The embedded models: their sizes, cards, and accuracy."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vitrail
from tests.data.media_files import DIGITS, real_digits
from vitrail.adapters.saved import EMBEDDED
from vitrail.data import open_dataset, read_image, samples, to_tensor
from vitrail.data.media.registry import recording
from vitrail.data.sample_files import drawings
from vitrail.models import ViT
from vitrail.training import evaluate, load_trained

LIMITS = {"tiny": 12, "audio": 4, "video": 4}
"""Largest file of each model, in MiB."""

TOKENS = {
    "tiny": [("cls", 1), ("distillation", 1), ("registers", 4)],
    "audio": [("digit", 1), ("speaker", 1), ("registers", 2)],
    "video": [("cls", 1), ("registers", 2)],
}


def load(name: str) -> ViT:
    loaded = vitrail.load_model(f"vitrail:{name}")
    assert isinstance(loaded, ViT)
    return loaded


def card(name: str) -> str:
    return (EMBEDDED[name] / "CARD.md").read_text(encoding="utf-8")


def test_every_folder_of_weights_is_an_embedded_model() -> None:
    folders = {path for path in EMBEDDED["tiny"].parent.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(EMBEDDED.values())
    assert set(LIMITS) == set(EMBEDDED)


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_models_are_small_and_have_special_tokens(name: str) -> None:
    model, weights = load(name), EMBEDDED[name] / "model.safetensors"
    assert sum(parameter.numel() for parameter in model.parameters()) <= 6_000_000
    assert weights.stat().st_size <= LIMITS[name] * 2**20
    assert {value.dtype for value in load_file(weights).values() if value.is_floating_point()} == {torch.float16}
    assert [(spec.name, spec.count) for spec in model.config.tokens] == TOKENS[name]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not model.training
    modality = vitrail.adapters.input_spec(model).modality
    assert modality == {"tiny": "image"}.get(name, name)
    patches = math.prod(model.config.grid)
    special = sum(count for _, count in TOKENS[name])
    with vitrail.merge(model, r=2) as merging:
        assert merging.tokens_per_layer()[-1] == special + patches - 2 * model.config.depth


@pytest.mark.parametrize(
    ("name", "source", "license"),
    [
        ("tiny", "Imagenette", "Licence of the weights: CC BY-NC 4.0"),
        ("audio", "Free Spoken Digit Dataset", "License of the weights: CC BY-SA 4.0"),
        ("video", "tools/moving_shapes.py", "License of the weights: Apache-2.0"),
    ],
)
def test_cards_name_source_and_license(name: str, source: str, license: str) -> None:
    assert source in card(name)
    assert license in card(name)
    log = [json.loads(line) for line in (EMBEDDED[name] / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    epochs = [line for line in log if line["kind"] == "epoch"]
    assert f"Trained for {len(epochs)} epochs" in card(name)
    assert f"epochs: {len(epochs)}\n" in card(name)


def test_card_of_tiny_has_accuracies_of_three_seeds() -> None:
    found = re.findall(r"\| fused \| ([\d.]+) % \| ([\d.]+) ± [\d.]+ % \|", card("tiny"))[0]
    assert all(92 <= float(accuracy) < 100 for accuracy in found)


def accuracies(name: str) -> dict[str, float]:
    """Return the accuracy of each head on a card, in percent."""
    return {
        head: float(share) for head, share in re.findall(r"^\| ([\w.]+) \| ([\d.]+) % \(", card(name), re.MULTILINE)
    }


@pytest.mark.parametrize("name", ["audio", "video"])
def test_merged_accuracy_on_the_card_is_of_the_same_data(name: str) -> None:
    rows = re.findall(r"^\| (unmerged|r=\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) %", card(name), re.MULTILINE)
    assert rows[0][0] == "unmerged"
    assert len(rows) >= 3
    head, share = next(iter(accuracies(name).items()))
    assert float(rows[0][3]) == share, head
    model = load(name)
    for setting, tokens, flops, _ in rows[1:]:
        with vitrail.merge(model, r=int(setting.removeprefix("r="))) as merging:
            assert merging.tokens_per_layer()[-1] == int(tokens)
            assert merging.flops() / 1e6 == pytest.approx(float(flops), abs=0.06)


def test_drawings_are_classified_merged_or_not() -> None:
    model, labels = load("tiny"), load_trained("vitrail:tiny")[1]
    (names,) = vitrail.class_names(model).values()
    batch = to_tensor([read_image(path) for path in drawings().values()], labels.preprocessing)
    expected = [name.replace("-", " ") for name in drawings()]
    with torch.inference_mode():
        assert [names[best] for best in model(batch).argmax(-1)] == expected
        with vitrail.merge(model, keep=0.25):
            assert [names[best] for best in model(batch).argmax(-1)] == expected


def predicted(name: str) -> dict[str, dict[str, str]]:
    """Return what a model predicts for each sample of its medium, by task."""
    model = load(name)
    classes, spec = vitrail.class_names(model), vitrail.adapters.input_spec(model)
    inputs = [recording(name, path).tensor(spec) for path in samples(name).values()]
    result: dict[str, dict[str, str]] = {}
    with torch.inference_mode():
        output = model.forward_output(torch.stack(inputs))
    for task, scores in _scores(output, classes).items():
        for sample, best in zip(samples(name), scores.argmax(-1).tolist(), strict=True):
            result.setdefault(sample, {})[task] = classes[task][best]
    return result


def _scores(output: object, classes: dict[str, tuple[str, ...]]) -> dict[str, torch.Tensor]:
    """Split the scores of a model by task: each has its own token, or all share the class token's."""
    by_role: dict[str, torch.Tensor] = output.by_role  # type: ignore[attr-defined]
    if set(by_role) == set(classes):
        return by_role
    (scores,) = by_role.values()
    return dict(zip(classes, scores.split([len(names) for names in classes.values()], 1), strict=True))


def test_sample_sounds_are_recognized() -> None:
    pytest.importorskip("soundfile", reason="sounds need soundfile")
    digits = {"three": "3", "seven": "7", "nine": "9"}
    speakers = {"three": "theo", "seven": "jackson", "nine": "lucas"}
    found = predicted("audio")
    assert {name: one["digit"] for name, one in found.items()} == digits
    assert {name: one["speaker"] for name, one in found.items()} == speakers


def test_color_and_motion_of_sample_clips_are_recognized() -> None:
    pytest.importorskip("av", reason="clips need PyAV")
    found = predicted("video")
    for name, one in found.items():  # of the shape it is often wrong, as its card says
        color, _, motion = name.split("-")
        assert (one["color"], one["motion"]) == (color, motion)


def test_accuracy_of_tiny_matches_the_card(shared_data: Path) -> None:
    some = open_dataset(str(shared_data / "imagenette-128-val.parquet"), labeled=True).take(0.025, 0)
    found = evaluate("vitrail:tiny", some, look=0, seconds=0)
    assert found.count >= 95
    assert found.accuracy["fused"] > 0.88  # 93.7 % of all; two standard errors of so few are 5 points


@real_digits
def test_accuracy_of_audio_is_that_of_the_card() -> None:
    pytest.importorskip("soundfile", reason="sounds need soundfile")
    found = evaluate("vitrail:audio", str(DIGITS), look=0, seconds=0)
    assert found.count == 300
    for head, share in accuracies("audio").items():
        assert 100 * found.accuracy[head] == pytest.approx(share, abs=0.34)  # one sound, on another machine
