"""The comparison with the oracle detects every mistake known from practice.

The oracle is broken on purpose, one part at a time, in a model that has the part.  If the library's output
stayed close to the broken oracle's, the parity tests would not notice the same mistake in the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.oracle import core, describe, run
from tests.oracle.core import Parts, Position, Recipe, Token, identity
from tests.parity.checks import distance
from tests.parity.models import timm_beit, timm_eva, timm_vit, transformers_vit
from tests.parity.models.cases import Case, outputs_of

VIT, EVA, HF = timm_vit.CASES, timm_eva.CASES, transformers_vit.CASES
BEIT = timm_beit.CASES

Breakage = Callable[[Recipe, pytest.MonkeyPatch], Recipe]


def in_blocks(**changes: Any) -> Breakage:
    """Replace parts of every block."""
    return lambda recipe, _: replace(recipe, blocks=[replace(b, **changes) for b in recipe.blocks])


def swapped(name: str, broken: Any) -> Breakage:
    """Replace a function or constant of the oracle."""

    def apply(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Recipe:
        monkeypatch.setattr(core, name, broken)
        return recipe

    return apply


def only_patches_protected_from(first: int) -> Breakage:
    """Protect only the first few tokens of the prefix."""
    return swapped("shielded", lambda recipe, protect, image: set(range(first)))


def position_of_lone_tokens(token: Token, recipe: Recipe) -> Position | None:
    return None if token.size > 1 else ORIGINAL_POSITION(token, recipe)


def position_of_first_member(token: Token, recipe: Recipe) -> Position | None:
    return ORIGINAL_POSITION(replace(token, members=token.members[:1]), recipe)


def bias_of_first_members(parts: Parts, head: int, query: Token, key: Token) -> Tensor:
    return ORIGINAL_BIAS(parts, head, replace(query, members=query.members[:1]), replace(key, members=key.members[:1]))


def bias_of_first_query(parts: Parts, head: int, query: Token, key: Token) -> Tensor:
    return ORIGINAL_BIAS(parts, head, replace(query, members=query.members[:1]), key)


def prefix_not_in_front(left: list[tuple[int, Token]], shield: set[int]) -> list[Token]:
    return [t for place, t in left if place % 2 == 0] + [t for place, t in left if place % 2 == 1]


def equal_weights(
    tokens: list[Token], metric: list[list[float]], shield: set[int], count: int, order: str
) -> list[Token]:
    """Compute a merged token as the plain mean of its members, ignoring sizes."""
    vectors = {id(t): t.vector for t in tokens}
    merged = ORIGINAL_MERGE(tokens, metric, shield, count, order)
    by_members = {tuple(t.members): vectors[id(t)] for t in tokens}
    for token in merged:
        joined = [v for members, v in by_members.items() if set(members) <= set(token.members)]
        token.vector = torch.stack(joined).mean(dim=0)
    return merged


def turned_keys(parts: Parts, recipe: Recipe, tokens: list[Token], proportional: bool) -> list[list[float]]:
    """Compare keys after rotary position is applied."""
    keys = parts.k_norm(parts.k(parts.before_attend(torch.stack([t.vector for t in tokens]))))
    places = [ORIGINAL_POSITION(t, recipe) for t in tokens]
    assert parts.rotate is not None
    turned = [row if p is None else parts.rotate(row, p) for row, p in zip(keys, places, strict=True)]
    ORIGINAL_ATTEND(parts, recipe, tokens, proportional)
    return core.matching_metric(torch.stack(turned))


def metric_of_first_head(keys: Tensor) -> list[list[float]]:
    return ORIGINAL_METRIC(keys[:, :1])


ORIGINAL_POSITION, ORIGINAL_MERGE, ORIGINAL_ATTEND = core.position, core.merge, core.attend
ORIGINAL_METRIC, ORIGINAL_BIAS = core.matching_metric, core.bias_between
UNSCALED = in_blocks(gain_attend=identity, gain_feed=identity)
NO_QK_NORM = in_blocks(q_norm=identity, k_norm=identity)

BREAKAGES: list[tuple[str, Case, Breakage]] = [
    ("no-qk-norm", VIT["qk-norm"], NO_QK_NORM),
    ("no-qk-norm", EVA["grouped-heads"], NO_QK_NORM),
    ("no-k-norm", VIT["registers-embedded"], in_blocks(k_norm=identity)),
    ("no-q-norm", VIT["registers-embedded"], in_blocks(q_norm=identity)),
    ("no-inner-norm", VIT["qk-norm"], in_blocks(inner_norm=identity)),
    ("no-gate", VIT["gated"], in_blocks(gate=None)),
    ("no-gate", EVA["gated-eva"], in_blocks(gate=None)),
    ("no-layer-scale", VIT["layer-scale"], UNSCALED),
    ("no-layer-scale", EVA["dinov3"], UNSCALED),
    ("no-layer-scale", HF["registers-head"], UNSCALED),
    ("no-layer-scale-of-attention", HF["dinov2-head"], in_blocks(gain_attend=identity)),
    ("no-layer-scale-of-feed", HF["dinov2-head"], in_blocks(gain_feed=identity)),
    ("no-rotary", EVA["dinov3"], in_blocks(rotate=None)),
    ("no-rotary", EVA["mixed-xy"], in_blocks(rotate=None)),
    ("no-rotary-when-merged", EVA["eva02"], swapped("position", position_of_lone_tokens)),
    ("no-rotary-when-merged", EVA["dinov3"], swapped("position", position_of_lone_tokens)),
    ("no-rotary-when-merged", EVA["mixed-xy"], swapped("position", position_of_lone_tokens)),
    ("rotary-of-first-member", EVA["eva02"], swapped("position", position_of_first_member)),
    ("rotary-of-first-member", EVA["dinov3"], swapped("position", position_of_first_member)),
    ("rotary-of-first-member", EVA["mixed-xy"], swapped("position", position_of_first_member)),
    ("no-bias", BEIT["own"], in_blocks(bias=None)),
    ("no-bias", BEIT["shared"], in_blocks(bias=None)),
    ("bias-of-first-member", BEIT["own"], swapped("bias_between", bias_of_first_members)),
    ("bias-of-keys-alone", BEIT["both"], swapped("bias_between", bias_of_first_query)),
    ("matching-after-rotary", EVA["eva02"], swapped("attend", turned_keys)),
    ("matching-on-one-head", VIT["class-odd"], swapped("matching_metric", metric_of_first_head)),
    ("registers-merge", VIT["registers"], only_patches_protected_from(1)),
    ("registers-merge", HF["registers-head"], only_patches_protected_from(1)),
    ("prefix-merges", VIT["registers-no-class"], only_patches_protected_from(0)),
    ("distillation-merges", VIT["distilled"], only_patches_protected_from(1)),
    ("prefix-not-in-front", VIT["distilled"], swapped("paper_order", prefix_not_in_front)),
    ("prefix-not-in-front", EVA["grouped-heads"], swapped("paper_order", prefix_not_in_front)),
    ("prefix-not-in-front", HF["deit-teacher"], swapped("paper_order", prefix_not_in_front)),
    ("merge-after-feed", VIT["class-odd"], swapped("STEPS", ("attend", "feed", "merge"))),
    ("merge-after-feed", EVA["post-norm"], swapped("STEPS", ("attend", "feed", "merge"))),
    ("merge-after-feed", HF["vit-head"], swapped("STEPS", ("attend", "feed", "merge"))),
    ("sizes-not-in-mean", VIT["gap-no-class"], swapped("merge", equal_weights)),
    ("sizes-not-in-mean", HF["dinov2"], swapped("merge", equal_weights)),
]


def both(case: Case, recipe_of: Callable[[Recipe], Recipe], **options: Any) -> float:
    """Distance of the library's output from that of the oracle on a (changed) recipe."""
    model, images = case.model(), case.images()
    with torch.no_grad():
        theirs = run(recipe_of(describe(model, images, **case.call)), 3, **options).outputs
        vitrail.merge(model, r=3)
        return distance(outputs_of(model(images, **case.call)), theirs)


@pytest.mark.parametrize(("breakage", "case", "broken"), BREAKAGES, ids=[f"{b}-{c.name}" for b, c, _ in BREAKAGES])
def test_breakage_is_noticed(breakage: str, case: Case, broken: Breakage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(case, lambda recipe: recipe) < case.tolerance
    assert both(case, lambda recipe: broken(recipe, monkeypatch)) > 1e-3


@pytest.mark.parametrize("case", [VIT["class-odd"], EVA["dinov3"], HF["dinov2-head"]], ids=lambda c: c.name)
def test_missing_size_bias_is_noticed(case: Case) -> None:
    assert both(case, lambda recipe: recipe, proportional=False) > 1e-3
