"""Weights cast to bfloat16: the bits of a model in bfloat16, gradients for the float32 weights, everything restored."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.training.models import ANIMALS, CLASS, DISTILLATION, Net, tiny
from tests.training.toys import FIELDS, make_photos, same, weights
from vitrail.errors import InvalidOption
from vitrail.models import ViT
from vitrail.training import Config, evaluate, train
from vitrail.training.objective.learner import Learner, cast_weights
from vitrail.training.objective.objective import Objective
from vitrail.training.objective.teacher import Teacher

DRAW = torch.Generator().manual_seed(0)
IMAGES, LABELS = torch.randn(4, 3, 16, 16, generator=DRAW), torch.tensor([[0], [2], [1], [1]])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad.float() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("merged", [False, True], ids=["plain", "merged"])
def test_equals_a_model_in_bfloat16(merged: bool) -> None:
    model = tiny()
    short = deepcopy(model).bfloat16()
    if merged:
        vitrail.merge(model, r=2)
        vitrail.merge(short, r=2)
    expected = short(IMAGES.bfloat16())
    expected.float().square().sum().backward()
    with cast_weights(model):
        found = model(IMAGES.bfloat16())
    found.float().square().sum().backward()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    wanted, here = gradients(short), gradients(model)
    assert len(wanted) > 20
    assert same(here, wanted)
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in model.parameters())


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.second.weight = self.first.weight
        self.whole = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)


def test_shared_weights_stay_shared_and_statistics_stay_float32() -> None:
    model = Shared()
    before = dict(model.named_parameters(remove_duplicate=False))
    with cast_weights(model):
        assert model.first.weight is model.second.weight
        assert model.first.weight.dtype == model.second.bias.dtype == torch.bfloat16
        assert model.norm.weight.dtype == model.norm.running_mean.dtype == torch.float32  # type: ignore[union-attr]
        assert model.whole.dtype == torch.int64
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(after[name] is weight for name, weight in before.items())


def test_weights_are_restored_after_an_error() -> None:
    model = tiny()
    before = dict(model.named_parameters())
    with pytest.raises(ZeroDivisionError), cast_weights(model):
        1 / 0  # noqa: B018
    assert all(weight is before[name] for name, weight in model.named_parameters())


def test_learner_casts_the_model_and_not_the_objective() -> None:
    model = tiny(CLASS, DISTILLATION)
    teacher = Teacher(Net(), features=True)
    objective = Objective(model, ANIMALS, distillation="soft", teacher=teacher, feature_weight=1.0)
    taught = teacher(IMAGES)
    exact = Learner(deepcopy(model).train(), deepcopy(objective))(IMAGES, LABELS, None, taught)
    with torch.autocast("cpu", torch.bfloat16):
        terms = Learner(model.train(), objective, bf16_weights=True)(IMAGES, LABELS, None, taught)
    terms.total.backward()
    assert terms.total.dtype == torch.float32
    assert terms.total.item() == pytest.approx(exact.total.item(), rel=0.02)
    assert terms.total.item() != exact.total.item()
    assert all(weight.grad is not None for weight in objective.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch looks, and hides it
def test_compiled_blocks_are_not_compiled_anew_for_each_step() -> None:
    model: ViT = tiny()
    graphs = []

    def count(graph: object, _: object) -> object:
        graphs.append(graph)
        return graph

    for block in model.blocks:
        block.compile(backend=count)
    for _ in range(3):
        with cast_weights(model):
            model(IMAGES.bfloat16()).sum().backward()
    assert 1 <= len(graphs) <= len(model.blocks)
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_run_learns_with_bfloat16_weights(tmp_path: Path) -> None:
    photos = str(make_photos(tmp_path / "photos"))
    fields = {**FIELDS, "data": photos, "lr": 3e-3, "epochs": 8}
    runs = {name: train(**fields, dtype=name, out=str(tmp_path / name)) for name in ("fp32", "bf16", "bf16-weights")}
    last = {name: weights(Path(run.folder) / "last") for name, run in runs.items()}
    assert all(weight.dtype == torch.float32 for weight in last["bf16-weights"].values())
    assert not same(last["bf16"], last["bf16-weights"])
    losses = {name: evaluate(run.folder, photos, seconds=0).loss for name, run in runs.items()}
    assert losses["bf16-weights"] == pytest.approx(losses["fp32"], abs=0.1)
    assert losses["bf16-weights"] < 0.5


@pytest.mark.parametrize(("name", "value"), [("recipe", "dino"), ("shard", "fsdp"), ("compile", "whole")])
def test_contradicting_options_are_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidOption, match=f"bf16-weights does not work with {name}={value}"):
        Config(data="photos", dtype="bf16-weights", **{name: value})  # type: ignore[arg-type]
