"""A float64 loop of DTEM's training pass, and blocks with normed tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tests.merging.methods.blocks import BATCH, BLOCKS, HEADS, WIDTH, apply, free_places, size_of
from vitrail.merging import Context, MergeState, ModelShape, Reduction
from vitrail.merging.methods.learned._matching import LearnedMatching

SHAPE = ModelShape(depth=12, width=HEADS * WIDTH, heads=HEADS, head_width=WIDTH, training=True)
Pick = Callable[[dict[tuple[int, int], Tensor], int], dict[tuple[int, int], Tensor]]


def value(number: Tensor | float) -> float:
    return float(torch.as_tensor(number).detach())


def ready(method: LearnedMatching, training: bool = True) -> LearnedMatching:
    """Return a method with random parameters for the blocks of the tests."""
    torch.manual_seed(0)
    method.build(SHAPE)
    return method.double().train(training)


def with_norm(context: Context, layer: int = 6) -> Context:
    """Return a context whose normed tokens differ from its tokens."""
    context = replace(context, layer=layer)
    context.norm = lambda: context.x.flip(1).cos() + context.x
    return context


NORMED = {name: with_norm(context) for name, context in BLOCKS.items()}


def cosines(method: LearnedMatching, context: Context, image: int, effective: int) -> dict[tuple[int, int], Tensor]:
    """Return the cosine of every even and odd token that may merge."""
    layer = method.get_submodule(f"metric.{context.layer}")
    features = [layer.weight @ token + layer.bias for token in context.normed[image]]
    free = [i for i in free_places(context, image) if i < effective]
    return {
        (i, j): (features[i] @ features[j]) / ((features[i] @ features[i]) * (features[j] @ features[j])).sqrt()
        for i in free if i % 2 == 0
        for j in free if j % 2 == 1
    }  # fmt: skip


def top_three(scores: dict[tuple[int, int], Tensor]) -> dict[tuple[int, int], Tensor]:
    """Return the three best partners of every even token, divided by 0.1."""
    best: dict[tuple[int, int], Tensor] = {}
    for i in {i for i, _ in scores}:
        row = sorted((j for k, j in scores if k == i), key=lambda j: (-value(scores[i, j]), j))
        best |= {(i, j): scores[i, j] / 0.1 for j in row[:3]}
    return best


def relaxed(logits: dict[tuple[int, int], Tensor], r: int, temperature: float = 0.1) -> dict[tuple[int, int], Tensor]:
    """Return the shares after r softmax steps, entry by entry."""
    logits, shares = dict(logits), {pair: torch.zeros(()).double() for pair in logits}
    for _ in range(r):
        largest = max(value(z) for z in logits.values())
        weights = {pair: ((z - largest) / temperature).exp() for pair, z in logits.items()}
        total = sum(weights.values())
        drawn = {pair: weight / total for pair, weight in weights.items()}
        for i, j in logits:
            shares[i, j] = shares[i, j] + drawn[i, j]
            left = 1 - sum(share for (k, _), share in drawn.items() if k == i)
            logits[i, j] = logits[i, j] + (left.log() if value(left) > 2**-23 else math.log(2**-23))
    rows = {i: value(sum(share for (k, _), share in shares.items() if k == i)) for i, _ in shares}
    return {(i, j): share / max(1.0, rows[i]) for (i, j), share in shares.items()}


def merged(
    method: LearnedMatching, context: Context, image: int, r: int, pick: Pick, effective: int
) -> tuple[Tensor, Tensor, list[int]]:
    """Return tokens, sizes and the new order of one image."""
    shares = pick(top_three(cosines(method, context, image, effective)), r)
    length = context.x.shape[1]
    tokens, sizes = [], []
    for place in range(length):
        size, token = size_of(context, image, place), context.x[image, place]
        size_after = size - sum(size * share for (i, _), share in shares.items() if i == place)
        size_after = size_after + sum(size_of(context, image, i) * s for (i, j), s in shares.items() if j == place)
        into = [(size_of(context, image, i) * share, i) for (i, j), share in shares.items() if j == place]
        if into:
            token = (size * token + sum(weight * context.x[image, i] for weight, i in into)) / size_after
        tokens.append(token)
        sizes.append(torch.as_tensor(size_after, dtype=torch.float64))
    front = [i for i in range(length) if not free_of_protection(context, image, i)]
    left = [value(size) if value(size) > 1e-12 else 1e-20 * size_of(context, image, i) for i, size in enumerate(sizes)]
    rest = sorted((i for i in range(length) if i not in front), key=lambda i: (-left[i], i))
    order = [*front, *rest]
    return torch.stack([tokens[i] for i in order]), torch.stack([sizes[i] for i in order]), order


def free_of_protection(context: Context, image: int, place: int) -> bool:
    if isinstance(context.protected, int):
        return place >= context.protected
    return not bool(context.protected.expand(BATCH, -1)[image, place])


def check_pass(method: LearnedMatching, context: Context, r: int, pick: Pick) -> None:
    """Assert that one block reduces as the loop does, with the same gradients."""
    reduction = method.reduce(context, r)
    assert isinstance(reduction, Reduction)
    tokens, state = apply(context, reduction)
    found = [merged(method, context, image, r, pick, context.x.shape[1]) for image in range(BATCH)]
    wanted, sizes = (torch.stack(each) for each in list(zip(*found, strict=True))[:2])
    present = sizes > 1e-12  # tokens that merged completely, and padding, have no value and no order in a loop
    for image, (*_, order) in enumerate(found):
        count = int(present[image].sum())
        assert reduction.assignment.target[image].argsort().tolist()[:count] == order[:count]
    assert state.size is not None
    torch.testing.assert_close(state.size, sizes, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(tokens[present], wanted[present], rtol=1e-9, atol=1e-11)
    probe = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weights = list(method.get_submodule(f"metric.{context.layer}").parameters())
    own, looped = (
        torch.autograd.grad((x * probe * present.unsqueeze(2)).sum() + (s * probe[..., 0]).sum(), weights)
        for x, s in ((tokens, state.size), (wanted, sizes))
    )
    for mine, theirs in zip(own, looped, strict=True):
        assert theirs.abs().max() > 1e-6
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def next_context(context: Context, tokens: Tensor, state: MergeState) -> Context:
    """Return the context of the next block."""
    return with_norm(
        replace(
            context, x=tokens, size=state.size, archive=state.archive, protected=state.protected, _normed=None,
        ),
        context.layer + 1,
    )  # fmt: skip
