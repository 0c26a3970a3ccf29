"""Norms that the detector is measured on: untrained and trained models on images, kept as arrays.

Each model runs once over each set of images; norms of the patches that enter the first block and of those that leave
each block are kept in ``runs/detector/`` (not part of the checkout), so that statistics can be computed again in
seconds.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import vitrail
from vitrail.adapters import find
from vitrail.adapters.registry import load_model
from vitrail.data import InputSpec, to_tensor
from vitrail.surgery.recording import stream

CACHE = Path(__file__).parent.parent / "runs" / "detector"
FILES = {"Imagenette": "imagenette-128-val.parquet", "Pets": "pets-160-test.parquet"}
IMAGE_SETS = (*FILES, "canvases")
Array = np.ndarray[Any, np.dtype[Any]]
Build = Callable[[], tuple[nn.Module, int]]
"""Returns a model, and the size of its images."""


@dataclass(frozen=True)
class Norms:
    """Norms of the patches of B images: entering the first block (B, P), after each layer (L, B, P), and their grid."""

    entry: Tensor
    layers: Tensor
    grid: tuple[int, int, int]


def canvases(number: int, size: int) -> list[Any]:
    """Return images without content: flat colors, noise, gradients, and flat rectangles on flat ground."""
    from PIL import Image

    rng = np.random.default_rng(0)
    images = []
    for index in range(number):
        flat = np.broadcast_to(rng.integers(0, 256, 3), (size, size, 3)).astype(np.float64)
        kind = index % 4
        if kind == 1:
            flat = rng.integers(0, 256, (size, size, 3)).astype(np.float64)
        elif kind == 2:
            flat = flat * np.linspace(0, 1, size)[:, None, None]
        elif kind == 3:
            flat = flat.copy()
            top, left = rng.integers(0, size * 3 // 4, 2)
            height, width = rng.integers(size // 8, size // 2, 2)
            flat[top : top + height, left : left + width] = rng.integers(0, 256, 3)
        images.append(Image.fromarray(flat.round().astype(np.uint8)))
    return images


def spread(length: int, number: int) -> Array:
    """Return evenly spread row numbers."""
    return np.linspace(0, length - 1, number).round().astype(int)


def images_of(name: str, number: int, size: int, split: str = "") -> list[Any]:
    """Return images of a set, evenly spread over its file."""
    if name == "canvases":
        return canvases(number, size)
    import pyarrow.parquet as pq
    from PIL import Image

    file = FILES[name].replace("val", split) if split else FILES[name]
    column = pq.read_table(find_data() / file, columns=["image"])["image"]
    return [
        Image.open(io.BytesIO(column[int(place)].as_py()["bytes"])).convert("RGB")
        for place in spread(len(column), number)
    ]


def find_data() -> Path:
    """Return the folder of the data: ``shared/data`` beside the checkout or one of its parents."""
    for parent in Path(__file__).resolve().parents:
        if (folder := parent / "shared" / "data").is_dir():
            return folder
    raise SystemExit("no folder shared/data beside the checkout; see experiments/README.md, Data")


def collect(model: nn.Module, images: list[Any], size: int) -> Norms:
    """Run a model over images."""
    spec = find(model).adapter.input_spec(find(model).trunk)
    entries, layers, grid = [], [], (1, 1, 1)
    for start in range(0, len(images), 25):
        batch = to_tensor(images[start : start + 25], InputSpec((size, size), spec.mean, spec.std))
        (seen,) = stream(model, batch, ("entry", "norms"), batch_size=25)
        assert seen.entry is not None
        entries.append(seen.entry)
        layers.append(torch.stack([seen.norms[layer][:, seen.layout.patches] for layer in seen.layers]))
        grid = seen.layout.grid
    return Norms(torch.cat(entries), torch.cat(layers, 1), grid)


def cached(name: str, images: str, number: int, build: Build) -> Norms:
    """Return norms of a model on a set of images, from the cache if they are there."""
    path = CACHE / f"{name}-{images}-{number}.npz".replace("/", "_")
    if not path.exists():
        model, size = build()
        found = collect(model.eval(), images_of(images, number, size), size)
        CACHE.mkdir(parents=True, exist_ok=True)
        np.savez(path, entry=found.entry.numpy(), layers=found.layers.numpy().astype(np.float32), grid=found.grid)
    with np.load(path) as kept:
        grid = tuple(int(n) for n in kept["grid"])
        return Norms(torch.from_numpy(kept["entry"]), torch.from_numpy(kept["layers"]), grid)  # type: ignore[arg-type]


def timm_model(name: str, size: int, seed: int = 0, **options: Any) -> tuple[nn.Module, int]:
    """Return a model of timm with random weights."""
    import timm

    torch.manual_seed(seed)
    return timm.create_model(name, img_size=size, **options), size


def own_model(name: str, size: int, seed: int = 0, **options: Any) -> tuple[nn.Module, int]:
    """Return a model of ours with random weights."""
    torch.manual_seed(seed)
    return vitrail.create_model(name, image_size=size, **options), size


def shipped() -> tuple[nn.Module, int]:
    """Return the trained model of the package."""
    return load_model("vitrail:tiny"), 128


def trained(steps: int = 120, **options: Any) -> tuple[nn.Module, int]:
    """Return a small model after some steps of supervised training on Imagenette at 64 pixels."""
    import pyarrow.parquet as pq

    model, size = own_model(
        "vit_tiny_patch16", 64, patch_size=8, depth=6, width=128, heads=4, num_classes=10, **options
    )
    number = 2000
    images = to_tensor(images_of("Imagenette", number, size, "train"), find(model).adapter.input_spec(model))
    column = pq.read_table(find_data() / FILES["Imagenette"].replace("val", "train"), columns=["label"])["label"]
    labels = torch.tensor(column.to_pylist())[spread(len(column), number)]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(number, (32,), generator=generator)
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, size


UNTRAINED: dict[str, Build] = {
    **{
        f"timm {name}": partial(timm_model, name, size, **options)
        for name, size, options in (
            ("vit_tiny_patch16_224", 64, {"patch_size": 8}),
            ("vit_small_patch16_224", 112, {}),
            ("vit_base_patch32_224", 160, {}),
            ("deit_tiny_patch16_224", 112, {}),
            ("deit_tiny_distilled_patch16_224", 112, {}),
            ("deit3_small_patch16_224", 112, {}),
            ("vit_small_patch14_dinov2", 98, {}),
            ("vit_small_patch14_reg4_dinov2", 98, {}),
            ("vit_small_patch16_dinov3", 112, {}),
            ("beit_base_patch16_224", 80, {"depth": 6}),
            ("eva02_tiny_patch14_224", 98, {}),
            ("vit_base_patch16_clip_224", 80, {"depth": 6}),
            ("vit_base_patch16_siglip_224", 80, {"depth": 6}),
            ("vit_tiny_r_s16_p8_224", 128, {}),
            ("vit_wee_patch16_reg1_gap_256", 112, {}),
            ("vit_small_patch16_rope_224", 112, {}),
        )
    },
    "vitrail vit_tiny_patch16": partial(own_model, "vit_tiny_patch16", 128),
    "vitrail deit_tiny_patch16_distilled": partial(own_model, "deit_tiny_patch16_distilled", 64, patch_size=8),
    "vitrail cait_xxs24": partial(own_model, "cait_xxs24", 112),
    "vitrail cait_s24, 8 blocks": partial(own_model, "cait_s24", 112, depth=8),
}
"""Twenty architectures with random weights, at small sizes; BEiT, CLIP and SigLIP with six blocks."""

LAYER_SCALE: dict[str, Build] = {
    f"vitrail vit_tiny_patch16, LayerScale {value:g}": partial(
        own_model, "vit_tiny_patch16", 64, patch_size=8, layer_scale=value
    )
    for value in (1e-6, 1e-4, 0.1)
}
TRAINED: dict[str, Build] = {
    "vitrail:tiny (shipped)": shipped,
    "6 blocks, 120 steps": trained,
    "6 blocks, 120 steps, LayerScale 0.1": partial(trained, layer_scale=0.1),
}
SEEDS: dict[str, Build] = {
    f"{size} pixels, patch {patch}, seed {seed}": partial(own_model, "vit_tiny_patch16", size, seed, patch_size=patch)
    for size, patch in ((64, 8), (128, 16))
    for seed in range(6)
}
"""Untrained ViT-Ti whose last norms follow the patch embedding."""
