"""A small model with random weights, and images, for methods that run in a whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.models import ViT, ViTConfig

SIZES: dict[str, Any] = {
    "image_size": 32, "patch_size": 4, "width": 16, "depth": 4, "heads": 2, "num_classes": 3,
}  # fmt: skip


def small_model(dtype: torch.dtype = torch.float64, **options: Any) -> ViT:
    """Return a model of 64 patches in eval mode."""
    torch.manual_seed(0)
    model = ViT(ViTConfig(**{**SIZES, **options}))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model.eval().to(dtype)


def small_images(dtype: torch.dtype = torch.float64, batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
