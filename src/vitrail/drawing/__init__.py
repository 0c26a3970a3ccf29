"""Drawing: stained glass from merged tokens, and contact sheets."""

from vitrail.drawing.glass import stained_glass
from vitrail.drawing.sheet import contact_sheet

__all__ = ["contact_sheet", "stained_glass"]
