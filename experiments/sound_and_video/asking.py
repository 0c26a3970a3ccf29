"""The study that is made of sounds and of clips: the arms, measures, tables and plots of `experiments.merging`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from experiments.common.data import Data
from experiments.common.study import Arm, Study
from experiments.merging.showing import draw, table
from experiments.merging.study import PLAIN, STUDY, look


def asked(
    name: str,
    question: str,
    data: Callable[[], Data],
    few: Callable[[], Data],
    r: int,
    base: Mapping[str, Any],
    reduced: Mapping[str, Any],
) -> Study:
    """Train without merging and with r, and measure each model for r from 0 to the cap."""
    return Study(
        name=name,
        question=question,
        data=data,
        few=few,
        base={
            "model": "vit_tiny_patch16", "preset": "small", "optimizer": "muon", "dtype": "bf16-weights", "mixup": 0.0,
            "cutmix": 0.0, **base,
        },
        arms=(Arm(PLAIN), Arm(f"trained with r = {r}", merge=f"r={r}")),
        reference=PLAIN,
        search={"lr": [1e-3, 3e-3]},
        timed=True,
        look=look,
        columns=STUDY.columns,
        table=table,
        draw=draw,
        reduced={
            "options": {"width": 32, "depth": 2, "heads": 2}, "preset": "tiny", "epochs": 2, "batch_size": 16,
            "dtype": "fp32", **reduced,
        },
    )  # fmt: skip
