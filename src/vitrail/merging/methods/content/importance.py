"""Importance of tokens: one table, from names to functions of a block's context.

Any other name is that of a map that the caller passes by ``merging.guide(name=...)``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.merging.method import Context, ModelShape
from vitrail.merging.pixels import pixels_by_patch

ROWS_AT_ONCE = 256
"""Queries whose attention is computed at once."""


def _mean_over_heads(attention: Tensor) -> Tensor:
    return attention.mean(1, dtype=torch.promote_types(attention.dtype, torch.float32))


def class_attention(context: Context) -> Tensor:
    """Return the attention of the class token to each token, mean over heads."""
    assert context.class_token is not None
    return _mean_over_heads(context.attention([context.class_token]))[:, 0]


def received_attention(context: Context) -> Tensor:
    """Return the mean attention that each token receives, mean over heads."""
    return _mean_over_heads(context.attention())


def attention_entropy(context: Context) -> Tensor:
    """Return ``Σ_j a_ij·log a_ij`` of each token's attention a, mean over heads (vid-TLDR): high where it is sharp."""
    length = context.x.shape[1]
    found = []
    for start in range(0, length, ROWS_AT_ONCE):
        rows = _mean_over_heads(context.attention(range(start, min(start + ROWS_AT_ONCE, length))))
        found.append(torch.xlogy(rows, rows).sum(2))
    return torch.cat(found, 1)


def norm(context: Context) -> Tensor:
    """Return the norm of each token."""
    work = torch.promote_types(context.x.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(context.x, dim=2, dtype=work)
    return found


def motion(context: Context) -> Tensor:
    """Return how much the pixels of each patch change between frames; see :func:`motion_map`."""
    return context.guide[MOTION]


IMPORTANCE: dict[str, Callable[[Context], Tensor]] = {
    "class_attention": class_attention,
    "received_attention": received_attention,
    "attention_entropy": attention_entropy,
    "norm": norm,
    "motion": motion,
}
"""Importance of a block's tokens (B, N) by name."""

MOTION = "vitrail_motion"
"""Name of the guide that holds the motion map."""


def motion_map(inputs: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Return the mean absolute difference of each patch (tubelet) of a video to the one before in time (B, P).

    Patches of the first step get the difference to the next step.
    """
    t, h, w = grid
    if t < 2:
        raise UnsupportedInput(
            f"importance='motion' compares frames, and this input has a patch grid of {grid}, one step in time; pass "
            "a video to a video model"
        )
    cells = pixels_by_patch(inputs, grid)
    steps = cells.view(*cells.shape[:2], t, h * w, cells.shape[3])
    change = (steps[:, :, 1:] - steps[:, :, :-1]).abs().mean((1, 4))
    return torch.cat([change[:, :1], change], 1).flatten(1)


def check_importance(name: object) -> str:
    """Return a valid name of an importance; raise ``InvalidOption`` for others."""
    if not isinstance(name, str) or not name:
        raise InvalidOption(
            f"importance is one of {', '.join(IMPORTANCE)}, or the name of a map passed by merging.guide(); got "
            f"{name!r}"
        )
    return name


def check_model(name: str, shape: ModelShape) -> None:
    """Raise ``UnsupportedModel`` if a model cannot serve an importance."""
    if name == "class_attention" and shape.class_token is None:
        raise UnsupportedModel(
            "importance='class_attention' needs a class token, and this model has none; use 'received_attention'"
        )
    if name == "motion" and shape.grid[0] < 2:
        raise UnsupportedModel(
            f"importance='motion' needs a video model, and the patch grid of this one is {shape.grid}, one step in "
            "time; use another importance"
        )


@torch.no_grad()
def importance_of(context: Context, name: str) -> Tensor:
    """Compute an importance (B, N) from 0, the least of an image, to 1, the highest; 0 where tokens cannot merge."""
    if name not in IMPORTANCE and name not in context.guide:
        raise InvalidOption(
            f"importance={name!r} is neither one of {', '.join(IMPORTANCE)}, nor a map of this pass; run the model "
            f"inside `with merging.guide({name}=...):`"
        )
    found = IMPORTANCE[name](context) if name in IMPORTANCE else context.guide[name]
    return min_max(found, context.mergeable)


def min_max(values: Tensor, among: Tensor) -> Tensor:
    """Scale values (B, N) of each image to 0 … 1 among some tokens (B or 1, N); 0 for the others."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    low = values.masked_fill(~among, torch.inf).amin(1, keepdim=True)
    high = values.masked_fill(~among, -torch.inf).amax(1, keepdim=True)
    span = high - low
    scaled = (values - low) / torch.where(span > 0, span, 1)
    return scaled.masked_fill(~among, 0).nan_to_num(0.0, 0.0, 0.0)
