"""Norms of patch tokens: artifact tokens, their threshold, and the layer they start in.

``docs/detector.md`` describes the detector and its error rates.
"""

from vitrail._deprecation import renamed_attributes
from vitrail.analysis.norms._histogram import Histogram
from vitrail.analysis.norms.accumulator import LayerNorms, NormAccumulator, Norms, NotFinite, analyze_norms
from vitrail.analysis.norms.prominence import prominence
from vitrail.analysis.norms.threshold import Threshold, Verdict, find_threshold

__all__ = [
    "Histogram",
    "LayerNorms",
    "NormAccumulator",
    "Norms",
    "NotFinite",
    "Threshold",
    "Verdict",
    "analyze_norms",
    "find_threshold",
    "prominence",
]

__getattr__ = renamed_attributes(__name__, {"analyse_norms": "vitrail.analysis.norms:analyze_norms"})
