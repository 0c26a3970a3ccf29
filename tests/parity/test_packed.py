"""Towers that pack images of different sizes into one sequence."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.parity.models_vlm import named, pixels
from vitrail.adapters import find
from vitrail.errors import SaturatedWarning, UnsupportedInput, UnsupportedModel
from vitrail.merging import Assignment, Context, Method, Reduction

SIZES = [[1, 4, 6], [1, 4, 4], [1, 2, 8], [1, 4, 6]]
every_packed = pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl"])


def tower_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    return named(name).model(dtype).model.visual


def patches_of(grids: list[list[int]], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return random patches, and their grids."""
    grid = torch.tensor(grids)
    return pixels(dtype, int(grid.prod(1).sum()), 3 * 2 * 4 * 4)["pixel_values"], grid


@every_packed
@torch.no_grad()
@pytest.mark.parametrize("options", [{"r": 2}, {"keep": 0.5}, {"r": 2, "order": "original"}])
def test_images_together_are_images_alone(name: str, options: dict[str, Any]) -> None:
    tower, (patches, grids) = tower_of(name), patches_of(SIZES)
    with vitrail.merge(tower, **options):
        together = tower(patches, grid_thw=grids)
        alone = [
            tower(piece, grid_thw=grid.unsqueeze(0))
            for piece, grid in zip(patches.split(grids.prod(1).tolist()), grids, strict=True)
        ]
    for output in ("last_hidden_state", "pooler_output"):
        assert torch.allclose(together[output], torch.cat([one[output] for one in alone]), rtol=0, atol=1e-9)


@every_packed
@torch.no_grad()
def test_each_frame_of_a_video_merges_as_an_image(name: str) -> None:
    tower, (patches, clip) = tower_of(name), patches_of([[2, 4, 4]])
    with vitrail.merge(tower, r=2):
        video = tower(patches, grid_thw=clip).pooler_output
        images = tower(patches, grid_thw=torch.tensor([[1, 4, 4], [1, 4, 4]])).pooler_output
    assert torch.equal(video, images)


@torch.no_grad()
def test_every_size_has_its_own_schedule_and_record() -> None:
    tower, (patches, grids) = tower_of("qwen2-vl"), patches_of(SIZES)
    with vitrail.merge(tower, keep=0.5) as merging, merging.track() as trace:
        tower(patches, grid_thw=grids)
    assert [one.layout.grid for one in trace.passes] == [(1, 4, 6), (1, 4, 4), (1, 2, 8)]
    assert [one.batch for one in trace.passes] == [2, 1, 1]
    assert [one.assignment.length for one in trace.passes] == [12, 8, 8]


@torch.no_grad()
def test_small_images_merge_what_they_can() -> None:
    tower, (patches, grids) = tower_of("qwen2-vl"), patches_of([[1, 2, 2], [1, 4, 6]])
    with vitrail.merge(tower, r=3) as merging, merging.track() as trace:
        with pytest.warns(SaturatedWarning, match="4 patches"):
            tower(patches, grid_thw=grids)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tower(patches, grid_thw=grids)
    assert [one.state.per_layer for one in trace.passes[:2]] == [(2, 1, 0, 0), (3, 3, 3, 3)]


@torch.no_grad()
def test_tokens_between_blocks_have_full_length_where_they_are_requested() -> None:
    tower, (patches, grids) = tower_of("qwen3-vl"), patches_of(SIZES)
    plain = tower(patches, grid_thw=grids, output_hidden_states=True).hidden_states
    with vitrail.merge(tower, r=[0, 0, 0, 2]):
        merged = tower(patches, grid_thw=grids, output_hidden_states=True).hidden_states
    assert [one.shape for one in merged] == [one.shape for one in plain]
    for before, after in zip(plain[:3], merged[:3], strict=True):
        assert torch.allclose(before, after, rtol=0, atol=1e-5)


class Brightest(Method):
    """Merge the two brightest patches."""

    seen: list[Tensor] = []  # noqa: RUF012

    def maps(self, inputs: Tensor, grid: tuple[int, int, int]) -> dict[str, Tensor]:
        self.seen.append(inputs)
        height, width = inputs.shape[2] // grid[1], inputs.shape[3] // grid[2]
        return {"light": inputs.mean(1).unfold(1, height, height).unfold(2, width, width).mean((3, 4)).flatten(1)}

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        pair = context.guide["light"].topk(2, 1).indices
        own = torch.arange(context.x.shape[1]).repeat(len(pair), 1).scatter(1, pair, pair[:, :1].expand_as(pair))
        return Reduction(Assignment(own, context.x.shape[1]).by_first_member().lengthened(context.x.shape[1] - 1))


@torch.no_grad()
def test_methods_read_the_images_that_were_packed() -> None:
    images = [torch.randn(3, 16, 24).double(), torch.randn(3, 8, 16).double()]
    grids = torch.tensor([[1, 4, 6], [1, 2, 4]])
    patches = torch.cat([packed(image) for image in images])
    tower, method = tower_of("qwen2-vl"), Brightest()
    with vitrail.merge(tower, r=[1, 0, 0, 0], method=method) as merging, merging.track() as trace:
        tower(patches, grid_thw=grids)
    for image, seen, one in zip(images, method.seen, trace.passes, strict=True):
        assert torch.equal(seen[0], image)
        light = torch.nn.functional.avg_pool2d(image.mean(0, keepdim=True), 4).flatten()
        first, second = light.topk(2).indices.tolist()
        target = one.assignment.target[0]
        assert target[first] == target[second]
        assert len(target.unique()) == len(target) - 1


def packed(image: Tensor) -> Tensor:
    """Return the patches of an image, shown for two frames, cell of 2 × 2 patches after cell."""
    rows = []
    for top in range(0, image.shape[1], 8):
        for left in range(0, image.shape[2], 8):
            for down, right in [(0, 0), (0, 4), (4, 0), (4, 4)]:
                patch = image[:, top + down : top + down + 4, left + right : left + right + 4]
                rows.append(torch.stack([patch, patch], 1).flatten())
    return torch.stack(rows)


def test_costs_are_those_of_one_image() -> None:
    tower = tower_of("qwen3-vl", torch.float32)
    width, hidden, cell, patches = 32, 48, 4, 24
    attend = patches * 4 * width * width + 2 * patches * patches * width
    merger = patches // cell * ((cell * width) ** 2 + cell * width * 24)
    expected = patches * 96 * width + 4 * (attend + patches * 2 * width * hidden) + 2 * merger
    assert vitrail.count(tower, (16, 24)).flops == expected
    with vitrail.merge(tower, r=4) as merging:
        assert merging.flops((16, 24), merged=False) == expected
        assert merging.flops((16, 24)) < expected
        assert merging.tokens_per_layer((16, 24)) == [20, 16, 12, 8]


@torch.no_grad()
def test_bad_input_is_refused() -> None:
    tower, (patches, grids) = tower_of("qwen2-vl"), patches_of(SIZES)
    with vitrail.merge(tower, r=2) as merging:
        with pytest.raises(UnsupportedInput, match="80 tokens"):
            tower(patches[:-4], grid_thw=grids)
        with pytest.raises(UnsupportedInput, match="cu_seqlens"):
            tower(patches, grid_thw=grids, cu_seqlens=torch.tensor([0, len(patches)], dtype=torch.int32))
        with pytest.raises(UnsupportedInput, match="output_attentions"):
            tower(patches, grid_thw=grids, output_attentions=True)
        with pytest.raises(UnsupportedModel, match="drawing"):
            merging.draw(torch.zeros(3, 16, 16))
    with vitrail.merge(tower, r=2, unmerge=False), pytest.raises(UnsupportedInput, match="unmerge=True"):
        tower(patches, grid_thw=grids)
    for refused in (
        lambda: vitrail.record(tower, torch.zeros(1, 3, 16, 16)),
        lambda: vitrail.add_tokens(tower, registers=2),
        lambda: vitrail.ablate(tower, "zero"),
    ):
        with pytest.raises(UnsupportedModel, match="one sequence"):
            refused()


def test_blocks_do_not_run_by_themselves() -> None:
    tower = tower_of("qwen2-vl", torch.float32)
    table = torch.zeros(16, 16)
    with vitrail.merge(tower, r=2), pytest.raises(vitrail.errors.BrokenPass, match="packed"):
        find(tower).blocks[0](torch.zeros(16, 32), cu_seqlens=torch.tensor([0, 16]), position_embeddings=(table, table))
