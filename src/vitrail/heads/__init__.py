"""Heads: pooling, one linear head per role, fusion of their logits, and dense maps."""

from vitrail.heads.by_role import Heads, Output
from vitrail.heads.dense import DenseHead
from vitrail.heads.outputs import listen
from vitrail.heads.pooling import AttentionPool

__all__ = ["AttentionPool", "DenseHead", "Heads", "Output", "listen"]
