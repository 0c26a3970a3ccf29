"""Prompts of vision-language models whose images have fewer visual tokens: a processor's output, kept in step."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitrail.adapters import VisualTokens
from vitrail.errors import InvalidOption

Inputs = TypeVar("Inputs", bound=MutableMapping[str, Any])


def shorten_prompts(inputs: Inputs, tokens: VisualTokens, length: int) -> Inputs:
    """Return a processor's output with ``length`` placeholders for each image instead of ``tokens.count``.

    All tensors with an entry for each token keep those of the tokens that stay: attention mask, token types, labels.
    Position ids close up. Where prompts have different numbers of images, the shorter ones are padded, on the side
    where the batch is padded already, otherwise in front.
    """
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise InvalidOption(
            "shorten takes a processor's output with input_ids (prompts, length) as a tensor; pass "
            f'return_tensors="pt". Got {type(ids).__name__}'
        )
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape != ids.shape:
        raise InvalidOption(
            f"attention_mask has an entry for each token, {tuple(ids.shape)}; got shape {tuple(mask.shape)}"
        )
    surplus = _surplus(ids, tokens, length)
    shorter = copy.copy(inputs)
    if not bool(surplus.any()):
        return shorter
    behind, padded = _padded(torch.ones_like(ids) if mask is None else mask)
    empty = surplus | padded
    kept = ids.shape[1] - int(empty.sum(1).min()) + int(padded.sum(1).min())
    places = empty.long().argsort(dim=1, descending=not behind, stable=True)
    places = places[:, :kept] if behind else places[:, -kept:]
    empty = empty.gather(1, places)
    if mask is None and bool(empty.any()):
        shorter["attention_mask"] = torch.ones_like(ids)
    positions = inputs.get("position_ids")
    if isinstance(positions, Tensor) and positions.shape == ids.shape:
        shorter["position_ids"] = positions - surplus.long().cumsum(1)
    fill = {"input_ids": _padding(tokens), "labels": -100}
    for name, values in shorter.items():
        if isinstance(values, Tensor) and values.shape == ids.shape:
            shorter[name] = values.gather(1, places).masked_fill(empty, fill.get(name, 0))
    return shorter


def _padded(mask: Tensor) -> tuple[bool, Tensor]:
    """Return whether prompts are padded behind, not in front, and where."""
    behind = bool((mask[:, -1] == 0).any())
    seen = mask.flip(1).cumsum(1).flip(1) if behind else mask.cumsum(1)
    return behind, seen == 0


def _surplus(ids: Tensor, tokens: VisualTokens, length: int) -> Tensor:
    """Return which placeholders of each image are too many: all behind the first ``length``."""
    is_image = ids == tokens.placeholder
    counts = is_image.sum(1)
    wrong = (counts % tokens.count).nonzero().flatten().tolist()
    if wrong:
        raise InvalidOption(
            f"every image has {tokens.count} placeholders in the prompts of this model; prompt {wrong[0]} has "
            f"{int(counts[wrong[0]])}, which is no multiple. Were they shortened before?"
        )
    return is_image & ((is_image.long().cumsum(1) - 1) % tokens.count >= length)


def _padding(tokens: VisualTokens) -> int:
    """Return an id for padding that is no placeholder; it is masked."""
    usable = tokens.padding is not None and tokens.padding != tokens.placeholder
    return int(tokens.padding) if usable else int(tokens.placeholder == 0)  # type: ignore[arg-type]
