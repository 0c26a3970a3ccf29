"""Losses against loops in float64 and against their papers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UnsupportedInput
from vitrail.training.objective.losses import (
    binary_cross_entropy,
    cross_entropy,
    feature_distillation,
    masked_cross_entropy,
    pixel_cross_entropy,
    reconstruction,
    soft_distillation,
    squared_error,
)


def softmax(row: list[float], temperature: float = 1.0) -> list[float]:
    powers = [math.exp(value / temperature) for value in row]
    return [value / sum(powers) for value in powers]


def entropy_loop(
    logits: Tensor, labels: Tensor, smoothing: float, partner: list[int] | None, share: list[float]
) -> float:
    total = 0.0
    rows, classes = logits.shape
    for i, row in enumerate(logits.tolist()):
        target = [smoothing / classes] * classes
        target[labels[i]] += (1 - smoothing) * share[i]
        if partner is not None:
            target[labels[partner[i]]] += (1 - smoothing) * (1 - share[i])
        total -= sum(t * math.log(p) for t, p in zip(target, softmax(row), strict=True))
    return total / rows


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixed", [False, True])
def test_cross_entropy_is_the_sum_over_targets(smoothing: float, mixed: bool) -> None:
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 4, 2, 2, 1, 3])
    partner = [1, 0, 3, 2, 5, 4] if mixed else None
    share = [0.3, 0.3, 1.0, 1.0, 0.75, 0.75] if mixed else [1.0] * 6
    given = (torch.tensor(partner), torch.tensor(share, dtype=torch.float64)) if partner else (None, None)
    found = cross_entropy(logits, labels, smoothing, *given)
    assert found.item() == pytest.approx(entropy_loop(logits, labels, smoothing, partner, share), abs=1e-12)


def test_low_precision_is_widened_first() -> None:
    logits, labels = torch.randn(4, 1000).bfloat16() * 20, torch.randint(1000, (4,))
    found = cross_entropy(logits, labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.cross_entropy(logits.float(), labels))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_soft_distillation_by_loop(temperature: float) -> None:
    student, teacher = torch.randn(2, 3, 4, dtype=torch.float64)
    total = 0.0
    for mine, theirs in zip(student.tolist(), teacher.tolist(), strict=True):
        p, q = softmax(theirs, temperature), softmax(mine, temperature)
        total += temperature**2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert soft_distillation(student, teacher, temperature).item() == pytest.approx(total / 3, abs=1e-12)


def test_soft_distillation_of_equal_logits_is_zero() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    loss = soft_distillation(logits, logits.detach() + 5)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6


def test_shapes_must_agree() -> None:
    with pytest.raises(UnsupportedInput, match=r"teacher: expected shape \(2, 3\)"):
        soft_distillation(torch.zeros(2, 3), torch.zeros(2, 4))


def test_feature_distillation_by_loop() -> None:
    student, teacher = torch.randn(2, 2, 3, 8, dtype=torch.float64)
    cosines = []
    for a, b in zip(student.flatten(0, 1).tolist(), teacher.flatten(0, 1).tolist(), strict=True):
        length = math.sqrt(sum(x * x for x in a) * sum(x * x for x in b))
        cosines.append(1 - sum(x * y for x, y in zip(a, b, strict=True)) / length)
    assert feature_distillation(student, teacher).item() == pytest.approx(sum(cosines) / 6)


def test_reconstruction_counts_hidden_patches_alone() -> None:
    patches, guess = torch.randn(2, 2, 4, 12, dtype=torch.float64)
    mask = torch.tensor([[True, False, False, True], [False, False, True, False]])
    normal = []
    for b, p in [(0, 0), (0, 3), (1, 2)]:
        truth = patches[b, p]
        level = (truth - truth.mean()) / (truth.var() + 1e-6).sqrt()
        normal.append(((guess[b, p] - level) ** 2).mean())
    torch.testing.assert_close(reconstruction(guess, patches, mask), torch.stack(normal).mean())
    assert reconstruction(guess, patches, torch.zeros_like(mask)).item() == 0
    with pytest.raises(UnsupportedInput, match="mask"):
        reconstruction(guess, patches, mask[:, :3])


def test_only_predictions_of_masked_patches_count() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    right = torch.randn(2, 3, 5, dtype=torch.float64).softmax(-1)
    mask = torch.tensor([[True, False, True], [False, False, True]])
    each = []
    for b, p in [(0, 0), (0, 2), (1, 2)]:
        output = softmax(logits[b, p].tolist())
        each.append(-sum(q * math.log(x) for q, x in zip(right[b, p].tolist(), output, strict=True)))
    found = masked_cross_entropy(logits, right, mask)
    assert found.item() == pytest.approx(sum(each) / 3)
    found.backward()
    expected = torch.where(mask.unsqueeze(-1), (logits.softmax(-1) - right) / 3, 0.0)
    torch.testing.assert_close(logits.grad, expected.detach())
    assert masked_cross_entropy(logits, right, torch.zeros_like(mask)).item() == 0
    with pytest.raises(UnsupportedInput, match="mask"):
        masked_cross_entropy(logits, right, mask.T)


def test_losses_of_values_and_several_classes_in_mixed_images() -> None:
    torch.manual_seed(0)
    outputs, values, partner, share = torch.randn(4, 1), torch.randn(4, 1), torch.tensor([1, 0, 3, 2]), torch.rand(4)
    own, other = (outputs - values).square()[:, 0], (outputs - values[partner]).square()[:, 0]
    expected = (share * own + (1 - share) * other).mean()
    assert torch.allclose(squared_error(outputs, values, 0.0, partner, share), expected)
    logits, labels = torch.randn(4, 3), (torch.rand(4, 3) < 0.5).float()
    assert torch.allclose(
        binary_cross_entropy(logits, labels),
        -(labels * logits.sigmoid().log() + (1 - labels) * (1 - logits.sigmoid()).log()).mean(),
    )
    both = share[:, None] * labels + (1 - share[:, None]) * labels[partner]  # the loss is linear in the labels
    assert torch.allclose(
        binary_cross_entropy(logits, labels, 0.0, partner, share), binary_cross_entropy(logits, both), atol=1e-6
    )


def test_loss_of_masks_counts_known_pixels() -> None:
    torch.manual_seed(0)
    logits, masks = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    masks[0, :2] = 255
    known = masks != 255
    each = torch.nn.functional.cross_entropy(logits.permute(0, 2, 3, 1)[known], masks[known])
    assert torch.allclose(pixel_cross_entropy(logits, masks), each)
    assert pixel_cross_entropy(logits, torch.full_like(masks, 255)) == 0
    with pytest.raises(UnsupportedInput, match="masks: expected shape"):
        pixel_cross_entropy(logits, masks[:, :2])
