"""Warnings about data: samples without labels, and data with a single class."""

from __future__ import annotations

from vitrail.data.dataset import Dataset
from vitrail.training.config import Config


def data_notes(config: Config, dataset: Dataset, held: Dataset | None) -> list[str]:
    """Return notes on samples without a label and on columns with a single class."""
    notes = [unlabeled_note("data", dataset)]
    if held is not None and not isinstance(config.validation, float):  # else held out of the same data
        notes.append(unlabeled_note("validation", held))
    for (column, names), labels in zip(dataset.classes.items(), dataset.labels.T, strict=True):
        if labels.min() == labels.max():
            notes.append(
                f"{column}: all {len(labels)} training samples have the class {names[int(labels[0])]!r}, so accuracy "
                "is meaningless. Expected at least two classes."
            )
    return [text for text in notes if text]


def unlabeled_note(name: str, dataset: Dataset) -> str:
    """Return a note on the samples that were skipped because they have no label; empty if there are none."""
    if not dataset.num_unlabeled:
        return ""
    columns = ", ".join(dataset.classes)
    return f"{name}: skipped {dataset.num_unlabeled} samples without a label (none, or a negative number) in {columns}."
