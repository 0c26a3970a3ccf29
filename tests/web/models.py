"""Small models for the page, and images."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitrail
from vitrail.adapters import find
from vitrail.training.objective.targets import assign_targets
from vitrail.web.cache import Cache
from vitrail.web.model_views import ModelViews

CLASSES = ("ash", "<b>birch</b>", "cedar")


def small_vit(depth: int = 3, size: int = 32, seed: int = 0) -> vitrail.ViT:
    """Return a ViT of 64 patches with class, distillation and register tokens, whose tokens are unlike each other."""
    torch.manual_seed(seed)
    roles = (("cls", vitrail.Role.CLASS, 1), ("distillation", vitrail.Role.DISTILLATION, 1))
    tokens = [vitrail.TokenSpec(name, role, count=count) for name, role, count in roles]
    tokens.append(vitrail.TokenSpec("registers", vitrail.Role.REGISTER, count=2))
    sizes = {"width": 32, "depth": depth, "heads": 2, "num_classes": len(CLASSES), "patch_size": size // 8}
    model = vitrail.create_model("vit_tiny_patch16", image_size=size, tokens=tokens, **sizes).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.05 * torch.randn_like(value))
    return model


def small_media_vit(modality: str) -> vitrail.ViT:
    """Return a ViT of 4 × 4 × 4 patches of clips, or of 4 × 8 patches of spectrograms, with random weights."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "video": {"image_size": (8, 32, 32), "patch_size": (2, 8, 8)},
        "audio": {"image_size": (32, 64), "patch_size": 8, "in_chans": 1},
    }[modality]
    sizes = {"width": 32, "depth": 3, "heads": 2, "num_classes": len(CLASSES)}
    model = vitrail.create_model("vit_tiny_patch16", **sizes, **shape).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.05 * torch.randn_like(value))
    return model


def views_of(model: torch.nn.Module, name: str = "small", cache: Cache | None = None) -> ModelViews:
    found = find(model)
    layout = found.adapter.layout(found.trunk)
    questions = assign_targets(model, vitrail.class_names(model) or {"label": CLASSES})
    spec = found.adapter.input_spec(found.trunk)
    return ModelViews(name, model, spec, layout, torch.device("cpu"), questions, cache or Cache())


def save(model: vitrail.ViT, folder: Path) -> Path:
    """Save a model as training does, with class names."""
    model.save_pretrained(folder)
    (folder / "labels.json").write_text(json.dumps({"classes": {"label": CLASSES}}), encoding="utf-8")
    return folder


def picture(size: tuple[int, int] = (48, 40), seed: int = 0) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
