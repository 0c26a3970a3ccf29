"""DTEM: its training pass against a float64 loop, with gradients; restoring; ToMe on its features in eval mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vitrail
from tests.merging.methods.blocks import BATCH, apply
from tests.merging.methods.learned.soft import NORMED, check_pass, cosines, merged, next_context, ready, relaxed
from tests.merging.methods.small import small_images, small_model
from vitrail.errors import InvalidOption, UntrainedMethod
from vitrail.merging import Assignment, ModelShape, as_method, match
from vitrail.merging.methods.learned import DTEM


@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize("r", [1, 3])
def test_a_training_pass_is_the_published_one(name: str, r: int) -> None:
    check_pass(ready(DTEM()), NORMED[name], r, relaxed)


def test_the_next_block_has_fewer_effective_tokens() -> None:
    method, context = ready(DTEM()), NORMED["registers"]
    reduction = method.reduce(context, 4)
    assert reduction is not None
    tokens, state = apply(context, reduction)
    assert state.size is not None
    later = replace(next_context(context, tokens.detach(), state), size=state.size.detach())
    again = method.reduce(later, 2)
    assert again is not None
    found, after = apply(later, again)
    assert after.size is not None
    for image in range(BATCH):
        assert max(max(pair) for pair in cosines(method, later, image, 13 - 4)) == 8
        wanted, sizes, _ = merged(method, later, image, 2, relaxed, 13 - 4)
        there = sizes.detach() > 1e-9  # not those that have merged completely
        assert int(there.sum()) >= 9
        torch.testing.assert_close(found[image][there], wanted[there], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(after.size[image], sizes, rtol=1e-8, atol=1e-10)
    third = method.reduce(next_context(later, found.detach(), after), 1)
    assert third is not None
    assert int(third.archive["removed"]) == 7


def test_every_token_is_restored_by_its_shares() -> None:
    method, context = ready(DTEM()), NORMED["registers"]
    shares, x = torch.eye(13).double().repeat(BATCH, 1, 1), context.x
    for r in (4, 3):
        reduction = method.reduce(context, r)
        assert reduction is not None
        assert reduction.soft is not None
        shares = torch.stack([one @ step for one, step in zip(shares, reduction.soft, strict=True)])
        tokens, state = apply(context, reduction)
        context = next_context(context, tokens, state)
    torch.testing.assert_close(shares.sum(2), torch.ones(BATCH, 13).double())
    places = shares.argmax(2)
    found = method.restore(tokens, Assignment(places, 13), {}, state.archive)
    torch.testing.assert_close(found, shares @ tokens)
    assert torch.equal(found[:, :3], x[:, :3]), "tokens that are alone are copied exactly"
    entered = torch.cat([torch.full((BATCH, 2, 8), 7.0).double(), tokens], 1)  # special tokens that enter later
    wanted = Assignment(places, 13).insert([0, 1])
    with_late = method.restore(entered, wanted, {}, state.archive)
    assert torch.equal(with_late[:, :2], entered[:, :2])
    torch.testing.assert_close(with_late[:, 2:], found)


@pytest.mark.parametrize("name", NORMED)
def test_eval_mode_is_tome_on_the_learned_features(name: str) -> None:
    method, context = ready(DTEM(), training=False), NORMED[name]
    reduction = method.reduce(context, 2)
    assert reduction is not None
    layer = method.get_submodule("metric.6")
    features = torch.stack([context.normed[image] @ layer.weight.T + layer.bias for image in range(BATCH)])
    wanted = match(features.detach(), 2, context.protected, present=context.present)
    assert torch.equal(reduction.assignment.target, wanted.target)
    assert reduction.assignment.length == wanted.length
    assert torch.equal(method.matched(context)[:, 0], features)


def test_its_width_is_that_of_a_head_or_of_two() -> None:
    for width, wanted in ((768, 64), (1024, 128)):
        method = DTEM()
        method.build(ModelShape(depth=2, width=width, heads=width // 64, head_width=64, training=True))
        assert [layer.out_features for layer in method.get_submodule("metric").children()] == [wanted, wanted]  # type: ignore[union-attr]


def test_gradients_reach_the_layers_and_the_model_does_not_learn_to_match() -> None:
    model = small_model().train()
    merging = vitrail.merge(model, r=8, method="dtem")
    with merging.track() as trace:
        output = model(small_images())
    assert trace.sizes.shape == (3, 65)
    torch.testing.assert_close(trace.sizes.sum(1), torch.full((3,), 65.0).double())
    F.cross_entropy(output, torch.tensor([0, 1, 2])).backward()
    *before, last = merging.method.get_submodule("metric").children()
    assert all(layer.weight.grad.isfinite().all() and layer.weight.grad.any() for layer in before)
    assert not last.weight.grad.any(), "the class token attends to nothing after the last merge"
    assert merging.loss() == 0
    model.eval()
    assert merging.tokens_per_layer() == [57, 49, 41, 33]
    with merging.track() as trace:
        model(small_images())
    assert trace.tokens_per_layer[0].tolist() == [57, 49, 41, 33]


def test_training_finds_the_tokens_that_belong_together() -> None:
    """The mean of a merged pair is an error for unlike tokens: features learn which channel tells them apart."""
    model = small_model(torch.float32, depth=2).train()
    for weight in model.parameters():
        weight.requires_grad_(False)
    images, teacher = small_images(torch.float32, batch=8), small_model(torch.float32, depth=2)
    wanted = teacher(images).detach()
    with vitrail.merge(model, r=[24, 0], method="dtem") as merging:
        optimizer = torch.optim.Adam(merging.method.parameters(), lr=0.02)
        losses = []
        for _ in range(40):
            loss = F.mse_loss(model(images), wanted)
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("options", [{"order": "original"}, {"protect": torch.arange(64) % 5 == 0}, {"unmerge": False}])
def test_training_with_other_options_of_merging(options: dict[str, object]) -> None:
    model = small_model().train()
    with vitrail.merge(model, r=[6, 6, 0, 0], method="dtem", **options) as merging:  # type: ignore[arg-type]
        output = model(small_images())
        output.sum().backward()
        first = merging.method.get_submodule("metric.0")
        assert isinstance(first, nn.Linear)
        assert first.weight.grad is not None
        assert first.weight.grad.any()


def test_zero_merges_reproduce_the_model_in_training() -> None:
    model = small_model().train()
    before = model(small_images())
    with vitrail.merge(model, r=0, method="dtem"):
        assert torch.equal(model(small_images()), before)


def test_reconstruction_is_the_relative_error_of_merged_and_restored_tokens() -> None:
    method, context = ready(DTEM(reconstruction=0.5)), NORMED["sizes"]
    reduction = method.reduce(context, 3)
    assert reduction is not None
    assert reduction.soft is not None
    assert context.size is not None
    errors = []
    for image in range(BATCH):
        size, x, soft = context.size[image], context.x[image], reduction.soft[image].detach()
        tokens = [sum(soft[i, j] * size[i] * x[i] for i in range(13)) / (soft[:, j] * size).sum() for j in range(13)]
        restored = [sum(soft[i, j] * tokens[j] for j in range(13)) for i in range(13)]
        mean = sum(size[i] * x[i] for i in range(13)) / size.sum()
        error = sum(size[i] * (restored[i] - x[i]).square().sum() for i in range(13))
        errors.append(float(error / sum(size[i] * (x[i] - mean).square().sum() for i in range(13))))
    loss = method.loss()
    assert loss is not None
    assert float(loss.detach()) == pytest.approx(0.5 * sum(errors) / BATCH)
    loss.backward()
    weight = method.get_submodule("metric.6").weight
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is not None
    assert weight.grad.any()


def test_reconstruction_reaches_the_last_layer() -> None:
    model = small_model().train()
    merging = vitrail.merge(model, r=8, method={"name": "dtem", "reconstruction": 1.0})
    model(small_images())
    merging.loss().backward()
    assert all(layer.weight.grad.any() for layer in merging.method.get_submodule("metric").children())
    own = {f"vitrail_method.{name}" for name, _ in merging.method.named_parameters()}
    assert {name for name, weight in model.named_parameters() if weight.grad is not None} == own


def test_an_untrained_method_is_refused() -> None:
    with pytest.raises(UntrainedMethod, match=r"DTEM\.from_state"):
        vitrail.merge(small_model(), r=8, method="dtem")


def test_its_cost_is_counted() -> None:
    model = small_model().train()
    with vitrail.merge(model, r=[8, 0, 0, 0], method="dtem") as merging:
        learned = merging.flops()
    with vitrail.merge(model, r=[8, 0, 0, 0]) as merging:
        assert learned - merging.flops() == 65 * 16 * 8


def test_options() -> None:
    assert DTEM().config == "dtem"
    assert as_method(DTEM(reconstruction=2).config).options == {"reconstruction": 2.0}
    for wrong in (-1, True, "much", float("inf")):
        with pytest.raises(InvalidOption, match="reconstruction"):
            DTEM(reconstruction=wrong)  # type: ignore[arg-type]


def test_a_batch_trains_like_its_images_one_by_one() -> None:
    model, images = small_model().train(), small_images()
    with vitrail.merge(model, r=6, method="dtem"):
        together = model(images)
        alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-10)
