"""Vision transformers of our own: ViT, DeiT, CaiT, with tokens of any roles; timm's equals, weight for weight."""

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
