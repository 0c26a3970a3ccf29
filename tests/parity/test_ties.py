"""Equal similarities: the token with the lower index wins, among the partners and among the pairs.

Equal tokens do not always give equal sums (a matrix product may add the columns of one row in another order
than those of the next), so these models are arranged such that every similarity is exactly 0 or exactly the
same number in whatever order it is computed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.oracle import describe, run
from tests.parity.models import timm_vit, transformers_vit

WIDTH, PATCHES, PIXELS = 32, 16, 8


@torch.no_grad()
def every_key_alike(model: nn.Module) -> None:
    """Make all keys of all layers the same unit vector, so that there are only ties."""
    for name, parameter in model.named_parameters():
        if "qkv" in name:
            keys = parameter[WIDTH : 2 * WIDTH]
        elif "k_proj" in name:
            keys = parameter
        else:
            continue
        keys.zero_()
        if name.endswith("bias"):
            keys[0] = keys[WIDTH // 2] = 1.0


@torch.no_grad()
def keys_by_kind(model: nn.Module) -> None:
    """Make the first layer's keys encode only the kind of a patch (see `images_of`)."""
    convolution = model.patch_embed.proj
    convolution.weight.zero_()
    convolution.bias.zero_()
    for channel in range(WIDTH):
        convolution.weight[channel, 0, channel // PIXELS, channel % PIXELS] = 1.0
    block = model.blocks[0]
    block.norm1.weight.fill_(1.0)
    block.norm1.bias.zero_()
    block.attn.qkv.bias[WIDTH : 2 * WIDTH] = 0.0
    keys = block.attn.qkv.weight[WIDTH : 2 * WIDTH]
    keys.zero_()
    for kind in range(4):
        keys[kind, 2 * kind], keys[kind, 2 * kind + 1] = 1.0, -1.0


def images_of(kinds: Tensor) -> Tensor:
    """Images (B, 3, 32, 32) whose patches have these kinds (B, 16).

    A patch's token is its first 32 pixels, +1 or -1, as many of each.  The pair of channels `kind` differs,
    the other pairs below 4 agree, so the key of a patch is a multiple of one unit vector.
    """
    images = torch.zeros(len(kinds), 3, 32, 32, dtype=torch.float64)
    for b, row in enumerate(kinds.tolist()):
        for patch, kind in enumerate(row):
            pairs = [(1.0, -1.0) if p == kind else ((1.0, 1.0) if p % 2 else (-1.0, -1.0)) for p in range(4)]
            head = [x for pair in pairs for x in pair]
            plus = WIDTH // 2 - head.count(1.0)
            token = torch.tensor(head + [1.0] * plus + [-1.0] * (WIDTH - len(head) - plus))
            top, left = 8 * (patch // 4), 8 * (patch % 4)
            images[b, 0, top : top + 4, left : left + 8] = token.reshape(4, 8)
    return images


def merged_groups(model: nn.Module, images: Tensor, **options: object) -> list[list[int]]:
    """The groups that the library makes."""
    with torch.no_grad(), vitrail.merge(model, **options) as merging, merging.track() as trace:
        model(images)
    return trace.groups.tolist()


def wanted_groups(model: nn.Module, images: Tensor, r: list[int], **options: str) -> list[list[int]]:
    """The groups that the oracle makes."""
    with torch.no_grad():
        return run(describe(model, images), r, **options).groups


def test_lower_index_wins_by_hand() -> None:
    """Class token at place 0, patches at 1 to 16: places 2, 4, 6 merge into place 1."""
    case = timm_vit.CASES["class-odd"]
    model, images = case.model(), case.images()
    every_key_alike(model)
    groups = merged_groups(model, images, r=[3, 0, 0])
    # Left: the class token, places 8 10 12 14 16 (now 1 to 5), places 1 3 5 7 9 11 13 15 (now 6 to 13).
    assert groups == [[6, 6, 7, 6, 8, 6, 9, 1, 10, 2, 11, 3, 12, 4, 13, 5]] * 2
    groups = merged_groups(model, images, r=[3, 0, 0], order="original")
    assert groups == [[1, 1, 2, 1, 3, 1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]] * 2


@pytest.mark.parametrize("order", ["paper", "original"])
@pytest.mark.parametrize("r", [1, 3, 4])
@pytest.mark.parametrize(
    "case",
    [
        timm_vit.CASES["class-odd"],
        timm_vit.CASES["gap-no-class"],
        timm_vit.CASES["registers-no-class"],
        timm_vit.CASES["distilled"],
        transformers_vit.CASES["vit"],
        transformers_vit.CASES["registers"],
    ],
    ids=lambda case: case.name,
)
def test_nothing_but_ties_in_every_layer(case: object, r: int, order: str) -> None:
    model, images = case.model(), case.images()
    every_key_alike(model)
    wanted = wanted_groups(model, images, [r] * 3, order=order)
    assert merged_groups(model, images, r=r, order=order) == wanted


@pytest.mark.parametrize("order", ["paper", "original"])
@pytest.mark.parametrize("r", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("name", ["no-positions", "no-class"])
def test_a_few_kinds_of_patches(name: str, r: int, order: str) -> None:
    options = {"no-positions": {}, "no-class": {"class_token": False, "global_pool": "avg"}}[name]
    build: Callable[[], nn.Module] = lambda: timm_vit.vit(pos_embed="none", **options)  # noqa: E731
    model = timm_vit.Case("ties", build, (32, 32)).model()
    keys_by_kind(model)
    kinds = torch.randint(4, (3, PATCHES), generator=torch.Generator().manual_seed(r))
    kinds[2] = 1
    images = images_of(kinds)
    wanted = wanted_groups(model, images, [r, 0, 0], order=order)
    assert merged_groups(model, images, r=[r, 0, 0], order=order) == wanted


@pytest.mark.parametrize("r", [1, 4, 8])
def test_tiles_of_one_image_may_merge_either_way(r: int) -> None:
    """An image of identical tiles without positions: whichever tokens merge, the output is the same."""
    case = timm_vit.CASES["no-positions"]
    model = case.model()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64).repeat(1, 1, 4, 4)
    with torch.no_grad():
        wanted = model(images)
        with vitrail.merge(model, r=[r, 0, 0]):
            merged = model(images)
    assert torch.allclose(merged, wanted, rtol=0, atol=1e-9)
