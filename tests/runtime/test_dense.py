"""The cache of the fused path is invalidated when a block changes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from timm.layers import DropPath
from timm.models.vision_transformer import Block
from torch import nn

from vitrail import kernels
from vitrail.adapters import NamedBlock
from vitrail.adapters.timm.vit import BLOCK
from vitrail.merging import MergeState, ToMe
from vitrail.runtime import dense_forward as dense
from vitrail.runtime.dense_forward import dense_block


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Block:
    monkeypatch.setattr(kernels, "usable", lambda x: True)
    return Block(32, 2, qkv_bias=True, init_values=0.1, drop_path=0.1, proj_drop=0.1).to(torch.bfloat16).eval()


PLAN = SimpleNamespace(order="paper", method=ToMe())
"""What the dense path asks of a plan."""


def find(block: nn.Module) -> dense.DenseBlock | None:
    return dense_block(BLOCK, block, torch.empty(1, 9, 32, dtype=torch.bfloat16), PLAN, MergeState((2,)))


def test_cached_block_is_not_searched_again(block: Block) -> None:
    first = find(block)
    assert first is not None
    with mock.patch.object(NamedBlock, "dense", side_effect=AssertionError):
        assert find(block) is first


MLP: dict[str, Callable[[Block], object]] = {
    "hook": lambda block: block.mlp.fc1.register_forward_hook(lambda *_: None),
    "module": lambda block: setattr(block.mlp, "act", nn.ReLU()),
    "subclass": lambda block: setattr(block.mlp, "fc2", type("Adapted", (nn.Linear,), {})(128, 32)),
    "kind of weight": lambda block: block.mlp.fc1._parameters.update(
        weight=type("Quantised", (nn.Parameter,), {})(block.mlp.fc1.weight.detach())
    ),
}
NORMS_AND_SUMS: dict[str, Callable[[Block], object]] = {
    "hook of a norm": lambda block: block.norm2.register_forward_pre_hook(lambda *_: None),
    "another norm": lambda block: setattr(block, "norm1", nn.RMSNorm(32)),
    "dropout of attention": lambda block: (setattr(block.attn.attn_drop, "p", 0.1), block.train()),
}


@pytest.mark.parametrize("change", MLP)
def test_changed_mlp_runs_itself(block: Block, change: str) -> None:
    found = find(block)
    assert found is not None
    assert found.mlp is not None
    MLP[change](block)
    found = find(block)
    assert found is not None
    assert found.mlp is None


@pytest.mark.parametrize("change", NORMS_AND_SUMS)
def test_changed_block_is_dense_no_more(block: Block, change: str) -> None:
    assert find(block) is not None
    NORMS_AND_SUMS[change](block)
    assert find(block) is None


def test_removed_hook_is_forgotten(block: Block) -> None:
    handle = block.norm1.register_forward_hook(lambda *_: None)
    assert find(block) is None
    handle.remove()
    assert find(block) is not None


def test_replaced_layer_scale_is_used(block: Block) -> None:
    assert find(block) is not None
    block.ls1.gamma = nn.Parameter(torch.ones(32, dtype=torch.bfloat16))
    found = find(block)
    assert found is not None
    assert found.gammas[0] is block.ls1.gamma


def test_replaced_layer_is_used(block: Block) -> None:
    assert find(block) is not None
    block.attn.proj = nn.Linear(32, 32, dtype=torch.bfloat16)
    found = find(block)
    assert found is not None
    assert found.proj is block.attn.proj


def test_dropouts_work_in_training_alone(block: Block) -> None:
    found = find(block)
    assert found is not None
    assert found.mlp is not None
    assert found.drops == found.mlp.drops == ((), ())
    found = find(block.train())
    assert found is not None
    assert found.mlp is not None
    assert [[type(drop) for drop in drops] for drops in found.drops] == [[nn.Dropout, DropPath], [DropPath]]
    assert [[type(drop) for drop in drops] for drops in found.mlp.drops] == [[nn.Dropout], [nn.Dropout]]
    for drop in (block.attn.proj_drop, block.mlp.drop1, block.mlp.drop2):
        drop.p = 0.0
    found = find(block)
    assert found is not None
    assert found.mlp is not None
    assert found.drops == ((block.drop_path1,), (block.drop_path2,))
    assert found.mlp.drops == ((), ())
