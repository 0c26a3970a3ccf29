"""The stained-glass image: exact mean colors, and leads between different groups and nowhere else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitrail.drawing import stained_glass
from vitrail.drawing.glass import LEAD_COLOR
from vitrail.errors import InvalidOption, UnsupportedInput


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def glass(pixels: np.ndarray, groups: object, **options: float) -> np.ndarray:
    return np.asarray(stained_glass(Image.fromarray(pixels), groups, **options))


def is_lead(painted: np.ndarray) -> np.ndarray:
    return (painted == LEAD_COLOR).all(-1)


def slow_glass(pixels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The image without leads in plain loops: each pixel belongs to the cell that holds its center."""
    (height, width), (rows, columns) = pixels.shape[:2], groups.shape
    members: dict[int, list[tuple[int, int]]] = {}
    for y in range(height):
        for x in range(width):
            cell = groups[int((y + 0.5) * rows / height), int((x + 0.5) * columns / width)]
            members.setdefault(int(cell), []).append((y, x))
    painted = np.zeros_like(pixels)
    for places in members.values():
        mean = sum(pixels[y, x].astype(float) for y, x in places) / len(places)
        for y, x in places:
            painted[y, x] = np.rint(mean)
    return painted


@given(
    height=st.integers(1, 17),
    width=st.integers(1, 17),
    groups=st.integers(1, 5).flatmap(
        lambda rows: st.integers(1, 5).flatmap(
            lambda columns: st.lists(st.integers(-3, 3), min_size=rows * columns, max_size=rows * columns).map(
                lambda ids: np.array(ids).reshape(rows, columns)
            )
        )
    ),
)
def test_every_group_has_its_mean_color(height: int, width: int, groups: np.ndarray) -> None:
    """Also where the grid does not divide the image, or is finer than its pixels."""
    pixels = noise(height, width)
    np.testing.assert_array_equal(glass(pixels, groups, lead=0), slow_glass(pixels, groups))


def test_cells_of_a_group_far_apart_share_one_color() -> None:
    pixels = np.zeros((10, 40, 3), dtype=np.uint8)
    pixels[:, :10] = 200
    pixels[:, 30:] = (100, 0, 50)
    painted = glass(pixels, [[7, 1, 1, 7]], lead=0)
    assert (painted[:, :10] == (150, 100, 125)).all()
    assert (painted[:, 30:] == (150, 100, 125)).all()
    assert (painted[:, 10:30] == 0).all()


def test_mean_is_exact_over_many_pixels() -> None:
    """Sums of millions of values, where a narrow accumulator would overflow or round."""
    pixels = np.full((2000, 2500, 3), 255, dtype=np.uint8)
    pixels[0, 0] = 0
    assert (glass(pixels, [[0]]) == 255).all()
    pixels[: 2000 // 2] = (201, 3, 90)
    assert tuple(glass(pixels, [[5]])[0, 0]) == (228, 129, 172)


def test_one_group_has_no_leads_and_no_frame() -> None:
    painted = glass(np.full((300, 200, 3), 150, dtype=np.uint8), np.zeros((14, 14), dtype=int))
    assert (painted == 150).all()


def test_leads_run_between_different_groups_and_nowhere_else() -> None:
    groups = np.array([[0, 0, 1], [0, 0, 1], [2, 2, 2]])
    painted = glass(np.full((300, 300, 3), 150, dtype=np.uint8), groups, lead=6)
    lead = is_lead(painted)
    assert lead[:197, 198:202].all()  # between 0 and 1
    assert lead[198:202, :].all()  # between 0, 1 and 2, from border to border
    near = np.zeros_like(lead)
    near[:210, 190:210] = True
    near[190:210, :] = True
    assert (painted[~near] == 150).all()
    assert not lead[0, :190].any()  # no frame


def test_leads_have_the_requested_width() -> None:
    painted = glass(np.full((100, 100, 3), 250, dtype=np.uint8), [[0, 1]], lead=10)
    assert is_lead(painted)[50].sum() == 10
    assert is_lead(painted)[50, 45:55].all()


def test_lead_edges_are_smooth_and_their_weight_is_right() -> None:
    """A line of 2.5 pixels darkens as much as 2.5 pixels would, wherever it falls on the pixel grid."""
    pixels = np.full((40, 101, 3), 220, dtype=np.uint8)
    darkness = 220 - glass(pixels, [[0, 1, 2]], lead=2.5)[20, :, 0].astype(float)
    assert darkness.sum() / (220 - LEAD_COLOR[0]) == pytest.approx(2 * 2.5, abs=0.05)


def test_bends_are_closed_and_corners_rounded() -> None:
    groups = np.zeros((2, 2), dtype=int)
    groups[1, 1] = 1
    painted = glass(np.full((200, 200, 3), 250, dtype=np.uint8), groups, lead=20)
    lead = is_lead(painted)
    assert lead[93, 99]  # outside of the bend, straight above the vertex
    assert lead[95, 95]
    assert not lead[91, 91]  # the cap is round
    assert lead[112, 112]  # the inner corner is filled a little
    assert not lead[125, 125]


@pytest.mark.parametrize(
    ("size", "grid", "width"),
    [
        ((300, 300), (14, 14), 1.5),
        ((3000, 3000), (14, 14), 15),
        ((400, 600), (25, 37), 1.6),
        ((64, 64), (32, 32), 0.4),
    ],
)
def test_default_leads_grow_with_the_image(size: tuple[int, int], grid: tuple[int, int], width: float) -> None:
    groups = np.broadcast_to(np.arange(grid[1]), grid)
    row = 250 - glass(np.full((*size, 3), 250, dtype=np.uint8), groups)[size[0] // 2, :, 0].astype(float)
    assert row.sum() / (250 - LEAD_COLOR[0]) / (grid[1] - 1) == pytest.approx(width, rel=0.1)


def test_every_pane_shows_its_color_even_on_the_finest_grid() -> None:
    pixels = np.kron(noise(32, 32), np.ones((4, 4, 1), dtype=np.uint8))
    painted = glass(pixels, np.arange(32 * 32).reshape(32, 32))
    for y, x in ((0, 0), (13, 20), (31, 31)):
        centre = painted[4 * y + 1 : 4 * y + 3, 4 * x + 1 : 4 * x + 3]
        assert (centre == pixels[4 * y, 4 * x]).all()


def test_an_image_painted_in_strips_has_no_seams() -> None:
    """A tall image takes several strips; turned on its side it takes one, and must be the same."""
    pixels, groups = noise(700, 90), np.random.default_rng(1).integers(0, 4, (20, 5))
    np.testing.assert_array_equal(glass(pixels, groups), glass(pixels.transpose(1, 0, 2), groups.T).transpose(1, 0, 2))


def test_the_image_keeps_its_size_and_is_not_changed() -> None:
    image = Image.fromarray(noise(31, 47))
    before = image.copy()
    painted = stained_glass(image, np.arange(12).reshape(3, 4))
    assert painted.size == (47, 31)
    assert painted.mode == "RGB"
    assert image == before


def test_any_kind_of_image_and_of_integers() -> None:
    import torch

    image = Image.new("RGBA", (10, 10), (0, 0, 0, 0))
    assert stained_glass(image, torch.tensor([[10**12, -4]]), lead=0).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("groups", [[1, 2], [[[1]]], [[1.5]], np.zeros((0, 3), dtype=int)])
def test_wrong_groups_are_an_error(groups: object) -> None:
    with pytest.raises(UnsupportedInput, match=r"integers \(h, w\)"):
        stained_glass(Image.new("RGB", (10, 10)), groups)


@pytest.mark.parametrize("lead", [-1, float("nan"), float("inf")])
def test_wrong_lead_is_an_error(lead: float) -> None:
    with pytest.raises(InvalidOption, match="lead="):
        stained_glass(Image.new("RGB", (10, 10)), [[1]], lead=lead)


def test_lead_wider_than_a_cell_is_as_wide_as_a_cell() -> None:
    pixels = noise(40, 40)
    np.testing.assert_array_equal(glass(pixels, [[0, 1], [2, 3]], lead=99), glass(pixels, [[0, 1], [2, 3]], lead=20))


def test_empty_image_is_an_error() -> None:
    with pytest.raises(UnsupportedInput, match="no pixels"):
        stained_glass(Image.new("RGB", (0, 5)), [[1]])
