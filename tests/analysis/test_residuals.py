"""Residual branches: what is measured adds up to the output of every block, in models of every library."""

import pytest
import torch
from torch import Tensor

import vitrail
from tests.adapters.families import FAMILIES
from tests.surgery.models import run
from vitrail.adapters import find
from vitrail.analysis.residuals import Branches, measure_residuals, watched
from vitrail.errors import UnsupportedModel
from vitrail.models import ViT

KINDS = (
    "DINOv2, with registers (timm)",  # LayerScale
    "BEiT, BEiT v2 (timm)",  # its scale is a parameter of the block
    "ViT with relative position (timm)",
    "ViT with differential attention (timm)",
    "DINOv2, with registers (transformers)",
    "data2vec-vision (transformers)",
    "V-JEPA 2 (transformers)",
    "ViT (torchvision)",  # its projection runs inside attention, unseen by hooks
    "CLIP, CoCa and others (open_clip)",
)


@pytest.mark.parametrize("family", KINDS)
def test_branches_add_up_to_the_output_of_each_block(family: str) -> None:
    case = FAMILIES[family].case
    model, images = case.model().eval(), case.images()
    outputs: list[Tensor] = []
    sums: list[Tensor] = []

    def keep(_: object, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    def add(seen: Branches) -> None:
        sums.append(seen.stream + sum(seen.added().values()))

    for block in find(model).blocks:
        block.register_forward_hook(keep)
    with watched(model, add), torch.no_grad():
        run(model, images, case)
    assert len(outputs) == len(sums) == len(find(model).blocks)
    for output, total in zip(outputs, sums, strict=True):
        torch.testing.assert_close(total, output, rtol=0, atol=1e-12)


def small(**options: object) -> ViT:
    torch.manual_seed(0)
    return vitrail.create_model(
        "vit_tiny_patch16", image_size=32, patch_size=8, width=16, depth=3, heads=2, **options
    ).double()


@torch.no_grad()
def test_norms_are_those_of_the_parts_run_one_by_one() -> None:
    model, images = small(layer_scale=0.25).eval(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    entering: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: entering.append(args[0]))
    found = measure_residuals(model, images)
    x = entering[0]
    for layer, block in enumerate(model.blocks):
        y = block.attn(block.norm1(x))
        z = block.mlp(block.norm2(x + 0.25 * y))
        expected = [x.norm(dim=-1).mean(), 0.25 * y.norm(dim=-1).mean(), 0.25 * z.norm(dim=-1).mean(), 0.25, 0.25]
        values = (found.stream, found.attention, found.mlp, found.attention_scale, found.mlp_scale)
        assert [one[layer] for one in values] == pytest.approx([float(one) for one in expected], rel=1e-5)
        x = x + 0.25 * y + 0.25 * z


def test_model_stays_as_it_is_and_may_be_merged() -> None:
    model, images = small(drop_path=0.5).train(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    plain, state = measure_residuals(model, images), torch.get_rng_state()
    assert measure_residuals(model, images) == plain  # stochastic depth is off
    assert torch.equal(torch.get_rng_state(), state)
    assert all(part.training for part in model.modules())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert plain.attention_scale == pytest.approx((1.0,) * 3)
    with vitrail.merge(model, r=4):
        merged = measure_residuals(model, images)
    assert merged.stream[0] == pytest.approx(plain.stream[0])
    assert merged.attention[0] == pytest.approx(plain.attention[0])
    assert merged.stream[2] != pytest.approx(plain.stream[2], rel=1e-6)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("Swin (timm)", "inside windows"),
        ("ViT with attention beside the MLP (timm)", "ParallelScalingBlock"),
        ("ViT with parallel attentions and MLPs (timm)", "ParallelThingsBlock"),
    ],
)
def test_blocks_without_two_branches_are_refused(family: str, why: str) -> None:
    case = FAMILIES[family].case
    model = case.model()
    with pytest.raises(UnsupportedModel, match=why):
        measure_residuals(model, case.images())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
