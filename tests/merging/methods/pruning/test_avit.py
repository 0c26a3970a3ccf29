"""A-ViT: which tokens halt, the ponder loss against a loop, training mode against really dropping tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import vitrail
from tests.merging.methods.blocks import BATCH, BLOCKS, absent, apply, block, free_places, size_of
from tests.merging.methods.small import small_images, small_model
from vitrail.errors import InvalidOption, UntrainedMethod
from vitrail.merging import Context, MergeState, ModelShape, as_method
from vitrail.merging.methods.pruning import AViT


def ready(training: bool = False, depth: int = 12, **options: float) -> AViT:
    """Return a method whose tokens halt at once or after a few blocks."""
    method = AViT(**{"epsilon": 0.3, "scale": 0.7, "shift": 0.4, **options})  # type: ignore[arg-type]
    method.build(ModelShape(depth=depth, width=8, heads=2, head_width=4, training=training))
    return method.double().train(training)


def score(value: float) -> float:
    return 1 / (1 + math.exp(0.4 - 0.7 * value))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("limit", [2, 100])
def test_tokens_above_the_threshold_are_dropped(name: str, limit: int) -> None:
    before = torch.rand(3, 13, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    context = BLOCKS[name]
    before = before[:, : context.x.shape[1]]
    context = replace(context, layer=2, memory={"halting": before})
    reduction = ready().reduce(context, limit)
    assert reduction is not None
    merged, state = apply(replace(context), reduction)
    lengths = []
    for image in range(BATCH):
        free = free_places(context, image)
        total = {i: float(before[image, i]) + score(float(context.x[image, i, 0])) for i in free}
        above = sorted((i for i in free if total[i] > 0.7), key=lambda i: (-total[i], i))
        halted = above[: min(limit, len(free) - 1)]
        assert above
        stays = [i for i in range(context.x.shape[1]) if i not in halted and i not in absent(context, image)]
        target = reduction.assignment.target[image].tolist()
        assert [target[i] for i in stays] == list(range(len(stays)))
        unit = context.x[image] / context.x[image].norm(dim=1, keepdim=True)
        for i in halted:
            into = max((j for j in stays if j in free), key=lambda j: (float(unit[i] @ unit[j]), -j))
            assert target[i] == target[into]
        for place, i in enumerate(stays):
            assert torch.equal(merged[image, place], context.x[image, i])
            assert state.size[image, place] == size_of(context, image, i)
            if i in free:
                assert float(state.memory["halting"][image, place]) == pytest.approx(total[i])
        assert not state.size[image, len(stays) :].any()
        lengths.append(len(stays))
    assert reduction.assignment.length == max(lengths)
    if limit == 100 and not context.padded:
        assert len(set(lengths)) > 1


def ponder_of(blocks: list[Tensor], image: int, free: list[int]) -> float:
    """Return the mean over tokens of the blocks that each runs through and what is left to 1 when it halts."""
    total = 0.0
    for i in free:
        runs, halting = 1, 0.0
        for x in blocks[1:]:
            h = score(float(x[image, i, 0]))
            if halting + h > 0.7:
                break
            runs, halting = runs + 1, halting + h
        total += runs + 1 - halting
    return total / len(free)


def run(method: AViT, blocks: list[Tensor], protected: int | Tensor) -> MergeState:
    """Run the blocks of one pass, whose inputs are given."""
    state = MergeState((100,) * len(blocks), protected=protected, padded=True)
    for layer, x in enumerate(blocks):
        context = Context(
            layer, (1, 1, 13), x, state.size, state.protected, state.memory, state.archive, padded=True,
            depth=len(blocks),
        )  # fmt: skip
        reduction = method.reduce(context, 100)
        if reduction is not None:
            tokens, state = state.apply(x, reduction)
            assert torch.equal(tokens, x)
        state = state.next_layer()
    return state


def test_the_ponder_loss_and_sizes_are_those_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = [torch.randn(3, 13, 8, generator=generator, dtype=torch.float64) - 2 for _ in range(5)]
    method = ready(training=True, depth=5)
    state = run(method, blocks, 1)
    wanted = sum(ponder_of(blocks, image, list(range(1, 13))) for image in range(3)) / 3
    loss = method.loss()
    assert loss is not None
    torch.testing.assert_close(float(loss.detach()), 5e-4 * wanted)
    assert state.size is not None
    assert set(state.size.unique().tolist()) == {0.0, 1.0}
    assert state.size[:, 0].eq(1).all()
    assert (state.size[:, 1:].sum(1) > 1).all(), "one token stays in any case, which the loop does not know"
    loss.backward()
    assert method.get_parameter("halting.shift").grad > 0, "a smaller shift halts earlier and costs less"


def test_training_computes_what_dropping_computes() -> None:
    model, images = small_model(), small_images()
    outputs = []
    for training in (True, False):
        method = AViT(epsilon=0.3, scale=0.7, shift=0.4)
        method.passes.fill_(1)
        with torch.no_grad(), vitrail.merge(model.train(training), method=method) as merging, merging.track() as trace:
            outputs.append(model(images))
    lengths = trace.tokens_per_layer
    assert lengths[:, 0].tolist() == [65] * 3
    assert len(set(lengths[:, -1].tolist())) > 1
    assert (lengths[:, -1] > 2).all()
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-12)


def test_the_models_loss_reaches_the_halting_score() -> None:
    model, method = small_model().train(), AViT(epsilon=0.3, scale=0.7, shift=0.4)
    with vitrail.merge(model, method=method):
        model(small_images()).square().sum().backward()
    for weight in method.parameters():
        assert weight.grad is not None
        assert weight.grad.isfinite()
        assert weight.grad != 0


def test_nothing_halts_at_first_in_a_model_of_usual_scale() -> None:
    context = replace(block(), layer=3)
    method = AViT().double()
    method.build(ModelShape(depth=12, width=8, heads=2, head_width=4))
    reduction = method.double().eval().reduce(context, 100)
    assert reduction is not None
    assert reduction.assignment.length == 13


def test_an_untrained_method_is_refused() -> None:
    with pytest.raises(UntrainedMethod, match=r"AViT\.from_state"):
        vitrail.merge(small_model(), method="avit")


def test_options() -> None:
    assert AViT().config == "avit"
    options = {"epsilon": 0.1, "ponder": 0.1, "scale": 10.0, "shift": 30.0}
    assert as_method(AViT(**options).config).options == options  # type: ignore[arg-type]
    for wrong in ({"epsilon": 1.0}, {"ponder": -1}, {"scale": "much"}, {"shift": True}):
        with pytest.raises(InvalidOption, match=next(iter(wrong))):
            AViT(**wrong)  # type: ignore[arg-type]
