"""Which weights of a model decay, and which do not."""

from __future__ import annotations

from torch import nn

from vitrail.models.vit import ViT

LEARNED_TOKENS = (
    *("cls_token", "dist_token", "distillation_token", "register", "reg_token", "mask_token"),
    *("pos_embed", "position_embedding", "relative_position_bias_table", "latent"),
)
"""Parts of the names by which other libraries call tokens and positions; our models name theirs themselves."""


def undecayed(model: nn.Module) -> set[str]:
    """Name the parameters that weight decay leaves alone.

    These are norms, biases and scales, all of one dimension or less; what the model's ``no_weight_decay`` names (ours:
    positions, and tokens whose spec does not ask for decay); and tokens and positions of models that are not ours.
    """
    named = dict(model.named_parameters())
    found = {name for name, parameter in named.items() if parameter.ndim <= 1}
    for prefix, part in model.named_modules():
        told = getattr(part, "no_weight_decay", None)
        if callable(told):
            found |= {f"{prefix}.{name}" if prefix else name for name in told()}
    if not any(isinstance(part, ViT) for part in model.modules()):
        found |= {name for name in named if any(word in name for word in LEARNED_TOKENS)}
    return found & set(named)
