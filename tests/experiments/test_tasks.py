"""Task tokens at the reduced size: measurements against loops over images, heads and pixels; READMEs against rows."""

import io
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from experiments.common.datasets import colored_shapes, trimaps
from experiments.common.readme import section, write_readme
from experiments.common.results import rows_of, unpack
from experiments.common.runner import Runner
from experiments.common.shapes import render_images
from experiments.common.study import Study
from experiments.tasks.groups.study import STUDY as GROUPS
from experiments.tasks.measure import (
    OTHER_TASK,
    SAME_TASK,
    SHOWN,
    attention_on_object,
    mean_overlaps,
    pair_overlaps,
    patch_coverage,
    probe_accuracy,
)
from experiments.tasks.pets.study import STUDY as PETS
from experiments.tasks.report import SHARED, TOKENS, TWICE
from experiments.tasks.shapes.study import STUDY as SHAPES
from experiments.tasks.shapes.study import lit_by_attention
from experiments.tasks.sounds.study import STUDY as SOUNDS
from vitrail.data import Arrays, open_dataset
from vitrail.surgery import Recording
from vitrail.tokens import Role, TokenLayout, TokenSpan

STUDIES = {"shapes": SHAPES, "groups": GROUPS, "sounds": SOUNDS, "pets": PETS}
TWO_EACH = TokenLayout((TokenSpan(Role.TASK, 2, "colour"), TokenSpan(Role.TASK, 2, "shape")), (1, 2, 3))


def some_maps(layout: TokenLayout, images: int = 3, heads: int = 2) -> Tensor:
    """Return attention over patches that sums to one, (B, H, Q, t, h, w)."""
    scores = torch.randn(images, heads, layout.num_special, *layout.grid, generator=torch.Generator().manual_seed(0))
    return scores.flatten(3).softmax(-1).view_as(scores)


def test_overlap_is_the_mean_cosine_over_images_heads_and_pairs() -> None:
    maps = some_maps(TWO_EACH).double()
    found = mean_overlaps([maps, maps.flip(2)], TWO_EACH)
    flat = maps.flatten(3).numpy()

    def mean(some: list[tuple[int, int]]) -> float:
        cosines = [
            one @ other / np.linalg.norm(one) / np.linalg.norm(other)
            for image, head in product(range(3), range(2))
            for one, other in ((flat[image, head, i], flat[image, head, j]) for i, j in some)
        ]
        return float(np.mean(cosines))

    within, between = mean([(0, 1), (2, 3)]), mean([(0, 2), (0, 3), (1, 2), (1, 3)])
    assert abs(within - between) > 0.01
    assert found == {SAME_TASK: pytest.approx([within] * 2), OTHER_TASK: pytest.approx([between] * 2)}
    names = [span.name for span, where in TWO_EACH.spans() if span.name for _ in where]
    every = [(names[i], names[j], pytest.approx(mean([(i, j)]))) for i, j in combinations(range(4), 2)]
    assert pair_overlaps(maps, TWO_EACH) == every


def test_single_token_has_no_overlap() -> None:
    alone = TokenLayout((TokenSpan(Role.CLASS, 1, "cls"),), (1, 2, 3))
    assert mean_overlaps([some_maps(alone)], alone) == {SAME_TASK: None, OTHER_TASK: None}


def test_attention_on_the_object_against_a_pixel_loop() -> None:
    """Each of the four pixels of a patch gets a quarter of its attention."""
    maps = some_maps(TWO_EACH)
    masks = (torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(1)) > 0.6).float()
    found = attention_on_object([maps], patch_coverage(masks, TWO_EACH), TWO_EACH)
    pixels = maps[:, :, :, 0].repeat_interleave(2, -2).repeat_interleave(2, -1) / 4
    for name, tokens in {"colour": (0, 1), "shape": (2, 3)}.items():
        inside = [
            sum(pixels[b, h, q, y, x].item() for y, x in masks[b].nonzero().tolist())
            for b, h, q in product(range(3), range(2), tokens)
        ]
        assert found[name] == pytest.approx([np.mean(inside)], rel=1e-5)


def test_probe_reads_only_what_a_token_encodes() -> None:
    draw = torch.Generator().manual_seed(0)
    color, shape = (torch.randint(4, (400,), generator=draw) for _ in range(2))
    tokens = torch.randn(400, TWO_EACH.num_tokens, 12, generator=draw)
    tokens[:, :2, :4] += 6 * torch.nn.functional.one_hot(color, 4)[:, None]
    tokens[:, 2:4, 4:8] += 6 * torch.nn.functional.one_hot(shape, 4)[:, None]
    labels = {"colour": color, "shape": shape}
    parts: list[Any] = []
    for rows in (slice(0, 300), slice(300, 400)):
        own = {name: values[rows] for name, values in labels.items()}
        empty = Arrays(torch.zeros(len(own["colour"]), 1, 1, 1), own)
        parts += [
            Recording(TWO_EACH, (1,), tokens={1: tokens[rows]}),
            open_dataset(empty, labels=tuple(labels), labeled=True),
        ]
    found = probe_accuracy(*parts)
    for token, task in product(labels, labels):
        assert found[token][task] == 1.0 if token == task else found[token][task] < 0.4


def test_masks_of_pets_are_center_cropped(tmp_path: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    pixels = np.full((10, 20), 2, np.uint8)
    pixels[2:6, 7:12], pixels[2:6, 12], pixels[0, 0] = 1, 3, 1  # a pet with a border at its right; a cropped spot
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "PNG")
    path = tmp_path / "pets.parquet"
    parquet.write_table(pyarrow.table({"trimap": [{"bytes": held.getvalue(), "path": "a.png"}]}), path)
    expected = torch.zeros(1, 10, 10)
    expected[0, 2:6, 2:8] = 1  # the center crop starts at column 5
    assert torch.equal(trimaps(path, 10), expected)


def test_masks_of_rendered_shapes_match_their_images() -> None:
    data, drawn = colored_shapes(32, 96), render_images(48, side=32, seed=1)
    assert data.masks is not None
    assert drawn.masks is not None
    assert torch.equal(data.masks(), drawn.masks.float())
    assert all(torch.equal(data.validation.tensor(row, 0), drawn.images[row]) for row in range(48))


def test_images_are_dark_without_attention() -> None:
    found = lit_by_attention(np.ones((4, 6, 3)), np.array([[0.0, 1.0, 2.0], [4.0, 0.0, 0.0]]))
    assert found[::2, ::2, 0] == pytest.approx(np.array([[0.15, 0.3625, 0.575], [1.0, 0.15, 0.15]]))
    assert np.array_equal(found[0::2], found[1::2])


@pytest.fixture(scope="module", params=list(STUDIES))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    out = tmp_path_factory.mktemp(request.param)
    study = replace(STUDIES[request.param].at_reduced_size(), search=None, seeds=(0,))
    study = replace(study, base={**study.base, "epochs": 1})
    runner = Runner(study, out, device="cpu")
    runner.run()
    assert (runner.failed, runner.unfinished) == (0, 0)
    return study, out


def test_rows_have_every_task_and_token(finished: tuple[Study, Path]) -> None:
    study, out = finished
    first, second = tasks = study.base["tasks"]
    rows = {row["arm"]: row for row in rows_of(study, out)}
    assert list(rows) == [SHARED, TOKENS, TWICE]
    for arm, row in rows.items():
        tokens = ["cls"] if arm == SHARED else [first, second]
        for task in tasks:
            right = unpack(row["correct"][f"task.{task}"], row["count"])
            assert right.mean() == pytest.approx(row["accuracy"][f"task.{task}"])
        assert list(row["effective"]) == list(row["knows"]) == list(row["mean_maps"]) == tokens
        assert {name: values and len(values) for name, values in row["overlap"].items()} == {
            SAME_TASK: 2 if arm == TWICE else None, OTHER_TASK: None if arm == SHARED else 2,
        }  # fmt: skip
        for name in tokens:
            assert 1 <= row["effective"][name] <= row["patches"]
            assert np.sum(row["mean_maps"][name]) == pytest.approx(1, abs=0.01)
            assert np.shape(row["shown_maps"][name])[0] == SHOWN
        masked = study.data().masks is not None
        assert (row["on_object"] is not None) == masked
        if masked:  # an almost untrained model attends uniformly
            assert row["on_object"][tokens[0]][-1] == pytest.approx(row["object_area"], rel=0.1)
    assert rows[TOKENS]["parameters"] - rows[SHARED]["parameters"] == 2 * 32  # one more token and its position


def test_readme_agrees_with_the_rows(finished: tuple[Study, Path]) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    study, out = finished
    write_readme(study, out)
    rows = {row["arm"]: row for row in rows_of(study, out)}
    lines = section(study, list(rows.values())).splitlines()
    first, second = study.base["tasks"]
    row = rows[TOKENS]
    assert f"| different tasks, one token each | {row['overlap'][OTHER_TASK][-1]:.3f} |" in lines
    alike = {(one, other): cosine for one, other, cosine in rows[TWICE]["pairs"] if one == other}
    assert f"| the two tokens of {second} | {alike[second, second]:.3f} |" in lines
    assert np.mean(list(alike.values())) == pytest.approx(rows[TWICE]["overlap"][SAME_TASK][-1])
    (line,) = (line for line in lines if line.startswith(f"| {TOKENS}: {second} |"))
    assert line.endswith(
        " | ".join(["", *(f"{100 * row['knows'][second][task]:.1f}" for task in (first, second)), ""])[1:-1]
    )
    (line,) = (line for line in lines if line.startswith(f"| {TWICE} |"))
    assert all(f" {100 * rows[TWICE]['accuracy'][f'task.{task}']:.2f} " in line for task in (first, second))
    drawn = {path.name for path in out.glob("*.png")}
    extra = {"sounds": {"attention.png"}, "pets": {"on_object.png"}}
    extra |= {name: {"attention.png", "on_object.png"} for name in ("shapes", "groups")}
    assert drawn == {"accuracy.png", "overlap.png", *extra[study.name.removeprefix("tasks/")]}


def test_third_arm_uses_the_search_of_the_second() -> None:
    for study in STUDIES.values():
        assert [arm.tuned_as for arm in study.arms] == [None, None, TOKENS]
        assert not {"lr", "epochs", "tasks"} & {name for arm in study.arms for name in arm.fields}
