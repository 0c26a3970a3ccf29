"""The embedded model: its size, its card, and its accuracy."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vitrail
from vitrail.adapters.saved import EMBEDDED
from vitrail.data import open_dataset, read_image, to_tensor
from vitrail.data.sample_images import drawings
from vitrail.models import ViT
from vitrail.training import evaluate, load_trained

FOLDER = EMBEDDED["tiny"]


@pytest.fixture(scope="module")
def model() -> ViT:
    loaded = vitrail.load_model("vitrail:tiny")
    assert isinstance(loaded, ViT)
    return loaded.eval()


def test_embedded_model_is_small_and_has_tokens_of_three_roles(model: ViT) -> None:
    assert sum(parameter.numel() for parameter in model.parameters()) <= 6_000_000
    weights = FOLDER / "model.safetensors"
    assert weights.stat().st_size <= 12 * 2**20
    assert {value.dtype for value in load_file(weights).values() if value.is_floating_point()} == {torch.float16}
    assert [(spec.name, spec.count) for spec in model.config.tokens] == [
        ("cls", 1), ("distillation", 1), ("registers", 4),
    ]  # fmt: skip
    assert model.config.grid[-2:] == (16, 16)


def test_card_names_source_and_license() -> None:
    card = (FOLDER / "CARD.md").read_text(encoding="utf-8")
    assert "Imagenette" in card
    assert "Licence of the weights: CC BY-NC 4.0" in card
    accuracies = [float(found) for found in re.findall(r"\| fused \| ([\d.]+) % \| ([\d.]+) ± [\d.]+ % \|", card)[0]]
    assert all(92 <= accuracy < 100 for accuracy in accuracies)
    log = [json.loads(line) for line in (FOLDER / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    epochs = [line for line in log if line["kind"] == "epoch"]
    assert f"Trained for {len(epochs)} epochs" in card
    assert f"epochs: {len(epochs)}\n" in card


def test_drawings_are_classified_merged_or_not(model: ViT) -> None:
    labels = load_trained("vitrail:tiny")[1]
    (names,) = vitrail.class_names(model).values()
    batch = to_tensor([read_image(path) for path in drawings().values()], labels.preprocessing)
    expected = [name.replace("-", " ") for name in drawings()]
    with torch.inference_mode():
        assert [names[best] for best in model(batch).argmax(-1)] == expected
        with vitrail.merge(model, keep=0.25):
            assert [names[best] for best in model(batch).argmax(-1)] == expected


def test_accuracy_matches_the_card(shared_data: Path) -> None:
    some = open_dataset(str(shared_data / "imagenette-128-val.parquet"), labeled=True).take(0.025, 0)
    found = evaluate("vitrail:tiny", some, look=0, seconds=0)
    assert found.count >= 95
    assert found.accuracy["fused"] > 0.88  # 93.7 % of all; two standard errors of so few are 5 points
