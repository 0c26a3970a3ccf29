"""The study that is made of every pair of tasks: the same three arms, search and measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common.data import Data
from experiments.common.study import Arm, Rows, Study
from experiments.tasks.looking import look
from experiments.tasks.showing import SHARED, TOKENS, TWICE, draw_all, table


def asked(
    name: str,
    question: str,
    tasks: tuple[str, str],
    data: Callable[[], Data],
    few: Callable[[], Data],
    base: Mapping[str, Any],
    reduced: Mapping[str, Any],
    draw: Callable[[Study, Rows, Path], None] | None = None,
) -> Study:
    """Compare one class token that answers two tasks, a token for each task, and two tokens for each.

    The last arm says how far two tokens differ that have one task: it is not the task that parts them.
    """
    return Study(
        name=name,
        question=question,
        data=data,
        few=few,
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
        answer=f"task.{tasks[0]}",
        also=(f"task.{tasks[1]}",),
        search={"lr": [1e-3, 3e-3]},
        look=look,
        table=table,
        draw=partial(draw_all, own=draw),
        reduced={
            "options": {"width": 32, "depth": 2, "heads": 2}, "preset": "tiny", "epochs": 2, "batch_size": 16,
            **reduced,
        },
    )  # fmt: skip
