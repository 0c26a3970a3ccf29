"""The study of registers for models trained without labels, by DINO's recipe."""

from __future__ import annotations

from dataclasses import replace

from experiments.registers.study import STUDY as WITH_LABELS

STUDY = replace(
    WITH_LABELS,
    name="registers_dino",
    question="Do artifact tokens appear in models trained without labels, and what do registers do?",
    base={**WITH_LABELS.base, "recipe": "dino", "optimizer": "adamw", "epochs": 6, "batch_size": 128},
    output="neighbours",
    monitor_every=1,
)
