"""The table in docs/models.md states what works."""

from __future__ import annotations

import pytest

from tests.adapters.families import FAMILIES
from tests.adapters.models_table import BEGIN, COLUMNS, END, PAGE, SLOW, read, table, tried
from tests.parity.models.cases import Case, require
from vitrail.adapters.registry import split_name

TEXT = PAGE.read_text(encoding="utf-8")
STALE = "the table in docs/models.md is stale: run python tools/models_table.py"


def test_every_family_has_its_row() -> None:
    stated = read(TEXT)
    assert list(stated) == list(FAMILIES), STALE
    assert TEXT.split(BEGIN)[1].split(END)[0] == table(stated), STALE


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_stated_is_what_works(family: str) -> None:
    columns = [column for column in COLUMNS if column not in SLOW]
    found, stated = tried(FAMILIES[family], columns), read(TEXT)[family]
    assert found == {column: stated[column] for column in columns}, STALE


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_stated_of_exports_is_what_works(family: str) -> None:
    assert tried(FAMILIES[family], SLOW) == {column: read(TEXT)[family][column] for column in SLOW}, STALE


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(name, one.case, id=name) for one in FAMILIES.values() for name in one.names.split()]
)
def test_names_are_those_of_a_library(name: str, case: Case) -> None:
    library, rest = split_name(name)
    assert library is not None
    assert library.looks_like(rest) or library.prefix == "open_clip"
    if library.prefix in ("timm", "torchvision"):
        if case.needs is not None:
            require(*case.needs)
        package = library.imported(name, "torchvision.models" if library.prefix == "torchvision" else "")
        assert rest in package.list_models()


def test_a_row_that_is_stale_is_noticed() -> None:
    changed = {**read(TEXT), "AST (transformers)": dict.fromkeys(COLUMNS, "It is not")}
    assert read(BEGIN + table(changed) + END) == changed
    assert table(changed) != table(read(TEXT))
