"""NamedBlock: every path resolves, and the dense form equals the block."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.models.cases import require
from tests.surgery.models import ALL
from vitrail.adapters import NamedBlock, find
from vitrail.adapters.base import DenseBlock
from vitrail.adapters.named_block import find_part
from vitrail.adapters.position import rotate
from vitrail.adapters.transformers.vit import _DINOV2_NESTED, DINOV2_NAMES
from vitrail.errors import UnsupportedModel
from vitrail.models import create_model

DENSE = [
    *("timm-class-odd", "timm-registers", "timm-layer-scale", "hf-vit", "hf-deit-head", "hf-registers"),
    *("clip-tower-even", "clip-siglip"),
]
PARTLY = {
    "timm-gated": ("mlp",),
    "eva-eva02": ("proj",),
    "eva-dinov3": ("proj", "mlp"),
    "eva-grouped-heads": ("proj",),
}
"""Blocks of which some parts alone are dense."""
OTHERS = ["timm-post-norm", "eva-post-norm"]


def first_block(name: str) -> tuple[NamedBlock, nn.Module]:
    found = find(ALL[name].model())
    parts = found.block_adapters[0]
    assert isinstance(parts, NamedBlock)
    return parts, found.blocks[0]


def run_dense(dense: DenseBlock, x: Tensor) -> Tensor:
    """A dense block in plain PyTorch."""
    h, mlp = dense.norm1(x), dense.mlp
    assert dense.qkv is not None
    assert dense.proj is not None
    assert mlp is not None
    packed = torch.cat([project(h) for project in dense.qkv], -1)
    q, k, v = (part.unflatten(-1, (dense.heads, -1)).transpose(1, 2) for part in packed.chunk(3, -1))
    y = dense.proj(F.scaled_dot_product_attention(q, k, v, scale=dense.scale).transpose(1, 2).flatten(2))
    x = x + (y if dense.gammas[0] is None else y * dense.gammas[0])
    y = mlp.fc2(F.gelu(mlp.fc1(dense.norm2(x)), approximate=mlp.gelu))
    return x + (y if dense.gammas[1] is None else y * dense.gammas[1])


def values(table: Any) -> list[str]:
    """All dotted paths of a table."""
    found: list[str] = []
    for field in fields(table):
        value = getattr(table, field.name)
        if field.name in ("tokens", "arguments", "classes") or value is None or isinstance(value, bool):
            continue
        found += [value] if isinstance(value, str) else values(value) if field.name == "dense" else filter(None, value)
    return found


def require_dense(name: str) -> None:
    """Skip the test of a block that had no dense form in older versions."""
    if name.startswith("hf-"):
        require("transformers", "5.18")


@pytest.mark.parametrize("name", [*DENSE, *PARTLY, *OTHERS, "torchvision-vit"])
def test_every_path_leads_somewhere(name: str) -> None:
    parts, block = first_block(name)
    mlp = parts.names.dense
    if mlp is not None and type(block.mlp).__name__ not in mlp.classes:
        parts = NamedBlock(replace(parts.names, dense=None))
    for path in values(parts.names):
        find_part(block, path)  # an AttributeError where it does not


@pytest.mark.parametrize("name", [*DENSE, "torchvision-vit"])
def test_the_dense_form_equals_the_block(name: str) -> None:
    require_dense(name)
    parts, block = first_block(name)
    dense = parts.dense(block)
    assert dense is not None
    x = torch.randn(2, 9, dense.norm1.weight.shape[0], dtype=torch.float64)
    mask = {"attention_mask": None} if name.startswith("clip-") else {}
    assert torch.allclose(run_dense(dense, x), block(x, **mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [{}, {"layer_scale": 0.5}, {"qk_norm": True}, {"mlp": "swiglu"}])
def test_the_dense_form_of_our_models(kind: dict[str, Any]) -> None:
    model = create_model("vit_tiny_patch16", image_size=32, width=32, depth=1, heads=2, **kind).double().eval()
    found = find(model)
    dense, x = found.block_adapters[0].dense(found.blocks[0]), torch.randn(2, 9, 32, dtype=torch.float64)
    assert dense is not None
    assert (dense.qkv is None) == ("qk_norm" in kind)
    assert (dense.mlp is None) == ("mlp" in kind)
    if not kind.keys() & {"qk_norm", "mlp"}:
        assert torch.allclose(run_dense(dense, x), found.blocks[0](x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PARTLY)
def test_parts_that_are_more_than_a_matrix_are_left_out(name: str) -> None:
    parts, block = first_block(name)
    dense = parts.dense(block)
    assert dense is not None
    assert tuple(part for part in ("qkv", "proj", "mlp") if getattr(dense, part) is not None) == PARTLY[name]


@pytest.mark.parametrize("name", OTHERS)
def test_other_blocks_have_no_dense_form(name: str) -> None:
    parts, block = first_block(name)
    assert parts.dense(block) is None


class Doubled(nn.Module):
    """A user's part in place of a library's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


@pytest.mark.parametrize("name", ["timm-layer-scale", "hf-registers", "torchvision-vit"])
def test_a_part_replaced_later_is_seen(name: str) -> None:
    parts, block = first_block(name)
    path = parts.names.mlp
    before = parts.feed(block, torch.ones(1, 3, 32, dtype=torch.float64))
    setattr(block, path, Doubled(find_part(block, path)))
    dense = parts.dense(block)
    assert dense is not None
    assert dense.mlp is None
    assert torch.equal(parts.feed(block, torch.ones(1, 3, 32, dtype=torch.float64)), 2 * before)


@pytest.mark.parametrize("name", ["timm-layer-scale", "hf-registers", "torchvision-vit"])
def test_a_hooked_part_runs_itself(name: str) -> None:
    require_dense(name)
    parts, block = first_block(name)
    assert parts.names.dense is not None
    handle = find_part(block, parts.names.norm1).register_forward_hook(lambda *_: None)
    assert parts.dense(block) is None
    handle.remove()
    for path in (parts.names.mlp, parts.names.dense.fc1, parts.names.dense.fc2):
        handle = find_part(block, path).register_forward_hook(lambda *_: None)
        dense = parts.dense(block)
        assert dense is not None
        assert dense.mlp is None, path
        handle.remove()
    dense = parts.dense(block)
    assert dense is not None
    assert dense.mlp is not None


def test_packed_parameters_are_read_at_each_call() -> None:
    parts, block = first_block("torchvision-vit")
    dense, h = parts.dense(block), torch.randn(1, 5, 32, dtype=torch.float64)
    assert dense is not None
    assert dense.qkv is not None
    attention = block.self_attention
    attention.in_proj_weight = nn.Parameter(torch.zeros_like(attention.in_proj_weight))
    assert torch.equal(dense.qkv[0](h), attention.in_proj_bias.expand(1, 5, -1))
    assert torch.equal(parts.qkv(block, h)[0].transpose(1, 2).flatten(2), attention.in_proj_bias[:32].expand(1, 5, -1))


def nested(block: Any) -> nn.Module:
    """A DINOv2 layer as transformers before 5.18 had it, with the weights of a present one."""
    attention, inner, output = block.attention, nn.Module(), nn.Module()
    inner.query, inner.key, inner.value = attention.q_proj, attention.k_proj, attention.v_proj
    inner.num_attention_heads, inner.attention_head_size = attention.num_attention_heads, attention.head_dim
    inner.scaling, inner.dropout_prob = attention.scaling, 0.25
    output.dense, output.dropout = attention.o_proj, nn.Dropout(0.0)
    block.attention = nn.Module()
    block.attention.attention, block.attention.output = inner, output
    return block


def test_the_nested_layout_of_transformers() -> None:
    require("transformers", "5.18")
    new, block = first_block("hf-registers")
    assert new.names == DINOV2_NAMES
    h = torch.randn(2, 9, 32, dtype=torch.float64)
    qkv, output = new.qkv(block, h), new.attend_output(block, h, h)
    trunk = find(ALL["hf-registers"].model())
    old = trunk.adapter.block_adapter(nested(block))
    assert isinstance(old, NamedBlock)
    assert old.names == _DINOV2_NESTED
    assert all(torch.equal(a, b) for a, b in zip(old.qkv(block, h), qkv, strict=True))
    assert torch.equal(old.attend_output(block, h, h), output)
    assert old.head_shape(block) == new.head_shape(find(ALL["hf-registers"].model()).blocks[0])
    assert old.attention_dropout(block.train()) == 0.25
    dense = old.dense(block.eval())
    assert dense is not None
    assert dense.mlp is None


def test_a_wrapper_is_refused() -> None:
    class Wrapped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    adapter = find(ALL["timm-registers"].model()).adapter
    with pytest.raises(UnsupportedModel, match="Wrapped"):
        adapter.block_adapter(Wrapped())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_the_libraries(interleaved: bool) -> None:
    from timm.layers import apply_rot_embed_cat

    from vitrail.models.position import rotate as rotate_ours

    x, table = torch.randn(2, 3, 7, 8), torch.randn(5, 16)
    ours = rotate(x, table, interleaved=interleaved)
    assert torch.equal(ours[:, :, 2:], apply_rot_embed_cat(x[:, :, 2:], table, half=not interleaved))
    assert torch.equal(ours[:, :, :2], x[:, :, :2])
    if not interleaved:
        assert torch.equal(ours, rotate_ours(x, table))


def test_arguments_are_read_by_place_and_by_name() -> None:
    parts = first_block("eva-eva02")[0]
    mask, rope = torch.ones(1), torch.zeros(1)
    assert parts.read_call((rope, mask), {"is_causal": True}) == parts.read_call(
        (), {"rope": rope, "attn_mask": mask, "is_causal": True}
    )
    call = parts.read_call((rope,), {})
    assert (call.rope is rope, call.mask, call.causal) == (True, None, False)


def test_a_part_that_is_none_is_skipped() -> None:
    names = replace(first_block("timm-class-odd")[0].names, gate="gate", after_attend=("gamma",))
    block: Any = SimpleNamespace(gamma=None)
    y = torch.ones(2)
    assert NamedBlock(names).attend_branch(block, y) is y
