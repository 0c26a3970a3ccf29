"""Dense heads: maps in the order of the patches."""

import pytest
import torch

from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.heads import DecoderHead, DenseHead
from vitrail.tokens import Role, TokenLayout

LAYOUT = TokenLayout.of(Role.CLASS, (Role.REGISTER, 2), grid=(1, 2, 3))


def made(kind="segmentation", layout=LAYOUT, classes=2):
    head = DenseHead(4, classes, kind).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head, torch.randn(2, layout.num_tokens, 4, dtype=torch.float64)


def by_hand(head, x, layout=LAYOUT):
    """Return the value of every patch (B, C, t, h, w)."""
    time, height, width = layout.grid
    found = torch.zeros(len(x), head.head.out_features, *layout.grid, dtype=torch.float64)
    for t in range(time):
        for row in range(height):
            for column in range(width):
                token = x[:, layout.num_special + (t * height + row) * width + column]
                found[:, :, t, row, column] = token @ head.head.weight.T + head.head.bias
    return found


def test_one_value_per_patch():
    head, x = made()
    assert head(x, LAYOUT).shape == (2, 2, 2, 3)
    assert torch.allclose(head(x, LAYOUT), by_hand(head, x)[:, :, 0], atol=1e-12)


def test_pixels_lie_between_patches():
    head, x = made("regression")
    patches = by_hand(head, x)[:, :, 0]
    pixels = head(x, LAYOUT, (4, 12))
    assert pixels.shape == (2, 2, 4, 12)
    assert torch.allclose(pixels[..., 0, 0], patches[..., 0, 0], atol=1e-12)  # beyond the center of the first patch
    # Pixel centres in units of patches, from the center of the first: 1 is (1.5 / 2 - 0.5), 2 is (2.5 / 4 - 0.5).
    down, right = 0.25, 0.125
    top = patches[..., 0, 0] * (1 - right) + patches[..., 0, 1] * right
    bottom = patches[..., 1, 0] * (1 - right) + patches[..., 1, 1] * right
    assert torch.allclose(pixels[..., 1, 2], top * (1 - down) + bottom * down, atol=1e-12)
    assert torch.equal(head(x, LAYOUT, (2, 3)), head(x, LAYOUT))


def test_depth_is_positive():
    head, x = made("depth", classes=1)
    found = head(x, LAYOUT, (8, 12))
    assert (found > 0).all()
    assert torch.allclose(head(x, LAYOUT), (1 + by_hand(head, x)[:, :, 0].exp()).log(), atol=1e-12)


def test_frames_are_interpolated_one_by_one():
    layout = TokenLayout.of(Role.CLASS, grid=(3, 2, 2))
    head, x = made(layout=layout)
    patches = by_hand(head, x, layout)
    assert torch.allclose(head(x, layout), patches, atol=1e-12)
    found = head(x, layout, (4, 6))
    assert found.shape == (2, 2, 3, 4, 6)
    for t in range(3):
        alone = torch.nn.functional.interpolate(patches[:, :, t], size=(4, 6), mode="bilinear")
        assert torch.allclose(found[:, :, t], alone, atol=1e-12)


def test_only_patches_get_gradients():
    head, x = made()
    x.requires_grad_()
    head(x, LAYOUT, (8, 12)).square().sum().backward()
    reached = x.grad.abs().amax((0, 2)) > 0
    assert reached.tolist() == [False] * 3 + [True] * 6
    assert head.head.weight.grad is not None


def test_compiles_as_one_graph():
    head, x = made("depth")
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x, LAYOUT, (4, 6)), head(x, LAYOUT, (4, 6)), atol=1e-12)


def test_wrong_use():
    with pytest.raises(InvalidOption, match="segmentation, depth, regression"):
        DenseHead(4, 2, "boxes")
    for width, classes, name in (
        (4, 0, "classes=0"),
        (4, "3", "classes='3'"),
        (0, 3, "width=0"),
        (True, 3, "width=True"),
    ):
        with pytest.raises(InvalidOption, match=f"{name}; expected an integer, 1 or more"):
            DenseHead(width, classes)
    head, x = made()
    with pytest.raises(UnsupportedInput, match="9 tokens"):
        head(x[:, :-1], LAYOUT)


def test_decoder_head_equals_its_layers_by_hand():
    """Norm, projection, and two stages, written with torch's functions."""
    layout = TokenLayout.of(Role.CLASS, grid=(1, 2, 3))
    head, x = DecoderHead(4, 3, hidden=8).double(), torch.randn(2, 7, 4, dtype=torch.float64)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    F, (first, second) = torch.nn.functional, head.stages
    maps = torch.stack([torch.stack([
        F.layer_norm(x[:, 1 + 3 * row + column], (4,), head.norm.weight, head.norm.bias) @ head.project.weight.T
        + head.project.bias for column in range(3)], 2) for row in range(2)], 2)  # fmt: skip
    for _, convolve, norm, _ in (first, second):
        maps = F.interpolate(maps, scale_factor=2, mode="bilinear")
        maps = F.conv2d(maps, convolve.weight, convolve.bias, padding=1)
        groups = maps.reshape(2, 8, 1, *maps.shape[2:])
        groups = (groups - groups.mean((2, 3, 4), keepdim=True)) / (
            groups.var((2, 3, 4), correction=0, keepdim=True) + norm.eps
        ).sqrt()
        maps = F.gelu(groups.reshape(maps.shape) * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1))
    logits = torch.einsum("bchw,kc->bkhw", maps, head.classify.weight[:, :, 0, 0]) + head.classify.bias.view(-1, 1, 1)
    assert head(x, layout).shape == (2, 3, 8, 12)
    assert torch.allclose(head(x, layout), logits, atol=1e-12)
    assert torch.allclose(head(x, layout, (5, 7)), F.interpolate(logits, (5, 7), mode="bilinear"), atol=1e-12)


def test_decoder_head_refuses_other_shapes():
    head = DecoderHead(4, 2, hidden=8)
    with pytest.raises(UnsupportedInput, match="unmerge merged tokens first"):
        head(torch.randn(1, 6, 4), TokenLayout.of(Role.CLASS, grid=(1, 2, 3)))
    with pytest.raises(UnsupportedInput, match="2 frames"):
        head(torch.randn(1, 13, 4), TokenLayout.of(Role.CLASS, grid=(2, 2, 3)))
    with pytest.raises(InvalidOption, match="multiple of 8"):
        DecoderHead(4, 2, hidden=12)
