"""The main tensor of a model's output, and which tasks are in it."""

import pytest
import torch
from torch import Tensor, nn

import vitrail
from vitrail.adapters.outputs import output_tensor, task_sizes
from vitrail.adapters.saved import LABELS_ATTRIBUTE
from vitrail.errors import UnsupportedInput
from vitrail.heads import Output
from vitrail.tokens import Role, TokenSpec

SMALL = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "heads": 2}


def tasks(*tokens: TokenSpec, **options: int) -> tuple[nn.Module, Output | Tensor]:
    model = vitrail.create_model("vit_tiny_patch16", **SMALL, tokens=tokens, **options).eval()
    with torch.no_grad():
        return model, model(torch.randn(2, 3, 16, 16))


def test_task_tokens_alone_are_side_by_side() -> None:
    model, output = tasks(
        TokenSpec("digit", Role.TASK, classes=4), TokenSpec("speaker", Role.TASK, classes=3), num_classes=0
    )
    assert isinstance(output, Output)
    expected = torch.cat([output.by_role["digit"], output.by_role["speaker"]], 1)
    assert torch.equal(output_tensor(output), expected)
    assert task_sizes(model, output) == [4, 3]


def test_class_logits_come_first_and_hold_the_columns_of_the_class_token() -> None:
    model, output = tasks(TokenSpec("cls", Role.CLASS), TokenSpec("digit", Role.TASK, classes=4), num_classes=5)
    assert isinstance(output, Output)
    assert output.logits is not None
    assert torch.equal(output_tensor(output), output.logits)
    assert task_sizes(model, output) == [5]
    classes = {"shape": ["disc", "ring"], "digit": list("0123"), "motion": ["left", "right", "still"]}
    setattr(model, LABELS_ATTRIBUTE, {"classes": classes})
    assert task_sizes(model, output) == [2, 3]
    setattr(model, LABELS_ATTRIBUTE, {"classes": {"other": ["a", "b"]}})
    assert task_sizes(model, output) == [5]


def test_other_outputs_are_refused() -> None:
    with pytest.raises(UnsupportedInput, match="expected a tensor"):
        output_tensor({"logits": 1})
