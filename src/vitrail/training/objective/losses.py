"""Losses as functions of tensors. All compute in at least float32; each states its reduction."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import UnsupportedInput


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    partner: Tensor | None = None,
    share: Tensor | None = None,
) -> Tensor:
    """Return the cross-entropy of logits (B, C) with labels (B,), averaged over samples.

    Args:
        logits: logits or log-probabilities.
        labels: true classes.
        smoothing: label smoothing.
        partner: (B,) index of the sample that each one was mixed with.
        share: (B,) weight of each sample's own label; the rest goes to its partner's label.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]), smoothing=0.1).item() == torch.tensor(4.0).log().item()
    True
    """
    log_p = _float(logits).log_softmax(-1)
    true = _pick(log_p, labels)
    if partner is not None and share is not None:
        true = share * true + (1 - share) * _pick(log_p, labels[partner])
    return -((1 - smoothing) * true + smoothing * log_p.mean(-1)).mean()


def hard_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the cross-entropy with the teacher's most likely class (DeiT), averaged over samples; both (B, C)."""
    _check_shapes(student, teacher)
    return cross_entropy(student, teacher.argmax(-1))


def soft_distillation(student: Tensor, teacher: Tensor, temperature: float = 3.0) -> Tensor:
    """Return the KL divergence of student from teacher logits (B, C) at a temperature τ, times τ², per sample.

    The factor keeps the scale of gradients independent of the temperature. DeiT's code also divides by the number of
    classes.
    """
    _check_shapes(student, teacher)
    log_q = (_float(student) / temperature).log_softmax(-1)
    log_p = (_float(teacher) / temperature).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum() * temperature**2 / len(student)


def feature_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """Return one minus the cosine similarity of tokens (B, N, D) with the teacher's, averaged over tokens."""
    _check_shapes(student, teacher)
    return (1 - F.cosine_similarity(_float(student), _float(teacher), dim=-1)).mean()


def reconstruction(predicted: Tensor, patches: Tensor, mask: Tensor) -> Tensor:
    """Return the mean squared error of the pixels (B, P, K) of masked patches (MAE).

    Each true patch is normalized to mean 0 and variance 1. ``mask`` (B, P) is true for masked patches; the loss is 0 if
    there are none.
    """
    _check_shapes(predicted, patches)
    variance, mean = torch.var_mean(_float(patches), -1, keepdim=True)
    target = (_float(patches) - mean) / (variance + 1e-6).sqrt()
    return _masked_mean((_float(predicted) - target).square().mean(-1), mask)


def masked_cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Return the cross-entropy of logits (B, P, K) with a teacher's probabilities, averaged over masked patches (iBOT).

    ``mask`` (B, P) is true for masked patches; the loss is 0 if there are none.
    """
    _check_shapes(logits, targets)
    return _masked_mean(-(_float(targets) * _float(logits).log_softmax(-1)).sum(-1), mask)


def patches_of(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Return the patches (B, P, C·h·w) of images (B, C, H, W), in row-major order."""
    height, width = patch
    cut = images.unflatten(2, (-1, height)).unflatten(4, (-1, width))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def uncertainty(losses: Tensor, log_variance: Tensor) -> Tensor:
    """Return the sum of task losses (T,) weighted by learned variances (Kendall et al. 2018): Σ exp(−s)·L + s/2.

    s = log σ². A hard task gets a large variance and a small weight; s/2 keeps variances bounded.
    """
    return ((-log_variance).exp() * losses + log_variance / 2).sum()


def _masked_mean(each: Tensor, mask: Tensor) -> Tensor:
    if mask.shape != each.shape:
        raise UnsupportedInput(f"expected a mask of shape {tuple(each.shape)}; got {tuple(mask.shape)}")
    masked = mask.to(each.dtype)
    return (each * masked).sum() / masked.sum().clamp(min=1)


def _float(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _pick(log_p: Tensor, labels: Tensor) -> Tensor:
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _check_shapes(student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise UnsupportedInput(
            f"expected predictions and targets of the same shape; got {tuple(student.shape)} and {tuple(teacher.shape)}"
        )
