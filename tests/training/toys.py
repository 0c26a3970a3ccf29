"""Helpers for training tests: images of three colors, a model of two blocks, and several processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
COLOURS = {"blue": (40, 40, 200), "green": (40, 200, 40), "red": (200, 40, 40)}

FIELDS: dict[str, Any] = {
    "model": "vit_tiny_patch16",
    "options": {"width": 32, "depth": 2, "heads": 2},
    "image_size": 32,
    "patch_size": 8,
    "preset": "tiny",
    "epochs": 3,
    "batch_size": 8,
    "validation": None,
    "tokens": "cls,register=2",
    "device": "cpu",
}
"""A run of some tenths of a second."""


def make_photos(folder: Path, each: int = 8) -> Path:
    """Write noisy images of three colors as class folders."""
    draw = np.random.default_rng(0)
    for name, color in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(each):
            pixels = draw.normal(color, 60, (36, 36, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def weights(folder: Path) -> dict[str, Tensor]:
    """The weights in a model folder."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two sets of weights agree in every bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference between two sets of weights."""
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def start(world: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start ``world`` Python processes as torchrun would, each with its rank and a shared rendezvous."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PYTHONFAULTHANDLER": "1"}
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def finish(processes: list[subprocess.Popen[str]], seconds: float = 240) -> list[tuple[int, str, str]]:
    """Wait for processes; return exit code, output and errors of each."""
    try:
        return [
            (process.returncode, *output) for process in processes for output in [process.communicate(timeout=seconds)]
        ]
    finally:
        for process in processes:
            process.kill()
