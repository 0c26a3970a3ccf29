"""DiffRate: its numbers and their gradients against loops, the budget, and the schedule that it leaves."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import vitrail
from tests.merging.methods.blocks import BATCH, BLOCKS, free_places
from tests.merging.methods.small import small_images, small_model
from vitrail.errors import InvalidOption, UntrainedMethod
from vitrail.merging import ModelShape, match
from vitrail.merging.methods.learned import DiffRate

SHAPE = ModelShape(depth=2, width=8, heads=2, head_width=4, grid=(1, 3, 4), training=True)


def ready(*logits: list[float], step: int = 2) -> DiffRate:
    """Return a method with these logits for each of two blocks."""
    method = DiffRate(step=step)
    method.build(SHAPE)
    for own, values in zip(method.get_submodule("rates").parameters(), logits, strict=True):
        own.data = torch.tensor(values, dtype=torch.float64)
    return method.train()


def test_numbers_are_expectations_rounded_down() -> None:
    method = ready([0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0])
    assert method.counts() == (3, 4)
    torch.testing.assert_close(method.expected()[0], torch.tensor(3.0).double())
    method.eval()
    assert method.counts() == (3, 4)


@pytest.mark.parametrize("name", [name for name in BLOCKS if "padding" not in name])
def test_the_most_similar_pairs_merge_with_the_gradients_of_their_probability(name: str) -> None:
    context, method = BLOCKS[name], ready([0.3, 0.1, -0.2, 0.4], [0.0] * 4)
    count = method.counts()[0]
    most = min(len([i for i in free_places(context, image) if i % 2 == 0]) for image in range(BATCH))
    assert 1 < count <= most
    reduction = method.reduce(context, 12)
    assert reduction is not None
    assert reduction.soft is not None
    assert int(reduction.archive["removed"]) == count
    wanted = match(context.k.mean(1), count, context.protected)
    logits = next(iter(method.get_submodule("rates").parameters()))
    probe = torch.randn(BATCH, 13, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    own, looped = torch.zeros(()).double(), torch.zeros(()).double()
    for image in range(BATCH):
        order = reduction.assignment.target[image].tolist()
        soft = reduction.soft[image][:, order]  # columns by the position before the reduction
        length = soft.shape[0]
        groups = wanted.target[image].tolist()
        for i in range(length):
            held = [j for j in range(length) if soft[i, j].detach() > 0.5]
            assert len(held) == 1
            assert groups[held[0]] == groups[i], "the group that ToMe merges it into"
        keys = F.normalize(context.k[image].mean(0), dim=1)
        free = free_places(context, image)
        pairs = []
        for i in (i for i in free if i % 2 == 0):
            j = max((j for j in free if j % 2), key=lambda j: (float(keys[i] @ keys[j]), -j))
            pairs.append((-float(keys[i] @ keys[j]), i, j))
        probabilities = logits.softmax(0)
        for place, (_, i, j) in enumerate(sorted(pairs)):
            likely = sum((probabilities[k] for k in range(4) if 2 * k > place), torch.zeros(()).double())
            looped = looped + likely * (probe[image, i, j] - probe[image, i, i])
            own = own + soft[i, j] * probe[image, i, j] + soft[i, i] * probe[image, i, i]
    (mine,), (theirs,) = (torch.autograd.grad(value, logits, retain_graph=True) for value in (own, looped))
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(mine, theirs)


def test_the_loss_is_the_distance_to_the_budget() -> None:
    model = small_model().train()
    merging = vitrail.merge(model, method=DiffRate(target=0.5, step=2, weight=10))
    method = merging.method
    assert isinstance(method, DiffRate)
    counts = merging.r
    share = merging.flops() / merging.flops(merged=False)
    assert 0.6 < share < 0.9
    assert float(merging.loss().detach()) == pytest.approx(10 * (share - 0.5) ** 2, rel=1e-3)
    loss = merging.loss()
    loss.backward()
    slopes = []
    for layer in range(4):  # fewer FLOPs are better: each loss falls with the number of merges
        with vitrail.merge(small_model(), r=[r + 2 * (layer == at) for at, r in enumerate(counts)]) as more:
            slopes.append(10 * (more.flops() / more.flops(merged=False) - 0.5) ** 2 - float(loss.detach()))
    assert max(slopes) < 0
    for logits, slope in zip(method.get_submodule("rates").parameters(), slopes, strict=True):
        probability = logits.softmax(0).detach()
        numbers = 2 * torch.arange(len(logits)).double()
        wanted = slope / 2 * probability * (numbers - (probability * numbers).sum())
        assert logits.grad is not None
        torch.testing.assert_close(logits.grad, wanted, rtol=0.1, atol=2e-3)


def test_training_reaches_the_budget_and_leaves_a_schedule() -> None:
    model, images = small_model(torch.float32).train(), small_images(torch.float32)
    for weight in model.parameters():
        weight.requires_grad_(False)
    wanted = small_model(torch.float32)(images).detach()
    merging = vitrail.merge(model, method=DiffRate(target=0.7, step=2))
    before, start = merging.r, merging.flops()
    optimizer = torch.optim.Adam(merging.method.parameters(), lr=0.05)
    for _ in range(30):
        loss = F.mse_loss(model(images), wanted) + merging.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert merging.r != before
    full = merging.flops(merged=False)
    assert abs(merging.flops() / full - 0.7) < 0.05 < abs(start / full - 0.7)
    model.eval()
    output, config, counts = model(images), merging.config, merging.r
    assert config["r"] == counts
    assert config["method"] == "tome"
    assert merging.tokens_per_layer() == [65 - sum(counts[: layer + 1]) for layer in range(4)]
    with merging.track() as trace:
        model(images)
    assert trace.tokens_per_layer[0].tolist() == merging.tokens_per_layer()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(images), output)
    states = model.state_dict()
    merging.remove()
    with vitrail.merge(model, **config):
        assert torch.equal(model(images), output)
    with vitrail.merge(model, method=DiffRate.from_state(states, step=2)) as again:
        assert again.r == counts
        assert torch.equal(model(images), output)


def test_weights_loaded_later_count() -> None:
    model = small_model().train()
    merging = vitrail.merge(model, method=DiffRate(step=2))
    model.eval()
    before = merging.r
    states = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in states.items():
        if ".rates." in name:
            value.copy_(torch.arange(len(value)) * 1.0)
    model.load_state_dict(states)
    assert merging.r != before
    assert merging.r[0] == 30


def test_one_reduction_trains_as_tome_merges() -> None:
    model, images = small_model().train(), small_images()
    merging = vitrail.merge(model, method=DiffRate(step=2))
    method = merging.method
    values = list(method.get_submodule("rates").parameters())
    for layer, logits in enumerate(values):
        logits.data = torch.where(torch.arange(len(logits)) == (5 if layer == 1 else 0), 50.0, -50.0).double()
    assert merging.r == [0, 10, 0, 0]
    in_training = model(images)
    method.count_pass()  # counts as trained
    model.eval()
    torch.testing.assert_close(in_training, model(images), rtol=1e-9, atol=1e-10)


def test_the_method_alone_decides() -> None:
    model = small_model().train()
    for given in ({"r": 4}, {"keep": 0.5}, {"gflops": 1.0}, {"schedule": "decreasing"}):
        with pytest.raises(InvalidOption, match="decides how many"):
            vitrail.merge(model, method="diffrate", **given)  # type: ignore[arg-type]
    merging = vitrail.merge(model, method="diffrate")
    with pytest.raises(InvalidOption, match="decides how many"):
        merging.r = 4  # type: ignore[assignment]
    merging.remove()
    with pytest.raises(UntrainedMethod):
        vitrail.merge(small_model(), method="diffrate")


def test_other_input_sizes_merge_what_is_possible() -> None:
    model = small_model(image_size=(32, 32)).train()
    merging = vitrail.merge(model, method=DiffRate(step=2))
    model.eval()
    assert sum(merging.method.counts()) == 65 - merging.tokens_per_layer()[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"target": 0}, "target"), ({"target": 1.5}, "target"), ({"step": 0}, "step"), ({"step": 2.5}, "step"),
     ({"weight": -1}, "weight"), ({"reconstruction": "x"}, "reconstruction")],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        DiffRate(**options)  # type: ignore[arg-type]


def test_options() -> None:
    assert DiffRate(target=0.5, reconstruction=0.2).options == {"target": 0.5, "reconstruction": 0.2}
    assert DiffRate().config == "tome"
