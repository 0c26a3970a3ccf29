"""``from_timm`` and ``to_timm``: convert models with their weights; outputs stay equal."""

from __future__ import annotations

import torch
from torch import nn

from vitrail.models.saving import load_states
from vitrail.models.timm.config import build_timm, read_config, refuse_changed
from vitrail.models.timm.weights import check_vit, load_timm_state_dict, timm_state_dict
from vitrail.models.vit import ViT


def from_timm(model: nn.Module) -> ViT:
    """Convert timm's ``VisionTransformer`` (including DeiT and DINOv2) or ``Cait`` to a `ViT`, copying the weights.

    Raises :class:`~vitrail.errors.UnsupportedModel` if the model has a part that `ViT` does not have.
    """
    config = read_config(model)
    states = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with torch.device("meta"):
        converted = ViT(config)
    load_timm_state_dict(converted, states, assign=True)
    return converted.train(model.training)


def to_timm(model: ViT) -> nn.Module:
    """Convert a `ViT` to a timm model, copying the weights; raise if timm has no equal."""
    check_vit(model)
    refuse_changed(model)
    converted = build_timm(model.config)
    states = {name: value.detach().clone() for name, value in timm_state_dict(model).items()}
    load_states(converted, states, assign=True)
    return converted.train(model.training)
