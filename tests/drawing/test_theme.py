"""The palette is complete, readable, and what pages and plots use."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from vitrail.drawing import theme


def luminance(color: str) -> float:
    parts = [part / 255 for part in theme.rgb(color)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_text_is_readable(palette: dict[str, str]) -> None:
    for name in ("ink", "soft", "cobalt", "ruby", "green"):
        for ground in ("page", "card"):
            assert contrast(palette[name], palette[ground]) >= 4.5, (name, ground)
    assert contrast(palette["amber"], palette["card"]) >= 3.0
    assert contrast(palette["on-cobalt"], palette["cobalt"]) >= 4.5


def test_both_palettes_have_the_same_names() -> None:
    assert theme.LIGHT.keys() == theme.DARK.keys()
    assert len(set(theme.SERIES)) == len(theme.SERIES)


@pytest.mark.parametrize(("place", "scripted"), [("vitrail.report", set()), ("vitrail.web", {"at"})])
def test_style_sheets_use_variables_that_exist(place: str, scripted: set[str]) -> None:
    text = files(place).joinpath("page", "style.css").read_text("utf-8")
    known = set(re.findall(r"--([\w-]+):", theme.css() + text))
    assert set(re.findall(r"var\(--([\w-]+)", text)) <= known | scripted


def test_the_style_sheet_has_both_palettes() -> None:
    text = theme.css()
    assert text.count(f"--cobalt: {theme.LIGHT['cobalt']}") == 1
    assert text.count(f"--cobalt: {theme.DARK['cobalt']}") == 2
    assert '"DejaVu Sans", system-ui' in text
