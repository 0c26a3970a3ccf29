"""Qualities against plain loops, and what counts as a tolerance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vitrail.errors import InvalidOption
from vitrail.tuning import QUALITIES, Tolerance
from vitrail.tuning.quality import of_tasks


def outputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return (
        reference + 0.5 * torch.randn(6, 4, generator=generator).double(),
        reference,
        torch.tensor([0, 1, 2, 3, 0, 1]),
    )


def test_qualities_equal_plain_loops() -> None:
    output, reference, labels = outputs()
    for image in range(len(output)):
        a, b = output[image].tolist(), reference[image].tolist()
        p = [math.exp(x) / sum(map(math.exp, b)) for x in b]
        q = [math.exp(x) / sum(map(math.exp, a)) for x in a]
        wanted = {
            "agreement": float(a.index(max(a)) == b.index(max(b))),
            "kl": sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)),
            "cosine": sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b),
            "dense_error": math.dist(a, b) / math.hypot(*b),
            "accuracy_loss": float(b.index(max(b)) == labels[image]) - float(a.index(max(a)) == labels[image]),
        }
        for name, quality in QUALITIES.items():
            found = quality.compare(output, reference, labels)[image]
            assert float(found) == pytest.approx(wanted[name], abs=1e-12), name


def test_a_score_of_the_user_counts_its_loss() -> None:
    output, reference, labels = outputs()
    quality = Tolerance.parse((lambda logits, truth: logits[range(6), truth], 0.1)).quality
    torch.testing.assert_close(
        quality.compare(output, reference, labels), (reference - output)[range(6), labels], check_dtype=False
    )
    assert quality.meets(0.1, 0.1)
    assert not quality.meets(0.2, 0.1)
    wrong = Tolerance.parse((lambda logits, truth: 3.0, 0.1)).quality
    with pytest.raises(InvalidOption, match="one number per image"):
        wrong.compare(output, reference, labels)


def test_a_tolerance_is_read_from_text_or_a_pair() -> None:
    assert Tolerance.parse("agreement 0.99") == Tolerance.parse(("agreement", 0.99))
    assert Tolerance.parse("agreement 0.99").quality.meets(0.995, 0.99)
    assert Tolerance.parse("kl 0.02").quality.meets(0.01, 0.02)
    assert not Tolerance.parse("kl 0.02").quality.meets(0.03, 0.02)


@pytest.mark.parametrize(
    "wrong",
    ["agreement", "agreement 99", "agreement -1", "agreement x", "speed 3", 0.9, ("agreement", True), "kl nan", ()],
)
def test_anything_else_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidOption, match="agreement"):
        Tolerance.parse(wrong)


def test_tasks_side_by_side_are_compared_one_by_one() -> None:
    output, reference = torch.randn(2, 40, 5, generator=torch.Generator().manual_seed(0)).double()
    sizes = [2, 3]
    parts = list(zip(output.split(sizes, 1), reference.split(sizes, 1), strict=True))
    agree, kl = (QUALITIES[name].compare for name in ("agreement", "kl"))
    both = of_tasks(agree, sizes, share=True)(output, reference, None).tolist()
    first, second = (agree(*part, None).tolist() for part in parts)
    assert both == [float(a and b) for a, b in zip(first, second, strict=True)]
    assert 0 < sum(both) < 40
    assert both != agree(output, reference, None).tolist()  # the largest logit of all
    summed = of_tasks(kl, sizes, share=False)(output, reference, None)
    torch.testing.assert_close(summed, kl(*parts[0], None) + kl(*parts[1], None))
