"""Speed beyond the table of targets, on one NVIDIA H200: autocast, training, other models and dtypes, small batches.

Time saved should be FLOPs saved: rows of 32 images and more have the target 0.95 × the ratio of multiply-adds, smaller
batches at least 1.2 × the unmerged model. Each row runs in its own process and is written as soon as it is done:

    python benchmarks/breadth.py autocast so400m --modes eager,capture --seconds 5
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import BenchConfig, Target, main

BASE, LARGE = "timm:vit_base_patch16_224", "timm:vit_large_patch16_224"
FAST = ("eager", "capture", "compiled")
DINOV2_L = {
    "architectures": ["Dinov2Model"], "model_type": "dinov2", "hidden_size": 1024, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 518, "patch_size": 14,
}  # fmt: skip
"""DINOv2-L as transformers builds it."""


def described(config: dict[str, Any]) -> str:
    """Write the configuration of a model of transformers to a directory, and return the model's name."""
    folder = Path(tempfile.gettempdir()) / f"vitrail-breadth-{config['model_type']}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return f"hf:{folder}"


def row(title: str, model: str, batch: int, r: int, least: float | None = None, **more: Any) -> Target:
    """Return a row: its target is 0.95 × the ratio of multiply-adds, or ``least`` × the unmerged model."""
    options: dict[str, Any] = {"dtype": "bf16", "device": "cuda", "modes": FAST, **more}
    return Target(title, BenchConfig(model, r=r, batch=batch, **options), least, flops_share=None if least else 0.95)


TRAINING: dict[str, Any] = {"autocast": True, "train": True, "modes": ("eager", "compiled")}
OVERHEAD: dict[str, Any] = {"compile_mode": "reduce-overhead"}

ROWS = {
    "autocast": row("ViT-B/16 224, 256, r 16, autocast", BASE, 256, 16, autocast=True),
    "training-b": row("ViT-B/16 224, training step, 128, r 16, autocast", BASE, 128, 16, 1.6, **TRAINING),
    "training-l": row("ViT-L/16 224, training step, 64, r 8, autocast", LARGE, 64, 8, 1.75, **TRAINING),
    "so400m": row("SigLIP so400m 384, 32, r 25", "timm:vit_so400m_patch14_siglip_384", 32, 25),
    "dinov2-l": row("DINOv2-L 518 (transformers), 16, r 50", described(DINOV2_L), 16, 50),
    "eva02-l": row("EVA02-L 448, 16, r 40", "timm:eva02_large_patch14_448", 16, 40),
    "dinov3-l-256": row("DINOv3-L 256, 128, r 10", "timm:vit_large_patch16_dinov3", 128, 10),
    "dinov3-l-512": row("DINOv3-L 512, 32, r 42", "timm:vit_large_patch16_dinov3", 32, 42, size=(512, 512)),
    "vit-l-32": row("ViT-L/16 224, 32, r 8", LARGE, 32, 8),
    "vit-l-8": row("ViT-L/16 224, 8, r 8", LARGE, 8, 8, 1.2),
    "vit-b-8": row("ViT-B/16 224, 8, r 16", BASE, 8, 16, 1.2, **OVERHEAD),
    "vit-b-1": row("ViT-B/16 224, 1, r 16", BASE, 1, 16, 1.2, **OVERHEAD),
    "tf32": row("ViT-B/16 224, 64, r 16, fp32 with TF32", BASE, 64, 16, dtype="fp32"),
}


if __name__ == "__main__":
    import torch

    torch.set_float32_matmul_precision("high")
    sys.exit(main(ROWS, __doc__, __file__, sys.argv[1:]))
