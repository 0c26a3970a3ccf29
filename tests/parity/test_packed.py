"""Towers that pack images of different sizes into one sequence."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import vitrail
from tests.oracle.models.vision_language import qwen
from tests.parity.models.cases import redraw, require
from tests.parity.models.vision_language import QWEN_VISION, named, pixels
from tests.surgery.models import flops_that_run
from vitrail.adapters import find
from vitrail.errors import InvalidOption, SaturatedWarning, UnsupportedInput, UnsupportedModel
from vitrail.merging import Assignment, Context, Method, Reduction

SIZES = [[1, 4, 6], [1, 4, 4], [1, 2, 8], [1, 4, 6]]
every_packed = pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])


def tower_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    return named(name).model(dtype).model.visual


def tower_alone(kind: str, config: str, **options: Any) -> Any:
    """Return a small tower of a class of its own, with redrawn parameters."""
    vision = {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 24}
    made = getattr(hf, config)(**vision, num_position_embeddings=16, **options)
    tower = getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), config.replace("Config", "Model"))(
        made
    )
    tower = tower.double()
    redraw(tower, seed=4)
    return tower.eval()


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


@pytest.mark.parametrize(
    ("kind", "config", "options"),
    [
        ("qwen3_vl_moe", "Qwen3VLMoeVisionConfig", {"deepstack_visual_indexes": [1]}),
        ("qwen3_5", "Qwen3_5VisionConfig", {}),
        ("qwen3_5_moe", "Qwen3_5MoeVisionConfig", {}),
    ],
)
@torch.no_grad()
def test_towers_with_the_same_blocks(kind: str, config: str, options: dict[str, Any]) -> None:
    require("transformers", "5.22")
    tower, (patches, grids) = tower_alone(kind, config, **options), patches_of(SIZES)
    plain = tower(patches, grid_thw=grids).pooler_output
    inputs = {"pixel_values": patches, "image_grid_thw": grids}
    wanted = qwen(SimpleNamespace(model=SimpleNamespace(visual=tower)), inputs, 2)
    with vitrail.merge(tower, r=0):
        assert torch.allclose(tower(patches, grid_thw=grids).pooler_output, plain, rtol=0, atol=1e-5)
    with vitrail.merge(tower, r=2):
        merged = tower(patches, grid_thw=grids).pooler_output
    assert torch.allclose(merged, torch.cat(wanted)[:, : merged.shape[1]], rtol=0, atol=1e-5)
    assert torch.equal(tower(patches, grid_thw=grids).pooler_output, plain)


WINDOWED = [[1, 8, 8], [1, 6, 10], [2, 8, 8]]
"""Grids of images in windows of 4 × 4 patches; those at the edges of the second are smaller."""


@torch.no_grad()
def test_windows_keep_the_share_of_their_image() -> None:
    tower, (patches, grids) = tower_of("qwen2.5-vl"), patches_of(WINDOWED)
    with vitrail.merge(tower, r=[8, 0, 4, 20]) as merging, merging.track() as trace:
        tower(patches, grid_thw=grids)
        assert merging.tokens_per_layer((32, 32)) == [56, 56, 52, 32]
        assert merging.tokens_per_layer((24, 40)) == [52, 52, 47, 28]
    # 64 patches keep 56, 56, 52, 32, and 60 keep 52, 52, 48, 28; each window keeps that share, rounded
    kept = {64: {16: [14, 14, 13, 8]}, 60: {16: [14, 14, 13, 7], 8: [7, 7, 6, 4], 4: [3, 3, 3, 2]}}
    windows = [(64, 16)] * 12 + [(60, 16)] * 2 + [(60, 8)] * 3 + [(60, 4)]
    found = []
    for one in trace.passes:
        count = one.layout.num_patches
        left = [count - sum(one.state.per_layer[: layer + 1]) for layer in range(4)]
        patches_of_image = next(size for size, sizes in kept.items() if sizes.get(count) == left)
        found += [(patches_of_image, count)] * one.batch
    assert sorted(found) == sorted(windows)


@torch.no_grad()
def test_costs_with_windows_are_those_that_run() -> None:
    tower, (patches, grids) = tower_of("qwen2.5-vl", torch.float32), patches_of([[1, 8, 8]], torch.float32)
    assert vitrail.count(tower, (32, 32)).flops == pytest.approx(
        flops_that_run(lambda: tower(patches, grid_thw=grids)) / 2
    )
    with vitrail.merge(tower, r=[16, 8, 8, 8]) as merging:
        found = flops_that_run(lambda: tower(patches, grid_thw=grids)) / 2
        assert merging.flops((32, 32)) == pytest.approx(found, rel=0.01)
    with vitrail.merge(tower, gflops=0.8 * merging.flops(merged=False) / 1e9) as merging:
        assert merging.flops() == pytest.approx(0.8 * merging.flops(merged=False), rel=0.02)


@torch.no_grad()
def test_what_windows_cannot_do_is_said() -> None:
    tower, (patches, grids) = tower_of("qwen2.5-vl"), patches_of([[1, 16, 16]])
    with vitrail.merge(tower, r=[0, 0, 0, 4]), pytest.warns(SaturatedWarning, match="half a token"):
        tower(patches, grid_thw=grids)
    with pytest.raises(InvalidOption, match="windows"):
        vitrail.merge(tower, r=2, protect=torch.ones(32, 32, dtype=torch.bool))
    lengths = torch.tensor([0, 16, 32], dtype=torch.int32)
    index = torch.arange(64)
    with vitrail.merge(tower, r=20), pytest.raises(UnsupportedInput, match="cu_window_seqlens"):
        tower(patches, grid_thw=grids, cu_window_seqlens=lengths, window_index=index)


@torch.no_grad()
def test_methods_read_the_image_of_each_window() -> None:
    image = torch.randn(3, 24, 40).double()
    tower, method = tower_of("qwen2.5-vl"), Brightest()
    with vitrail.merge(tower, r=[4, 0, 0, 0], method=method):
        tower(packed(image), grid_thw=torch.tensor([[1, 6, 10]]))
    windows = [image[:, top : top + 16, left : left + 16] for top in (0, 16) for left in (0, 16, 32)]
    for seen in method.seen:
        same = [window for window in windows if window.shape == seen.shape[1:]]
        assert all(torch.equal(one, window) for one, window in zip(seen, same, strict=True))
    assert sum(map(len, method.seen)) == len(windows)


class Brightest(Method):
    """Merge the two brightest patches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

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
