"""Gumbel top-k: sampled merges against a loop, straight-through gradients, and the probability of a sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import vitrail
from tests.merging.methods.blocks import BATCH
from tests.merging.methods.learned.soft import NORMED, check_pass, ready, relaxed, value
from tests.merging.methods.small import small_images, small_model
from vitrail.errors import InvalidOption
from vitrail.merging import as_method
from vitrail.merging.methods.learned import Gumbel


def fixed_noise(like: Tensor) -> Tensor:
    """Return noise that depends on the row and the candidate alone."""
    row, candidate = torch.arange(like.shape[1]).unsqueeze(1), torch.arange(like.shape[2])
    return ((7 * row + 5 * candidate) % 11 / 2.0).double().expand_as(like)


def sampled(logits: dict[tuple[int, int], Tensor], r: int) -> dict[tuple[int, int], Tensor]:
    """Return the r best pairs with noise, one for each even token, with the gradients of the relaxed choice."""
    noisy, count = {}, dict.fromkeys((i for i, _ in logits), 0)
    for (i, j), logit in logits.items():
        noisy[i, j] = logit + (7 * (i // 2) + 5 * count[i]) % 11 / 2.0
        count[i] += 1
    best = {i: max((pair for pair in noisy if pair[0] == i), key=lambda pair: value(noisy[pair])) for i in count}
    chosen = sorted(best.values(), key=lambda pair: (-value(noisy[pair]), pair[0]))[:r]
    soft = relaxed(noisy, r, temperature=0.7)
    return {pair: float(pair in chosen) + (share - share.detach()) for pair, share in soft.items()}


@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize("r", [1, 3])
def test_r_pairs_merge_with_straight_through_gradients(name: str, r: int) -> None:
    method = ready(Gumbel(temperature=0.7))
    method.noise = fixed_noise  # type: ignore[method-assign]
    check_pass(method, NORMED[name], r, sampled)


def test_without_noise_training_computes_what_eval_mode_computes() -> None:
    model, images = small_model().train(), small_images()
    merging = vitrail.merge(model, r=[12, 0, 0, 0], method="gumbel")
    merging.method.noise = torch.zeros_like  # type: ignore[assignment,method-assign]
    merging.method.count_pass()  # counts as trained, with random weights
    in_training = model(images)
    model.eval()
    torch.testing.assert_close(in_training, model(images), rtol=1e-9, atol=1e-10)
    assert merging.tokens_per_layer() == [53, 53, 53, 53]


def test_without_noise_restored_patches_are_those_of_eval_mode() -> None:
    model, images = small_model().train(), small_images()
    merging = vitrail.merge(model, r=[12, 0, 0, 0], method="gumbel")
    merging.method.noise = torch.zeros_like  # type: ignore[assignment,method-assign]
    merging.method.count_pass()  # counts as trained, with random weights
    in_training = model.forward_features(images)
    model.eval()
    torch.testing.assert_close(in_training, model.forward_features(images), rtol=1e-9, atol=1e-10)


def test_pairs_are_sampled_by_their_probability() -> None:
    """The best of logits with Gumbel noise is a sample of their softmax."""
    torch.manual_seed(0)
    scores = torch.tensor([[0.1, -0.05], [0.0, 0.02]]).expand(4000, 2, 2)
    shares = Gumbel().pick(scores, 1)
    assert torch.equal(shares.sum((1, 2)), torch.ones(4000))
    wanted = (scores[0] / 0.1).flatten().softmax(0).view(2, 2)
    torch.testing.assert_close(shares.mean(0), wanted, rtol=0, atol=0.03)


def test_gradients_reach_the_layers() -> None:
    model = small_model().train()
    merging = vitrail.merge(model, r=8, method={"name": "gumbel", "reconstruction": 1.0})
    torch.manual_seed(0)
    with merging.track() as trace:
        (model(small_images()).square().sum() + merging.loss()).backward()
    gradients = [weight.grad for weight in merging.method.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() and gradient.any() for gradient in gradients)
    merged = trace.sizes < 1e-9
    assert merged.sum(1).tolist() == [32] * BATCH
    torch.testing.assert_close(trace.sizes.sum(1), torch.full((BATCH,), 65.0).double())


def test_options() -> None:
    assert Gumbel().config == "gumbel"
    made = as_method(Gumbel(temperature=0.5, reconstruction=0.1).config)
    assert made.options == {"temperature": 0.5, "reconstruction": 0.1}
    for wrong in (0, -1, True, "cold", float("inf")):
        with pytest.raises(InvalidOption, match="temperature"):
            Gumbel(temperature=wrong)  # type: ignore[arg-type]
