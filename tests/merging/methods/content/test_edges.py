"""Matching that respects boundaries, against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.merging.methods.loops import best_pairs, bipartite, context, cosine, groups_after, merge_pairs
from tests.models.mixes import SMALL, built, random_images
from vitrail.errors import InvalidOption
from vitrail.merging import MergeState
from vitrail.merging.methods.content import Edges
from vitrail.merging.methods.content.edges import edge_map
from vitrail.models import ViTConfig

Place = tuple[float, float]


def edge_between(edges: Tensor, a: Place, b: Place) -> float:
    height, width = edges.shape
    found = []
    for sample in range(9):
        row, column = (p * (1 - sample / 8) + q * sample / 8 for p, q in zip(a, b, strict=True))
        found.append(float(edges[min(math.floor(row + 0.5), height - 1), min(math.floor(column + 0.5), width - 1)]))
    return max(found)


def test_pairs_across_an_edge_merge_later_in_every_layer() -> None:
    """Two layers: in the second, groups stand at the mean place of their members."""
    torch.manual_seed(0)
    h, w, penalty = 4, 5, 0.7
    x = torch.randn(3, 1 + h * w, 4).double()
    edges = torch.rand(3, h, w).double() * 7
    guide = {"edges": torch.cat([torch.zeros(3, 1), edges.flatten(1)], 1)}
    method = Edges("edges", penalty=penalty)
    state = MergeState((5, 3), protected=1, guide=guide)
    places: list[list[Place]] = [[(0.0, 0.0), *((float(i // w), float(i % w)) for i in range(h * w))] for _ in x]
    tokens = x
    for r in (5, 3):
        here = context(
            tokens, grid=(1, h, w), protected=1, size=state.size, memory=state.memory, archive=state.archive,
            guide=state.guide,
        )  # fmt: skip
        reduction = method.reduce(here, r)
        length = tokens.shape[1]
        for image in range(3):
            scaled = edges[image] / edges[image].max()
            scores = {
                (a, b): cosine(tokens[image, a], tokens[image, b])
                - penalty * edge_between(scaled, places[image][a], places[image][b])
                for a, b in bipartite(list(range(1, length)))
            }
            assert groups_after(reduction, image) == merge_pairs(list(range(length)), best_pairs(scores)[:r])
            sizes = [1.0] * length if state.size is None else state.size[image].tolist()
            target, new = reduction.assignment.target[image].tolist(), []
            for group in range(reduction.assignment.length):
                members = [i for i in range(length) if target[i] == group]
                total = sum(sizes[i] for i in members)
                new.append(tuple(sum(sizes[i] * places[image][i][axis] for i in members) / total for axis in (0, 1)))
            places[image] = new  # type: ignore[assignment]
        tokens, state = state.apply(tokens, reduction, method)
    assert tokens.shape[1] == 1 + h * w - 8


def test_sobel_by_a_loop() -> None:
    torch.manual_seed(1)
    image = torch.randn(2, 3, 8, 12).double()
    found = edge_map(image, (1, 2, 3))
    for index in range(2):
        gray = image[index].mean(0)
        strongest = [0.0] * 6
        for i in range(8):
            for j in range(12):
                near = [
                    [float(gray[min(max(i + a, 0), 7), min(max(j + b, 0), 11)]) for b in (-1, 0, 1)] for a in (-1, 0, 1)
                ]
                across = sum(k * (near[n][2] - near[n][0]) for n, k in enumerate((1, 2, 1)))
                down = sum(k * (near[2][n] - near[0][n]) for n, k in enumerate((1, 2, 1)))
                patch = (i // 4) * 3 + j // 4
                strongest[patch] = max(strongest[patch], math.hypot(across, down))
        assert found[index].tolist() == pytest.approx(strongest)
    video = image.unsqueeze(2).repeat(1, 1, 2, 1, 1)
    assert torch.equal(edge_map(video, (2, 2, 3)), found.repeat(1, 2))


def test_no_pair_crosses_a_wall() -> None:
    config = ViTConfig(**{**SMALL, "image_size": 24})
    model, x = built(config), random_images(config, batch=3)
    wall = torch.zeros(6, 6)
    wall[:, 3] = 1
    method = Edges("wall", penalty=10)
    with torch.no_grad(), vitrail.merge(model, r=[8, 4], method=method) as merging:
        with merging.guide(wall=wall), merging.track() as trace:
            model(x)
        groups = trace.groups.view(3, 6, 6)
        for image in groups:
            left, right = set(image[:, :3].flatten().tolist()), set(image[:, 4:].flatten().tolist())
            assert not left & right
            assert len(set(image[:, 3].tolist())) == 6
        with pytest.raises(InvalidOption, match="guide"):
            model(x)
    with torch.no_grad(), vitrail.merge(model, r=[8, 4]) as merging, merging.track() as trace:
        model(x)
    plain = trace.groups.view(3, 6, 6)
    assert any(set(g[:, :3].flatten().tolist()) & set(g[:, 4:].flatten().tolist()) for g in plain)


def test_edges_of_the_input() -> None:
    config = ViTConfig(**{**SMALL, "image_size": 24})
    model, x = built(config), random_images(config, batch=2)
    with torch.no_grad(), vitrail.merge(model, r=4, method="edges"):
        found = model(x)
    own = edge_map(x, (1, 6, 6))
    with torch.no_grad(), vitrail.merge(model, r=4, method=Edges("mine")) as merging, merging.guide(mine=own):
        assert torch.equal(model(x), found)


@pytest.mark.parametrize("options", [{"boundary": ""}, {"penalty": -1}, {"penalty": math.nan}, {"features": "x"}])
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        Edges(**options)


def test_options_make_the_same_method_again() -> None:
    for options in ({}, {"boundary": "mine", "penalty": 2.0, "features": "values"}):
        assert Edges(**options).options == options
