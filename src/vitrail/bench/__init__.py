"""Benchmarks: a model unmerged, merged, and with its tokens cut off for free, timed interleaved.

>>> from vitrail.bench import BenchConfig, run
>>> config = BenchConfig("timm:vit_base_patch16_224", r=16, batch=256, dtype="bf16", device="cuda")
>>> result = run(config)                        # doctest: +SKIP
>>> result.speedup, result.efficiency           # doctest: +SKIP

`time_models` times models of your own, merged or changed in any way.
"""

from vitrail._deprecation import renamed_attributes
from vitrail.bench._agreement import Check
from vitrail.bench.benchmark import ModelTimes, Timed, run, time_models
from vitrail.bench.config import MODES, VARIANTS, BenchConfig
from vitrail.bench.result import BenchResult, Failure, Row
from vitrail.surgery.copies import copy_model

__all__ = [
    "MODES",
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

__getattr__ = renamed_attributes(__name__, {"FORMS": "vitrail.bench:MODES"})
