"""Analyses of the tokens of a model: functions on tensors that return frozen results with ``to_dict()``.

==============  ==============================================================================================
``norms``       are there artifact tokens, how many, and from which layer on?
``redundancy``  are outlier patches redundant, near the border, in the background?
``attention``   attention maps by token and head, rollout, attention mass between roles, overlap
``features``    patch features from keys and values; PCA
``probes``      position, pixel and class probes of single tokens; linear probes
``discovery``   object discovery: LOST, TokenCut, CorLoc
``downstream``  frozen features: classification, segmentation, depth, a small decoder, boundary F-score
``roles``       are special tokens copies of each other, or do they specialize?
``survey``      norms over checkpoints or models
``residuals``   how much does each layer add to the residual stream, and which does LayerScale hold back?
``statistics``  splits and confidence intervals over images
==============  ==============================================================================================

scikit-learn and scipy are test oracles only. Ours run on the device of the features, in bounded memory, and the same
way each time; small formulas (AUC, Wilson interval) are not worth a dependency.
"""

__all__ = [
    "attention",
    "discovery",
    "downstream",
    "features",
    "norms",
    "probes",
    "redundancy",
    "residuals",
    "result",
    "roles",
    "statistics",
    "survey",
]
