"""Object discovery without labels: LOST and TokenCut, and their CorLoc.

Both find the box of one object from the patch features of one image
(:func:`~vitrail.analysis.features.patch_features`). A box is (left, top, right, bottom), right and bottom exclusive.
Ties go to the lower index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field

import torch
from torch import Tensor

from vitrail._arguments import fitting
from vitrail.analysis._inputs import Grid, as_features, as_frame, at_least_float32, check_count, chunks
from vitrail.analysis.result import Result
from vitrail.analysis.statistics import wilson
from vitrail.errors import InvalidOption, UnsupportedInput

Box = tuple[float, float, float, float]
Boxes = Tensor | Sequence[Box]


class Discovery(Result, eq=False):
    """An object found in one image.

    Attributes:
        scores: (P,) what the seed is chosen by. LOST: degrees, the lowest wins. TokenCut: the eigenvector with its
            sign such that the object is positive, the largest wins.
    """

    method: str  # ``lost`` or ``tokencut``
    grid: tuple[int, int]  # height and width in patches
    box: tuple[int, int, int, int]  # box in patches
    seed: int  # the patch that the object is grown from
    mask: Tensor = field(metadata={"json": False})  # (h, w) bool mask of the object
    scores: Tensor = field(metadata={"json": False})

    def pixels(self, patch: int | tuple[int, int], size: tuple[int, int] | None = None) -> Box:
        """Return the box in pixels, for patches of ``patch`` (height, width), clipped to an image of ``size``.

        ``size`` is (height, width) before padding to whole patches; None if the image was not padded.
        """
        high, wide = (patch, patch) if isinstance(patch, int) else patch
        height, width = size or (self.grid[0] * high, self.grid[1] * wide)
        x0, y0, x1, y1 = self.box
        left, right = (float(min(x * wide, width)) for x in (x0, x1))
        top, bottom = (float(min(y * high, height)) for y in (y0, y1))
        return left, top, right, bottom


@fitting
def lost(features: Tensor, grid: Grid, *, k: int = 100, bias: float = 0.0) -> Discovery:
    """Find an object with LOST (Siméoni et al., 2021) in features (P, D), usually the last block's keys.

    ``A = F·Fᵀ + bias``. The seed is the patch with the fewest positive entries in A outside of the diagonal. Of the
    ``k`` patches with the fewest, those that are positive to the seed add up their rows of A; where the sum is
    positive, the 4-connected component around the seed is the object. If nothing is positive, it is the seed alone.
    """
    return lost_batch(features.unsqueeze(0), grid, k=k, bias=bias)[0]


@fitting
@torch.no_grad()
def lost_batch(features: Tensor, grid: Grid, *, k: int = 100, bias: float = 0.0) -> list[Discovery]:
    """Run :func:`lost` on each of several images (B, P, D)."""

    def discover(x: Tensor, shape: tuple[int, int]) -> list[Discovery]:
        return _expand((x @ x.mT).add_(bias), shape, k)

    return _discover(discover, features, grid, 2)


@fitting
def tokencut(features: Tensor, grid: Grid, *, tau: float = 0.2, eps: float = 1e-5) -> Discovery:
    """Find an object with TokenCut (Wang et al., 2022) in features (P, D).

    Edges have weight 1 between patches whose cosine is above ``tau``, and ``eps`` otherwise. The generalized
    eigenvector of (D − A, D) with the second-smallest eigenvalue is cut at its mean; the object is the 4-connected
    component, on its side, around the patch with the largest magnitude. A single patch is its own object.
    """
    return tokencut_batch(features.unsqueeze(0), grid, tau=tau, eps=eps)[0]


@fitting
@torch.no_grad()
def tokencut_batch(features: Tensor, grid: Grid, *, tau: float = 0.2, eps: float = 1e-5) -> list[Discovery]:
    """Run :func:`tokencut` on each of several images (B, P, D)."""
    if not 0 < eps < 1:
        raise InvalidOption(f"eps, the weight between patches that do not match, must be between 0 and 1; got {eps}")

    def discover(x: Tensor, shape: tuple[int, int]) -> list[Discovery]:
        x = torch.nn.functional.normalize(x, dim=-1)
        joined = x @ x.mT > tau
        vectors = _second_eigenvector(joined if joined.is_cuda else joined.cpu(), eps).cpu()
        size = vectors.abs()
        # Patches with the same edges have the same value but for rounding: the lowest index is the seed.
        seeds = (size >= size.amax(1, keepdim=True) * (1 - 1e-8)).int().argmax(1)
        vectors = vectors * torch.where(vectors.gather(1, seeds[:, None]) < 0, -1.0, 1.0)
        above = vectors > vectors.mean(1, keepdim=True)
        return _discoveries("tokencut", above.reshape(-1, *shape), seeds, vectors)

    return _discover(discover, features, grid, 8)


def _discover(
    method: Callable[[Tensor, tuple[int, int]], list[Discovery]], features: Tensor, grid: Grid, matrices: int
) -> list[Discovery]:
    """Run a method that needs so many matrices (P, P) per image on a few images (B, P, D) at a time."""
    features = as_features(features, "features", "B P D")
    shape = as_frame(grid, features.shape[1])
    parts = chunks(len(features), matrices * features.shape[1] ** 2 + features[0].numel())
    return [found for part in parts for found in method(at_least_float32(features[part]), shape)]


def _second_eigenvector(joined: Tensor, eps: float) -> Tensor:
    """Solve (D − A) v = λ D v for the second-smallest λ, in float64: (B, P, P) bool to (B, P)."""
    graph = torch.where(joined, 1.0, eps).double()
    root = graph.sum(-1).rsqrt()
    if joined.shape[-1] == 1:
        return torch.ones_like(root)
    laplacian = torch.eye(joined.shape[-1]).to(graph) - root.unsqueeze(-1) * graph * root.unsqueeze(-2)
    vectors: Tensor = torch.linalg.eigh(laplacian)[1]
    return vectors[..., 1] * root


def _expand(gram: Tensor, shape: tuple[int, int], k: int) -> list[Discovery]:
    """Choose seeds and grow objects from Gram matrices (B, P, P) that include the bias."""
    check_count(k, "k")
    degrees = (gram > 0).sum(-1) - (gram.diagonal(dim1=-2, dim2=-1) > 0).int()
    lowest = degrees.argsort(dim=-1, stable=True)[:, :k]
    seeds = lowest[:, 0]
    rows = gram[torch.arange(len(gram), device=gram.device), seeds]
    similar = torch.zeros_like(rows).scatter_(1, lowest, (rows.gather(1, lowest) > 0).to(rows.dtype))
    sums = (similar.unsqueeze(1) @ gram).squeeze(1)
    return _discoveries("lost", (sums > 0).cpu().reshape(-1, *shape), seeds.cpu(), degrees.cpu())


def _discoveries(method: str, masks: Tensor, seeds: Tensor, scores: Tensor) -> list[Discovery]:
    """Keep the component around each seed, and draw its box."""
    height, width = masks.shape[1:]
    found = []
    for part, seed, score in zip(_component(masks, seeds), seeds.tolist(), scores, strict=True):
        rows, columns = part.any(1).nonzero().flatten().tolist(), part.any(0).nonzero().flatten().tolist()
        box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        found.append(Discovery(method, (height, width), box, seed, part, score))
    return found


def _component(masks: Tensor, seeds: Tensor) -> Tensor:
    """Return the 4-connected component of each mask (B, h, w) around its seed (B,), which always belongs to it."""
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


@fitting
def iou(box: Box | Tensor, boxes: Boxes) -> Tensor:
    """Return the intersection over union of one box and several (n, 4): (n,); 0 for boxes without area."""
    one, many = (torch.as_tensor(each, dtype=torch.float64).detach().cpu() for each in (box, boxes))
    if one.shape != (4,) or many.ndim != 2 or many.shape[1] != 4:
        raise UnsupportedInput(f"iou takes a box (4,) and boxes (n, 4); got {tuple(one.shape)}, {tuple(many.shape)}")
    overlap = (torch.minimum(one[2:], many[:, 2:]) - torch.maximum(one[:2], many[:, :2])).clamp(min=0).prod(1)
    union = (one[2:] - one[:2]).clamp(min=0).prod() + (many[:, 2:] - many[:, :2]).clamp(min=0).prod(1) - overlap
    return torch.where(union > 0, overlap / union.clamp(min=1e-300), 0.0)


class CorLoc(Result):
    """Correct localization: the share of images whose box has an IoU of ``threshold`` or more with a true one.

    An IoU of exactly ``threshold`` counts, as in the code of LOST.

    ``low`` and ``high`` are Wilson's interval at 95 %. All three are None if no image has a true box; images without
    one are left out and counted in ``without_truth``.
    """

    share: float | None
    low: float | None
    high: float | None
    hits: int
    images: int
    without_truth: int
    threshold: float = 0.5

    @classmethod
    def of(cls, hits: Sequence[bool], without_truth: int, threshold: float = 0.5) -> CorLoc:
        """Summarize one hit or miss per image."""
        low, high = wilson(sum(hits), len(hits)) or (None, None)
        return cls(sum(hits) / len(hits) if hits else None, low, high, sum(hits), len(hits), without_truth, threshold)


@fitting
def corloc(found: Sequence[Box | None], truth: Sequence[Boxes | None], *, threshold: float = 0.5) -> CorLoc:
    """Compare one box per image (None is a miss) with true boxes (n, 4); None or n = 0 for images without truth."""
    if not 0 < threshold <= 1:
        raise InvalidOption(f"the IoU threshold must be above 0 and at most 1; got {threshold}")
    if len(found) != len(truth):
        raise UnsupportedInput(f"expected true boxes for each image; got {len(found)} found, {len(truth)} true")
    pairs = [(box, boxes) for box, boxes in zip(found, truth, strict=True) if boxes is not None and len(boxes)]
    hits = [box is not None and bool((iou(box, boxes) >= threshold).any()) for box, boxes in pairs]
    return CorLoc.of(hits, len(found) - len(pairs), threshold)


class LostSweep(Result):
    """LOST with one fixed bias, and with the best of several."""

    fixed_setting: CorLoc  # at ``fixed_bias``, chosen in advance. The number to trust
    fixed_bias: float
    best_of_sweep: CorLoc  # at ``best_bias``, chosen on the images that it is measured on. An upper bound
    best_bias: float
    held_out: CorLoc  # even and odd images, each with the best bias of the others
    biases: tuple[float, ...]
    by_bias: tuple[CorLoc, ...]  # CorLoc at each of ``biases``


@fitting
@torch.no_grad()
def sweep_lost(
    features: Iterable[Tensor],
    grids: Sequence[Grid],
    truth: Sequence[Tensor | None],
    *,
    biases: Sequence[float],
    fixed: float = 0.0,
    patch: int | tuple[int, int] = 1,
    k: int = 100,
) -> LostSweep:
    """Run LOST with several biases on images of any size.

    Papers do not report the bias of their figures, hence both results. An image's Gram matrix is computed once.

    Args:
        features: (P, D) of each image.
        grids: grid of each image.
        truth: true boxes (n, 4) of each image, in pixels; None or n = 0 without truth.
        biases: biases to try; :func:`suggest_biases` returns some that fit the scale of the features.
        fixed: the bias of ``fixed_setting``.
        patch: patch size in pixels.
        k: see :func:`lost`.
    """
    if len(grids) != len(truth):
        raise UnsupportedInput(
            f"expected a grid and true boxes for each image; got {len(grids)} grids and {len(truth)} boxes"
        )
    settings = tuple(sorted({float(fixed), *map(float, biases)}))
    shift = torch.tensor(settings, dtype=torch.float64)
    rows: list[list[bool]] = []
    without = 0
    for image, grid, boxes in zip(features, grids, truth, strict=True):
        if boxes is None or not len(boxes):
            without += 1
            continue
        x = at_least_float32(as_features(image, "features", "P D"))
        shape = as_frame(grid, len(x))
        gram, added = x @ x.T, shift.to(device=x.device, dtype=x.dtype)
        found = [
            one.pixels(patch)
            for part in chunks(len(settings), 2 * gram.numel())
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


@fitting
@torch.no_grad()
def suggest_biases(features: Tensor, count: int = 9) -> tuple[float, ...]:
    """Return biases for :func:`sweep_lost` from features (B, P, D) of some images: 0 and quantiles of Gram entries.

    Subtracting a quantile makes that share of all pairs negative, which features that point the same way need.
    """
    features = as_features(features, "features", "B P D")
    if count < 2 or features.shape[1] < 2:
        raise InvalidOption(f"expected a count of 2 or more, and 2 patches or more; got {count}, {features.shape[1]}")
    pair = tuple(torch.triu_indices(features.shape[1], features.shape[1], 1, device=features.device))
    at = torch.linspace(0, 1, count + 1, dtype=torch.float64)[1:-1]
    found = []
    for part in chunks(len(features), 4 * features.shape[1] ** 2):
        x = at_least_float32(features[part])
        entries = (x @ x.mT)[:, pair[0], pair[1]].sort(-1)[0]
        found.append(entries[:, (at * (entries.shape[1] - 1)).long().to(x.device)].cpu().double())
    return tuple(sorted({0.0, *(-torch.cat(found).mean(0)).tolist()}))
