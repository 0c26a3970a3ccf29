"""Linear probes of single tokens: position, pixels, and the class of the image."""

from vitrail.analysis.probes.classes import ClassProbe, ClassScore, TokenPerImage, one_token_each, probe_classes
from vitrail.analysis.probes.linear import LinearClassifier, LinearRegressor, fit_classifier, fit_regressor
from vitrail.analysis.probes.local import (
    PixelProbe,
    PixelScore,
    PositionProbe,
    PositionScore,
    cut_patches,
    probe_pixels,
    probe_positions,
)

__all__ = [
    "ClassProbe",
    "ClassScore",
    "LinearClassifier",
    "LinearRegressor",
    "PixelProbe",
    "PixelScore",
    "PositionProbe",
    "PositionScore",
    "TokenPerImage",
    "cut_patches",
    "fit_classifier",
    "fit_regressor",
    "one_token_each",
    "probe_classes",
    "probe_pixels",
    "probe_positions",
]
