"""Vision transformers (ViT, DeiT, CaiT) with special tokens of any roles, weight-compatible with timm."""

from vitrail.models.config import ViTConfig
from vitrail.models.registry import MODELS, create_model, list_models
from vitrail.models.timm.convert import from_timm, to_timm
from vitrail.models.timm.weights import load_timm_state_dict, timm_state_dict
from vitrail.models.vit import ViT

__all__ = [
    "MODELS",
    "ViT",
    "ViTConfig",
    "create_model",
    "from_timm",
    "list_models",
    "load_timm_state_dict",
    "timm_state_dict",
    "to_timm",
]
