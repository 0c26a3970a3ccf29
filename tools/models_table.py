"""Write the table of supported families in docs/models.md: what works is tried on a small model of each."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.adapters.families import FAMILIES
from tests.adapters.models_table import BEGIN, COLUMNS, END, PAGE, table, tried


def main() -> None:
    """Replace the text between the markers."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    made = table({name: tried(family, COLUMNS) for name, family in FAMILIES.items()})
    PAGE.write_text(before + BEGIN + made + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
