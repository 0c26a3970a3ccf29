"""The notebooks in ``examples``: every cell runs, on small data; what they show is a card; no outputs are kept."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.drawing.test_notebook import check_card

FOLDER = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("artifacts_in_my_model", "faster_in_five_minutes", "train_with_tasks_and_registers")
SMALL = {"images_per_split, epochs = 600, 12": "images_per_split, epochs = 60, 1"}
"""Lines that tests replace, so that a notebook takes seconds."""


def cells(name: str) -> list[dict[str, Any]]:
    notebook: dict[str, Any] = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    found: list[dict[str, Any]] = notebook["cells"]
    return found


def run_cell(source: str, place: str, namespace: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; return the value of its last line if that is an expression."""
    tree = ast.parse(source, place)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, place, "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), place, "eval"), namespace)


def test_every_notebook_is_tested() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_no_outputs_are_kept(name: str) -> None:
    found = cells(name)
    assert len({cell["id"] for cell in found}) == len(found)
    assert found[0]["cell_type"] == "markdown"
    assert found[0]["source"][0].startswith("# ")
    for cell in found:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.filterwarnings("ignore::vitrail.errors.VitrailWarning")
@pytest.mark.parametrize("name", NAMES)
def test_cells_run_in_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cards = 0
    for number, cell in enumerate(cells(name)):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            for line, small in SMALL.items():
                source = source.replace(line, small)
            shown = run_cell(source, f"{name}, cell {number}", namespace)
            if hasattr(shown, "_repr_html_"):
                check_card(shown._repr_html_(), limit=40_000)
                cards += 1
    assert cards >= 2
