"""Evaluation by name: at another size than the model was trained for."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F

from tests.training.toys import FIELDS
from vitrail.data import open_dataset
from vitrail.errors import InvalidOption
from vitrail.training import Arrays, evaluate, load_trained, train


@pytest.mark.parametrize("model", ["vit_tiny_patch16", "timm:resnet18"])
def test_at_another_size(photos: str, tmp_path: Path, model: str) -> None:
    own = (
        FIELDS
        if model == FIELDS["model"]
        else {k: v for k, v in FIELDS.items() if k not in ("tokens", "patch_size", "options")}
    )
    run = train(**{**own, "model": model, "data": photos, "epochs": 1, "out": str(tmp_path / "run")})
    found = evaluate(run.folder, photos, size=48, seconds=0)
    net, labels = load_trained(run.folder)
    examples = open_dataset(photos, labeled=True)
    images = torch.stack([examples.tensor(row, 48) for row in range(len(examples))]).float() / 255
    mean, std = (torch.tensor(value)[:, None, None] for value in (labels.preprocessing.mean, labels.preprocessing.std))  # type: ignore[union-attr]
    with torch.no_grad():
        loss = F.cross_entropy(net.eval()((images - mean) / std), examples.labels[:, 0])
    assert found.loss == pytest.approx(loss.item(), rel=1e-4)
    assert found.loss != pytest.approx(evaluate(run.folder, photos, seconds=0).loss, rel=1e-3)
    assert any("48 × 48" in note for note in found.notes)


def test_sizes_that_a_model_does_not_take(photos: str) -> None:
    fixed = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
    with pytest.raises(InvalidOption, match="size=48: VisionTransformer does not accept"):
        evaluate(fixed, photos, size=48)
    with pytest.raises(InvalidOption, match="size=0: expected"):
        evaluate(fixed, photos, size=0)


def test_arrays_have_no_other_size() -> None:
    arrays = Arrays(torch.zeros(6, 1, 8, 8, dtype=torch.uint8), torch.arange(6) % 2)
    with pytest.raises(InvalidOption, match="size=16 is for images"):
        evaluate(torch.nn.Flatten(), arrays, size=16)
