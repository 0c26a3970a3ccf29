"""Position and pixel probes: planted positions and pixels, noise, and too few tokens."""

import json
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tests.analysis.probes.estimates import measured
from vitrail.analysis.probes import cut_patches, probe_pixels, probe_positions
from vitrail.errors import InvalidOption, UnsupportedInput

IMAGES, GRID, PATCHES = 40, (3, 4), 12


def planted(outlier_share: float = 0.25, images: int = IMAGES) -> tuple[Tensor, Tensor]:
    """Normal tokens hold their position, outliers the label of their image; each in channels of its own."""
    outliers = torch.rand(images, PATCHES) < outlier_share
    position = one_hot(torch.arange(PATCHES), PATCHES).float().expand(images, -1, -1)
    label = one_hot(torch.arange(images) % 4, 4).float()[:, None].expand(-1, PATCHES, -1)
    known = ~outliers[..., None]
    tokens = torch.cat([position * known, 3 * label * ~known], -1)
    return tokens + 0.05 * torch.randn_like(tokens), outliers


class TestPositions:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_planted(self, dtype: torch.dtype) -> None:
        tokens, outliers = planted()
        probe = probe_positions(tokens.to(dtype), outliers, GRID)
        normal, outlier = probe.kinds["normal"], probe.kinds["outlier"]
        assert (measured(normal.accuracy).mean, measured(normal.accuracy).sd) == (1.0, 0.0)
        assert measured(normal.distance).mean == 0.0
        assert measured(outlier.accuracy).mean < 0.25
        assert measured(outlier.distance).mean == pytest.approx(probe.chance_distance, abs=0.5)
        assert (probe.grid, probe.trained_on, probe.seeds) == ((1, 3, 4), "all", 3)
        assert probe.train_tokens == 28 * PATCHES

    def test_noise_is_chance(self) -> None:
        outliers = torch.rand(100, PATCHES) < 0.3
        probe = probe_positions(torch.randn(100, PATCHES, 8), outliers, GRID)
        for score in probe.kinds.values():
            low, high = measured(score.accuracy).low, measured(score.accuracy).high
            assert low is not None
            assert high is not None
            assert low - 0.02 < probe.chance_accuracy < high + 0.02

    def test_distance_is_in_patches(self) -> None:
        """Only the row of a position is encoded, so the error is along the row."""
        rows = one_hot(torch.arange(PATCHES) // 4, 3).float().expand(IMAGES, -1, -1)
        tokens, outliers = rows + 0.01 * torch.randn(rows.shape), torch.zeros(IMAGES, PATCHES, dtype=torch.bool)
        score = probe_positions(tokens, outliers, GRID).kinds["normal"]
        assert measured(score.accuracy).mean == pytest.approx(0.25, abs=0.08)
        assert 1 <= measured(score.distance).mean <= 1.5

    def test_chance_distance_by_brute_force(self) -> None:
        tokens, outliers = planted()
        for grid in ((3, 4), (12, 1), (2, 2, 3), (1, 3, 4)):
            places = torch.cartesian_prod(*[torch.arange(float(n)) for n in ((1, *grid) if len(grid) == 2 else grid)])
            distance = probe_positions(tokens, outliers, grid, seeds=1).chance_distance
            assert distance == pytest.approx(float(torch.cdist(places, places).mean()), rel=1e-5)

    def test_train_on(self) -> None:
        """Outliers that hold their position in another code: only a probe of their own can read it."""
        outliers = torch.rand(120, PATCHES) < 0.3
        position = torch.arange(PATCHES).expand(120, -1)
        code = torch.where(outliers, (position + 5) % PATCHES, position)
        tokens = one_hot(code, PATCHES).float() + 0.01 * torch.randn(120, PATCHES, PATCHES)
        for train_on, good in (("own", True), ("normal", False), ("all", False)):
            probe = probe_positions(tokens, outliers, GRID, train_on=train_on)  # type: ignore[arg-type]
            assert measured(probe.kinds["normal"].accuracy).mean > 0.98
            assert measured(probe.kinds["outlier"].accuracy).mean == pytest.approx(float(good), abs=0.02)

    def test_outliers_in_one_place(self) -> None:
        outliers = (torch.arange(PATCHES) == 7).expand(120, -1)
        outlier = probe_positions(torch.randn(120, PATCHES, 4), outliers, GRID, train_on="own").kinds["outlier"]
        assert measured(outlier.accuracy).mean == 1.0

    def test_too_few_outliers_give_a_note(self) -> None:
        tokens, outliers = planted(0.0)
        assert probe_positions(tokens, outliers, GRID).kinds["outlier"].note == "there are no outlier tokens"
        outliers[::5, 0] = True
        probe = probe_positions(tokens, outliers, GRID)
        assert probe.kinds["outlier"].distance is None
        written = json.loads(json.dumps(probe.to_dict()))["kinds"]
        assert written["outlier"]["accuracy"] is None
        assert "at least 30 from 5" in written["outlier"]["note"]
        assert written["normal"]["accuracy"]["mean"] > 0.9

    def test_outliers_of_few_images_give_a_note(self) -> None:
        tokens, outliers = planted(0.0, images=60)
        outliers[:8] = True
        score = probe_positions(tokens, outliers, GRID).kinds["outlier"]
        assert score.accuracy is None
        assert score.note is not None

    def test_too_few_to_train_give_a_note(self) -> None:
        probe = probe_positions(*planted(0.1), GRID, train_on="own", test_share=0.9)
        assert probe.kinds["normal"].accuracy is not None
        assert "to train the probe on; at least 30" in str(probe.kinds["outlier"].note)

    @pytest.mark.parametrize("images", [1, 15])
    def test_few_images_give_a_note(self, images: int) -> None:
        for score in probe_positions(*planted(images=images), GRID).kinds.values():
            assert score.accuracy is None
            assert "at least 16 images are needed" in str(score.note)

    def test_the_seed_decides(self) -> None:
        tokens, outliers = planted()
        tokens += torch.randn_like(tokens)
        first = probe_positions(tokens, outliers, GRID, seed=3)
        torch.manual_seed(1)
        assert first == probe_positions(tokens, outliers, GRID, seed=3)
        assert first != probe_positions(tokens, outliers, GRID, seed=4)

    def test_max_tokens(self) -> None:
        probe = probe_positions(*planted(), GRID, max_tokens=100)
        assert probe.train_tokens == 100
        assert probe.kinds["normal"].accuracy is not None
        assert probe.kinds["normal"].tokens > 80

    def test_images_are_never_in_both_parts(self) -> None:
        """Tokens hold their image's own code for positions: nothing carries over to other images."""
        tokens = torch.stack([torch.randperm(PATCHES) for _ in range(60)])
        codes = one_hot(tokens, PATCHES).float() + 10 * torch.randn(60, 1, PATCHES)
        accuracy = probe_positions(codes, torch.zeros(60, PATCHES, dtype=torch.bool), GRID).kinds["normal"].accuracy
        assert measured(accuracy).mean < 0.2

    def test_errors(self) -> None:
        tokens, outliers = planted()
        broken = tokens.clone()
        broken[3, 4, 0] = math.nan
        broken[5, 6, 1] = math.inf
        with pytest.raises(UnsupportedInput, match="2 of 480 vectors in tokens are not finite"):
            probe_positions(broken, outliers, GRID)
        with pytest.raises(UnsupportedInput, match="15 patches; got 12"):
            probe_positions(tokens, outliers, (3, 5))
        with pytest.raises(UnsupportedInput, match="expected bool of shape"):
            probe_positions(tokens, outliers.float(), GRID)
        with pytest.raises(UnsupportedInput, match="expected bool of shape"):
            probe_positions(tokens, outliers[:, 1:], GRID)
        with pytest.raises(UnsupportedInput, match="only one position"):
            probe_positions(tokens[:, :1], outliers[:, :1], (1, 1))
        with pytest.raises(InvalidOption, match="train_on"):
            probe_positions(tokens, outliers, GRID, train_on="outlier")  # type: ignore[arg-type]
        for seeds in (0, 1.5):
            with pytest.raises(InvalidOption, match="seeds"):
                probe_positions(tokens, outliers, GRID, seeds=seeds)  # type: ignore[arg-type]
        with pytest.raises(InvalidOption, match="max_tokens"):
            probe_positions(tokens, outliers, GRID, max_tokens=3)


class TestPixels:
    def test_patches_are_cut_row_by_row(self) -> None:
        images = torch.randn(2, 3, 6, 8)
        patches = cut_patches(images, (3, 2))
        assert patches.shape == (2, 8, 18)
        assert torch.equal(patches[1, 5], images[1, :, 3:6, 2:4].flatten())
        kernel = torch.randn(5, 3, 2, 2)
        tokens = torch.nn.functional.conv2d(images, kernel, stride=2).flatten(2).transpose(1, 2)
        torch.testing.assert_close(cut_patches(images, 2) @ kernel.flatten(1).T, tokens, atol=1e-4, rtol=1e-4)
        with pytest.raises(UnsupportedInput, match="do not divide into patches of 4×4"):
            cut_patches(images, 4)

    def test_planted(self) -> None:
        """Normal tokens hold their pixels, outliers nothing."""
        patches = cut_patches(torch.rand(IMAGES, 3, 6, 8), 2)
        outliers = torch.rand(IMAGES, PATCHES) < 0.3
        tokens = torch.where(outliers[..., None], 0.0, patches @ torch.randn(12, 20))
        probe = probe_pixels(tokens.half(), outliers, patches, train_on="normal")
        normal, outlier = probe.kinds["normal"], probe.kinds["outlier"]
        assert measured(normal.r2).mean > 0.99
        assert measured(normal.l2).mean < 0.1
        assert measured(outlier.r2).mean < 0.05
        assert measured(outlier.l2).mean > 0.9  # Twelve pixels with a standard deviation of 0.29 each: a norm of 1.

    def test_noise_explains_nothing(self) -> None:
        patches = torch.rand(IMAGES, PATCHES, 12)
        none = torch.zeros(IMAGES, PATCHES, dtype=torch.bool)
        score = probe_pixels(torch.randn(IMAGES, PATCHES, 5), none, patches).kinds["normal"]
        assert measured(score.r2).mean == pytest.approx(0, abs=0.05)
        l2 = measured(score.l2)
        assert l2.mean == pytest.approx(1.0, abs=0.05)
        assert l2.low is not None
        assert l2.high is not None
        assert l2.low < l2.mean < l2.high

    def test_uniform_patches_have_no_r2(self) -> None:
        none = torch.zeros(IMAGES, PATCHES, dtype=torch.bool)
        score = probe_pixels(torch.randn(IMAGES, PATCHES, 5), none, torch.ones(IMAGES, PATCHES, 12)).kinds["normal"]
        assert score.r2 is None
        assert measured(score.l2).mean == pytest.approx(0, abs=1e-6)

    def test_patches_of_other_tokens(self) -> None:
        with pytest.raises(UnsupportedInput, match=r"patches: shape .20, 8, 4. given; expected .20, 9, K."):
            probe_pixels(torch.randn(20, 9, 4), torch.zeros(20, 9) > 0, torch.randn(20, 8, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_deterministic_and_agrees_with_the_cpu() -> None:
    tokens, outliers = planted()
    tokens += 0.3 * torch.randn_like(tokens)
    x, mask = tokens.cuda(), outliers.cuda()
    positions, pixels = probe_positions(x, mask, GRID), probe_pixels(x, mask, x[..., :5])
    assert positions == probe_positions(x, mask, GRID)
    assert pixels == probe_pixels(x, mask, x[..., :5])
    for kind, score in probe_positions(tokens, outliers, GRID).kinds.items():
        found = measured(positions.kinds[kind].accuracy)
        assert found.mean == pytest.approx(measured(score.accuracy).mean, abs=0.03)
    for kind, pixel in probe_pixels(tokens, outliers, tokens[..., :5]).kinds.items():
        assert measured(pixels.kinds[kind].l2).mean == pytest.approx(measured(pixel.l2).mean, rel=0.01)
