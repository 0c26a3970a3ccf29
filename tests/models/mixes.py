"""Small ViTs with every combination of roles, entry points and visibility."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.extras import always
from tests.parity.models.cases import redraw
from vitrail.models import ViT, ViTConfig
from vitrail.tokens import Role, TokenSpec

SMALL: dict[str, Any] = {
    "image_size": 16, "patch_size": 4, "width": 24, "depth": 2, "heads": 2, "num_classes": 5,
}  # fmt: skip

ROLES = {
    "class": [TokenSpec("cls", Role.CLASS)],
    "classes": [TokenSpec("cls", Role.CLASS, count=3)],
    "distillation": [TokenSpec("teacher", Role.DISTILLATION)],
    "registers": [TokenSpec("registers", Role.REGISTER, count=2)],
    "tasks": [TokenSpec("colour", Role.TASK, classes=3), TokenSpec("weight", Role.TASK, classes=1, kind="regression")],
}
PLACES: dict[str, dict[str, Any]] = {
    "plain": {},
    "late": {"enters": 1},
    "reading": {"visible": False},
    "gathering": {"enters": -1},
    "mixed": {},
}


def mixes() -> dict[str, ViTConfig]:
    """Return all combinations of roles (with one, several or no class tokens) and entry points, by name."""
    found = {}
    for main, distilled, registers, tasks in product(("", "class", "classes"), *[(False, True)] * 3):
        chosen = {"distillation": distilled, "registers": registers, "tasks": tasks}
        names = [*([main] if main else []), *(name for name, there in chosen.items() if there)]
        for place, options in PLACES.items():
            if names or place == "plain":
                found["+".join([*names, place])] = config(names, place, options)
    return found


def config(names: list[str], place: str, options: dict[str, Any]) -> ViTConfig:
    """Return the specs of one combination; ``mixed`` gives each role its own entry point."""
    specs = [spec for name in names for spec in ROLES[name]]
    given = []
    for index, spec in enumerate(specs):
        changes = list(PLACES.values())[:4][(index + 3) % 4] if place == "mixed" else options
        given.append(TokenSpec.from_dict({**spec.to_dict(), **changes}))
    staged = any(spec.enters == -1 for spec in given)
    answered = any(name in ("class", "classes") for name in names)
    return ViTConfig(
        **SMALL,
        tokens=tuple(given),
        pool="token" if answered else "mean",
        class_attention=2 if staged else 0,
        talking_heads=place == "gathering",
        layer_scale=0.1 if place in ("gathering", "late") else None,
        position="rotary" if place == "reading" else "learned",
    )


MIXES = mixes()
FULLEST = tuple(f"classes+distillation+registers+tasks+{place}" for place in ("gathering", "mixed"))
COMPILED = always(FULLEST, MIXES)
"""All combinations for compilation, which takes seconds each; only two are not marked slow."""

WHOLE = ("class", "distillation", "registers", "tasks", "classes+distillation+registers+tasks")
SINGLE = always([name for name in MIXES if name.rpartition("+")[0] in ("", *WHOLE)], MIXES)
"""All combinations; each role alone and all together are not marked slow."""


def built(config: ViTConfig, dtype: torch.dtype = torch.float64, seed: int = 1) -> ViT:
    """Return a model in evaluation mode with redrawn parameters."""
    model = ViT(config).double()
    redraw(model, seed)
    return model.to(dtype).eval()


def random_images(config: ViTConfig, batch: int = 2, dtype: torch.dtype = torch.float64, size: Any = None) -> Tensor:
    """Return random inputs, the same at every call."""
    generator = torch.Generator().manual_seed(7)
    shape = (batch, config.in_chans, *(config.image if size is None else size))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
