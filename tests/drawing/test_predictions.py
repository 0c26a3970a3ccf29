"""Sheets of predictions: images, bars and maps in their places."""

import numpy as np
from PIL import Image

from vitrail.drawing.predictions import CHANGED, LIKELY, MARGIN, Column, prediction_sheet


def test_sheets_hold_image_and_maps_without_overlap() -> None:
    image = Image.new("RGB", (40, 20), (200, 30, 30))
    glass = Image.new("RGB", (40, 20), (10, 200, 10))
    guesses = {"label": [("käse|" * 20, 0.75), ("猫", 0.25)]}
    other = {"label": [("猫", 0.6), ("x", 0.4)]}
    map_ = Image.new("RGB", (40, 20), (5, 5, 250))
    columns = [
        Column(image, "unmerged", "", guesses, {"class": map_}),
        Column(glass, "strong", "", other, {"class": map_}),
    ]
    sheet = np.asarray(prediction_sheet("title", "detail", columns, "legend")).astype(int)

    def place(color: tuple[int, int, int]) -> tuple[int, int, int, int]:
        rows, columns = (np.abs(sheet - color).max(-1) <= 1).nonzero()
        return rows.min(), rows.max(), columns.min(), columns.max()

    red, green = place((200, 30, 30)), place((10, 200, 10))
    assert (red[1] - red[0] + 1, red[3] - red[2] + 1) == (210, 420)  # as large as it may be, in its own shape
    assert red[:2] == green[:2]
    assert red[2] == MARGIN
    assert red[3] < green[2]
    changed, likely = place(CHANGED), place(LIKELY)
    assert changed[2] == green[2]  # another class is first in the second column, and its bar is as long as it is likely
    assert changed[3] - changed[2] + 1 == round(0.6 * 420)
    assert likely[2] == red[2]
    assert red[1] < likely[0] < likely[1]
    blue = place((5, 5, 250))
    assert (blue[0] > likely[1], blue[2]) == (True, red[2])
