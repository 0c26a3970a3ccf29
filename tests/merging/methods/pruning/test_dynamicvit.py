"""DynamicViT: its predictor and choice against loops, its training mode against really dropping tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitrail
from tests.merging.methods.blocks import BATCH, BLOCKS, absent, apply, block, free_places, members, size_of
from tests.merging.methods.small import small_images, small_model
from vitrail.errors import InvalidOption, UntrainedMethod
from vitrail.merging import Context, ModelShape, as_method
from vitrail.merging.methods.pruning import DynamicViT
from vitrail.merging.methods.pruning.dynamicvit import Predictor

SHAPE = ModelShape(depth=12, width=8, heads=2, head_width=4, training=True)


def ready(training: bool = False) -> DynamicViT:
    """Return a method with random parameters for the blocks of the tests."""
    torch.manual_seed(0)
    method = DynamicViT()
    method.build(SHAPE)
    return method.double().train(training)


def keep_probability(predictor: Predictor, context: Context, image: int) -> dict[int, float]:
    """Return the probability to keep each free token of an image, token by token."""
    free = free_places(context, image)
    norm, first = predictor.embed[0], predictor.embed[1]
    embedded = {}
    for i in free:
        x = context.x[image, i]
        x = (x - x.mean()) / (x.var(unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias
        embedded[i] = F.gelu(first.weight @ x + first.bias)
    total = sum(size_of(context, image, i) for i in free)
    mean = torch.stack([embedded[i][4:] * size_of(context, image, i) / total for i in free]).sum(0)
    found = {}
    for i in free:
        h = torch.cat([embedded[i][:4], mean])
        for layer in (predictor.decide[0], predictor.decide[2]):
            h = F.gelu(layer.weight @ h + layer.bias)
        keep, drop = (predictor.decide[4].weight @ h + predictor.decide[4].bias).tolist()
        found[i] = 1 / (1 + math.exp(drop - keep))
    return found


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("r", [1, 6])
@torch.no_grad()
def test_the_tokens_with_the_highest_scores_stay(name: str, r: int) -> None:
    context, method = replace(BLOCKS[name], layer=6), ready()
    reduction = method.reduce(context, r)
    assert reduction is not None
    merged, state = apply(context, reduction)
    assert merged.shape[1] == context.x.shape[1] - r
    for image in range(BATCH):
        free = free_places(context, image)
        scores = keep_probability(method.stages["6"], context, image)  # type: ignore[arg-type]
        kept = sorted(free, key=lambda i: (-scores[i], i))[: len(free) - r]
        unit = context.x[image] / context.x[image].norm(dim=1, keepdim=True)
        target = reduction.assignment.target[image].tolist()
        for i in range(context.x.shape[1]):
            if i in free and i not in kept:
                assert target[i] == target[max(kept, key=lambda j: (float(unit[i] @ unit[j]), -j))]
            elif i not in absent(context, image):
                assert torch.equal(merged[image, target[i]], context.x[image, i])
                assert state.size[image, target[i]] == size_of(context, image, i)


def decided(kept: Tensor, method: DynamicViT) -> None:
    """Let the predictors be sure that these tokens (B, N) stay, so that nothing is random."""
    logits = torch.stack([kept.double(), 1 - kept.double()], -1) * 1e6
    method.scores = lambda context, _: logits[:, -context.x.shape[1] :].log_softmax(-1)  # type: ignore[method-assign]


def test_the_ratio_loss_compares_kept_with_planned_shares() -> None:
    method = ready(training=True)
    first, second = torch.zeros(2, 3, 13, dtype=torch.bool)
    first[0, 1:11], first[1, 1:7], first[2, 1:13] = True, True, True
    second[:, :5] = True
    context = block()
    decided(first, method)
    reduction = method.reduce(replace(context, layer=3), 4)
    assert reduction is not None
    tokens, state = apply(context, reduction)
    assert torch.equal(tokens, context.x)
    assert state.size is not None
    assert torch.equal(state.size.detach(), torch.cat([torch.ones(3, 1), first[:, 1:]], 1).double())
    decided(second, method)
    later = replace(context, layer=6, size=state.size, archive=reduction.archive)
    reduction = method.reduce(later, 3)
    assert reduction is not None
    assert reduction.size is not None
    assert torch.equal(reduction.size.detach()[:, 1:], (first & second)[:, 1:].double())
    wanted = sum((kept / 12 - 8 / 12) ** 2 for kept in (10, 6, 12)) / 3
    wanted += sum((kept / 12 - 5 / 12) ** 2 for kept in (4, 4, 4)) / 3
    loss = method.loss()
    assert loss is not None
    torch.testing.assert_close(float(loss.detach()), 2 * wanted / 3)


def test_training_computes_what_dropping_computes() -> None:
    """A token of size 0 is invisible to the others: the output equals that of a model that drops it."""
    model, images = small_model(), small_images()
    kept = torch.zeros(3, 65, dtype=torch.bool)
    for image in range(3):
        kept[image, 1 + torch.randperm(64, generator=torch.Generator().manual_seed(image))[:40]] = True
    outputs = []
    for training in (True, False):
        method = DynamicViT()
        method.passes.fill_(1)
        decided(kept, method)
        with torch.no_grad(), vitrail.merge(model.train(training), r=[0, 24, 0, 0], method=method):
            outputs.append(model(images))
            assert method.training == training
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-12)


def test_gradients_of_the_models_loss_reach_every_predictor() -> None:
    model, method = small_model().train(), DynamicViT()
    with vitrail.merge(model, keep=0.4, method=method):
        torch.manual_seed(0)
        F.cross_entropy(model(small_images()), torch.tensor([0, 1, 2])).backward()
    assert list(method.stages) == ["1", "2", "3"]
    for predictor in method.stages.values():
        gradients = [weight.grad for weight in predictor.parameters()]
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
        assert any(gradient.abs().sum() > 0 for gradient in gradients if gradient is not None)


def test_training_reaches_the_planned_share() -> None:
    model, method = small_model(torch.float32).train(), DynamicViT()
    for weight in model.parameters():
        weight.requires_grad_(False)
    images = small_images(torch.float32)
    with vitrail.merge(model, r=[0, 48, 0, 0], method=method) as merging:
        optimizer = torch.optim.Adam(method.parameters(), lr=0.03)
        torch.manual_seed(0)
        losses = []
        for _ in range(20):
            model(images)
            loss = merging.loss()
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with merging.track() as trace, torch.no_grad():
            model(images)
    assert abs(trace.sizes[:, 1:].mean() - 0.25) < 0.1
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])


def test_three_blocks_prune_and_no_others() -> None:
    model = small_model(depth=12).train()
    merging = vitrail.merge(model, keep=0.7**3, method="dynamicvit")
    assert [layer for layer, r in enumerate(merging.r) if r] == [3, 6, 9]
    assert list(merging.method.stages) == ["3", "6", "9"]  # type: ignore[union-attr]
    merging.r = [2, *[0] * 11]
    with pytest.raises(InvalidOption, match=r"blocks 3, 6, 9 .* block 0"):
        model(small_images())


def test_an_untrained_method_is_refused() -> None:
    with pytest.raises(UntrainedMethod, match=r"DynamicViT\.from_state"):
        vitrail.merge(small_model(), keep=0.5, method="dynamicvit")


def test_its_cost_is_counted() -> None:
    model, method = small_model().train(), DynamicViT()
    with vitrail.merge(model, r=[0, 8, 0, 0], method=method) as merging:
        plain = merging.flops(merged=False)
        predictor = 16 * 16 + 16 * 8 + 8 * 4 + 4 * 2
        saved = {"attend": 3 * 8 * (16 * 48 + 16 * 16), "feed": 3 * 8 * 2 * 16 * 64, "pairs": 3 * 2 * 16}
        pairs = saved["pairs"] * (65**2 - 57**2)
        assert plain - merging.flops() == saved["attend"] + saved["feed"] + pairs - 65 * (predictor + 65 * 16)


def test_options() -> None:
    assert DynamicViT().config == "dynamicvit"
    assert as_method(DynamicViT(0.5).config).options == {"rate": 0.5}
    with pytest.raises(InvalidOption, match="rate"):
        DynamicViT(2)


def test_a_broken_image_keeps_as_many_tokens() -> None:
    context = replace(block(), layer=3)
    context.x[1] = torch.nan
    reduction = ready().reduce(context, 5)
    assert reduction is not None
    assert [len([g for g in members(reduction, image) if g]) for image in range(3)] == [8, 8, 8]
