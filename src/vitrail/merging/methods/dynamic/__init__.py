"""Methods whose number of tokens depends on the image."""

from vitrail.merging.methods.dynamic.base import Calibrated, DynamicMethod
from vitrail.merging.methods.dynamic.entropy import Entropy
from vitrail.merging.methods.dynamic.identical import Identical
from vitrail.merging.methods.dynamic.local_global import LocalGlobal
from vitrail.merging.methods.dynamic.threshold import Threshold

__all__ = ["Calibrated", "DynamicMethod", "Entropy", "Identical", "LocalGlobal", "Threshold"]
