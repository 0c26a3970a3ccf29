"""Losses as functions of tensors, in at least float32; each states its reduction."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.sample import UNKNOWN
from vitrail.errors import UnsupportedInput


def cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, partner: Tensor | None = None, share: Tensor | None = None
) -> Tensor:
    """Return the cross-entropy of logits or log-probabilities (B, C) with labels (B,), averaged over samples.

    In mixed images, ``share`` (B,) is the weight of each sample's own label; the rest goes to the label of the sample
    that it was mixed with, whose index is ``partner`` (B,).

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]), smoothing=0.1).item() == torch.tensor(4.0).log().item()
    True
    """
    logits = _float(logits)

    def each(labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)

    return _mixed(each, labels, partner, share)


def squared_error(
    outputs: Tensor, values: Tensor, smoothing: float = 0.0, partner: Tensor | None = None, share: Tensor | None = None
) -> Tensor:
    """Return the squared error of outputs (B, 1) of a regression, averaged over samples; mixed images as above.

    >>> squared_error(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]])).item()
    5.0
    """
    outputs = _float(outputs)
    _check_shape("values", values, outputs)
    return _mixed(lambda values: (outputs - values).square().mean(1), values, partner, share)


def binary_cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, partner: Tensor | None = None, share: Tensor | None = None
) -> Tensor:
    """Return the binary cross-entropy of multi-label logits (B, K), averaged over classes and samples.

    >>> binary_cross_entropy(torch.zeros(2, 3), torch.ones(2, 3)).item() == torch.tensor(2.0).log().item()
    True
    """
    logits = _float(logits)
    _check_shape("labels", labels, logits)

    def each(labels: Tensor) -> Tensor:
        smooth = labels * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(logits, smooth.to(logits), reduction="none").mean(1)

    return _mixed(each, labels, partner, share)


def pixel_cross_entropy(
    logits: Tensor, masks: Tensor, smoothing: float = 0.0, partner: Tensor | None = None, share: Tensor | None = None
) -> Tensor:
    """Return the cross-entropy of a map of logits (B, K, H, W) with masks (B, H, W), averaged over known pixels.

    Pixels of value 255 are unknown. Images are not mixed.

    >>> masks = torch.tensor([[[0, 255]], [[1, 1]]])
    >>> pixel_cross_entropy(torch.zeros(2, 2, 1, 2), masks).item() == torch.tensor(2.0).log().item()
    True
    """
    _check_shape("masks", masks, logits[:, 0])
    known = masks != UNKNOWN
    loss = F.cross_entropy(_float(logits), masks, reduction="none", ignore_index=UNKNOWN, label_smoothing=smoothing)
    return _masked_mean(loss, known)


def pixel_squared_error(
    maps: Tensor, depths: Tensor, smoothing: float = 0.0, partner: Tensor | None = None, share: Tensor | None = None
) -> Tensor:
    """Return the squared error of maps (B, 1, H, W) with depths (B, H, W), averaged over known pixels.

    Pixels that are NaN are unknown. There are no classes to smooth, and images are not mixed.

    >>> depths = torch.tensor([[[1.0, float("nan")]]])
    >>> pixel_squared_error(torch.full((1, 1, 1, 2), 3.0), depths).item()
    4.0
    """
    _check_shape("depths", depths, maps[:, 0])
    known = ~depths.isnan()
    return _masked_mean((_float(maps[:, 0]) - depths.nan_to_num()).square(), known)


def _mixed(each: Callable[[Tensor], Tensor], labels: Tensor, partner: Tensor | None, share: Tensor | None) -> Tensor:
    """Return the mean of a loss per sample; in mixed images the partner's labels have the rest of the weight."""
    loss = each(labels)
    if partner is not None and share is not None:
        loss = share * loss + (1 - share) * each(labels[partner])
    return loss.mean()


def soft_distillation(student: Tensor, teacher: Tensor, temperature: float = 3.0) -> Tensor:
    """Return the KL divergence of student from teacher logits (B, C) at a temperature τ, times τ², per sample.

    The factor keeps the scale of gradients independent of the temperature. DeiT's code also divides by the number of
    classes.
    """
    _check_shape("teacher", teacher, student)
    log_q, log_p = ((_float(logits) / temperature).log_softmax(-1) for logits in (student, teacher))
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True) * temperature**2


def feature_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """Return one minus the cosine similarity of tokens (B, N, D) with the teacher's, averaged over tokens."""
    _check_shape("teacher", teacher, student)
    return (1 - F.cosine_similarity(_float(student), _float(teacher), dim=-1)).mean()


def reconstruction(predicted: Tensor, patches: Tensor, mask: Tensor) -> Tensor:
    """Return the mean squared error of the pixels (B, P, K) of masked patches (MAE).

    Each true patch is normalized to mean 0 and variance 1. ``mask`` (B, P) is true for masked patches; the loss is 0 if
    there are none.
    """
    _check_shape("patches", patches, predicted)
    variance, mean = torch.var_mean(_float(patches), -1, keepdim=True)
    target = (_float(patches) - mean) / (variance + 1e-6).sqrt()
    return _masked_mean((_float(predicted) - target).square().mean(-1), mask)


def masked_cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Return the cross-entropy of logits (B, P, K) with a teacher's probabilities, averaged over masked patches (iBOT).

    ``mask`` (B, P) is true for masked patches; the loss is 0 if there are none.
    """
    _check_shape("targets", targets, logits)
    return _masked_mean(-(_float(targets) * _float(logits).log_softmax(-1)).sum(-1), mask)


def _masked_mean(each: Tensor, mask: Tensor) -> Tensor:
    _check_shape("mask", mask, each)
    masked = mask.to(each.dtype)
    return (each * masked).sum() / masked.sum().clamp(min=1)


def _float(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check_shape(name: str, given: Tensor, expected: Tensor) -> None:
    if given.shape != expected.shape:
        raise UnsupportedInput(f"{name}: expected shape {tuple(expected.shape)}; got {tuple(given.shape)}")
