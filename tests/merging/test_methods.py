"""What Token Merging is compared with: merging at random, and pruning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitrail
from tests.models.mixes import SMALL, built, pictures
from vitrail.errors import InvalidOption
from vitrail.merging import METHODS, match
from vitrail.merging.methods import prune
from vitrail.models import ViT, ViTConfig


@pytest.mark.parametrize("order", ["paper", "original"])
def test_pruning_keeps_the_tokens_that_others_would_go_into(order: str) -> None:
    torch.manual_seed(0)
    features, x = torch.randn(3, 11, 4), torch.randn(3, 11, 5)
    for r in range(6):
        merged, pruned = match(features, r, 1, order), prune(features, r, 1, order)
        assert torch.equal(pruned.target, merged.target)
        kept, sizes, _ = pruned.merge_all(x, None)
        assert torch.equal(sizes, torch.ones(3, 11 - r))
        for picture in range(3):
            for place in range(11 - r):
                members = (merged.target[picture] == place).nonzero()[:, 0].tolist()
                stays = members[0] if len(members) == 1 else next(one for one in members if one % 2)
                assert torch.equal(kept[picture, place], x[picture, stays])


def test_sizes_that_tokens_had_stay_theirs() -> None:
    """Pruning after merging: a token of four members that stays counts four times, whoever went into it."""
    torch.manual_seed(0)
    size = torch.tensor([[4.0, 1.0, 2.0, 3.0]])
    step = prune(torch.randn(1, 4, 3), 1)
    gone = int((~step.stays).nonzero()[0, 1])
    assert sorted(step.merge_sizes(size)[0].tolist()) == sorted(size[0].tolist()[:gone] + size[0].tolist()[gone + 1 :])


def test_random_merges_choose_all_pairs_alike() -> None:
    torch.manual_seed(0)
    step = METHODS["random"](torch.zeros(4000, 8, 16), 1, 0, "paper")
    pairs = torch.zeros(8, 8)
    for row in step.target:
        into = (row == row.mode().values).nonzero()[:, 0]
        pairs[into[0], into[1]] += 1
    even_odd = torch.tensor([[i != j and (i + j) % 2 == 1 and i < j for j in range(8)] for i in range(8)])
    assert not pairs[~even_odd].any()
    assert int(even_odd.sum()) == 16
    assert (pairs[even_odd] - 250).abs().max() < 5 * 250**0.5


def pruned_by_hand(model: ViT, x: Tensor, r: int) -> Tensor:
    """The answer of a model whose blocks lose tokens between attention and MLP, written out."""
    patches, special = model._embed(x, model.config.grid)
    y = torch.cat([special["cls"], patches], 1)
    for block in model.blocks:
        h = block.norm1(y)
        q, k, v = block.attn.qkv(h).unflatten(-1, (3, model.config.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = y + block.ls1(block.attn.proj(out))
        unit = F.normalize(k.mean(1), dim=-1)
        scores = unit[:, ::2] @ unit[:, 1::2].mT
        scores[:, 0] = -torch.inf  # the class token
        gone = 2 * scores.amax(2).topk(r).indices
        stays = torch.ones(y.shape[:2], dtype=torch.bool).scatter(1, gone, False)
        order = torch.arange(y.shape[1]).expand(y.shape[:2])
        order = torch.where(order % 2 == 0, order, order + y.shape[1])  # even ones first
        places = order.masked_fill(~stays, 10**6).argsort(1)[:, : y.shape[1] - r]
        y = y.gather(1, places.unsqueeze(-1).expand(-1, -1, y.shape[2]))
        y = y + block.ls2(block.mlp(block.norm2(y)))
    return model.norm(y)[:, 0]


def test_a_pruned_model_is_one_that_loses_tokens() -> None:
    config = ViTConfig(**SMALL)
    model, x = built(config), pictures(config)
    with torch.no_grad():
        expected = pruned_by_hand(model, x, 3)
        with vitrail.merge(model, r=3, method="prune") as merging:
            found = model.forward_features(x)[:, 0]
            assert merging.config["method"] == "prune"
        with vitrail.merge(model, r=3):
            merged = model.forward_features(x)[:, 0]
    torch.testing.assert_close(found, expected)
    assert (found - merged).abs().max() > 1e-3


def test_random_merging_depends_on_the_seed_alone() -> None:
    config = ViTConfig(**SMALL)
    model, x = built(config), pictures(config)
    answers = []
    with torch.no_grad(), vitrail.merge(model, r=3, method="random"):
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            answers.append(model(x))
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])


def test_unknown_methods() -> None:
    with pytest.raises(InvalidOption, match=r"method is one of tome, random, prune; got 'magic'"):
        vitrail.merge(built(ViTConfig(**SMALL)), r=1, method="magic")
