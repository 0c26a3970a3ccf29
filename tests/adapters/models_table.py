"""The table of supported families: what works for each is tried on its small model, and read back from the page."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.adapters.families import FAMILIES, Family
from tests.surgery.models import distance, main_output
from vitrail.errors import ExportError, SaturatedWarning, VitrailError
from vitrail.export import export

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->"


def merges(model: nn.Module, inputs: Tensor) -> None:
    plain = main_output(model(inputs))
    with vitrail.merge(model, r=2):
        assert distance(main_output(model(inputs)), plain) > 1e-4
    assert torch.equal(main_output(model(inputs)), plain)


def records(model: nn.Module, inputs: Tensor) -> None:
    found = vitrail.record(model, inputs, ("embedding", "norms", "attention"), queries=range(2))
    assert len(found) == len(inputs)
    first = next(iter(found.attention.values()))  # blocks that run as they are record none
    assert torch.allclose(first.sum(-1), torch.ones(()), atol=1e-5)


def inspects(model: nn.Module, inputs: Tensor) -> None:
    report = vitrail.inspect(model, inputs, probes=False, discovery=False, cure=False)
    assert report is not None
    assert report.data["images"] == len(inputs)


def takes_tokens(model: nn.Module, inputs: Tensor) -> None:
    plain = main_output(model(inputs))
    added = vitrail.add_tokens(model, registers=2)
    assert distance(main_output(model(inputs)), plain) < 1e-4
    added.remove()


def takes_registers(model: nn.Module, inputs: Tensor) -> None:
    plain = main_output(model(inputs))
    with vitrail.test_time_registers(model, neurons={0: [1, 3]}):
        assert main_output(model(inputs)).shape == plain.shape
    assert torch.equal(main_output(model(inputs)), plain)


def exports(model: nn.Module, inputs: Tensor) -> None:
    merging = vitrail.merge(model, r=2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        try:
            export(model, path, example=inputs)
        except ExportError:
            export(model, path, example=inputs, batch=len(inputs))
            merging.remove()
            with pytest.raises(ExportError):  # the library's own model
                export(model, path, example=inputs)
            raise ExportError("not for any batch size, as the library's own model, but for a fixed one") from None


COLUMNS: dict[str, Callable[[nn.Module, Tensor], None]] = {
    "merge": merges,
    "record": records,
    "inspect": inspects,
    "add tokens": takes_tokens,
    "test-time registers": takes_registers,
    "export": exports,
}
"""What is tried; each raises one of Vitrail's errors where it is refused."""

SLOW = ("export",)

Results = Mapping[str, str]
"""For each column ``yes``, or the reason why not."""


def tried(family: Family, columns: Iterable[str]) -> dict[str, str]:
    """Try some columns on fresh models of a family."""
    found = {}
    for column in columns:
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore", SaturatedWarning)  # small models with windows
                COLUMNS[column](family.case.model(torch.float32), family.case.images(torch.float32, 4))
        except VitrailError as error:
            reason = re.split(r"[;:.] | \(", str(error).replace("|", "/"))[0].rstrip(".")
            found[column] = reason[0].upper() + reason[1:]
        else:
            found[column] = "yes"
    return found


def table(results: Mapping[str, Results]) -> str:
    """Return the table in Markdown, with the reasons below it."""
    head = ["models", "for example", *COLUMNS]
    rows = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
    reasons: list[str] = []
    for name, family in FAMILIES.items():
        cells = []
        for column in COLUMNS:
            answer = results[name][column]
            if answer != "yes" and answer not in reasons:
                reasons.append(answer)
            cells.append("yes" if answer == "yes" else f"no ({reasons.index(answer) + 1})")
        names = "<br>".join(f"`{one}`" for one in family.names.split())
        rows.append("| " + " | ".join([name, names, *cells]) + " |")
    below = [f"{number}. {reason}." for number, reason in enumerate(reasons, 1)]
    return "\n".join([*rows, "", *below, ""])


def read(text: str) -> dict[str, Results]:
    """Return the results that a page states."""
    part = text.split(BEGIN)[1].split(END)[0]
    lines = part.splitlines()
    reasons = {found[1]: found[2] for line in lines if (found := re.fullmatch(r"(\d+)\. (.*)\.", line))}
    stated = {}
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 + len(COLUMNS):
            stated[cells[0]] = {
                column: "yes" if cell == "yes" else reasons[cell[4:-1]]
                for column, cell in zip(COLUMNS, cells[2:], strict=True)
            }
    return stated
