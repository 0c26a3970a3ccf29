"""Heads: pooling, one linear head per role, fusion of their logits, and dense maps."""

from vitrail._deprecation import renamed_attributes
from vitrail.heads.by_role import Heads, Output
from vitrail.heads.dense import DecoderHead, DenseHead
from vitrail.heads.pooling import AttentionPool

__all__ = ["AttentionPool", "DecoderHead", "DenseHead", "Heads", "Output"]

__getattr__ = renamed_attributes(__name__, {"listen": "vitrail.adapters:head_outputs"})
