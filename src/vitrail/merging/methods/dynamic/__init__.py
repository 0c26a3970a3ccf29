"""Methods whose number of tokens depends on the image."""

from vitrail.merging.methods.dynamic.base import Calibrated, DynamicMethod
from vitrail.merging.methods.dynamic.threshold import Threshold

__all__ = ["Calibrated", "DynamicMethod", "Threshold"]
