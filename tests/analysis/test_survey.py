"""Surveys over checkpoints and models with planted artifacts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torch import nn

from vitrail.analysis.survey import survey
from vitrail.errors import InvalidOption, UnsupportedInput


def checkpoint(strength: float) -> nn.Module:
    """A small ViT; ``strength`` multiplies some of its patch tokens after the second block."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=128, depth=4, embed_dim=32, num_heads=2, num_classes=3)

    def grow(_: nn.Module, __: object, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[:, 9::32] *= strength
        return out

    if strength != 1:
        model.blocks[1].register_forward_hook(grow)
    return model.eval()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(24, 3, 128, 128, generator=torch.Generator().manual_seed(0))


def test_first_checkpoint_with_artifacts(images: torch.Tensor) -> None:
    loaded: list[str] = []

    def load(name: str, strength: float) -> nn.Module:
        loaded.append(name)
        return checkpoint(strength)

    seen: list[tuple[str, int, int | None]] = []
    found = survey(
        {
            "step 0": checkpoint(1),
            "step 100": lambda: load("step 100", 1),
            "step 200": lambda: load("step 200", 30),
            "step 300": lambda: load("step 300", 60),
        },
        images,
        batch_size=8,
        progress=lambda *event: seen.append(event),
    )
    assert [row["verdict"] for row in found.table()] == ["none", "none", "artifacts", "artifacts"]
    assert found.first == "step 200"
    assert loaded == ["step 100", "step 200", "step 300"]
    assert seen == [(f"step {100 * i}", i, 4) for i in range(4)]
    assert found.entries[2].norms is not None
    assert found.entries[2].norms.onset == 1
    assert found.entries[0].depth == 4
    json.dumps(found.to_dict())


def test_batches_give_the_same(images: torch.Tensor) -> None:
    whole = survey({"a": checkpoint(30)}, images)
    parts = survey({"a": checkpoint(30)}, [(images[:10], None), (images[10:], None)])
    assert parts.to_dict()["entries"][0]["norms"]["threshold"] == pytest.approx(
        whole.to_dict()["entries"][0]["norms"]["threshold"], rel=0.02
    )


def test_iterators_and_files(images: torch.Tensor, tmp_path: Path) -> None:
    both = {"a": checkpoint(1), "b": checkpoint(30)}
    once, again = survey(both, iter(images.split(8))), survey(both, images.split(8))
    assert once.to_dict() == again.to_dict()
    for number in range(4):
        Image.effect_noise((40, 40), 60 + number).convert("RGB").save(tmp_path / f"{number}.png")
    small = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=32, num_heads=2).eval()
    found = survey({"large": checkpoint(1), "small": small}, tmp_path)
    assert [entry.norms.num_tokens for entry in found.entries if entry.norms] == [4 * 64, 4 * 16]


def test_a_model_that_fails_is_reported(images: torch.Tensor) -> None:
    def broken() -> nn.Module:
        raise OSError("no such checkpoint")

    found = survey({"linear": nn.Linear(3, 3), "gone": broken, "fine": checkpoint(30)}, images[:8])
    assert found.entries[0].problem.startswith("UnsupportedModel")
    assert found.entries[1].problem == "OSError: no such checkpoint"
    assert found.entries[2].norms is not None
    other = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, embed_dim=32, num_heads=2)
    sizes = survey({"fine": checkpoint(1), "other size": other}, images[:2])
    assert "doesn't match model (64)" in sizes.entries[1].problem
    with pytest.raises(InvalidOption, match="got 5 as number"):
        survey({"fine": checkpoint(1), "number": 5}, images[:2])  # type: ignore[dict-item]
    with pytest.raises(UnsupportedInput, match="got NoneType"):
        survey({"fine": checkpoint(1)}, None)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedInput, match="all 1 models"):
        survey({"linear": nn.Linear(3, 3)}, images[:2])


def test_models_have_names() -> None:
    with pytest.raises(InvalidOption, match="models="):
        survey([checkpoint(1)], torch.zeros(1, 3, 128, 128))  # type: ignore[arg-type]
