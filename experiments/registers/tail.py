"""The longest patch tokens of a model, whether or not they are artifacts: which they are, where, and what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from experiments.registers.looking import Seen
from vitrail.analysis.class_probe import probe_classes
from vitrail.analysis.redundancy import pool_mask, redundancy

SHARE = 0.001
"""The longest one in a thousand."""

HEAD = (
    "longest tokens", "above twice the median", "pictures with any", "in the four with most", "patches from the edge",
    "others", "on the object, %", "others", "cosine with neighbours", "others",
    "species from each picture's longest patch, %", "from a random one",
)  # fmt: skip


def look(seen: Seen, share: float = SHARE) -> dict[str, Any]:
    """Note the longest tokens of the last layer one by one, their places beside all others, and the class from each.

    Where artifacts begin, long tokens should sit in redundant places, in the background, and tell of the whole picture.
    """
    norms = seen.tokens.norm(dim=-1).cpu()
    count = max(1, round(share * norms.numel()))
    order = norms.flatten().argsort(descending=True)[:count]
    chosen = torch.zeros(norms.numel(), dtype=torch.bool)
    chosen[order] = True
    covered = _covered(seen)
    pictures, places = order // norms.shape[1], order % norms.shape[1]
    ratios = norms.flatten()[order] / norms.median()
    named = [
        {
            "picture": seen.names[picture],
            "row": place // seen.grid[1],
            "column": place % seen.grid[1],
            "over_median": float(ratio),
            "similarity": float(seen.similarity[picture, place]),
            "covered": None if covered[picture, place].isnan() else float(covered[picture, place]),
        }
        for picture, place, ratio in zip(pictures.tolist(), places.tolist(), ratios, strict=True)
    ]
    found = redundancy(seen.similarity, chosen.reshape(norms.shape), seen.grid, masks=covered)
    return {"share": share, "tokens": named, "places": found.to_dict(), "classes": _classes(seen, norms)}


def _covered(seen: Seen) -> Tensor:
    """Give how much of each patch is object, (B, P); not a number where that is unknown."""
    masks = seen.masks.float()
    return pool_mask(masks.masked_fill(masks == 255, torch.nan), seen.grid)


def _classes(seen: Seen, norms: Tensor) -> dict[str, Any]:
    """Tell the class from the longest patch token of each picture, and from one at random."""
    tokens, everyone = seen.tokens.cpu(), torch.arange(len(norms))

    def one_each(seed: int) -> dict[str, Tensor]:
        drawn = torch.randint(norms.shape[1], (len(norms),), generator=torch.Generator().manual_seed(seed))
        return {"longest": tokens[everyone, norms.argmax(1)], "random": tokens[everyone, drawn]}

    return probe_classes(one_each, seen.classes).to_dict()


def cells(tail: Mapping[str, Any]) -> list[str]:
    """Write what was noted as one line of a table below HEAD."""
    tokens, kinds = tail["tokens"], tail["classes"]["kinds"]
    held = Counter(token["picture"] for token in tokens)
    above = sum(token["over_median"] > 2 for token in tokens)
    in_four = sum(count for _, count in held.most_common(4))

    def beside(name: str, digits: int, scale: float = 1.0) -> list[str]:
        both = (tail["places"][name][kind] for kind in ("outlier", "normal"))
        return ["–" if one is None else f"{scale * one['mean']:.{digits}f}" for one in both]

    return [
        *map(str, (len(tokens), above, len(held), in_four)),
        *beside("border_distance", 2),
        *beside("foreground", 1, 100),
        *beside("similarity", 2),
        *(f"{100 * kinds[kind]['balanced_accuracy']['mean']:.1f}" for kind in ("longest", "random")),
    ]
