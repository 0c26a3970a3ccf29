"""Losses as functions of tensors, in at least float32; each states its reduction."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
    loss = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    if partner is not None and share is not None:
        other = F.cross_entropy(logits, labels[partner], reduction="none", label_smoothing=smoothing)
        loss = share * loss + (1 - share) * other
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
