"""The study of registers once more, for models that learn without labels (DINO's recipe)."""

from __future__ import annotations

from dataclasses import replace

from experiments.registers.study import STUDY as WITH_LABELS

STUDY = replace(
    WITH_LABELS,
    name="registers_dino",
    question="Do artifact tokens appear in models that learn without labels, and what do registers do?",
    base={**WITH_LABELS.base, "recipe": "dino", "optimizer": "adamw", "epochs": 6, "batch_size": 128},
    answer="neighbours",
    watch_every=1,
)
