"""Assignment of heads to label columns, and errors before training."""

from __future__ import annotations

import pytest
import torch

from tests.training.models import ANIMALS, CLASS, DISTILLATION, TASKS, Net, task, tiny
from vitrail.errors import InvalidOption
from vitrail.tokens import TokenSpec
from vitrail.training.objective.targets import assign_targets, find_heads


def test_class_and_distillation_tokens_predict_the_one_task() -> None:
    model = tiny(CLASS, DISTILLATION, TokenSpec("register", "register", 2))
    (one,) = assign_targets(model, ANIMALS)
    assert (one.name, one.heads, one.label, one.own) == ("label", ("cls",), "fused", True)
    plan = find_heads(model)
    assert (plan.own, plan.distilled, plan.tasks) == (("cls",), "distillation", ())
    assert plan.sizes == {"cls": 3, "distillation": 3}


def test_heads_of_pooled_patches_come_before_class_tokens() -> None:
    extra = TokenSpec("extra", "class", classes=3)
    assert assign_targets(tiny(extra, pool="mean"), ANIMALS)[0].heads == ("patch", "extra")
    assert assign_targets(tiny(CLASS, pool="mean"), ANIMALS)[0].heads == ("patch",)


def test_task_tokens_take_the_columns_of_their_names() -> None:
    model = tiny(CLASS, task("shape", 4), task("colour", 2), num_classes=3)
    calls = assign_targets(model, {**ANIMALS, **TASKS})
    assert [(one.name, one.where.start, one.heads, one.label) for one in calls] == [
        ("label", 0, ("cls",), "fused"),
        ("colour", 1, ("colour",), "task.colour"),
        ("shape", 2, ("shape",), "task.shape"),
    ]
    assert [one.own for one in calls] == [True, False, False]


def test_one_token_with_several_heads_splits_its_outputs() -> None:
    calls = assign_targets(tiny(num_classes=6), TASKS)
    assert [(one.label, one.start, one.heads) for one in calls] == [
        ("task.colour", 0, ("cls",)),
        ("task.shape", 2, ("cls",)),
    ]
    logits = torch.arange(12.0).view(2, 6)
    assert torch.equal(calls[0].read(logits), logits[:, :2])
    assert torch.equal(calls[1].read(logits), logits[:, 2:])


def test_models_of_other_libraries_have_a_class_head() -> None:
    timm = pytest.importorskip("timm")
    assert find_heads(Net()).own == ("class",)
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3, depth=1, img_size=32)
    plan = find_heads(model)
    assert (plan.own, plan.distilled) == (("class",), "distillation")
    assert assign_targets(model, ANIMALS)[0].heads == ("class",)


@pytest.mark.parametrize(
    ("model", "classes", "words"),
    [
        (lambda: tiny(num_classes=4), ANIMALS, "'cls' has 4 outputs.* 3 classes"),
        (lambda: tiny(CLASS, task("mood", 2)), ANIMALS, "no column for the task tokens mood"),
        (lambda: tiny(CLASS, task("colour", 2), task("shape", 4)), TASKS, "no labels for the heads.*num_classes=0"),
        (lambda: tiny(task("colour", 2), num_classes=0), TASKS, "no head for the labels shape"),
        (lambda: tiny(CLASS, task("colour", 3), num_classes=4), TASKS, "'colour' has 3 outputs.* 2 classes"),
        (lambda: tiny(num_classes=0), ANIMALS, "no head for the labels label"),
        (tiny, {}, "no column"),
        (lambda: Net(classes=5), ANIMALS, "'class' has 5 outputs"),
        (lambda: tiny(TokenSpec("cls", "class", kind="regression")), ANIMALS, "regression"),
    ],
)
def test_mismatches_are_refused(model: object, classes: dict[str, tuple[str, ...]], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        assign_targets(model(), classes)  # type: ignore[operator]


def test_a_class_token_next_to_task_tokens_is_named_by_its_column() -> None:
    model = tiny(CLASS, task("breed", 3), num_classes=2)
    calls = assign_targets(model, {"breed": ("a", "b", "c"), "species": ("cat", "dog")})
    assert [one.label for one in calls] == ["task.breed", "task.species"]
