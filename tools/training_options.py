"""Write the table of training options in docs/training.md, generated from `vitrail.training.config`."""

from __future__ import annotations

from pathlib import Path

from vitrail.training.config import options_table

PAGE = Path(__file__).parents[1] / "docs" / "training.md"
BEGIN, END = "<!-- options -->\n", "<!-- end of options -->"


def main() -> None:
    """Replace the text between the markers."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + options_table() + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
