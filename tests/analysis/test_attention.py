"""Attention maps, rollout, mass, overlap and spread: against loops, scipy and known answers."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from vitrail import Role, TokenLayout, TokenSpan
from vitrail.analysis.attention import entropy, map_quality, overlap, role_mass, rollout, spread, token_maps
from vitrail.errors import InvalidOption, UnsupportedInput

LAYOUT = TokenLayout.of(Role.CLASS, (Role.REGISTER, 2), grid=(2, 2, 3))


def rows(*shape, seed=0, sharp=2.0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (sharp * x).softmax(-1)


def test_maps_are_the_patch_columns_on_their_grid():
    attention = rows(2, 3, 3, 15)
    plain = token_maps(attention, LAYOUT, normalize=False)
    assert plain.shape == (2, 3, 3, 2, 2, 3)
    assert plain[1, 2, 0, 1, 0, 2] == attention[1, 2, 0, 3 + 6 + 2]
    shared = token_maps(attention, LAYOUT)
    assert torch.allclose(shared.flatten(3).sum(-1), torch.ones(2, 3, 3, dtype=torch.float64))
    assert torch.allclose(shared * attention[..., 3:].sum(-1)[..., None, None, None], plain)
    assert token_maps(attention.half(), LAYOUT).dtype == torch.float32
    assert not token_maps(attention.requires_grad_(), LAYOUT).requires_grad


def test_a_row_without_any_patch_stays_zero():
    attention = torch.zeros(1, 1, 1, 15)
    attention[..., 0] = 1
    assert (token_maps(attention, LAYOUT) == 0).all()


@pytest.mark.parametrize("head", ["mean", "max", "min"])
@pytest.mark.parametrize("residual", [0.5, 0.0, 0.2, 1.0])
def test_rollout_by_loops(head, residual):
    layers = [rows(2, 3, 5, 5, seed=seed) for seed in range(4)]
    join = {"mean": np.mean, "max": np.max, "min": np.min}[head]
    expected = np.zeros((2, 5, 5))
    for b in range(2):
        result = np.eye(5)
        for layer in layers:
            step = np.zeros((5, 5))
            for i in range(5):
                for j in range(5):
                    step[i, j] = (1 - residual) * join(layer[b, :, i, j].numpy()) + residual * (i == j)
                step[i] /= step[i].sum()
            result = step @ result
        expected[b] = result
    found = rollout(iter(layers), head=head, residual=residual)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(found.sum(-1).numpy(), 1, atol=1e-12)
    half = rollout([layer.half() for layer in layers], head=head, residual=residual)
    assert half.dtype == torch.float32
    np.testing.assert_allclose(half.numpy(), expected, atol=2e-3)


def test_rollout_does_not_change_its_input():
    layers = [rows(1, 1, 4, 4)]
    before = layers[0].clone()
    rollout(layers, head="max")
    assert torch.equal(layers[0], before)


def test_rollout_follows_a_planted_path():
    """Token 0 attends to 1 in the last layer, and 1 to 3 in the first: 0 holds 3."""
    first, last = torch.eye(4)[[0, 3, 2, 3]], torch.eye(4)[[1, 1, 2, 3]]
    found = rollout([first[None, None], last[None, None]], residual=0.0)[0]
    assert torch.equal(found[0], torch.eye(4)[3])
    maps = token_maps(rollout([rows(2, 3, 15, 15)])[:, None, :3], LAYOUT)
    assert maps.shape == (2, 1, 3, 2, 2, 3)


def test_role_mass_by_loops(monkeypatch):
    attention = rows(5, 2, 15, 15)
    roles = [LAYOUT.role_of(i).value for i in range(15)]
    names = ("class", "register", "patch")
    expected = np.zeros((2, 3, 3))
    for head in range(2):
        for i, one in enumerate(names):
            for j, other in enumerate(names):
                asking = [t for t in range(15) if roles[t] == one]
                attended = [t for t in range(15) if roles[t] == other]
                parts = [float(attention[b, head, q, k]) for b in range(5) for q in asking for k in attended]
                expected[head, i, j] = sum(parts) / (5 * len(asking))
    found = role_mass(attention, LAYOUT)
    assert (found.queries, found.keys) == (names, names)
    np.testing.assert_allclose(found.per_head.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(found.mass.numpy(), expected.mean(0), atol=1e-12)
    np.testing.assert_allclose(found.mass.sum(-1).numpy(), 1, atol=1e-12)
    assert found.fair.tolist() == pytest.approx([1 / 15, 2 / 15, 12 / 15])
    monkeypatch.setattr("vitrail.analysis._inputs.CHUNK", 500)
    np.testing.assert_allclose(role_mass(attention, LAYOUT).mass.numpy(), expected.mean(0), atol=1e-12)
    assert json.loads(json.dumps(found.to_dict()))["queries"] == list(names)


def test_role_mass_of_some_queries_and_named_tasks():
    layout = TokenLayout((TokenSpan(Role.TASK, 1, "breed"), TokenSpan(Role.TASK, 2, "colour")), (1, 2, 2))
    attention = torch.zeros(1, 1, 2, 7)
    attention[0, 0, 0, 0] = attention[0, 0, 1, 1] = 0.25
    attention[0, 0, :, 5] = 0.75
    found = role_mass(attention, layout, queries=[2, 6])
    assert (found.queries, found.keys) == (("colour", "patch"), ("breed", "colour", "patch"))
    assert found.mass.tolist() == [[0.25, 0, 0.75], [0, 0.25, 0.75]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_role_mass_in_half_precision_still_sums_to_one(dtype):
    found = role_mass(rows(2, 3, 15, 15).to(dtype), LAYOUT)
    np.testing.assert_allclose(found.mass.sum(-1).numpy(), 1, atol=1e-6)


def test_overlap_by_loops(monkeypatch):
    maps = token_maps(rows(4, 2, 3, 15), LAYOUT)
    flat = maps.flatten(3).numpy()
    cosine, divergence, top = np.zeros((3, 3)), np.zeros((3, 3)), np.zeros((3, 3))
    for i in range(3):
        for j in range(3):
            for b in range(4):
                for h in range(2):
                    one, other = flat[b, h, i], flat[b, h, j]
                    cosine[i, j] += one @ other / np.linalg.norm(one) / np.linalg.norm(other) / 8
                    divergence[i, j] += np.nan_to_num(jensenshannon(one, other, base=2) ** 2) / 8
                    best = [set(np.argsort(-x, kind="stable")[:3]) for x in (one, other)]
                    top[i, j] += len(best[0] & best[1]) / len(best[0] | best[1]) / 8
    found = overlap(maps, top=0.25)
    assert (found.top, found.left_out) == (3, 0)
    np.testing.assert_allclose(found.cosine.numpy(), cosine, atol=1e-12)
    np.testing.assert_allclose(found.divergence.numpy(), divergence, atol=1e-9)
    np.testing.assert_allclose(found.top_iou.numpy(), top, atol=1e-12)
    monkeypatch.setattr("vitrail.analysis._inputs.CHUNK", 500)
    np.testing.assert_allclose(overlap(maps, top=0.25).divergence.numpy(), divergence, atol=1e-9)


def test_overlap_of_the_same_and_of_nothing_in_common():
    maps = torch.zeros(1, 1, 4, 1, 2, 4)
    maps[0, 0, 0, 0, 0] = 0.25
    maps[0, 0, 1, 0, 0] = 0.5  # The same map, not normalized.
    maps[0, 0, 2, 0, 1] = 0.25
    found = overlap(maps, top=0.5)
    assert found.cosine[0, :3].tolist() == pytest.approx([1, 1, 0])
    assert found.divergence[0, :3].tolist() == pytest.approx([0, 0, 1], abs=1e-6)
    assert found.top_iou[0, :3].tolist() == [1, 1, 0]
    assert found.left_out == 1
    assert found.to_dict()["cosine"][3] == [None] * 4


def test_spread_of_known_maps():
    maps = torch.zeros(2, 1, 3, 1, 2, 4)
    maps[:, :, 0, 0, 0, 0] = 1
    maps[:, :, 1] = 1 / 8
    maps[:, :, 2, 0, 0, :2] = 0.3
    assert entropy(maps)[0, 0].tolist() == pytest.approx([0, 3, 1])
    maps[1, :, 2] = 0  # Left out of the mean.
    found = spread(maps)
    assert found.effective.tolist() == pytest.approx([1, 8, 2])
    assert (found.patches, found.entropy_per_head.shape) == (8, (1, 3))
    random = token_maps(rows(3, 2, 3, 15), LAYOUT)
    by_hand = -(random * random.log2()).flatten(3).sum(-1)
    assert torch.allclose(entropy(random), by_hand)
    assert spread(random).effective[1] == pytest.approx(float(torch.exp2(by_hand)[:, :, 1].mean()))
    assert math.isclose(spread(random).entropy_per_head[1, 2], float(by_hand[:, 1, 2].mean()))


def test_errors():
    good = rows(1, 2, 3, 15)
    with pytest.raises(UnsupportedInput, match=r"attention: shape .1, 2, 3, 14. given; expected .B, H, Q, 15."):
        token_maps(rows(1, 2, 3, 14), LAYOUT)
    with pytest.raises(UnsupportedInput, match="sum to one"):
        role_mass(2 * good, LAYOUT)
    with pytest.raises(InvalidOption, match="may be left out"):
        role_mass(good[:, :, :2], LAYOUT)
    with pytest.raises(InvalidOption, match="one token"):
        role_mass(good, LAYOUT, queries=[0, 1, 15])
    with pytest.raises(InvalidOption, match="'mean' or 'max' or 'min'"):
        rollout([rows(1, 1, 3, 3)], head="median")
    with pytest.raises(InvalidOption, match="residual"):
        rollout([rows(1, 1, 3, 3)], residual=1.5)
    with pytest.raises(UnsupportedInput, match="at least one layer"):
        rollout([])
    with pytest.raises(UnsupportedInput, match="layer 1"):
        rollout([rows(1, 1, 3, 3), rows(1, 1, 2, 3)])
    with pytest.raises(UnsupportedInput, match="not merged"):
        rollout([rows(1, 1, 3, 3), rows(1, 1, 2, 2)])
    with pytest.raises(InvalidOption, match="top"):
        overlap(token_maps(good, LAYOUT), top=0)
    with pytest.raises(UnsupportedInput, match="token_maps"):
        overlap(good)
    with pytest.raises(UnsupportedInput, match="negative"):
        entropy(-token_maps(good, LAYOUT))
    good[0, 1, 2, 3] = torch.nan
    with pytest.raises(UnsupportedInput, match="not finite"):
        token_maps(good, LAYOUT)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu():
    attention = rows(2, 3, 15, 15)
    maps, there = token_maps(attention, LAYOUT), token_maps(attention.cuda(), LAYOUT)
    assert torch.allclose(maps, there.cpu())
    assert torch.allclose(role_mass(attention.cuda(), LAYOUT).mass, role_mass(attention, LAYOUT).mass)
    assert torch.allclose(overlap(there).divergence, overlap(maps).divergence)
    assert torch.allclose(spread(there).effective, spread(maps).effective)
    assert torch.allclose(rollout([attention.cuda()] * 2).cpu(), rollout([attention] * 2))


def test_quality_of_maps_on_a_planted_object():
    """An object of 2 × 2 patches: one token looks at it, one at a single spot elsewhere, one everywhere."""
    maps = torch.zeros(3, 2, 3, 1, 5, 5)
    maps[:, :, 0, 0, 1:3, 1:3] = 0.25
    maps[:, :, 1] = 0.5 / 24
    maps[:, :, 1, 0, 4, 4] = 0.5
    maps[:, :, 2] = 1 / 25
    share = torch.zeros(3, 5, 5)
    share[:, 1:3, 1:3] = 1
    share[2] = 0  # an image without an object is left out
    found = map_quality(maps, share.flatten(1))
    assert found.on_object.tolist() == pytest.approx([1, 4 * 0.5 / 24, 4 / 25])
    assert (found.fair, found.object_images) == (pytest.approx(4 / 25), 2)
    assert found.patch_hit[:2].tolist() == [1, 0]
    assert found.spikes.tolist() == [0, 1, 0]
    assert found.on_spikes.tolist() == pytest.approx([0, 0.5, 0])
    without = map_quality(maps)
    assert without.on_object is None
    assert torch.equal(without.spikes, found.spikes)


def test_quality_leaves_out_unknown_patches():
    maps = torch.rand(1, 1, 1, 1, 3, 3) + 0.1
    share = torch.tensor([[1.0, 0, 0.5, math.nan, 0, 0, 1, 0, math.nan]])
    known = [0, 1, 2, 4, 5, 6, 7]
    flat = maps.flatten()
    found = map_quality(maps, share)
    assert found.on_object.item() == pytest.approx((flat[known] @ share[0, known] / flat[known].sum()).item(), rel=1e-5)
    assert found.fair == pytest.approx(2.5 / 7)
