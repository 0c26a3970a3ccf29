"""MLERP (ToFu) against a loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vitrail
from tests.merging.methods.pairs.cases import CASES, Case, context_of, every_case, groups_of, merged
from tests.models.mixes import SMALL, built, random_images
from vitrail.errors import InvalidOption
from vitrail.merging import Assignment, ToMe, as_method
from vitrail.merging.methods.pairs import MLERP
from vitrail.models import ViTConfig


@every_case
@pytest.mark.parametrize("layer", [1, 2])
def test_tokens_against_a_loop(case: Case, layer: int) -> None:
    """Blocks 0 and 1 of 4 keep the destination, blocks 2 and 3 the mean direction with the largest norm."""
    context = context_of(case, layer, layer=layer)
    method = MLERP()
    reduction = method.reduce(context, 3)
    assert torch.equal(reduction.assignment.target, ToMe().reduce(context, 3).assignment.target)
    tokens, sizes = merged(method, context, reduction)
    for image in range(3):
        size = torch.ones(case.length).double() if context.size is None else context.size[image]
        for group in groups_of(reduction.assignment, context, image):
            place = int(reduction.assignment.target[image, min(group)])
            members = {i: context.x[image, i] for i in group}
            if len(group) == 1:
                wanted, total = context.x[image, min(group)], size[min(group)]
                assert torch.equal(tokens[image, place], wanted)
            elif layer < 2:
                (stays,) = (i for i in group if i % 2)
                wanted, total = members[stays], size[stays]
                assert torch.equal(tokens[image, place], wanted)
            else:
                mean = sum(size[i] * x for i, x in members.items())
                assert isinstance(mean, torch.Tensor)
                wanted = mean / mean.norm() * max(float(x.norm()) for x in members.values())
                total = sum(size[i] for i in group)
                torch.testing.assert_close(tokens[image, place], wanted, rtol=0, atol=1e-12)
            assert sizes[image, place] == total


def test_opposite_tokens_and_gradients() -> None:
    x = torch.tensor([[[1.0, 0], [-1, 0], [3, 4], [6, 8]]], requires_grad=True)
    step = Assignment(torch.tensor([[0, 0, 1, 1]]), 2)
    y = MLERP().pool(x, step, None)
    assert y[0].tolist() == [[0, 0], [6, 8]]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad[0, 2:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = torch.tensor([[[3.0, 4], [6, 8], [1, 1]]], dtype=dtype)
    y = MLERP().pool(x, Assignment(torch.tensor([[0, 0, 1]]), 2), torch.ones(1, 3))
    assert y.dtype == dtype
    assert y[0].tolist() == [[6, 8], [1, 1]]


def test_in_a_model() -> None:
    config = ViTConfig(**{**SMALL, "depth": 4})
    model, x = built(config), random_images(config)
    outputs = {}
    with torch.no_grad():
        for prune in (0.0, 0.5, 1.0):
            method = {"name": "mlerp", "prune": prune} if prune != 0.5 else "mlerp"
            with vitrail.merge(model, r=3, method=method) as merging:
                outputs[prune] = model(x)
                assert merging.config["method"] == method
        with vitrail.merge(model, r=3, method="prune"):
            torch.testing.assert_close(outputs[1.0], model(x))
        with vitrail.merge(model, r=[3, 3, 0, 0], method="prune"):
            first = model(x)
        with vitrail.merge(model, r=[3, 3, 0, 0], method="mlerp"):
            torch.testing.assert_close(model(x), first)
        with vitrail.merge(model, r=3):
            assert (model(x) - outputs[0.0]).abs().max() > 1e-4
    assert (outputs[0.0] - outputs[0.5]).abs().max() > 1e-4


def test_gradients_reach_all_members() -> None:
    config = ViTConfig(**SMALL)
    model, x = built(config), random_images(config).requires_grad_()
    with vitrail.merge(model, r=3, method={"name": "mlerp", "prune": 0.0}):
        model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert (x.grad.abs().amax((1,)) > 0).all()


@pytest.mark.parametrize("options", [{"prune": 1.5}, {"prune": -0.1}, {"prune": "early"}, {"features": "colors"}])
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        MLERP(**options)
    with pytest.raises(InvalidOption, match=next(iter(options))):
        as_method({"name": "mlerp", **options})


def test_padding_has_no_share() -> None:
    context = context_of(CASES["padding"], 2, layer=3)
    reduction = MLERP().reduce(context, 3)
    tokens, sizes = merged(MLERP(), context, reduction)
    assert not tokens[sizes == 0].any()
