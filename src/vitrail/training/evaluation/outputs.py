"""Outputs of any library's classifier in one form: fused logits, logits of each head, and a feature map."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any

from torch import Tensor, nn

from vitrail.adapters import find, head_outputs
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.heads import Output
from vitrail.models import ViT
from vitrail.runtime.side_tokens import receiving
from vitrail.surgery.added_tokens import added_module
from vitrail.tokens import Role

CLASS, DISTILLATION = Role.CLASS.value, Role.DISTILLATION.value
"""Names of the heads of other libraries' models."""


def forward_output(model: nn.Module, images: Tensor) -> Output:
    """Return a classifier's output for images (B, C, H, W).

    Vitrail models name their heads. Others have ``class`` and, if distilled, ``distillation``: timm returns a tuple of
    both during training, transformers an object with both. ``features`` is empty (B, 0, 0) for these. Heads of added
    tokens come after the model's own; ``logits`` are the model's own.
    """
    return _with_added(model, lambda: _forward_own(model, images))


def _forward_own(model: nn.Module, images: Tensor) -> Output:
    """Return the output of a model's own heads."""
    if isinstance(model, ViT):
        return model.forward_output(images)
    if getattr(model, "head_dist", None) is None or model.training:
        return _to_output(model, model(images))
    # in evaluation mode, timm's distilled models return only the mean of their heads
    with head_outputs(model) as by_token:
        logits = model(images)
    by_role = {name: parts[-1].to(logits.device) for name, parts in by_token.items()}
    return _output(logits, by_role if len(by_role) == 2 else {})


def forward_output_and_map(model: nn.Module, images: Tensor) -> tuple[Output, Tensor]:
    """Return the output and the features behind it as a map (B, D, h, w), without special tokens.

    Supports models of Vitrail, timm (transformers and convnets) and transformers. The map is 1 × 1 for features
    without spatial dimensions.
    """
    maps: list[Tensor] = []

    def forward() -> Output:
        output, features = _forward_own_and_map(model, images)
        maps.append(features)
        return output

    return _with_added(model, forward), maps[0]


def _with_added(model: nn.Module, forward: Callable[[], Output]) -> Output:
    """Run a model; return its output with the logits of added tokens, if it has any."""
    added = added_module(model)
    if added is None:
        return forward()
    with receiving() as found:
        output = forward()
    _, by_role = added.answer(found[0])
    return output._replace(by_role={**output.by_role, **by_role})


def _forward_own_and_map(model: nn.Module, images: Tensor) -> tuple[Output, Tensor]:
    """Return the output of a model's own heads, and the map behind it."""
    if isinstance(model, ViT):
        output = model.forward_output(images)
        layout = model.layout(tuple(images.shape[2:]))
        patches = output.features[:, layout.patches].transpose(1, 2)
        return output, patches.unflatten(2, layout.grid).flatten(2, 3)  # time and height, then width
    base = getattr(model, "base_model", None)
    if isinstance(base, nn.Module) and hasattr(model, "config"):
        captured: list[Any] = []
        handle = base.register_forward_hook(lambda _, __, result: captured.append(result))
        try:
            output = _forward_own(model, images)
        finally:
            handle.remove()
        return output, _to_map(model, captured[-1].last_hidden_state, images)
    if hasattr(model, "forward_features") and hasattr(model, "forward_head"):
        timm: Any = model
        features = timm.forward_features(images)
        return _to_output(model, timm.forward_head(features)), _to_map(model, features, images)
    raise UnsupportedModel(
        f"cannot find the features of {type(model).__name__}: expected a model of Vitrail or transformers, or one with "
        "forward_features and forward_head, as in timm"
    )


def feature_width(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    candidates = (
        getattr(config, "width", None),
        getattr(model, "num_features", None),
        getattr(config, "hidden_size", None),
        (getattr(config, "hidden_sizes", None) or [None])[-1],
    )
    width = next((value for value in candidates if isinstance(value, int)), None)
    if width is None:
        raise UnsupportedModel(f"unknown feature width: {type(model).__name__} has no num_features")
    return width


def _to_output(model: nn.Module, result: Any) -> Output:
    if isinstance(result, Output):
        return result
    if isinstance(result, Tensor):
        return _output(result, {CLASS: result})
    if isinstance(result, tuple | list) and len(result) == 2 and all(isinstance(part, Tensor) for part in result):
        first, second = result
        return _output((first + second) / 2, {CLASS: first, DISTILLATION: second})
    logits = getattr(result, "logits", None)
    if not isinstance(logits, Tensor):
        raise UnsupportedInput(
            f"{type(model).__name__} returned {type(result).__name__}; expected logits (images, classes), a tuple of "
            "class and distillation logits, or an object with .logits"
        )
    first, second = getattr(result, "cls_logits", None), getattr(result, "distillation_logits", None)
    if first is None or second is None:
        return _output(logits, {CLASS: logits})
    return _output(logits, {CLASS: first, DISTILLATION: second})


def _output(logits: Tensor, by_role: dict[str, Tensor]) -> Output:
    if logits.ndim != 2:
        raise UnsupportedInput(f"expected logits (images, classes) of a classifier; got shape {tuple(logits.shape)}")
    return Output(logits, by_role, logits.new_empty(len(logits), 0, 0))


def _to_map(model: nn.Module, features: Tensor, images: Tensor) -> Tensor:
    """Return features of any library as (B, D, h, w)."""
    if features.ndim == 4:
        return features if features.shape[1] == feature_width(model) else features.permute(0, 3, 1, 2)
    if features.ndim == 2:
        return features[:, :, None, None]
    try:
        found = find(model)
        layout = found.adapter.layout(found.trunk, (images.shape[-2], images.shape[-1]))
        return features[:, layout.patches].transpose(1, 2).unflatten(2, layout.grid).flatten(2, 3)
    except UnsupportedModel:
        patches = features[:, getattr(model, "num_prefix_tokens", 0) :].transpose(1, 2)
    side = isqrt(patches.shape[2])
    if side * side != patches.shape[2]:
        raise InvalidOption(f"{patches.shape[2]} tokens of {type(model).__name__} do not form a square feature map")
    return patches.unflatten(2, (side, side))
