"""Projectors of vision-language models: what turns a tower's patches into tokens of the language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from vitrail.adapters.base import VisualTokens
from vitrail.errors import UnsupportedModel
from vitrail.tokens import TokenLayout

_PROJECTORS = ("multi_modal_projector", "connector")
"""Attributes of models around a trunk that hold its projector."""

_SEQUENCES = (
    "Gemma3Model",
    "Idefics3Model",
    "InternVLModel",
    "LlavaModel",
    "PaliGemmaModel",
    "SmolVLMModel",
    "VipLlavaModel",
)
"""Models whose language model takes the tokens of an image one after another, by their order alone.

LLaVA-NeXT and LLaVA-OneVision lay tiles out as one grid behind the projector; in Qwen-VL, positions are those of the
grid.
"""


def projectors(model: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Yield each projector in a model, behind the module that calls it."""
    for owner in model.modules():
        for name, part in owner.named_children():
            if name in _PROJECTORS:
                yield owner, part


def patches_per_token(config: Any, layout: TokenLayout) -> int:
    """Return how many patches a projector turns into one token: by pixel shuffle, or by pooling to a fixed number."""
    pooled = getattr(config, "mm_tokens_per_image", None)
    if pooled is not None:
        return layout.num_patches // int(pooled)
    ratio = getattr(config, "downsample_ratio", None)
    side = getattr(config, "scale_factor", getattr(config, "downsample_factor", 1)) if ratio is None else 1 / ratio
    return round(side) ** 2


def visual_tokens(model: nn.Module, layout: TokenLayout) -> VisualTokens:
    """Return the tokens that a model's projector passes to its language model for an image of its own size."""
    found = list(projectors(model))
    for owner, projector in found:
        if not any(kind.__name__ in _SEQUENCES and _is_theirs(kind) for kind in type(owner).__mro__):
            continue
        selected = getattr(owner.config, "vision_feature_select_strategy", None)
        read = {None: layout.num_patches, "default": layout.num_tokens - 1}.get(selected, layout.num_tokens)
        count = read // patches_per_token(owner.config, layout)
        padding = owner.config.get_text_config().pad_token_id
        return VisualTokens(owner, projector, count, owner.config.image_token_id, padding)
    kinds = ", ".join(name.removesuffix("Model") for name in _SEQUENCES)
    if found:
        raise UnsupportedModel(
            f"shorten= is not supported for {type(found[0][0]).__name__}, which arranges the tokens of an image by "
            f"their places in a grid; it is for {kinds}. Merging inside the tower is supported"
        )
    raise UnsupportedModel(
        f"shorten= is for vision-language models, given whole: {kinds}; this {type(model).__name__} has no projector "
        "to a language model that is one of theirs"
    )


def _is_theirs(kind: type) -> bool:
    return kind.__module__.startswith("transformers.models.")
