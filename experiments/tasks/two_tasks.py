"""The study made for every pair of tasks: the same three arms, search and measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common.datasets import Data
from experiments.common.study import Arm, Rows, Study
from experiments.tasks.measure import measure
from experiments.tasks.report import SHARED, TOKENS, TWICE, plot_all, table


def two_task_study(
    name: str,
    question: str,
    tasks: tuple[str, str],
    data: Callable[[], Data],
    reduced_data: Callable[[], Data],
    base: Mapping[str, Any],
    reduced: Mapping[str, Any],
    plot: Callable[[Study, Rows, Path], None] | None = None,
) -> Study:
    """Return a study of one class token for two tasks, one token for each task, and two tokens for each task.

    The last arm shows how far two tokens with the same task differ: the task is not what separates them.
    """
    return Study(
        name=name,
        question=question,
        data=data,
        reduced_data=reduced_data,
        base={
            "model": "vit_tiny_patch16", "preset": "small", "optimizer": "muon", "tasks": tasks,
            **base,
        },
        arms=(
            Arm(SHARED, heads="shared"),
            Arm(TOKENS, heads="tokens"),
            Arm(TWICE, tokens=",".join(f"{task}=2" for task in tasks), tuned_as=TOKENS),
        ),
        reference=SHARED,
        output=f"task.{tasks[0]}",
        other_outputs=(f"task.{tasks[1]}",),
        search={"lr": [1e-3, 3e-3]},
        measure=measure,
        table=table,
        plot=partial(plot_all, own=plot),
        reduced={
            "options": {"width": 32, "depth": 2, "heads": 2}, "preset": "tiny", "epochs": 2, "batch_size": 16,
            **reduced,
        },
    )  # fmt: skip
