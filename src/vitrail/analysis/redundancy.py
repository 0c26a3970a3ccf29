"""Where outlier patches sit: in redundant places, near the border, in the background?

Artifact tokens are said to take the places of patches that say nothing new: very similar to their neighbours right
after the patch embedding. The comparison here is between outlier and normal patches of the same pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.analysis.features import check_patches, steps, working
from vitrail.analysis.probes.inputs import Grid, check_finite, whole_grid
from vitrail.analysis.result import Result
from vitrail.analysis.statistics import bootstrap, ratio
from vitrail.data.sample import UNKNOWN
from vitrail.errors import InvalidOption, UnsupportedInput

BINS = 512
"""Values are sorted into so many bins of equal count for the intervals of the AUC; the AUC itself is exact."""


@torch.no_grad()
def neighbour_similarity(embedding: Tensor, grid: Grid) -> Tensor:
    """Give each patch's mean cosine with its neighbours above, below, left and right: (B, P, D) becomes (B, P).

    The embedding is the one right after the patch embedding, before positions are added. Patches at the border
    have three neighbours, in corners two; frames of a video are not neighbours. Two patches of zeros are the same
    patch, so their similarity is 1; a patch of zeros and another have 0.
    """
    time, height, width = check_patches(embedding, grid, "patch embeddings")
    if height * width < 2:
        raise UnsupportedInput(f"a grid of {grid} has no neighbours; use larger pictures")
    similarity = torch.empty(
        embedding.shape[:2], dtype=torch.promote_types(embedding.dtype, torch.float32), device=embedding.device
    )
    for part in steps(len(embedding), 3 * embedding[0].numel()):
        x = F.normalize(working(embedding[part]), dim=-1).reshape(-1, height, width, embedding.shape[2])
        total, count = x.new_zeros(x.shape[:3]), x.new_zeros(height, width)
        for axis, size in ((1, height), (2, width)):
            first, second = x.narrow(axis, 0, size - 1), x.narrow(axis, 1, size - 1)
            cosine = (first * second).sum(-1).clamp(-1, 1)
            cosine = torch.where((first == 0).all(-1) & (second == 0).all(-1), 1.0, cosine)
            for start in (0, 1):
                total.narrow(axis, start, size - 1).add_(cosine)
                count.narrow(axis - 1, start, size - 1).add_(1)
        similarity[part] = (total / count).reshape(-1, time * height * width)
    return similarity


def border_distance(grid: Grid) -> Tensor:
    """Give each patch's distance from the nearest edge of the picture, in patches; 0 at the border: (P,).

    >>> border_distance((3, 4)).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    time, height, width = whole_grid(grid)
    row, column = torch.arange(height), torch.arange(width)
    row, column = torch.minimum(row, height - 1 - row), torch.minimum(column, width - 1 - column)
    return torch.minimum(row[:, None], column[None]).flatten().repeat(time).float()


@torch.no_grad()
def pool_mask(mask: Tensor, grid: Grid) -> Tensor:
    """Give the share of foreground pixels in each patch: a pixel mask (B, H, W), 0 to 1, becomes (B, P).

    The mask is that of the pictures as the model sees them, so that H and W are whole numbers of patches. Pixels
    that are not a number are unknown: a patch takes the share of those that are known, and is itself not a number
    where none is.
    """
    time, height, width = whole_grid(grid)
    if mask.ndim != 3 or time > 1 or mask.shape[1] % height or mask.shape[2] % width or 0 in mask.shape:
        raise UnsupportedInput(
            f"the mask must be (pictures, height, width) with whole patches of a grid of {grid}; "
            f"got {tuple(mask.shape)}; resize or pad it as the picture was"
        )
    x = mask.detach().to(torch.promote_types(mask.dtype, torch.float32))
    if (x < 0).any() or (x > 1).any():
        raise UnsupportedInput(f"a mask has values between 0 and 1; got {x.min().item():g} to {x.max().item():g}")
    cells = x.reshape(len(x), height, x.shape[1] // height, width, x.shape[2] // width)
    return cells.transpose(2, 3).flatten(3).nanmean(-1).flatten(1)


def object_share(masks: Tensor, grid: Grid) -> Tensor:
    """Do the same for masks as pictures have them: 1 is the object, 255 is unknown, all else is background."""
    return pool_mask(torch.where(masks == UNKNOWN, torch.nan, (masks == 1).float()), grid)


@dataclass(frozen=True)
class Mean(Result):
    """A mean over patches; ``low`` and ``high`` are None where fewer than two pictures have such patches."""

    mean: float
    low: float | None
    high: float | None
    patches: int
    pictures: int


@dataclass(frozen=True)
class Contrast(Result):
    """One quantity for outlier and normal patches; what does not exist is None.

    Attributes:
        outlier: mean over outlier patches.
        normal: mean over all others.
        auc: chance that an outlier patch has a larger value than a normal one, ties counted half. 0.5 says that
            the quantity does not tell them apart, 1 that every outlier is above every normal patch, 0 below.
        auc_low, auc_high: ends of its interval.
    """

    outlier: Mean | None
    normal: Mean | None
    auc: float | None
    auc_low: float | None
    auc_high: float | None


@dataclass(frozen=True)
class Redundancy(Result):
    """Outlier patches beside normal ones: how redundant, how far from the border, how much foreground.

    All intervals, at 95 %, come from drawing whole pictures again (bootstrap), since patches of one picture are
    alike. They are somewhat narrow for few pictures: on planted data they held the truth in 93 to 96 % of trials
    with 100 pictures or more, in 89 to 94 % with 30, in 87 to 90 % with 10.
    """

    pictures: int
    patches: int
    outliers: int
    similarity: Contrast
    border_distance: Contrast
    foreground: Contrast | None


@torch.no_grad()
def redundancy(
    similarity: Tensor,
    outliers: Tensor,
    grid: Grid,
    *,
    masks: Tensor | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> Redundancy:
    """Compare outlier patches (B, P) bool with the others.

    Args:
        similarity: (B, P) from :func:`neighbour_similarity`.
        outliers: (B, P) which patches are outliers.
        grid: of the patches.
        masks: (B, P) foreground share of each patch, from :func:`pool_mask`; not a number where it is not known.
        draws: how often pictures are drawn again for the intervals.
        seed: of the draws.
    """
    patches = prod(whole_grid(grid))
    shape = tuple(similarity.shape)
    if similarity.ndim != 2 or shape[1] != patches or tuple(outliers.shape) != shape or outliers.dtype != torch.bool:
        raise UnsupportedInput(
            f"similarity and outliers (booleans) must both be (pictures, {patches}) for a grid of {grid}; "
            f"got {shape} and {outliers.dtype} {tuple(outliers.shape)}"
        )
    if masks is not None and tuple(masks.shape) != shape:
        raise UnsupportedInput(f"masks must be {shape}, one number a patch; got {tuple(masks.shape)}; see pool_mask")
    if draws < 1:
        raise InvalidOption(f"draws must be 1 or more; got {draws}")
    check_finite(similarity, "similarities")
    chosen = outliers.cpu()

    def compare(values: Tensor) -> Contrast:
        return _contrast(values.detach().cpu().double(), chosen, draws, seed)

    return Redundancy(
        len(chosen),
        chosen.numel(),
        int(chosen.sum()),
        compare(similarity),
        compare(border_distance(grid).expand(shape)),
        None if masks is None else compare(masks),
    )


def _contrast(values: Tensor, outliers: Tensor, draws: int, seed: int) -> Contrast:
    known = values.isfinite()
    kinds = outliers & known, ~outliers & known
    outlier, normal = (_mean(values, kind, draws, seed) for kind in kinds)
    if outlier is None or normal is None:
        return Contrast(outlier, normal, None, None, None)
    exact = auc(values[kinds[0]], values[kinds[1]])
    low = high = None
    if outlier.pictures > 1 and normal.pictures > 1:
        ordered = values[known].sort().values
        places = torch.linspace(0, len(ordered) - 1, BINS + 1, dtype=torch.float64)[1:-1].long()
        edges = torch.tensor(sorted(set(ordered[places].tolist())), dtype=torch.float64)
        counts = torch.cat([_histogram(values, kind, edges) for kind in kinds], 1)
        low, high = bootstrap(counts, _binned_auc, resamples=draws, seed=seed) or (None, None)
    return Contrast(outlier, normal, exact, low, high)


def auc(above: Tensor, below: Tensor) -> float:
    """Give the chance that a value of the first kind (n,) is larger than one of the second (m,), ties counted half.

    >>> auc(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))
    0.875
    """
    ordered = below.sort().values
    smaller, not_larger = torch.searchsorted(ordered, above), torch.searchsorted(ordered, above, right=True)
    return int((smaller + not_larger).sum()) / (2 * len(above) * len(below))


def _mean(values: Tensor, kind: Tensor, draws: int, seed: int) -> Mean | None:
    count = kind.sum(1)
    pictures = int((count > 0).sum())
    if not pictures:
        return None
    total = torch.where(kind, values, 0.0).sum(1)
    low = high = None
    if pictures > 1:
        sums = torch.stack([total, count.double()], 1)
        low, high = bootstrap(sums, ratio(0, 1), resamples=draws, seed=seed) or (None, None)
    return Mean(float(total.sum() / count.sum()), low, high, int(count.sum()), pictures)


def _histogram(values: Tensor, kind: Tensor, edges: Tensor) -> Tensor:
    """Count each picture's values of a kind by bin: (B, P) gives (B, bins)."""
    bins = len(edges) + 1
    place = torch.searchsorted(edges, values.contiguous()) + bins * torch.arange(len(values))[:, None]
    return place[kind].bincount(minlength=bins * len(values)).reshape(len(values), bins).double()


def _binned_auc(counts: Tensor) -> Tensor:
    """Give the AUC from counts (R, 2·bins) of outlier and normal values by bin, those of one bin being ties."""
    above, below = counts.chunk(2, 1)
    pairs = above.sum(1) * below.sum(1)
    return (above * (below.cumsum(1) - below / 2)).sum(1) / pairs
