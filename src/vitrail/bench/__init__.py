"""How fast merging is: a model unmerged, merged, and with its tokens cut off for free, measured by turns.

>>> from vitrail.bench import BenchConfig, run
>>> config = BenchConfig("timm:vit_base_patch16_224", r=16, batch=256, dtype="bf16", device="cuda")
>>> result = run(config)                        # doctest: +SKIP
>>> result.speedup, result.efficiency           # doctest: +SKIP

`time_models` takes models that are there already, changed in whatever way.
"""

from vitrail.bench.check import Check
from vitrail.bench.config import FORMS, VARIANTS, BenchConfig
from vitrail.bench.measuring import run
from vitrail.bench.models import copy_model
from vitrail.bench.result import BenchResult, Failure, Row
from vitrail.bench.several import ModelTimes, Timed, time_models

__all__ = [
    "FORMS",
    "VARIANTS",
    "BenchConfig",
    "BenchResult",
    "Check",
    "Failure",
    "ModelTimes",
    "Row",
    "Timed",
    "copy_model",
    "run",
    "time_models",
]
