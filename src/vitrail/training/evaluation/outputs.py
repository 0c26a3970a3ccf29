"""What any classifier says, in one form: the fused answer, that of each head, and a map of features."""

from __future__ import annotations

from math import isqrt
from typing import Any

from torch import Tensor, nn

from vitrail.adapters import find, head_outputs
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.heads import Output
from vitrail.models import ViT
from vitrail.tokens import Role

CLASS, DISTILLATION = Role.CLASS.value, Role.DISTILLATION.value
"""What the heads of models that are not ours are called."""


def answer(model: nn.Module, images: Tensor) -> Output:
    """Ask any classifier about pictures (B, C, H, W).

    Our models name their heads themselves. Others have ``class`` and, where they are distilled, ``distillation``:
    timm's give both as a tuple while they train, transformers' as fields. ``features`` are all tokens for our models,
    and no tokens (B, 0, 0) for others.
    """
    if isinstance(model, ViT):
        return model.forward_output(images)
    return _ask(model, images)


def answer_with_map(model: nn.Module, images: Tensor) -> tuple[Output, Tensor]:
    """Do the same, and give the features behind the answer as a map (B, D, h, w), without special tokens.

    For ours, timm's models (transformers or convolutional nets), and those of transformers; a model whose features
    have no place in the picture has a map of 1 × 1.
    """
    if isinstance(model, ViT):
        output = model.forward_output(images)
        layout = model.layout(tuple(images.shape[2:]))
        patches = output.features[:, layout.patches].transpose(1, 2)
        return output, patches.unflatten(2, layout.grid).flatten(2, 3)  # time and height, then width
    base = getattr(model, "base_model", None)
    if isinstance(base, nn.Module) and hasattr(model, "config"):
        seen: list[Any] = []
        handle = base.register_forward_hook(lambda _, __, said: seen.append(said))
        try:
            output = _ask(model, images)
        finally:
            handle.remove()
        return output, _as_map(model, seen[-1].last_hidden_state, images)
    if hasattr(model, "forward_features") and hasattr(model, "forward_head"):
        timm: Any = model
        features = timm.forward_features(images)
        return _normal(model, timm.forward_head(features)), _as_map(model, features, images)
    raise UnsupportedModel(
        f"{type(model).__name__} has no features that can be found: expected one of ours, a model of transformers, or "
        "one with forward_features and forward_head, as timm's have"
    )


def width_of(model: nn.Module) -> int:
    """Channels of a model's features, as its library tells them."""
    config: Any = getattr(model, "config", None)
    told = (
        getattr(config, "width", None),
        getattr(model, "num_features", None),
        getattr(config, "hidden_size", None),
        (getattr(config, "hidden_sizes", None) or [None])[-1],
    )
    found = next((value for value in told if isinstance(value, int)), None)
    if found is None:
        raise UnsupportedModel(f"{type(model).__name__} does not say how wide its features are (num_features)")
    return found


def _ask(model: nn.Module, images: Tensor) -> Output:
    if getattr(model, "head_dist", None) is None or model.training:
        return _normal(model, model(images))
    with head_outputs(model) as heard:  # in evaluation timm's distilled models give the mean of their heads alone
        said = model(images)
    by_role = {name: parts[-1].to(said.device) for name, parts in heard.items()}
    return _output(said, by_role if len(by_role) == 2 else {})


def _normal(model: nn.Module, said: Any) -> Output:
    if isinstance(said, Output):
        return said
    if isinstance(said, Tensor):
        return _output(said, {CLASS: said})
    if isinstance(said, tuple | list) and len(said) == 2 and all(isinstance(part, Tensor) for part in said):
        first, second = said
        return _output((first + second) / 2, {CLASS: first, DISTILLATION: second})
    logits = getattr(said, "logits", None)
    if not isinstance(logits, Tensor):
        raise UnsupportedInput(
            f"{type(model).__name__} answers with {type(said).__name__}; expected logits (pictures, classes), a tuple "
            "of class and distillation logits, or an object with .logits"
        )
    first, second = getattr(said, "cls_logits", None), getattr(said, "distillation_logits", None)
    if first is None or second is None:
        return _output(logits, {CLASS: logits})
    return _output(logits, {CLASS: first, DISTILLATION: second})


def _output(logits: Tensor, by_role: dict[str, Tensor]) -> Output:
    if logits.ndim != 2:
        raise UnsupportedInput(f"logits are (pictures, classes); got {tuple(logits.shape)}. Is this a classifier?")
    return Output(logits, by_role, logits.new_empty(len(logits), 0, 0))


def _as_map(model: nn.Module, features: Tensor, images: Tensor) -> Tensor:
    """Bring features of any library to (B, D, h, w)."""
    width = width_of(model)
    if features.ndim == 4:
        return features if features.shape[1] == width else features.permute(0, 3, 1, 2)
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
        raise InvalidOption(f"{patches.shape[2]} tokens of {type(model).__name__} are no square map of features")
    return patches.unflatten(2, (side, side))
