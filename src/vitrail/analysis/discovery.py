"""Object discovery without labels: LOST and TokenCut, and how often their boxes are right (CorLoc).

Both read one object's box out of the patch features of one picture. They are told about patches alone:
:func:`~vitrail.analysis.features.patch_features` takes those out of keys or values, without any special token.
A box is (left, top, right, bottom), the last two being just outside. Ties go to the lower index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitrail.analysis.features import check_patches, steps, working
from vitrail.analysis.probes.inputs import Grid
from vitrail.analysis.result import Result
from vitrail.analysis.statistics import wilson
from vitrail.errors import InvalidOption, UnsupportedInput

Box = tuple[float, float, float, float]
Boxes = Tensor | Sequence[Box]


@dataclass(frozen=True, eq=False)
class Discovery(Result):
    """One object, found in one picture.

    Attributes:
        method: ``lost`` or ``tokencut``.
        grid: height and width in patches.
        box: in patches.
        seed: the patch that the object was grown from.
        mask: (h, w) which patches belong to the object.
        scores: (P,) what the seed was chosen by: degrees, of which the lowest wins, for LOST; the eigenvector, of
            which the largest wins (its sign is such that the object is positive), for TokenCut.
    """

    method: str
    grid: tuple[int, int]
    box: tuple[int, int, int, int]
    seed: int
    mask: Tensor = field(metadata={"json": False})
    scores: Tensor = field(metadata={"json": False})

    def pixels(self, patch: int | tuple[int, int], size: tuple[int, int] | None = None) -> Box:
        """Give the box in pixels, for patches of ``patch`` (height, width), clipped to a picture of ``size``.

        ``size`` is (height, width) before the picture was padded to whole patches; None for no padding.
        """
        high, wide = (patch, patch) if isinstance(patch, int) else patch
        height, width = size or (self.grid[0] * high, self.grid[1] * wide)
        x0, y0, x1, y1 = self.box
        left, right = (float(min(x * wide, width)) for x in (x0, x1))
        top, bottom = (float(min(y * high, height)) for y in (y0, y1))
        return left, top, right, bottom


def lost(features: Tensor, grid: Grid, *, k: int = 100, bias: float = 0.0) -> Discovery:
    """Find an object with LOST (Siméoni et al., 2021) in features (P, D), usually the last block's keys.

    ``A = F·Fᵀ + bias``. The seed is the patch with the fewest positive entries in A, its own left out. Of the ``k``
    patches with the fewest, those that are positive to the seed add up their rows of A; where the sum is positive,
    the 4-connected part around the seed is the object. A negative bias that leaves nothing around the seed gives the
    seed alone.
    """
    return lost_batch(features.unsqueeze(0), grid, k=k, bias=bias)[0]


@torch.no_grad()
def lost_batch(features: Tensor, grid: Grid, *, k: int = 100, bias: float = 0.0) -> list[Discovery]:
    """Find an object in each of several pictures (B, P, D) with :func:`lost`, a few at a time."""
    shape = _frame(features, grid)
    found: list[Discovery] = []
    for part in steps(len(features), 2 * features.shape[1] ** 2 + features[0].numel()):
        x = working(features[part])
        found += _expand((x @ x.mT).add_(bias), shape, k)
    return found


def tokencut(features: Tensor, grid: Grid, *, tau: float = 0.2, eps: float = 1e-5) -> Discovery:
    """Find an object with TokenCut (Wang et al., 2022) in features (P, D).

    Patches whose cosine is above ``tau`` are joined by 1, others by ``eps``. The generalised eigenvector with the
    second-smallest eigenvalue of (D − A, D) is cut at its mean; the object is the 4-connected part, on its side,
    around the patch with the largest magnitude. A single patch is its own object.
    """
    return tokencut_batch(features.unsqueeze(0), grid, tau=tau, eps=eps)[0]


@torch.no_grad()
def tokencut_batch(features: Tensor, grid: Grid, *, tau: float = 0.2, eps: float = 1e-5) -> list[Discovery]:
    """Find an object in each of several pictures (B, P, D) with :func:`tokencut`, a few at a time."""
    shape = _frame(features, grid)
    if not 0 < eps < 1:
        raise InvalidOption(f"eps, the weight of patches that do not match, must be between 0 and 1; got {eps}")
    found: list[Discovery] = []
    for part in steps(len(features), 8 * features.shape[1] ** 2 + features[0].numel()):
        x = torch.nn.functional.normalize(working(features[part]), dim=-1)
        joined = x @ x.mT > tau
        vectors = _second_vector(joined if joined.is_cuda else joined.cpu(), eps).cpu()
        size = vectors.abs()
        # Patches that are joined alike have the same value but for rounding: the lowest index is the seed.
        seeds = (size >= size.amax(1, keepdim=True) * (1 - 1e-8)).int().argmax(1)
        vectors = vectors * torch.where(vectors.gather(1, seeds[:, None]) < 0, -1.0, 1.0)
        above = vectors > vectors.mean(1, keepdim=True)
        found += _discoveries("tokencut", above.reshape(-1, *shape), seeds, vectors)
    return found


def _second_vector(joined: Tensor, eps: float) -> Tensor:
    """Solve (D − A) v = λ D v for the second-smallest λ, in float64: (B, P, P) booleans give (B, P)."""
    graph = torch.where(joined, 1.0, eps).double()
    root = graph.sum(-1).rsqrt()
    if joined.shape[-1] == 1:
        return torch.ones_like(root)
    laplacian = torch.eye(joined.shape[-1]).to(graph) - root.unsqueeze(-1) * graph * root.unsqueeze(-2)
    vectors: Tensor = torch.linalg.eigh(laplacian)[1]
    return vectors[..., 1] * root


def _frame(features: Tensor, grid: Grid) -> tuple[int, int]:
    time, height, width = check_patches(features, grid)
    if time > 1:
        raise UnsupportedInput(f"boxes are found in single frames; got a grid of {grid}: give one frame at a time")
    return height, width


def _expand(gram: Tensor, shape: tuple[int, int], k: int) -> list[Discovery]:
    """Choose seeds and grow objects from Gram matrices (B, P, P) that have their bias already."""
    if k < 1:
        raise InvalidOption(f"k, the number of patches that may join the seed, must be 1 or more; got {k}")
    degrees = (gram > 0).sum(-1) - (gram.diagonal(dim1=-2, dim2=-1) > 0).int()
    lowest = degrees.argsort(dim=-1, stable=True)[:, :k]
    seeds = lowest[:, 0]
    rows = gram[torch.arange(len(gram), device=gram.device), seeds]
    similar = torch.zeros_like(rows).scatter_(1, lowest, (rows.gather(1, lowest) > 0).to(rows.dtype))
    sums = (similar.unsqueeze(1) @ gram).squeeze(1)
    return _discoveries("lost", (sums > 0).cpu().reshape(-1, *shape), seeds.cpu(), degrees.cpu())


def _discoveries(method: str, masks: Tensor, seeds: Tensor, scores: Tensor) -> list[Discovery]:
    """Keep the part around each seed, and draw boxes."""
    height, width = masks.shape[1:]
    found = []
    for part, seed, score in zip(connected(masks, seeds), seeds.tolist(), scores, strict=True):
        rows, columns = part.any(1).nonzero().flatten().tolist(), part.any(0).nonzero().flatten().tolist()
        box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        found.append(Discovery(method, (height, width), box, seed, part, score))
    return found


def connected(masks: Tensor, seeds: Tensor) -> Tensor:
    """Give the 4-connected part of each mask (B, h, w) that holds its seed (B,); the seed always belongs to it."""
    part = torch.zeros_like(masks).flatten(1).scatter_(1, seeds[:, None], True).reshape(masks.shape)
    masks = masks | part
    while True:
        grown = part.clone()
        grown[:, 1:] |= part[:, :-1]
        grown[:, :-1] |= part[:, 1:]
        grown[:, :, 1:] |= part[:, :, :-1]
        grown[:, :, :-1] |= part[:, :, 1:]
        grown &= masks
        if torch.equal(grown, part):
            return part
        part = grown


def iou(box: Box | Tensor, boxes: Boxes) -> Tensor:
    """Give the intersection over union of one box and several (n, 4): (n,). A box without area has none."""
    one, many = (torch.as_tensor(each, dtype=torch.float64).detach().cpu() for each in (box, boxes))
    if one.shape != (4,) or many.ndim != 2 or many.shape[1] != 4:
        raise UnsupportedInput(f"iou takes a box (4,) and boxes (n, 4); got {tuple(one.shape)}, {tuple(many.shape)}")
    overlap = (torch.minimum(one[2:], many[:, 2:]) - torch.maximum(one[:2], many[:, :2])).clamp(min=0).prod(1)
    union = (one[2:] - one[:2]).clamp(min=0).prod() + (many[:, 2:] - many[:, :2]).clamp(min=0).prod(1) - overlap
    return torch.where(union > 0, overlap / union.clamp(min=1e-300), 0.0)


@dataclass(frozen=True)
class CorLoc(Result):
    """Correct localisation: the share of pictures whose box meets a true one with an IoU of ``threshold`` or more.

    ``low`` and ``high`` are Wilson's interval at 95 %. ``share`` and both are None where no picture has a true box;
    pictures without one are left out and counted in ``without_truth``.
    """

    share: float | None
    low: float | None
    high: float | None
    hits: int
    pictures: int
    without_truth: int
    threshold: float = 0.5

    @classmethod
    def of(cls, hits: Sequence[bool], without_truth: int, threshold: float = 0.5) -> CorLoc:
        """Sum up which pictures were right."""
        low, high = wilson(sum(hits), len(hits)) or (None, None)
        return cls(sum(hits) / len(hits) if hits else None, low, high, sum(hits), len(hits), without_truth, threshold)


def corloc(found: Sequence[Box | None], truth: Sequence[Boxes | None], *, threshold: float = 0.5) -> CorLoc:
    """Compare one box a picture (None: nothing found, a miss) with true boxes (n, 4); None or n = 0 for no truth."""
    if not 0 < threshold <= 1:
        raise InvalidOption(f"the threshold of the IoU is above 0 and at most 1; got {threshold}")
    if len(found) != len(truth):
        raise UnsupportedInput(f"each picture needs its true boxes; got {len(found)} found, {len(truth)} true")
    pairs = [(box, boxes) for box, boxes in zip(found, truth, strict=True) if boxes is not None and len(boxes)]
    hits = [box is not None and bool((iou(box, boxes) >= threshold).any()) for box, boxes in pairs]
    return CorLoc.of(hits, len(found) - len(pairs), threshold)


@dataclass(frozen=True)
class LostSweep(Result):
    """LOST with one fixed bias, and with the best of several.

    Attributes:
        fixed_setting: at ``fixed_bias``, chosen before looking. The figure to trust.
        best_of_sweep: at ``best_bias``, chosen on the very pictures that it is measured on. An upper bound.
        held_out: even and odd pictures, each with the bias that was best for the others.
        by_bias: CorLoc at each of ``biases``.
    """

    fixed_setting: CorLoc
    fixed_bias: float
    best_of_sweep: CorLoc
    best_bias: float
    held_out: CorLoc
    biases: tuple[float, ...]
    by_bias: tuple[CorLoc, ...]


@torch.no_grad()
def sweep_lost(
    features: Iterable[Tensor],
    grids: Sequence[Grid],
    truth: Sequence[Tensor | None],
    *,
    biases: Sequence[float],
    fixed: float = 0.0,
    patch: int | tuple[int, int] = 1,
    sizes: Sequence[tuple[int, int]] | None = None,
    k: int = 100,
) -> LostSweep:
    """Run LOST with several biases on pictures of any size: features (P, D) one by one, true boxes in pixels.

    The bias that published figures were found with is not known, so both results stand side by side. With all of
    ``biases`` a picture's Gram matrix is computed once. :func:`suggest_biases` names biases that fit a model's scale.
    """
    if len(grids) != len(truth) or (sizes is not None and len(sizes) != len(truth)):
        raise UnsupportedInput(f"each picture needs its grid, true boxes and size; got {len(grids)} and {len(truth)}")
    settings = tuple(sorted({float(fixed), *map(float, biases)}))
    shift = torch.tensor(settings, dtype=torch.float64)
    rows: list[list[bool]] = []
    without = 0
    for number, (x, grid, boxes) in enumerate(zip(features, grids, truth, strict=True)):
        if boxes is None or not len(boxes):
            without += 1
            continue
        shape, size = _frame(x.unsqueeze(0), grid), sizes[number] if sizes else None
        x = working(x)
        gram, added = x @ x.T, shift.to(device=x.device, dtype=x.dtype)
        found = [
            one.pixels(patch, size)
            for part in steps(len(settings), 2 * gram.numel())
            for one in _expand(gram + added[part, None, None], shape, k)
        ]
        rows.append([bool((iou(box, boxes) >= 0.5).any()) for box in found])

    def best(chosen: Sequence[Sequence[bool]]) -> int:
        hits = [sum(column) for column in zip(*chosen, strict=True)] or [0] * len(settings)
        return min(range(len(settings)), key=lambda i: (-hits[i], abs(settings[i] - fixed), settings[i]))

    other = best(rows[1::2]), best(rows[0::2])
    by_bias = tuple(CorLoc.of([row[i] for row in rows], without) for i in range(len(settings)))
    held_out = CorLoc.of([row[other[number % 2]] for number, row in enumerate(rows)], without)
    at, top = settings.index(float(fixed)), best(rows)
    return LostSweep(by_bias[at], settings[at], by_bias[top], settings[top], held_out, settings, by_bias)


@torch.no_grad()
def suggest_biases(features: Tensor, count: int = 9) -> tuple[float, ...]:
    """Name biases for :func:`sweep_lost` from some pictures' features (B, P, D): 0, and shares of Gram entries.

    Taking off a quantile of the entries leaves that share of all pairs negative: a model whose features point the
    same way has no other way to have any.
    """
    check_patches(features, (1, features.shape[1]))
    if count < 2 or features.shape[1] < 2:
        raise InvalidOption(f"biases to try need a count of 2 or more and 2 patches or more; got {count}")
    pair = tuple(torch.triu_indices(features.shape[1], features.shape[1], 1, device=features.device))
    at = torch.linspace(0, 1, count + 1, dtype=torch.float64)[1:-1]
    found = []
    for part in steps(len(features), 4 * features.shape[1] ** 2):
        x = working(features[part])
        entries = (x @ x.mT)[:, pair[0], pair[1]].sort(-1)[0]
        found.append(entries[:, (at * (entries.shape[1] - 1)).long().to(x.device)].cpu().double())
    return tuple(sorted({0.0, *(-torch.cat(found).mean(0)).tolist()}))
