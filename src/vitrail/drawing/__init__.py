"""Drawing: stained glass from merged tokens of images, clips and sounds, and contact sheets."""

from vitrail.drawing.glass import stained_glass
from vitrail.drawing.groups import draw_groups
from vitrail.drawing.sheet import contact_sheet

__all__ = ["contact_sheet", "draw_groups", "stained_glass"]
