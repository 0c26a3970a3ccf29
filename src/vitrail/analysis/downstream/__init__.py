"""Frozen features on downstream tasks.

============  ========================================================================
``linear``    classification, semantic segmentation and depth by one linear map
``decoder``   segmentation by a small convolutional decoder
``boundary``  boundary F-score of predicted masks
============  ========================================================================
"""

from vitrail.analysis.downstream.linear import (
    MAX_PATCHES,
    Classification,
    Dense,
    Depth,
    Segmentation,
    evaluate_classification,
    evaluate_depth,
    evaluate_segmentation,
)

__all__ = [
    "MAX_PATCHES",
    "Classification",
    "Dense",
    "Depth",
    "Segmentation",
    "evaluate_classification",
    "evaluate_depth",
    "evaluate_segmentation",
]
