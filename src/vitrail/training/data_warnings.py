"""What is worth knowing about data before a run begins on it."""

from __future__ import annotations

from vitrail.data.dataset import Dataset
from vitrail.training.config.config import Config


def remarks(config: Config, examples: Dataset, held: Dataset | None) -> list[str]:
    """Say how many samples are left out for want of a class, and where there is nothing to tell apart."""
    apart = held is not None and not isinstance(config.validation, float)
    sets = {"data": examples, **({"validation": held} if apart and held is not None else {})}
    return [text for name, one in sets.items() if (text := left_out(name, one))] + _of_one_class(examples)


def left_out(name: str, examples: Dataset) -> str:
    """Say how many samples of a source were left out because they have no class; nothing where all have one."""
    if not examples.num_unlabeled:
        return ""
    columns = list(examples.classes)
    by = f"by one of {', '.join(columns)}" if len(columns) > 1 else f"by {columns[0]}"
    return (
        f"{name}: {examples.num_unlabeled} samples have no class {by} (none is given, or a negative number) and are "
        "left out."
    )


def _of_one_class(examples: Dataset) -> list[str]:
    found = []
    for (column, names), labels in zip(examples.classes.items(), examples.labels.T, strict=True):
        if labels.min() == labels.max():
            found.append(
                f"{column}: all {len(labels)} samples to learn from are of one class, {names[int(labels[0])]!r}. There "
                "is nothing to tell apart, and an accuracy of 100 % on such data says nothing. Expected two classes or "
                "more."
            )
    return found
