"""Teachers: frozen, outside the student, and with their own preprocessing of the student's images."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.training.models import Net, task, tiny
from vitrail.adapters.registry import declared_spec
from vitrail.data.spec import InputSpec
from vitrail.errors import UnsupportedModel
from vitrail.training.objective.teacher import Teacher

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
GIVEN = InputSpec((16, 16), (0.5, 0.4, 0.3), (0.2, 0.25, 0.5))
OWN = InputSpec((16, 16), (0.1, 0.2, 0.3), (0.5, 0.5, 0.25))


def test_frozen_and_in_evaluation_mode() -> None:
    net = Net().train()
    before = net.norm.running_mean.clone()
    teacher = Teacher(net)
    net.train()  # forgotten by the user
    first, second = teacher(IMAGES), teacher(IMAGES)
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(net.norm.running_mean, before)
    assert not any(value.requires_grad for value in net.parameters())
    assert not first.logits.requires_grad
    assert first.features is None


def test_predictions_have_gradients() -> None:
    taught = Teacher(Net())(IMAGES)
    student = torch.randn(2, 3, requires_grad=True)
    F.cross_entropy(student, taught.logits.softmax(-1)).backward()  # no inference tensors, which cannot be
    assert student.grad is not None


def test_other_normalization_and_size() -> None:
    net = Net()
    plain = Teacher(net)
    pixels = torch.rand(2, 3, 16, 16)
    as_student, as_teacher = (
        (pixels - torch.tensor(one.mean).view(3, 1, 1)) / torch.tensor(one.std).view(3, 1, 1) for one in (GIVEN, OWN)
    )
    found = Teacher(net, given=GIVEN, expects=OWN)(as_student)
    torch.testing.assert_close(found.logits, plain(as_teacher).logits)
    larger = InputSpec((24, 24), OWN.mean, OWN.std)
    found = Teacher(net, given=GIVEN, expects=larger)(as_student)
    resized = F.interpolate(as_teacher, (24, 24), mode="bilinear", antialias=True)
    torch.testing.assert_close(found.logits, plain(resized).logits)
    same = Teacher(net, given=GIVEN)(as_student)
    assert torch.equal(same.logits, plain(as_student).logits)


def test_a_library_declares_the_input_of_its_model() -> None:
    timm = pytest.importorskip("timm")
    net = timm.create_model("resnet10t.c3_in1k", num_classes=3)
    assert declared_spec(net).mean == tuple(net.pretrained_cfg["mean"])
    assert declared_spec(Net()) is None
    assert declared_spec(tiny()).size == (16, 16)
    taught = Teacher(net, features=True)(torch.randn(2, 3, 64, 64))
    assert taught.features.shape == (2, 512, 2, 2)


def test_lower_precision_inside_float32_outside() -> None:
    taught = Teacher(Net(), dtype=torch.bfloat16, features=True)(IMAGES)
    assert taught.logits.dtype == taught.features.dtype == torch.float32


def test_some_of_its_classes() -> None:
    net = Net(classes=6)
    assert torch.equal(Teacher(net, outputs=[4, 0, 2])(IMAGES).logits, Teacher(net)(IMAGES).logits[:, [4, 0, 2]])


def test_without_a_head() -> None:
    with pytest.raises(UnsupportedModel, match="only task tokens"):
        Teacher(tiny(task("colour", 2), num_classes=0))(IMAGES)
