"""Targets of each head, against losses computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training.models import ANIMALS, CLASS, DISTILLATION, TASKS, Net, task, tiny
from vitrail.errors import InvalidOption
from vitrail.models.vit import undecayed
from vitrail.tokens import TokenSpec
from vitrail.training.evaluation.outputs import forward_output, forward_output_and_map
from vitrail.training.objective.learner import Learner
from vitrail.training.objective.objective import Objective
from vitrail.training.objective.teacher import Teacher, TeacherOutput

DRAW = torch.Generator().manual_seed(0)
IMAGES, LABELS = torch.randn(4, 3, 16, 16, generator=DRAW), torch.tensor([[0], [2], [1], [1]])
TWO = torch.tensor([[0, 3], [1, 0], [1, 2], [0, 0]])


def learner(model: nn.Module, classes: Any = ANIMALS, **options: Any) -> Learner:
    return Learner(model.train(), Objective(model, classes, **options))


def test_labels_alone() -> None:
    model = tiny()
    terms = learner(model, smoothing=0.1)(IMAGES, LABELS)
    expected = F.cross_entropy(model(IMAGES), LABELS[:, 0], label_smoothing=0.1)
    torch.testing.assert_close(terms.total, expected)
    assert list(terms.parts) == ["cls"]
    assert not terms.parts["cls"].requires_grad


def test_several_class_tokens_of_one_spec_are_averaged_before_the_loss() -> None:
    model = tiny(TokenSpec("cls", "class", 2))
    tokens = model.heads.cls(model.forward_features(IMAGES)[:, :2]).mean(1)
    torch.testing.assert_close(learner(model)(IMAGES, LABELS).total, F.cross_entropy(tokens, LABELS[:, 0]))


def test_several_class_heads_learn_the_same() -> None:
    model = tiny(TokenSpec("one", "class"), TokenSpec("two", "class"))
    terms = learner(model)(IMAGES, LABELS)
    output = forward_output(model, IMAGES).by_role
    losses = {name: F.cross_entropy(output[name], LABELS[:, 0]) for name in ("one", "two")}
    torch.testing.assert_close(terms.total, (losses["one"] + losses["two"]) / 2)
    assert {name: part.item() for name, part in terms.parts.items()} == pytest.approx(
        {name: loss.item() for name, loss in losses.items()}
    )


def test_mixed_images_have_both_labels() -> None:
    model = tiny()
    partner, share = torch.tensor([1, 0, 3, 2]), torch.tensor([0.7, 0.7, 1.0, 0.2])
    output = model(IMAGES)
    hot = F.one_hot(LABELS[:, 0], 3).float()
    target = share[:, None] * hot + (1 - share[:, None]) * hot[partner]
    terms = learner(model, smoothing=0.2)(IMAGES, LABELS, (partner, share))
    torch.testing.assert_close(terms.total, F.cross_entropy(output, target, label_smoothing=0.2))
    same = learner(model)(IMAGES, LABELS, (None, torch.ones(4)))
    torch.testing.assert_close(same.total, F.cross_entropy(output, LABELS[:, 0]))


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_distillation_token_learns_from_the_teacher_alone(kind: str) -> None:
    model, teacher = tiny(CLASS, DISTILLATION), Teacher(Net())
    taught = teacher(IMAGES)
    terms = learner(model, distillation=kind, teacher=teacher, smoothing=0.1, temperature=2.0)(
        IMAGES, LABELS, taught=taught
    )
    output = forward_output(model, IMAGES).by_role
    label = F.cross_entropy(output["cls"], LABELS[:, 0], label_smoothing=0.1)
    if kind == "hard":
        expected = 0.5 * label + 0.5 * F.cross_entropy(output["distillation"], taught.logits.argmax(1))
    else:
        logs = [(x / 2).log_softmax(-1) for x in (output["distillation"], taught.logits)]
        expected = 0.9 * label + 0.1 * 4 * F.kl_div(*logs, log_target=True, reduction="batchmean")
    torch.testing.assert_close(terms.total, expected)
    terms.parts["cls"]
    grads = torch.autograd.grad(terms.total, [model.heads.cls.weight, model.heads.distillation.weight])
    assert all(grad.abs().max() > 0 for grad in grads)


def test_without_a_distillation_token_the_class_head_learns_from_both() -> None:
    model, teacher = tiny(), Teacher(Net())
    taught = teacher(IMAGES)
    terms = learner(model, distillation="hard", teacher=teacher, share=0.25)(IMAGES, LABELS, taught=taught)
    output = model(IMAGES)
    expected = 0.75 * F.cross_entropy(output, LABELS[:, 0]) + 0.25 * F.cross_entropy(output, taught.logits.argmax(1))
    torch.testing.assert_close(terms.total, expected)


def test_timm_distilled_models_return_both_logits_in_training() -> None:
    timm = pytest.importorskip("timm")
    name = "deit_tiny_distilled_patch16_224"
    model = timm.create_model(name, num_classes=3, depth=1, img_size=16, patch_size=4, embed_dim=24)
    teacher = Teacher(Net())
    taught = teacher(IMAGES)
    terms = learner(model, distillation="hard", teacher=teacher)(IMAGES, LABELS, taught=taught)
    first, second = model(IMAGES)
    expected = F.cross_entropy(first, LABELS[:, 0]) + F.cross_entropy(second, taught.logits.argmax(1))
    torch.testing.assert_close(terms.total, expected / 2)
    assert set(terms.parts) == {"class", "distillation"}


def test_task_tokens_and_their_control_learn_all_columns() -> None:
    model = tiny(task("colour", 2), task("shape", 4), num_classes=0)
    terms = learner(model, TASKS)(IMAGES, TWO)
    output = forward_output(model, IMAGES).by_role
    losses = [F.cross_entropy(output[name], TWO[:, column]) for column, name in enumerate(TASKS)]
    torch.testing.assert_close(terms.total, sum(losses) / 2)
    assert set(terms.parts) == {"task.colour", "task.shape"}
    control = tiny(num_classes=6)
    logits = control(IMAGES)
    losses = [F.cross_entropy(logits[:, :2], TWO[:, 0]), F.cross_entropy(logits[:, 2:], TWO[:, 1])]
    weighed = learner(control, TASKS, weights={"shape": 2.0, "colour": 0.5})(IMAGES, TWO)
    torch.testing.assert_close(weighed.total, 0.5 * losses[0] + 2.0 * losses[1])


def test_distillation_of_shared_heads_is_by_task() -> None:
    model, teacher = tiny(CLASS, DISTILLATION, num_classes=6), Teacher(Net(classes=6))
    taught = teacher(IMAGES)
    terms = learner(model, TASKS, distillation="hard", teacher=teacher)(IMAGES, TWO, taught=taught)
    student = forward_output(model, IMAGES).by_role["distillation"]
    parts = [
        F.cross_entropy(student[:, :2], taught.logits[:, :2].argmax(1)),
        F.cross_entropy(student[:, 2:], taught.logits[:, 2:].argmax(1)),
    ]
    torch.testing.assert_close(terms.parts["distillation"], ((parts[0] + parts[1]) / 2).detach())


def test_uncertainty_is_learned_and_not_decayed() -> None:
    model = tiny(task("colour", 2), task("shape", 4), num_classes=0)
    module = learner(model, TASKS, weights="uncertainty")
    terms = module(IMAGES, TWO)
    torch.testing.assert_close(terms.total.detach(), sum(terms.parts.values()))  # variances of 1 weigh nothing
    terms.total.backward()
    losses = torch.stack(list(terms.parts.values()))
    torch.testing.assert_close(module.objective.log_variance.grad, 0.5 - losses)
    assert {"objective.log_variance", "model.tokens.colour"} <= undecayed(module)


def test_features_are_compared_on_the_students_grid() -> None:
    model, teacher = tiny(), Teacher(Net(), features=True)
    module = learner(model, distillation="features", teacher=teacher, share=0.3)
    taught = teacher(IMAGES)
    assert taught.features is not None
    assert taught.features.shape == (4, 12, 8, 8)
    terms = module(IMAGES, LABELS, taught=taught)
    output, features = forward_output_and_map(model, IMAGES)
    mine = module.objective.projector(features.flatten(2).transpose(1, 2))
    theirs = F.interpolate(taught.features, (4, 4), mode="bilinear", antialias=True).flatten(2).transpose(1, 2)
    expected = (1 - F.cosine_similarity(mine, theirs, dim=-1)).mean()
    torch.testing.assert_close(terms.parts["features"], expected.detach())
    label = F.cross_entropy(output.logits, LABELS[:, 0])
    torch.testing.assert_close(terms.total, 0.7 * label + 0.3 * expected)


def test_features_without_a_place_are_compared_with_the_mean() -> None:
    model, teacher = tiny(CLASS, DISTILLATION), Teacher(Net(), features=True)
    module = learner(model, distillation="hard", teacher=teacher, feature_weight=2.0)
    logits, pooled = torch.randn(4, 3), torch.randn(4, 12, 1, 1)
    terms = module(IMAGES, LABELS, taught=TeacherOutput(logits, pooled))
    mean = forward_output_and_map(model, IMAGES)[1].mean((2, 3))
    expected = (1 - F.cosine_similarity(module.objective.projector(mean), pooled.flatten(1))).mean()
    torch.testing.assert_close(terms.parts["features"], expected.detach())
    total = (terms.parts["cls"] + terms.parts["distillation"]) / 2 + 2 * expected
    torch.testing.assert_close(terms.total, total)


def test_a_plain_net_is_trained_the_same_way() -> None:
    net = Net()
    module = learner(net)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        terms = module(IMAGES, LABELS)
        terms.total.backward()
        optimizer.step()
        losses.append(terms.total.item())
    assert losses[-1] < 0.5 * losses[0]
    assert list(terms.parts) == ["class"]


def test_all_parameters_get_a_gradient() -> None:
    model = tiny(CLASS, DISTILLATION, TokenSpec("register", "register", 2), task("colour", 2))
    teacher = Teacher(Net(), features=True)
    module = learner(
        model, {**ANIMALS, "colour": TASKS["colour"]}, distillation="hard", teacher=teacher, feature_weight=1.0
    )
    labels = torch.cat([LABELS, TWO[:, :1]], 1)
    module(IMAGES, labels, taught=teacher(IMAGES)).total.backward()
    assert [name for name, value in module.named_parameters() if value.grad is None] == []
    assert all(value.grad is None for value in teacher.model.parameters())
    assert not any("teacher" in name for name in module.state_dict())


def test_options_that_contradict() -> None:
    heads, teacher = tiny(CLASS, DISTILLATION), Teacher(Net(), features=True)
    for model, options, words in (
        (heads, {"distillation": "features", "teacher": teacher}, "does not train the head"),
        (tiny(), {"weights": {"other": 1.0}}, "for each of label"),
    ):
        with pytest.raises(InvalidOption, match=words):
            Objective(model, ANIMALS, **options)  # type: ignore[arg-type]


def test_batches_that_do_not_fit() -> None:
    model, teacher = tiny(), Teacher(Net(classes=5))
    module = learner(model, distillation="hard", teacher=teacher)
    with pytest.raises(InvalidOption, match="teacher has 5 outputs, the student 3"):
        module(IMAGES, LABELS, taught=teacher(IMAGES))


def test_the_learner_compiles_into_one_graph() -> None:
    model, teacher = tiny(CLASS, DISTILLATION), Teacher(Net())
    module = learner(model, distillation="hard", teacher=teacher)
    taught = teacher(IMAGES)
    plain = module(IMAGES, LABELS, None, taught)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    again = compiled(IMAGES, LABELS, None, taught)
    torch.testing.assert_close(again.total, plain.total)


def test_nothing_is_random_in_between(seed: int) -> None:
    model = tiny(drop_path=0.5, dropout=0.1)
    module = learner(model)

    def once() -> Tensor:
        torch.manual_seed(seed)
        return module(IMAGES, LABELS).total

    assert torch.equal(once(), once())
    module.after_step(0.5)


def test_a_distillation_token_without_a_teacher_learns_the_labels() -> None:
    model = tiny(CLASS, DISTILLATION)
    objective = Objective(model, {"label": ("a", "b", "c")})
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([[0], [1], [2], [0]])
    output = model.forward_output(images)
    terms = objective(output, labels)
    expected = [F.cross_entropy(output.by_role[head], labels[:, 0]) for head in ("cls", "distillation")]
    torch.testing.assert_close(terms.total, torch.stack(expected).mean())
    assert set(terms.parts) == {"cls", "distillation"}
