"""Arguments for the fuzzer: right ones by the name of a parameter, and wrong ones of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

import vitrail


class Odd:
    """An object of no use, whose representation fills a screen."""

    def __repr__(self) -> str:
        return "odd " * 10_000


class World:
    """Files and models to pass: right and hostile ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        pixels = np.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=np.uint8)
        for name in ("photos/cat/a", "photos/cat/b", "photos/dog/c", "photos/dog/d"):
            file = folder / f"{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.roll(pixels, len(name) + ord(name[-1]), 0)).save(file)
        torch.manual_seed(0)
        model = self.model()
        model.save_pretrained(folder / "model")
        (folder / "model" / "labels.json").write_text('{"classes": {"label": ["cat", "dog"]}}')
        (folder / "empty").mkdir()
        (folder / "text.txt").write_text("nothing")
        (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
        (folder / "bad.yaml").write_text("a: &a [*a]")
        (folder / "bad.json").write_text('{"format": 2, "norms": []}')
        (folder / "loop").symlink_to(folder / "loop")
        (folder / "[red]").mkdir()

    def model(self) -> nn.Module:
        return vitrail.create_model(
            "vit_tiny_patch16", image_size=16, patch_size=8, width=16, depth=2, heads=2, num_classes=2
        ).eval()


def wrong(draw: random.Random, world: World) -> Any:
    """Return a value that is wrong nearly everywhere."""
    folder = world.folder
    return draw.choice(_WRONG)(folder)


_WRONG: list[Callable[[Path], Any]] = [
    lambda folder: None, lambda folder: True, lambda folder: -1, lambda folder: 0, lambda folder: 10**30,
    lambda folder: 2**62, lambda folder: 10**5000, lambda folder: 1.5, lambda folder: float("nan"),
    lambda folder: float("inf"), lambda folder: -float("inf"), lambda folder: 1e38, lambda folder: -0.0,
    lambda folder: "", lambda folder: "x", lambda folder: "cuda:7", lambda folder: "a\0b", lambda folder: "[/red]",
    lambda folder: "x" * 100_000, lambda folder: "\x1b[31m\ud800", lambda folder: b"bytes", lambda folder: (),
    lambda folder: [], lambda folder: {}, lambda folder: set(), lambda folder: {1: 2}, lambda folder: {"a": Odd()},
    lambda folder: [None], lambda folder: [[1], [2]], lambda folder: [1.5, "x"], lambda folder: range(5),
    lambda folder: memoryview(b"abc"), lambda folder: Odd(), lambda folder: object, lambda folder: lambda *a, **k: None,
    lambda folder: iter([1]), lambda folder: torch.zeros(0), lambda folder: torch.tensor(float("nan")),
    lambda folder: torch.ones(3, 2), lambda folder: torch.tensor([True, False]), lambda folder: torch.float16,
    lambda folder: torch.zeros(2, 3, 16, 16, dtype=torch.int64), lambda folder: torch.full((1, 3, 16, 16), torch.nan),
    lambda folder: torch.zeros(1, 3, 17, 5), lambda folder: torch.zeros(2, 4, 16, 16),
    lambda folder: torch.device("meta"),
    lambda folder: np.zeros((0, 3)), lambda folder: np.array(["a"]), lambda folder: np.ones((24, 24, 3)),
    lambda folder: np.float64("nan"), lambda folder: np.bool_(True), lambda folder: nn.Linear(2, 2),
    lambda folder: nn.Identity(), lambda folder: Image.new("L", (1, 1)), lambda folder: folder,
    lambda folder: folder / "loop", lambda folder: folder / "nowhere" / "x", lambda folder: folder / "text.txt",
    lambda folder: folder / "broken.png", lambda folder: folder / "bad.yaml", lambda folder: str(folder / "bad.json"),
    lambda folder: str(folder / "empty"), lambda folder: folder / "[red]", lambda folder: "/dev/null",
    lambda folder: Path("x" * 5000), lambda folder: "hf:", lambda folder: "timm:none", lambda folder: "vitrail:../..",
    lambda folder: ("tome", {}), lambda folder: {"name": "tome", "features": 3}, lambda folder: slice(1),
]  # fmt: skip

_HINTS: dict[str, list[Callable[[World], Any]]] = {
    "model": [lambda w: w.model(), lambda w: str(w.folder / "model")],
    "images": [lambda w: torch.randn(2, 3, 16, 16), lambda w: str(w.folder / "photos")],
    "data": [lambda w: str(w.folder / "photos"), lambda w: torch.randn(4, 3, 16, 16)],
    "source": [lambda w: str(w.folder / "photos")],
    "paths": [lambda w: str(w.folder / "photos")],
    "image": [lambda w: Image.new("RGB", (16, 16))],
    "r": [lambda w: 1, lambda w: [1, 0]],
    "batch_size": [lambda w: 2],
    "batch": [lambda w: 1],
    "num_classes": [lambda w: 2],
    "x": [lambda w: torch.randn(2, 5, 8)],
    "features": [lambda w: torch.randn(2, 4, 8), lambda w: torch.randn(4, 8)],
    "grid": [lambda w: (2, 2), lambda w: (1, 2, 2)],
    "attention": [lambda w: torch.rand(2, 2, 5, 5).softmax(-1)],
    "attentions": [lambda w: [torch.rand(2, 2, 5, 5).softmax(-1)]],
    "layout": [lambda w: vitrail.TokenLayout.of(vitrail.Role.CLASS, grid=(1, 2, 2))],
    "tokens": [lambda w: torch.randn(2, 5, 8), lambda w: "cls,register=2"],
    "labels": [lambda w: torch.tensor([0, 1, 0, 1])],
    "targets": [lambda w: torch.randn(4)],
    "norms": [lambda w: torch.rand(2, 4)],
    "path": [lambda w: w.folder / "out"],
    "seconds": [lambda w: 0.01],
    "limit": [lambda w: 2],
    "epochs": [lambda w: 1],
    "method": [lambda w: "tome"],
    "layers": [lambda w: [0]],
    "pattern": [lambda w: "vit*"],
    "name": [lambda w: "vit_tiny_patch16", lambda w: str(w.folder / "model")],
    "device": [lambda w: "cpu"],
    "spec": [lambda w: vitrail.adapters.InputSpec((16, 16))],
    "box": [lambda w: (0.0, 0.0, 4.0, 4.0)],
    "boxes": [lambda w: [(0.0, 0.0, 4.0, 4.0)]],
    "groups": [lambda w: np.zeros((2, 2), int)],
    "specs": [lambda w: [vitrail.TokenSpec("a", vitrail.Role.REGISTER)]],
    "config": [lambda w: None],
    "within": [lambda w: 0.5],
    "modes": [lambda w: ("eager",)],
    "example": [lambda w: torch.zeros(1, 3, 16, 16)],
    "outliers": [lambda w: torch.tensor([[True, False, False, False]] * 2)],
    "mask": [lambda w: torch.tensor([[True, False], [False, False]])],
    "neurons": [lambda w: 2],
}


def right(name: str, draw: random.Random, world: World) -> Any:
    """Return a plausible argument by the name of a parameter; raise `KeyError` where none is known."""
    return draw.choice(_HINTS[name])(world)
