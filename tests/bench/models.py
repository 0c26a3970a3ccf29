"""Small models, a clock and made-up results for the tests of measuring."""

from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import nn

from vitrail.bench import BenchConfig, BenchResult, Row
from vitrail.bench.result import make_row
from vitrail.bench.timing import Spread

NAME = "timm:vit_tiny_patch16_224"


class CountingClock:
    """Every look at the clock takes a second, every timed piece of work a quarter of one."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        self.seconds += 1.0
        return self.seconds

    def time(self, work: Callable[[], object]) -> float:
        work()
        return 0.25


def tiny(depth: int = 3) -> nn.Module:
    """17 tokens, three blocks."""
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=depth, num_classes=10).eval()


def quick(**options: Any) -> BenchConfig:
    """A measurement of a moment."""
    return BenchConfig(NAME, **{"r": 2, "batch": 2, "device": "cpu", "seconds": 0.01, "inputs": 2, **options})


def row(variant: str, form: str, ms: float, **options: Any) -> Row:
    """A row with a median, and a little spread around it."""
    config = options.pop("config", BenchConfig(NAME, r=4, batch=8))
    spread = Spread(ms / 1e3, 0.99 * ms / 1e3, 1.01 * ms / 1e3, 0.98 * ms / 1e3, samples=9, loops=2)
    given = {"peak": 5_000_000, "ready_s": 0.5, **options}
    return make_row(config, variant, form, spread, 1_000_000_000, **given)


def result(*rows: Row, **options: Any) -> BenchResult:
    """A result of these rows."""
    given: dict[str, Any] = {
        "config": BenchConfig(NAME, r=4, batch=8, forms=("eager", "compiled")),
        "failed": (),
        "size": (224, 224),
        "tokens_before": 197,
        "tokens_per_layer": tuple(197 - 4 * layer for layer in range(1, 13)),
        "flops_before": 2_000_000_000,
        "flops_after": 1_000_000_000,
        "check": None,
        "kernels": "reference",
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
