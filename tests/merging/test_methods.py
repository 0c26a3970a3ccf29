"""The methods that come with the package: ToMe with any features, and the controls Random and Prune."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitrail
from tests.models.mixes import SMALL, built, random_images
from vitrail.errors import InvalidOption
from vitrail.merging import Context, MergeState, Prune, Random, ToMe, as_method, match
from vitrail.merging.methods.random import uniform
from vitrail.models import ViT, ViTConfig


def context(x: Tensor, **options: Any) -> Context:
    """Return the context of a block with the same values as tokens, queries, keys and values of one head."""
    heads = x.unsqueeze(1)
    return Context(0, (1, 1, x.shape[1]), x, project=lambda: (heads, heads, heads), **options)


def test_pruning_keeps_the_tokens_that_others_would_go_into() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 11, 4)
    for r in range(1, 6):
        merged = match(x, r, 1)
        reduction = Prune().reduce(context(x, protected=1), r)
        assert torch.equal(reduction.assignment.target, merged.target)
        kept, state = MergeState((r,), protected=1).apply(x, reduction)
        assert torch.equal(state.size, torch.ones(3, 11 - r))
        for image in range(3):
            for place in range(11 - r):
                members = (merged.target[image] == place).nonzero()[:, 0].tolist()
                stays = members[0] if len(members) == 1 else next(one for one in members if one % 2)
                assert torch.equal(kept[image, place], x[image, stays])


def test_pruning_keeps_the_size_of_the_token_that_stays() -> None:
    torch.manual_seed(0)
    x, size = torch.randn(1, 4, 3), torch.tensor([[4.0, 1.0, 2.0, 3.0]])
    reduction = Prune().reduce(context(x, size=size), 1)
    assert reduction.weight is not None
    dropped = int((reduction.weight == 0).nonzero()[0, 1])
    _, state = MergeState((1,), size=size).apply(x, reduction)
    assert state.size is not None
    assert sorted(state.size[0].tolist()) == sorted(size[0].tolist()[:dropped] + size[0].tolist()[dropped + 1 :])


def test_random_merges_choose_all_pairs_alike() -> None:
    torch.manual_seed(0)
    step = Random().reduce(context(torch.zeros(4000, 8, 16)), 1).assignment
    pairs = torch.zeros(8, 8)
    for row in step.target:
        into = (row == row.mode().values).nonzero()[:, 0]
        pairs[into[0], into[1]] += 1
    even_odd = torch.tensor([[i != j and (i + j) % 2 == 1 and i < j for j in range(8)] for i in range(8)])
    assert not pairs[~even_odd].any()
    assert int(even_odd.sum()) == 16
    assert (pairs[even_odd] - 250).abs().max() < 5 * 250**0.5


def merged_by_hand(model: ViT, x: Tensor, r: int, features: Any, prune: bool = False) -> Tensor:
    """The class token of a model that merges or prunes by some features, written out for unmerged models."""
    patches, special = model._embed(x, model.config.grid)
    y = torch.cat([special["cls"], patches], 1)
    size = torch.ones(y.shape[:2], dtype=y.dtype)
    for block in model.blocks:
        h = block.norm1(y)
        q, k, v = block.attn.qkv(h).unflatten(-1, (3, model.config.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=size.log()[:, None, None])
        y = y + block.ls1(block.attn.proj(out.transpose(1, 2).flatten(2)))
        shown = {"keys": k.mean(1), "queries": q.mean(1), "values": v.mean(1), "tokens": y}
        scores = sum(
            weight * F.normalize(shown[name], dim=-1) @ F.normalize(shown[name], dim=-1).mT
            for name, weight in features.items()
        )[:, ::2, 1::2]
        scores[:, 0] = -torch.inf  # the class token
        best, partner = scores.max(2)
        merged_y, merged_size = [], []
        for image in range(len(y)):
            dropped = {2 * int(i): 2 * int(partner[image, i]) + 1 for i in best[image].topk(r).indices}
            left = sorted((i for i in range(y.shape[1]) if i not in dropped), key=lambda i: (i % 2, i))
            groups = [[i, *(s for s, d in dropped.items() if d == i and not prune)] for i in left]
            merged_size.append(torch.stack([size[image, members].sum() for members in groups]))
            merged_y.append(
                torch.stack([(size[image, m, None] * y[image, m]).sum(0) / size[image, m].sum() for m in groups])
            )
        y, size = torch.stack(merged_y), torch.stack(merged_size)
        y = y + block.ls2(block.mlp(block.norm2(y)))
    return model.norm(y)[:, 0]


@pytest.mark.parametrize(
    "features", ["keys", "queries", "values", "tokens", {"keys": 0.7, "tokens": 0.3}, {"queries": 2, "values": 1}]
)
def test_every_feature_against_a_loop(features: Any) -> None:
    config = ViTConfig(**SMALL)
    model, x = built(config), random_images(config)
    weights = {features: 1} if isinstance(features, str) else features
    with torch.no_grad():
        expected = merged_by_hand(model, x, 3, weights)
        with vitrail.merge(model, r=3, method=ToMe(features=features)) as merging:
            found = model.forward_features(x)[:, 0]
            config_of_method = merging.config["method"]
        with vitrail.merge(model, r=3, method=config_of_method):
            again = model.forward_features(x)[:, 0]
    torch.testing.assert_close(found, expected)
    assert torch.equal(again, found)


def test_features_differ() -> None:
    config = ViTConfig(**SMALL)
    model, x = built(config), random_images(config)
    answers = []
    for features in ("keys", "queries", "values", "tokens"):
        with torch.no_grad(), vitrail.merge(model, r=3, method=ToMe(features=features)):
            answers.append(model(x))
    assert len({tuple(answer.flatten().tolist()) for answer in answers}) == 4


def test_a_pruned_model_loses_tokens() -> None:
    config = ViTConfig(**SMALL)
    model, x = built(config), random_images(config)
    with torch.no_grad():
        expected = merged_by_hand(model, x, 3, {"keys": 1}, prune=True)
        with vitrail.merge(model, r=3, method="prune") as merging:
            found = model.forward_features(x)[:, 0]
            assert merging.config["method"] == "prune"
        with vitrail.merge(model, r=3):
            merged = model.forward_features(x)[:, 0]
    torch.testing.assert_close(found, expected)
    assert (found - merged).abs().max() > 1e-3


def test_a_seed_of_random_merging_repeats_its_pairs() -> None:
    config = ViTConfig(**SMALL)
    model, x = built(config), random_images(config)
    outputs = []
    with torch.no_grad():
        for seed in (1, 1, 2):
            with vitrail.merge(model, r=3, method={"name": "random", "seed": seed}) as merging:
                assert merging.config["method"] == {"name": "random", "seed": seed}
                outputs += [model(x), torch.cat([model(image[None]) for image in x])]
    first, alone, again, _, other, _ = outputs
    assert torch.equal(first, again)
    torch.testing.assert_close(first, alone)
    assert not torch.allclose(first, other)
    with pytest.raises(InvalidOption, match="seed is a whole number"):
        Random(seed=-1)


def test_numbers_of_a_seed_are_uniform_and_those_of_splitmix() -> None:
    def splitmix(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        return state ^ (state >> 31)

    found = uniform(5, 3, 20000, torch.device("cpu"))
    start = ((5 << 16) + 4) * 0xD1342543DE82EF95
    for index in (1, 2, 19999):
        state = splitmix((0x9E3779B97F4A7C15 * index + start) % 2**64)
        assert float(found[index - 1]) == (state >> 40) / 2**24 - 0.5
    counts = torch.histc(found, 20, -0.5, 0.5)
    assert abs(counts - 1000).max() < 150
    assert abs(float(torch.corrcoef(torch.stack([found[:-1], found[1:]]))[0, 1])) < 0.03


def test_random_merging_depends_on_the_seed_alone() -> None:
    config = ViTConfig(**SMALL)
    model, x = built(config), random_images(config)
    answers = []
    with torch.no_grad(), vitrail.merge(model, r=3, method="random"):
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            answers.append(model(x))
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("method", ["magic", 3, {"features": "keys"}, {"name": "tome", "speed": 2}, None, ToMe])
def test_unknown_methods(method: Any) -> None:
    with pytest.raises(InvalidOption, match="method"):
        as_method(method)


@pytest.mark.parametrize("features", ["colors", {}, {"keys": 0}, {"keys": -1.0}, {"keys": True}, {"x": 1}, ["keys"]])
def test_unknown_features(features: Any) -> None:
    with pytest.raises(InvalidOption, match="features"):
        ToMe(features=features)
