"""Putting special tokens into the sequence and taking it apart again, always in the order of the specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vitrail.tokens import TokenSpec


def weave(
    specs: Sequence[TokenSpec], here: Sequence[TokenSpec], x: Tensor, joining: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Put joining tokens into a sequence (B, N, D) that begins with the tokens of ``here``.

    The special tokens of the result are in the order of ``specs``; those in neither place are left out.
    """
    pieces, start = [], 0
    for spec in specs:
        if spec in here:
            pieces.append(x[:, start : start + spec.count])
            start += spec.count
        elif joining is not None and spec.name in joining:
            pieces.append(joining[spec.name])
    return torch.cat([*pieces, x[:, start:]], 1)


def pick(specs: Sequence[TokenSpec], x: Tensor) -> dict[str, Tensor]:
    """Give the special tokens that a sequence (B, N, D) begins with, by name."""
    return {spec.name: part for spec, part in zip(specs, x.split([spec.count for spec in specs], 1), strict=True)}


def drop_patches(x: Tensor, rope: Tensor | None, share: float) -> tuple[Tensor, Tensor | None]:
    """Leave out a share of the patches (B, P, D), chosen anew for each input, with what turns them (P, d)."""
    count = max(round(x.shape[1] * (1 - share)), 1)
    kept = torch.rand(x.shape[:2], device=x.device).argsort(1)[:, :count]
    if rope is not None:
        rope = rope[kept].unsqueeze(1)  # (B, 1, P, d): the same for all heads
    return x.gather(1, kept.unsqueeze(-1).expand(-1, -1, x.shape[2])), rope


def reading_mask(specs: Sequence[TokenSpec], patches: int, queries: int, device: torch.device) -> Tensor | None:
    """Say who reads whom: (queries, keys), true where the query may read.

    The keys are the special tokens of ``specs`` and then the patches; the queries are the first of them. An
    invisible token is read by itself alone. ``None`` where everybody reads everybody.
    """
    visible = [spec.visible for spec in specs for _ in range(spec.count)]
    if all(visible):
        return None
    readable = torch.tensor(visible + [True] * patches, device=device)
    return readable | torch.eye(queries, len(visible) + patches, dtype=torch.bool, device=device)
