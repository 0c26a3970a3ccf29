"""Draw one image merged by every method to the same share of its patches: ``docs/images/methods.jpg``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from PIL import Image

import vitrail
from vitrail.data import samples
from vitrail.drawing import contact_sheet
from vitrail.errors import VitrailError

TARGET = Path(__file__).resolve().parents[1] / "docs" / "images" / "methods.jpg"
KEEP = 0.3
SIDE, COLUMNS = 224, 6
FREE: dict[str, Any] = {"ats": {}, "mutual": {}, "local_global": {}, "identical": {}}
"""Methods that decide by themselves how much to merge."""


def drawing(model: Any, image: Image.Image, method: str) -> Image.Image | None:
    """Return the stained glass of a method; None where it needs training."""
    options = FREE.get(method, {"keep": KEEP})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with vitrail.merge(model, method=method, **options) as merging:
                if method == "threshold":
                    merging.calibrate([str(path) for path in samples().values()], keep=KEEP)
                return merging.draw(image)[0]
    except VitrailError:
        return None


def main() -> None:
    """Write the sheet."""
    model = vitrail.load_model("vitrail:tiny")
    image = Image.open(samples()["chelsea"]).convert("RGB")
    side = min(image.size)
    image = image.crop((0, 0, side, side)).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    drawn = {"unmerged": image, **{name: drawing(model, image, name) for name in vitrail.list_methods()}}
    found = [(name, one) for name, one in drawn.items() if one is not None]
    sheet = contact_sheet([one for _, one in found], [name for name, _ in found], columns=COLUMNS)
    sheet.save(TARGET, quality=85)


if __name__ == "__main__":
    main()
