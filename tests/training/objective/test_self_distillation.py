"""Self-distillation: views, the loss computed in loops, the teacher's average, and that it learns."""

from __future__ import annotations

from math import cos, log, pi

import pytest
import torch
from torch import Tensor

from tests.training.models import ANIMALS, CLASS, Net, tiny
from vitrail.data.augment.images import Augment
from vitrail.data.augment.views import Views, split_views
from vitrail.data.loading.order import generator
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.models.vit import undecayed
from vitrail.tokens import TokenSpec
from vitrail.training.evaluation.evaluator import evaluate_model
from vitrail.training.objective.self_distillation import SelfLearner, balanced

PICTURES = torch.randint(256, (4, 3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
VIEWS = Views(Augment("medium", 16, crop_min=0.4))


def views() -> Tensor:
    return VIEWS(PICTURES, generator("cpu", 1))


def headless(*tokens: TokenSpec, **options: object) -> SelfLearner:
    torch.manual_seed(5)
    return SelfLearner(tiny(*tokens, num_classes=0), prototypes=32, **options)  # type: ignore[arg-type]


def test_views_are_split_in_the_order_of_concatenation() -> None:
    found = views()
    assert found.shape == (4, 3, 3, 16, 16)
    large, small = split_views(found)
    assert (large.shape, small.shape) == ((8, 3, 16, 16), (16, 3, 8, 8))
    assert torch.equal(large[4 + 2], found[2, 1])
    assert torch.equal(small[0 + 1], found[1, 2, :, :8, :8])
    assert torch.equal(small[4 + 1], found[1, 2, :, :8, 8:])
    assert torch.equal(small[8 + 3], found[3, 2, :, 8:, :8])
    none = split_views(Views(VIEWS.augment, sheets=0)(PICTURES, generator("cpu", 1)))[1]
    assert none.shape[0] == 0


def test_views_are_the_same_for_any_world_size() -> None:
    halves = [VIEWS(PICTURES[rows], generator("cpu", 1), rows, 4) for rows in (slice(0, 2), slice(2, 4))]
    assert torch.equal(torch.cat(halves), views())
    assert torch.equal(VIEWS.plain(PICTURES), VIEWS.augment.plain(PICTURES))


def test_small_views_cover_small_areas() -> None:
    ramp = torch.linspace(0, 255, 64).round().byte().expand(64, 3, 64, 64).contiguous()
    plain = Augment("light", 32, (0.0,) * 3, (1.0,) * 3, crop_min=0.5)  # type: ignore[arg-type]
    large, small = split_views(Views(plain, small_min=0.05, small_max=0.2)(ramp, generator("cpu", 0)))
    assert (large.amax(3) - large.amin(3)).mean() > 0.6
    assert 0.1 < (small.amax(3) - small.amin(3)).mean() < 0.5


def test_the_loss_by_loop() -> None:
    learner = headless(CLASS, TokenSpec("register", "register", 2))
    found = views()
    terms = learner(found)
    large, small = split_views(found)
    shown = [large[:4], large[4:], *small.split(4)]

    def logits(model: torch.nn.Module, projection: torch.nn.Module, x: Tensor) -> Tensor:
        return projection(model.forward_features(x)[:, 0])  # type: ignore[operator]

    total = entropy = 0.0
    pairs = 0
    targets = balanced(torch.cat([logits(*learner.teacher, x) for x in shown[:2]]) / 0.04).split(4)
    for v, target in enumerate(targets):
        entropy += -(target * target.clamp(min=1e-30).log()).sum(-1).mean().item() / 2
        for w, x in enumerate(shown):
            if w != v:
                output = (logits(learner.model, learner.projection, x) / 0.1).log_softmax(-1)
                total += -(target * output).sum(-1).mean().item()
                pairs += 1
    assert pairs == 10
    assert terms.total.item() == pytest.approx(total / pairs, rel=1e-5)
    assert terms.parts["entropy"].item() == pytest.approx(entropy, rel=1e-4)
    assert set(terms.parts) == {"dino", "entropy"}


def test_balanced_outputs_use_all_classes_alike() -> None:
    logits = torch.randn(64, 8, dtype=torch.float64) + torch.tensor([9.0, *[0.0] * 7])  # one class has it all
    found = balanced(logits, rounds=50)
    torch.testing.assert_close(found.sum(1), torch.ones(64, dtype=torch.float64))
    torch.testing.assert_close(found.sum(0), torch.full((8,), 8.0, dtype=torch.float64), atol=1e-4, rtol=0)
    scaled = found.log() - logits  # rows and columns were scaled, and nothing else
    torch.testing.assert_close(scaled - scaled[:1] - scaled[:, :1] + scaled[0, 0], torch.zeros_like(scaled))
    assert balanced(torch.tensor([[0.0, -2000.0], [0.0, -2000.0]])).isfinite().all()


def test_the_teacher_follows_after_a_step() -> None:
    learner = headless(momentum=0.9).train()
    assert not learner.teacher.training
    learner(views()).total.backward()
    before = [value.clone() for value in learner.teacher.parameters()]
    assert all(value.grad is None for value in learner.teacher.parameters())
    assert [name for name, p in learner.named_parameters() if p.requires_grad and p.grad is None] == []
    with torch.no_grad():
        for value in learner.model.parameters():
            value.add_(1.0)
    learner.after_step(0.25)
    keep = 1 - 0.1 * (1 + cos(pi / 4)) / 2
    student = [*learner.model.parameters(), *learner.projection.parameters()]
    for old, new, own in zip(before, learner.teacher.parameters(), student, strict=True):
        torch.testing.assert_close(new, keep * old + (1 - keep) * own)
    frozen = [value.clone() for value in learner.teacher.parameters()]
    learner.after_step(1.0)
    assert all(torch.equal(a, b) for a, b in zip(frozen, learner.teacher.parameters(), strict=True))


def test_a_checkpoint_holds_the_complete_state() -> None:
    learner, other = headless(), headless()
    learner(views())
    learner.after_step(0.1)
    other.load_state_dict(learner.state_dict())
    torch.testing.assert_close(other(views()).total, learner(views()).total)
    assert "projection.prototypes" in undecayed(learner)


def test_masked_patches_are_predicted() -> None:
    learner = headless(CLASS, TokenSpec("register", "register", 2), reconstruct=0.5, hidden=0.5)
    large = split_views(views())[0]
    painted, mask = learner._mask(large)
    assert mask is not None
    assert 0.3 < mask.float().mean() < 0.7
    grid = mask.view(8, 4, 4)
    for image, row, column in [(0, 0, 0), (3, 1, 2), (7, 3, 3)]:
        block = (image, slice(None), slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4))
        assert torch.equal(painted[block], torch.zeros(3, 4, 4) if grid[image, row, column] else large[block])
    terms = learner(views())
    torch.testing.assert_close(terms.total.detach(), terms.parts["dino"] + 0.5 * terms.parts["reconstruction"])


def test_loss_of_masked_patches_by_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher sees all patches; its outputs are balanced over all patches; only masked ones count."""
    learner = headless(CLASS, TokenSpec("register", "register", 2), patches=0.5, hidden=0.4)
    found = views()
    large = split_views(found)[0]
    painted, mask = learner._mask(large)
    assert mask is not None
    monkeypatch.setattr(learner, "_mask", lambda images: (painted, mask))
    terms = learner(found)
    model, projection = learner.teacher
    rows = [projection(token) / 0.04 for image in model.forward_features(large) for token in image[3:]]  # type: ignore[operator]
    targets = balanced(torch.stack(rows)).view(8, 16, 32)
    output = learner.model.forward_features(painted)
    each = [
        -(targets[b, p] * (learner.projection(output[b, 3 + p]) / 0.1).log_softmax(-1)).sum()
        for b, p in mask.nonzero().tolist()
    ]
    torch.testing.assert_close(terms.parts["patches"], torch.stack(each).mean().detach())
    spread = -(targets * targets.clamp(min=1e-30).log()).sum(-1).mean().detach()
    torch.testing.assert_close(terms.parts["patch_entropy"], spread, rtol=1e-4, atol=0)
    torch.testing.assert_close(terms.total.detach(), terms.parts["dino"] + 0.5 * terms.parts["patches"])
    terms.total.backward()
    assert all(value.grad is None for value in learner.teacher.parameters())


@pytest.mark.parametrize("options", [{}, {"patches": 1.0, "hidden": 0.3}])
def test_views_of_an_image_agree_without_collapse(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    soft = torch.nn.functional.interpolate(torch.rand(32, 3, 3, 3), (20, 20), mode="bilinear")
    images = (soft * 255).byte()
    learner = headless(temperature=0.02, momentum=0.98, **options)
    crops = Views(Augment("light", 16, crop_min=0.5))

    @torch.no_grad()
    def found() -> float:
        one, other = split_views(crops(images, generator("cpu", 99)))[0].chunk(2)
        a, b = (torch.nn.functional.normalize(learner.model(x), dim=-1) for x in (one, other))
        return ((a @ b.T).argmax(1) == torch.arange(32)).float().mean().item()

    before = found()
    optimizer = torch.optim.AdamW([p for p in learner.parameters() if p.requires_grad], lr=1e-3)
    entropies = []
    for step in range(75):
        terms = learner(crops(images, generator("cpu", 7, step)))
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
        learner.after_step(step / 75)
        entropies.append(terms.parts["entropy"].item())
    assert found() > before + 0.1
    assert 0.2 * log(32) < min(entropies) < 0.7 * log(32)


def test_evaluation_uses_other_images_as_neighbors() -> None:
    model = tiny(num_classes=0).eval()
    images, labels = torch.randn(12, 3, 16, 16), torch.arange(12) % 3
    found = evaluate_model(model, [(images[:5], labels[:5]), (images[5:], labels[5:])], classes=ANIMALS, seconds=0)
    features = model(images)
    unit = torch.nn.functional.normalize(features, dim=-1)
    alike = (unit @ unit.T).fill_diagonal_(-9)
    hits = 0
    for row, label in zip(alike, labels, strict=True):
        votes = torch.zeros(3)
        for other in row.argsort(descending=True)[:11]:
            votes[labels[other]] += (row[other] / 0.07).exp()
        hits += int(votes.argmax() == label)
    assert found.accuracy == pytest.approx({"neighbours": hits / 12})
    assert found.score == found.accuracy["neighbours"]
    assert found.count == 12


def test_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Vitrail model"):
        SelfLearner(Net())
    with pytest.raises(InvalidOption, match=r"temperature=0\.5"):
        headless(temperature=0.5)
    for odd in (-1, float("nan"), float("inf"), "1", True):
        with pytest.raises(InvalidOption, match=f"patches={odd!r}: expected a number from 0 to"):
            headless(patches=odd)
    with pytest.raises(InvalidOption, match=r"hidden=0: expected a number from 0\.01"):
        headless(patches=1, hidden=0)
    with pytest.raises(InvalidOption, match="prototypes=1: expected an integer"):
        SelfLearner(tiny(num_classes=0), prototypes=1)
    with pytest.raises(UnsupportedInput, match="views"):
        headless()(torch.zeros(2, 3, 16, 16))
    with pytest.raises(InvalidOption, match="views"):
        Views(Augment("flip", 16))
    with pytest.raises(InvalidOption, match="even size"):
        Views(Augment("light", 15))
    with pytest.raises(UnsupportedInput, match="two samples"):
        evaluate_model(tiny(num_classes=0), [], classes=ANIMALS)
