"""Small models, a fake clock and made-up results."""

from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import nn

from vitrail._timing import Spread
from vitrail.bench import BenchConfig, BenchResult, Row
from vitrail.bench._modes import Runner
from vitrail.bench.benchmark import make_row

NAME = "timm:vit_tiny_patch16_224"


class CountingClock:
    """A clock that advances a second per reading, and reports a quarter second for all work."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        self.seconds += 1.0
        return self.seconds

    def time(self, work: Callable[[], object]) -> float:
        work()
        return 0.25


def tiny(depth: int = 3) -> nn.Module:
    """Return a ViT with 17 tokens."""
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=depth, num_classes=10).eval()


def quick(**options: Any) -> BenchConfig:
    """Return a benchmark that takes a moment."""
    return BenchConfig(NAME, **{"r": 2, "batch": 2, "device": "cpu", "seconds": 0.01, **options})


def row(variant: str, mode: str, ms: float, **options: Any) -> Row:
    """Return a row with a median and a small spread."""
    config = options.pop("config", BenchConfig(NAME, r=4, batch=8))
    spread = Spread(ms / 1e3, 0.99 * ms / 1e3, 1.01 * ms / 1e3, 0.98 * ms / 1e3, samples=9, loops=2)
    runner = Runner(lambda index: None, lambda: 0, **{"peak": 5_000_000, "ready_s": 0.5, **options})
    return make_row(config, variant, mode, runner, spread, 1_000_000_000)


def result(*rows: Row, **options: Any) -> BenchResult:
    """Return a result with these rows."""
    given: dict[str, Any] = {
        "config": BenchConfig(NAME, r=4, batch=8, modes=("eager", "compiled")),
        "failed": (),
        "size": (224, 224),
        "tokens_before": 197,
        "tokens_per_layer": tuple(197 - 4 * layer for layer in range(1, 13)),
        "flops_before": 2_000_000_000,
        "flops_after": 1_000_000_000,
        "check": None,
        "kernels": {"kernels": "reference", "why": "no CUDA device"},
        "startup_s": None,
        "machine": {
            "date": "2026-01-02T03:04:05+00:00",
            "device": "Some GPU",
            "cuda": "13.0",
            "python": "3.11",
            "versions": {"torch": "2.11"},
        },
    }
    return BenchResult(rows=rows, **{**given, **options})


FULL = (
    row("unmerged", "eager", 24.0),
    row("unmerged", "compiled", 20.0),
    row("sliced", "eager", 15.0),
    row("sliced", "compiled", 12.0),
    row("merged", "eager", 12.5),
    row("merged", "compiled", 16.0),
)
