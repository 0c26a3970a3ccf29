"""``.pt2``: programs of ``torch.export``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from vitrail.errors import InvalidOption
from vitrail.export.base import Format, Traced, Written
from vitrail.export.program import quiet

NOTES = "vitrail.json"
"""The extra file inside, with the model's settings."""


class Pt2(Format):
    """A program that ``torch.export.load`` reads."""

    name, suffix = "pt2", ".pt2"

    def check(self, dtype: torch.dtype, opset: int | None) -> None:
        if opset is not None:
            raise InvalidOption(f"opset={opset} is a version of ONNX's operators; leave it out for format='pt2'")

    def write(self, traced: Traced, path: Path, opset: int | None) -> None:
        with quiet():
            torch.export.save(traced.program, path, extra_files={NOTES: json.dumps(traced.notes)})

    def read(self, path: Path, outputs: tuple[str, ...]) -> Written:
        with quiet():
            return WrittenPt2(torch.export.load(path), outputs)


class WrittenPt2(Written):
    """A program that was read back."""

    def __init__(self, program: torch.export.ExportedProgram, outputs: tuple[str, ...]) -> None:
        self.program = program
        self.outputs = outputs
        self.module = program.module()

    def run(self, images: Tensor) -> dict[str, Tensor]:
        result = self.module(images)
        return {self.outputs[0]: result} if isinstance(result, Tensor) else dict(result)

    def values(self) -> Iterator[tuple[tuple[str, ...], tuple[int | None, ...]]]:
        for node in self.program.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                scopes = tuple(str(entry[0]) for entry in node.meta.get("nn_module_stack", {}).values())
                yield scopes, tuple(side if isinstance(side, int) else None for side in value.shape)
