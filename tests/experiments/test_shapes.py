"""Synthetic images and clips: independent labels, motion that no frame reveals, smooth edges."""

import math

import pytest
import torch

from experiments.common.datasets import moving_shapes
from experiments.common.shapes import (
    COLORS,
    MOTIONS,
    RGB,
    SHAPES,
    balanced_labels,
    displacements,
    render_clips,
    render_images,
    sample_scenes,
)


def test_labels_are_independent() -> None:
    drawn = render_images(4 * len(SHAPES) * len(COLORS), side=16, seed=3)
    table = torch.zeros(len(SHAPES), len(COLORS), dtype=torch.long)
    for shape, color in zip(drawn.shape.tolist(), drawn.color.tolist(), strict=True):
        table[shape, color] += 1
    assert (table == 4).all()
    assert drawn.shape.tolist() != sorted(drawn.shape.tolist())
    uneven = torch.stack(balanced_labels(100, (6, 8), seed=0)).T.tolist()
    counts = [uneven.count([i, j]) for i in range(6) for j in range(8)]
    assert (min(counts), max(counts)) == (2, 3)


def test_images_are_determined_by_the_seed() -> None:
    first, again, other = (render_images(20, side=24, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)
    assert (first.images.shape, first.images.dtype) == ((20, 3, 24, 24), torch.uint8)


def test_shapes_have_their_color() -> None:
    drawn = render_images(96, side=48, seed=0)
    assert drawn.masks is not None
    for image, mask, color in zip(drawn.images.float() / 255, drawn.masks, drawn.color.tolist(), strict=True):
        inside = image[:, mask].mean(1)
        assert (inside - RGB[color]).abs().max() < 0.3  # shades, and edges that are half background
        assert (RGB - inside).norm(dim=1).argmin() == color
        assert not mask[0].any()
        assert not mask[:, -1].any()


def test_edges_are_smooth_and_discs_have_the_right_area() -> None:
    generator = torch.Generator().manual_seed(0)
    disc = sample_scenes(torch.zeros(50, dtype=torch.long), torch.zeros(50, dtype=torch.long), 64, generator)
    _, covered = disc.draw()
    area = covered.sum((1, 2)) / 64**2
    assert torch.allclose(area, math.pi * (0.9 * disc.radius) ** 2, rtol=0.01)
    partly = ((covered > 0.05) & (covered < 0.95)).sum((1, 2))
    assert (partly > 20).all()


def test_all_motions_start_from_the_same_frame_and_differ_later() -> None:
    """A frame is a shifted start and all starts are equally likely, so no frame reveals the motion."""
    clips = [render_clips(12, frames=4, side=24, seed=0, motion=motion).images for motion in range(len(MOTIONS))]
    for one in clips[1:]:
        assert torch.equal(one[:, :, 0], clips[0][:, :, 0])
        assert not torch.equal(one[:, :, 2], clips[0][:, :, 2])
    generator = torch.Generator().manual_seed(0)
    scene = sample_scenes(torch.arange(6), torch.arange(6), 32, generator)
    moved = torch.tensor([0.25, -0.5])  # whole pixels: shapes wrap around
    _, before = scene.draw()
    _, after = scene.draw(scene.position + moved)
    assert torch.allclose(after, before.roll((-16, 8), (1, 2)), atol=1e-4)


def test_positions_are_uniform_in_every_frame_for_every_motion() -> None:
    stats = pytest.importorskip("scipy.stats", reason="the test of Kolmogorov and Smirnov is scipy's")
    generator = torch.Generator().manual_seed(0)
    start = torch.rand(2000, 2, generator=generator)
    for motion in range(len(MOTIONS)):
        moved = (start[:, None] + displacements(torch.full((2000,), motion), 6, generator)) % 1
        for frame, axis in ((2, 0), (2, 1), (5, 0), (5, 1)):
            assert stats.kstest(moved[:, frame, axis].numpy(), "uniform").pvalue > 1e-4


def test_directions_match_their_names() -> None:
    generator = torch.Generator().manual_seed(0)
    moved = {name: displacements(torch.tensor([number]), 8, generator)[0] for number, name in enumerate(MOTIONS)}
    assert moved["still"].abs().max() == 0
    assert (moved["right"].diff(dim=0)[:, 0] > 0).all()
    assert (moved["left"].diff(dim=0)[:, 0] < 0).all()
    assert (moved["up"].diff(dim=0)[:, 1] < 0).all()  # rows are counted downwards
    assert (moved["down"].diff(dim=0)[:, 1] > 0).all()


def test_classes_of_clips_name_shape_and_motion() -> None:
    clips, drawn = moving_shapes(4, 24, 60).train, render_clips(60, frames=4, side=24, seed=0)
    assert drawn.motion is not None
    wanted = [f"{SHAPES[shape]}, {MOTIONS[motion]}" for shape, motion in zip(drawn.shape, drawn.motion, strict=True)]
    assert [clips.classes["label"][label] for label in clips.labels[:, 0]] == wanted
    assert len(set(wanted)) == len(SHAPES) * len(MOTIONS)
