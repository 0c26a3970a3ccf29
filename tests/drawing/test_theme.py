"""The palette is complete, readable, and what pages and plots use."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

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


def test_drawings_in_notebooks_are_seen_on_white_and_on_black() -> None:
    for name, color in theme.ON_ANY_PAGE.items():
        assert min(contrast(color, "#ffffff"), contrast(color, "#111111")) >= 3.0, name


def test_the_style_sheet_of_the_site_has_the_colors_of_the_theme() -> None:
    text = (Path(__file__).parents[2] / "docs" / "theme" / "site.css").read_text("utf-8")
    used = set(re.findall(r"#[0-9a-f]{6}", text))
    assert used
    assert used <= {*theme.LIGHT.values(), *theme.DARK.values()}


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
