"""Small models with and without planted artifacts, and images for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import vitrail
from vitrail.report import Report

PLANTED = (9, 42)
SINCE = 2


def small(name: str = "vit_tiny_patch16_224", **options: Any) -> nn.Module:
    """Four blocks of 32 channels over 8 × 8 patches."""
    torch.manual_seed(0)
    sizes = {"img_size": 128, "depth": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 3}
    return timm.create_model(name, **{**sizes, **options}).eval()


def plant(block: nn.Module, places: Sequence[int] = PLANTED, special: int = 1, factor: float = 10.0) -> None:
    """Make some patch tokens leave a block with a large norm."""

    def enlarge(_: nn.Module, __: Any, output: Any) -> Any:
        tokens = (output[0] if isinstance(output, tuple) else output).clone()
        tokens[:, [special + place for place in places]] *= factor
        return (tokens, *output[1:]) if isinstance(output, tuple) else tokens

    block.register_forward_hook(enlarge)


def planted() -> nn.Module:
    model = small()
    plant(model.blocks[SINCE])  # type: ignore[index, union-attr]
    return model


def random_images(count: int = 24, size: int = 128) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1)) / 4


def write_images(directory: Path, count: int = 24, classes: int = 2) -> Path:
    """Write images of several colors into one directory per class, and one file that is not an image."""
    generator = np.random.default_rng(0)
    for number in range(count):
        place = directory / f"class-{number % classes}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 120, (48, 48, 3), dtype=np.uint8)
        pixels[..., number % classes] += 120
        Image.fromarray(pixels).save(place / f"{number:02d}.png")
    (directory / "class-0" / "broken.png").write_bytes(b"not an image")
    return directory


def inspect(model: nn.Module, data: Any, **options: Any) -> Report:
    """Inspect a model in this process, which then has the report."""
    report = vitrail.inspect(model, data, **options)
    assert report is not None
    return report


def inspect_quickly(model: nn.Module, data: Any, **options: Any) -> Report:
    """Inspect without the slow sections."""
    return inspect(model, data, probes=False, discovery=False, **options)
