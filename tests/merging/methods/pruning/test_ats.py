"""ATS against a loop over quantiles."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

import vitrail
from tests.merging.methods.blocks import BATCH, BLOCKS, absent, apply, block, free_places, size_of
from vitrail.errors import UnsupportedModel
from vitrail.merging import Context
from vitrail.merging.methods.pruning import ATS
from vitrail.models import ViT, ViTConfig


def sampled(context: Context, image: int, r: int | None) -> tuple[list[int], dict[int, int]]:
    """Return the sampled tokens of an image, and the one from which each dropped token is restored."""
    free = free_places(context, image)
    rows, values = context.attention([0])[image, :, 0], context.v[image]
    scores = [sum(float(rows[h, i] * values[h, i].norm()) for h in range(len(rows))) for i in free]
    shares = [score / sum(scores) for score in scores]
    ends = list(accumulate(shares))
    count = len(free) if r is None else max(1, len(free) - r)
    quantiles = [(k - 0.5) / count for k in range(1, count + 1)]
    drawn = [free[next(i for i, end in enumerate(ends) if end >= quantile)] for quantile in quantiles]
    stand_in = {}
    for i, (end, share) in enumerate(zip(ends, shares, strict=True)):
        nearest = min(range(count), key=lambda k, at=end - share / 2: abs(quantiles[k] - at))
        stand_in[free[i]] = free[i] if free[i] in drawn else drawn[nearest]
    return sorted(set(drawn)), stand_in


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("r", [1, 5, 9, None])
def test_tokens_at_even_quantiles_stay(name: str, r: int | None) -> None:
    context = replace(BLOCKS[name], planned=r)
    reduction = ATS().reduce(context, 9 if r is None else r)
    step = reduction.assignment
    merged, state = apply(context, reduction)
    lengths = []
    for image in range(BATCH):
        kept, stand_in = sampled(context, image, r)
        target = step.target[image].tolist()
        stays = [i for i in range(context.x.shape[1]) if i not in absent(context, image) and stand_in.get(i, i) == i]
        assert [target[i] for i in stays] == list(range(len(stays)))
        assert len(stays) == context.x.shape[1] - len(absent(context, image)) - len(stand_in) + len(kept)
        for i, into in stand_in.items():
            assert target[i] == target[into]
        for place, i in enumerate(stays):
            assert torch.equal(merged[image, place], context.x[image, i])
            assert state.size[image, place] == size_of(context, image, i)
        assert not state.size[image, len(stays) :].any()
        lengths.append(len(stays))
    assert step.length == max(lengths)


def test_equal_significance_keeps_all() -> None:
    context = block(protected=1)
    context.attend = lambda queries: torch.full((3, 2, 1, 13), 1 / 13, dtype=torch.float64)
    values = torch.ones(3, 2, 13, 4, dtype=torch.float64)
    context.project = lambda: (values, values, values)
    for planned, kept in ((None, 13), (8, 5)):
        context.planned = planned
        assert ATS().reduce(context, 8).assignment.length == kept


@pytest.mark.parametrize("broken", [0.0, torch.nan, torch.inf])
def test_broken_scores_keep_at_least_one(broken: float) -> None:
    context, whole = block(planned=5), block(planned=5)
    rows = whole.attention([0])
    rows[1] = broken
    context.attend = lambda queries: rows
    wanted, found = (ATS().reduce(one, 5).assignment.target for one in (whole, context))
    assert torch.equal(wanted[[0, 2]], found[[0, 2]])
    assert 2 <= found[1].unique().numel() <= 8


def small_model(**options: object) -> ViT:
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 4, "width": 16, "depth": 4, "heads": 2, "num_classes": 3}
    model = ViT(ViTConfig(**{**sizes, **options}))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model.eval().double()


def test_it_runs_without_a_number_after_a_quarter_of_the_blocks() -> None:
    model = small_model()
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad(), vitrail.merge(model, method="ats") as merging, merging.track() as trace:
        model(images)
    lengths = trace.tokens_per_layer
    assert lengths[:, 0].tolist() == [65, 65, 65]
    assert (lengths[:, 1] < 65).all()
    assert len(set(lengths[:, -1].tolist())) > 1


def test_a_planned_number_is_reached() -> None:
    model = small_model()
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad(), vitrail.merge(model, keep=0.5, method="ats") as merging, merging.track() as trace:
        model(images)
    assert (trace.tokens_per_layer[:, -1] <= 33).all()
    assert (trace.tokens_per_layer[:, -1] > 10).all()


def test_a_class_token_is_required() -> None:
    model = small_model(tokens=(), pool="mean")
    with pytest.raises(UnsupportedModel, match="class token"):
        vitrail.merge(model, method="ats")
