"""Losses as plain functions of tensors. Each says how it is reduced; all compute in float32 or better."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import InvalidOption, UnsupportedInput

Reduction = Literal["batchmean", "numel", "sum"]
FeatureLoss = Literal["cosine", "smooth_l1"]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    partner: Tensor | None = None,
    share: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of logits (B, C) with labels (B,), as mean over pictures.

    Args:
        logits: what a head says; log-probabilities will do.
        labels: the true classes.
        smoothing: share of the target that is spread evenly over all classes.
        partner: (B,) for mixed pictures, which picture of the batch each was mixed with.
        share: (B,) how much of each picture is its own; the rest has its partner's label.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]), smoothing=0.1).item() == torch.tensor(4.0).log().item()
    True
    """
    if not 0 <= smoothing < 1:
        raise InvalidOption(f"smoothing is a share, 0 or more and less than 1; got {smoothing}")
    if (partner is None) != (share is None):
        raise InvalidOption("mixed pictures have a partner and a share each; got one of the two alone")
    log_p = _wide(logits).log_softmax(-1)
    right = _entry(log_p, labels)
    if partner is not None and share is not None:
        right = share * right + (1 - share) * _entry(log_p, labels[partner])
    return -((1 - smoothing) * right + smoothing * log_p.mean(-1)).mean()


def hard_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy with the class that the teacher finds most likely (DeiT), as mean over pictures; both (B, C)."""
    _check_pair(student, teacher)
    return cross_entropy(student, teacher.argmax(-1))


def soft_distillation(
    student: Tensor, teacher: Tensor, temperature: float = 3.0, reduction: Reduction = "batchmean"
) -> Tensor:
    """Kullback–Leibler divergence of the student from the teacher at a temperature τ, times τ²; both (B, C).

    The factor keeps gradients of the same size at every temperature. How the sum over pictures and classes becomes
    one number differs between codes by a factor of C, so it is said: ``batchmean`` divides by pictures (the
    divergence itself), ``numel`` by pictures and classes (as DeiT's own code does), ``sum`` by nothing.
    """
    _check_pair(student, teacher)
    if temperature <= 0:
        raise InvalidOption(f"temperature is a number more than 0; got {temperature}")
    if reduction not in get_args(Reduction):
        raise InvalidOption(f"reduction is one of {', '.join(get_args(Reduction))}; got {reduction!r}")
    log_q = (_wide(student) / temperature).log_softmax(-1)
    log_p = (_wide(teacher) / temperature).log_softmax(-1)
    total = (log_p.exp() * (log_p - log_q)).sum() * temperature**2
    divisor = {"batchmean": len(student), "numel": student.numel(), "sum": 1}[reduction]
    return total / divisor


def feature_distillation(student: Tensor, teacher: Tensor, kind: FeatureLoss = "cosine") -> Tensor:
    """Compare tokens (B, N, D) with a teacher's, as mean over pictures and tokens.

    ``cosine`` is one minus the cosine of each pair. ``smooth_l1`` is Huber's loss (its bend at 1), as mean over
    channels too, against teacher tokens brought to mean 0 and variance 1 over their channels, for teachers differ in
    scale by orders of magnitude.
    """
    _check_pair(student, teacher)
    x, y = _wide(student), _wide(teacher)
    if kind == "cosine":
        return (1 - F.cosine_similarity(x, y, dim=-1)).mean()
    if kind == "smooth_l1":
        return F.smooth_l1_loss(x, F.layer_norm(y, y.shape[-1:]))
    raise InvalidOption(f"a loss of features is one of {', '.join(get_args(FeatureLoss))}; got {kind!r}")


def reconstruction(predicted: Tensor, patches: Tensor, mask: Tensor, normalise: bool = True) -> Tensor:
    """Mean squared error of the pixels (B, P, K) of masked patches (MAE), as mean over pixels and masked patches.

    Args:
        predicted: what the model says.
        patches: the true pixels, as :func:`patches_of` cuts them.
        mask: (B, P), true where a patch was hidden. Patches that were seen do not count; where all were, the loss is 0.
        normalise: bring every true patch to mean 0 and variance 1 first, so that contrast counts and brightness does
            not.
    """
    _check_pair(predicted, patches)
    target = _wide(patches)
    if normalise:
        variance, mean = torch.var_mean(target, -1, keepdim=True)
        target = (target - mean) / (variance + 1e-6).sqrt()
    return _mean_where((_wide(predicted) - target).square().mean(-1), mask)


def masked_answers(logits: Tensor, answers: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy of logits (B, P, K) with a teacher's probabilities, as mean over masked patches (iBOT).

    Args:
        logits: what the model says, already divided by its temperature.
        answers: what is right: probabilities.
        mask: (B, P), as for :func:`reconstruction`.
    """
    _check_pair(logits, answers)
    return _mean_where(-(_wide(answers) * _wide(logits).log_softmax(-1)).sum(-1), mask)


def patches_of(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Cut pictures (B, C, H, W) into patches (B, P, C·h·w), row after row."""
    height, width = patch
    cut = images.unflatten(2, (-1, height)).unflatten(4, (-1, width))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def uncertainty(losses: Tensor, log_variance: Tensor) -> Tensor:
    """Weigh losses (T,) of tasks by learned variances (Kendall et al. 2018): Σ exp(−s)·L + s/2, with s = log σ².

    A task that stays hard gets a large variance and pulls less; s/2 keeps variances from growing for ever. Where the
    losses are constant, s settles at log 2L.
    """
    return ((-log_variance).exp() * losses + log_variance / 2).sum()


def _mean_where(each: Tensor, mask: Tensor) -> Tensor:
    """Give the mean of the losses of patches (B, P) that are masked; 0 where none is."""
    if mask.shape != each.shape:
        raise UnsupportedInput(f"a mask of {tuple(each.shape)} fits these patches; got {tuple(mask.shape)}")
    hidden = mask.to(each.dtype)
    return (each * hidden).sum() / hidden.sum().clamp(min=1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _entry(log_p: Tensor, labels: Tensor) -> Tensor:
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _check_pair(student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise UnsupportedInput(
            f"student and teacher, or guess and truth, have the same shape; got {tuple(student.shape)} and "
            f"{tuple(teacher.shape)}"
        )
