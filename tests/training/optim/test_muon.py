"""Muon: orthogonalized updates against an SVD, and against PyTorch's optimizer of the same name."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from vitrail.errors import InvalidOption
from vitrail.models import create_model
from vitrail.training import Config
from vitrail.training.optim.muon import Muon, hidden_weights, orthogonal
from vitrail.training.optim.optimizer import make_optimizer, optimizer_tensors


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 30), (2, 30, 5), (1, 1, 7)])
def test_singular_values_become_about_one_and_directions_stay(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given = torch.randn(shape)
    left, values, right = torch.linalg.svd(given.double(), full_matrices=False)
    found = left.mT @ orthogonal(given).double() @ right.mT
    around = torch.diagonal(found, dim1=-2, dim2=-1)
    assert around.min() > 0.5
    assert around.max() < 1.3 < values.max()
    assert (found - torch.diag_embed(around)).abs().max() < 0.05
    assert torch.equal(orthogonal(torch.zeros(shape)), torch.zeros(shape))


def test_muon_used_directly_takes_the_steps_of_our_optimizer() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 2))
    direct = deepcopy(ours)
    prepared = make_optimizer(ours, 0.02, 0.1, "muon")
    first, *hidden = (layer.weight for layer in direct)
    biases = [layer.bias for layer in direct]
    groups = [{"params": hidden, "orthogonal": True}, {"params": [first]}, {"params": biases, "weight_decay": 0.0}]
    alone = Muon(groups, lr=0.02, weight_decay=0.1)
    for _ in range(3):
        x = torch.randn(4, 6)
        for model, optimizer in ((ours, prepared), (direct, alone)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for one, other in zip(ours.parameters(), direct.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    Muon(direct.parameters(), lr=0.1).step()


def test_hidden_layers_of_ours_and_of_others_are_known() -> None:
    blocks = [f"blocks.0.{part}.weight" for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    assert hidden_weights(create_model("vit_tiny_patch16", depth=1, num_classes=3)) == set(blocks)
    timm = pytest.importorskip("timm", reason="needs timm models")
    assert hidden_weights(timm.create_model("vit_tiny_patch16_224", depth=1)) == set(blocks)
    net = timm.create_model("resnet18d", num_classes=3)
    convolutions = {n for n, p in net.named_parameters() if p.ndim == 4}
    assert hidden_weights(net) == convolutions - {"conv1.0.weight"}


def test_steps_equal_those_of_pytorch() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 8, 1), nn.Flatten(), nn.Linear(8, 8))
    theirs = deepcopy(ours)
    first = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    optimizer = make_optimizer(ours, 0.02, 0.1, "muon")
    assert isinstance(optimizer, Muon)
    held = optimizer_tensors(optimizer)
    assert {name for name in held if name.startswith("momentum")} == {f"momentum.{n}.weight" for n in (1, 2, 4)}
    matrices = {n: nn.Parameter(p.detach().flatten(1).clone()) for n, p in theirs.named_parameters() if p.ndim > 1}
    matrices.pop("0.weight")
    rest = [p for n, p in theirs.named_parameters() if n not in matrices]
    alone = torch.optim.AdamW([{"params": rest[:1]}, {"params": rest[1:], "weight_decay": 0.0}], 0.02, weight_decay=0.1)
    whole = torch.optim.Muon(matrices.values(), 0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        x = torch.randn(4, 3, 5, 5)
        for model, steps in ((ours, [optimizer]), (theirs, [alone, whole])):
            model.zero_grad()
            model(x).square().mean().backward()
            for name, matrix in matrices.items() if model is theirs else ():
                gradient = theirs.get_parameter(name).grad
                assert gradient is not None
                matrix.grad = gradient.flatten(1).clone()
            for one in steps:
                one.step()
            with torch.no_grad():
                for name, matrix in matrices.items() if model is theirs else ():
                    theirs.get_parameter(name).copy_(matrix.view_as(theirs.get_parameter(name)))
    for name, found in ours.named_parameters():
        assert torch.allclose(found, theirs.get_parameter(name), atol=1e-3), name
        assert (found - first[name]).abs().max() > 0.015, name


def test_matrices_that_are_cut_up_are_refused() -> None:
    with pytest.raises(InvalidOption, match="optimizer=muon needs whole matrices"):
        Config(data="photos", optimizer="muon", shard="fsdp")
