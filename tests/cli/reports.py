"""Fakes of inspections: they read the images as the real ones do, and count them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vitrail.data import Dataset, InputSpec
from vitrail.errors import VitrailError


class Report:
    """The attributes of a report that the commands use."""

    def __init__(self, name: str, images: int, skipped: list[tuple[str, str]], share: float = 0.02) -> None:
        self.model = {"name": name}
        self.data = {"images": images}
        self.norms = {"threshold": 12.5, "outlier_share": share, "onset": 1, "confidence": 1.0, "per_layer": [{}, {}]}
        self.norms["num_images"] = images
        self.next_step = "Use a model with registers."
        listed = [{"name": name, "reason": reason} for name, reason in skipped]
        self.problems = {"skipped": listed, "num_skipped": len(skipped), "num_not_finite_images": 0}
        self.cure = {"effect": "gone", "after": {"outlier_share": 0.001}, "control": {"outlier_share": share}}
        self.verdict = f"{name} has artifact tokens."

    def to_dict(self) -> dict[str, Any]:
        return vars(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict()) + "\n"

    def save(self, path: Path) -> None:
        path.write_text("<html>", encoding="utf-8")
        path.with_suffix(".json").write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str) -> Report:
        file = Path(path).with_suffix(".json")
        if not file.is_file():
            raise VitrailError(f"{file} could not be read")
        values = json.loads(file.read_text(encoding="utf-8"))
        return cls(values["model"]["name"], values["data"]["images"], [], values["norms"]["outlier_share"])


class Comparison:
    """The attributes of a comparison that the commands use."""

    def __init__(self, a: Report, b: Report) -> None:
        self.reports = a, b
        self.verdict = f"{a.model['name']} against {b.model['name']}."
        self.remarks = [] if a.data == b.data else ["The reports are about different images."]

    def to_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "remarks": self.remarks}

    def save(self, path: Path) -> None:
        path.write_text(self.verdict, encoding="utf-8")


class FakeReports:
    """Fakes of the functions of ``vitrail.report``, which record their calls."""

    Report = Report

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.sizes: list[tuple[int, ...]] = []
        self.error: BaseException | None = None

    def inspect(
        self,
        model: torch.nn.Module,
        data: Dataset,
        *,
        batch_size: int,
        progress: Callable[[str, int, int | None], object],
        name: str,
        **options: Any,
    ) -> Report:
        self.calls.append({"batch_size": batch_size, "name": name, **options})
        if self.error is not None:
            raise self.error
        seen = 0
        for batch in data.batches(InputSpec((32, 32)), batch_size):
            self.sizes.append(tuple(batch.images.shape))
            seen += len(batch.names)
            progress("running images", seen, len(data))
        progress("waiting", 1, None)
        return Report(name, seen, data.skipped)

    def compare(self, a: Report, b: Report) -> Comparison:
        return Comparison(a, b)
