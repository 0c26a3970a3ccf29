"""The table of targets for one NVIDIA H200 in bf16.

Each row runs in its own process and is written as soon as it is done. Choose some rows if time is short:

    python benchmarks/h200.py vit-b-224 vit-l-224 --seconds 20 --timeout 280
"""

from __future__ import annotations

import sys
from typing import Any

from common import BenchConfig, Target, main

MODES = ("eager", "compiled", "blocks")


def _row(
    title: str, model: str, batch: int, r: int, *targets: float, eager: float | None = None, **more: Any
) -> Target:
    options: dict[str, Any] = {"dtype": "bf16", "device": "cuda", "modes": MODES, **more}
    floor, goal, efficiency = targets
    return Target(title, BenchConfig(f"timm:{model}", r=r, batch=batch, **options), floor, goal, efficiency, eager)


GRAPHS: dict[str, Any] = {"modes": ("eager", "graph", "compiled", "compiled-graph")}
BASE, LARGE = "vit_base_patch16_224", "vit_large_patch16_224"

ROWS = {
    "vit-b-224": _row("ViT-B/16 224, 256, r 16", BASE, 256, 16, 1.60, 2.0, 1.05, eager=1.0),
    "vit-l-224": _row("ViT-L/16 224, 256, r 8", LARGE, 256, 8, 1.75, 2.0, 1.05, eager=1.0),
    "vit-l-384": _row("ViT-L/16 384, 64, r 23", "vit_large_patch16_384", 64, 23, 1.80, 2.0, 1.05, eager=1.0),
    "dinov2-l-518": _row(
        "DINOv2-L/14 with registers 518, 16, r 50", "vit_large_patch14_reg4_dinov2", 16, 50, 1.75, 2.0, 1.05, eager=1.0
    ),
    "one-picture": _row("ViT-B/16 224, one image, r 16", BASE, 1, 16, 1.05, 1.25, 1.0, **GRAPHS),
    "training": _row("ViT-L/16 224, training step, 128, r 8", LARGE, 128, 8, 1.6, 1.9, 0.95, train=True),
}


if __name__ == "__main__":
    sys.exit(main(ROWS, __doc__, __file__, sys.argv[1:]))
