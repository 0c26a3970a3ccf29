"""Boundary F-score of segmentation: how well the outlines of predicted masks follow the true ones.

The boundary of a mask are its pixels next to a pixel outside it (above, below, left or right); the border of the image
is no boundary. A boundary pixel is right if a boundary pixel of the other mask is within the tolerance (Euclidean
distance in pixels). Precision is the share of predicted boundary pixels that are right, recall the share of true ones,
F their harmonic mean, as in DAVIS (Perazzi et al., 2016) but for its one-sided definition of the boundary. The score of
an image whose masks both have no boundary is 1, and 0 if only one has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail._checks import is_number
from vitrail.errors import InvalidOption, UnsupportedInput

SHARE = 0.008
"""Default tolerance as a share of the image's diagonal, as in DAVIS."""


@dataclass(frozen=True)
class BoundaryScores:
    """Precision, recall and F-score of each image (B,), in float64."""

    precision: Tensor
    recall: Tensor
    f_score: Tensor


def boundary_scores(predicted: Tensor, true: Tensor, *, tolerance: float | None = None) -> BoundaryScores:
    """Return the boundary scores of masks (B, H, W), bool, against the true ones.

    Args:
        predicted: masks of one class.
        true: the true masks of that class.
        tolerance: in pixels; by default 0.008 of the diagonal, rounded up.
    """
    if (
        predicted.shape != true.shape
        or predicted.ndim != 3
        or predicted.dtype != torch.bool
        or true.dtype != torch.bool
    ):
        raise UnsupportedInput(
            f"expected two boolean masks (B, H, W) of one shape; got {tuple(predicted.shape)} of {predicted.dtype} "
            f"and {tuple(true.shape)} of {true.dtype}"
        )
    if tolerance is None:
        tolerance = math.ceil(SHARE * math.hypot(*true.shape[1:]))
    if not is_number(tolerance) or not 0 <= tolerance < math.inf:
        raise InvalidOption(f"tolerance is a number of pixels, 0 or more; got {tolerance!r}")
    found, wanted = boundary(predicted), boundary(true)
    precision = _share(found & _near(wanted, tolerance), found)
    recall = _share(wanted & _near(found, tolerance), wanted)
    total = precision + recall
    return BoundaryScores(precision, recall, torch.where(total > 0, 2 * precision * recall / total.clamp(min=1e-12), 0))


def boundary(masks: Tensor) -> Tensor:
    """Return the boundary (B, H, W) of masks (B, H, W): pixels of the mask beside one outside it."""
    padded = F.pad(masks[:, None].float(), (1, 1, 1, 1), mode="replicate")[:, 0].bool()
    inside = padded[:, :-2, 1:-1] & padded[:, 2:, 1:-1] & padded[:, 1:-1, :-2] & padded[:, 1:-1, 2:]
    return masks & ~inside


def _near(masks: Tensor, tolerance: float) -> Tensor:
    """Return which pixels are within a distance of a pixel of the mask."""
    reach = int(tolerance)
    offsets = torch.arange(-reach, reach + 1, device=masks.device)
    disk = (offsets[:, None].square() + offsets[None].square() <= tolerance**2).float()
    return F.conv2d(masks[:, None].float(), disk[None, None], padding=reach)[:, 0] > 0.5


def _share(right: Tensor, of: Tensor) -> Tensor:
    """Return the share of pixels that are right; 1 where there are none."""
    count = of.flatten(1).sum(1).double()
    return torch.where(count > 0, right.flatten(1).sum(1).double() / count.clamp(min=1), 1.0)
