"""Tiny models for tests of training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.models import ViT, ViTConfig
from vitrail.tokens import TokenSpec

CLASS, DISTILLATION = TokenSpec("cls", "class"), TokenSpec("distillation", "distillation")  # type: ignore[arg-type]
ANIMALS = {"label": ("cat", "dog", "eel")}
TASKS = {"colour": ("red", "blue"), "shape": ("disc", "ring", "star", "bar")}


def tiny(*tokens: TokenSpec, num_classes: int = 3, **options: Any) -> ViT:
    """A ViT of two blocks for images of 16 pixels, 4 × 4 patches; weights are larger than new ones are."""
    values = {"image_size": 16, "patch_size": 4, "width": 32, "depth": 2, "heads": 2, **options}
    model = ViT(ViTConfig(tokens=tokens or (CLASS,), num_classes=num_classes, **values))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.05)
    return model


def task(name: str, classes: int) -> TokenSpec:
    return TokenSpec(name, "task", classes=classes)  # type: ignore[arg-type]


class Net(nn.Module):
    """A convolutional net, as a teacher or a student; it has the two halves that timm's models have."""

    def __init__(self, classes: int = 3, width: int = 12) -> None:
        super().__init__()
        self.num_features, self.num_classes = width, classes
        self.conv = nn.Conv2d(3, width, 3, 2, 1)
        self.norm = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, classes)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))
