"""Patch features without special tokens; PCA against numpy."""

import numpy as np
import pytest
import torch

from vitrail import Role, TokenLayout
from vitrail.analysis._inputs import chunks
from vitrail.analysis.features import fit_pca, patch_features, pca_maps
from vitrail.errors import InvalidOption, UnsupportedInput


def seeded(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def shaped(images=3, patches=20, channels=6):
    """Features with clearly different variances by channel, then rotated."""
    x = seeded(images, patches, channels) * torch.tensor([9.0, 5.0, 3.0, 1.5, 0.7, 0.2])[:channels].double()
    turn = torch.linalg.qr(seeded(channels, channels, seed=1))[0]
    return x @ turn + 4


def by_svd(rows, components=3):
    rows = rows.reshape(-1, rows.shape[-1]).numpy()
    _, strength, directions = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    signs = np.sign([row[np.abs(row).argmax()] for row in directions])
    return (directions * signs[:, None])[:components], (strength**2 / (strength**2).sum())[:components]


def test_patch_features_leave_out_every_special_token_and_join_heads():
    layout = TokenLayout.of(Role.CLASS, (Role.REGISTER, 2), (Role.TASK, 1), grid=(1, 2, 3))
    keys = seeded(2, 3, 10, 4)
    found = patch_features(keys, layout)
    assert found.shape == (2, 6, 12)
    for patch in range(6):
        for head in range(3):
            assert torch.equal(found[:, patch, head * 4 : head * 4 + 4], keys[:, head, 4 + patch])


def test_patch_features_of_merged_tokens():
    with pytest.raises(UnsupportedInput, match=r"expected .B, H, 7, d.*Unmerge"):
        patch_features(seeded(1, 2, 6, 4), TokenLayout.of(Role.CLASS, grid=(1, 2, 3)))


def test_components_are_those_of_an_svd():
    x = shaped()
    found = fit_pca(x)
    directions, explained = by_svd(x)
    np.testing.assert_allclose(found.directions.numpy(), directions, atol=1e-10)
    np.testing.assert_allclose(found.explained.numpy(), explained, atol=1e-12)
    assert (found.patches, found.left_out) == (60, 0)
    assert found.to_dict() == {"explained": found.explained.tolist(), "patches": 60, "left_out": 0}


def test_maps_are_projections_scaled_by_percentiles():
    x = shaped()
    directions, _ = by_svd(x)
    rows = x.reshape(-1, 6).numpy()
    places = (rows - rows.mean(0)) @ directions.T
    low, high = np.percentile(places, [5, 95], axis=0)
    expected = np.clip((places - low) / (high - low), 0, 1).reshape(3, 1, 4, 5, 3)
    np.testing.assert_allclose(pca_maps(x, (4, 5), percentiles=(5, 95)).numpy(), expected, atol=1e-10)
    assert pca_maps(x, (2, 2, 5), components=2).shape == (3, 2, 2, 5, 2)
    assert not pca_maps(x.requires_grad_(), (4, 5)).requires_grad


def test_outliers_left_out_do_not_move_the_basis():
    x = shaped()
    mask = torch.zeros(3, 20, dtype=torch.bool)
    mask[1, 4] = mask[2, 19] = True
    broken = x.clone()
    broken[mask] = 1e4 * torch.eye(6, dtype=torch.float64)[2]
    clean = x[~mask][None]
    assert torch.allclose(fit_pca(broken, leave_out=mask).directions, fit_pca(clean).directions, atol=1e-9)
    assert fit_pca(broken).directions[0, 2].abs() > 0.999
    kept = pca_maps(broken, (4, 5), leave_out=mask).reshape(3, 20, 3)[~mask]
    assert torch.allclose(kept, pca_maps(clean, (1, 58)).reshape(58, 3), atol=1e-9)


def test_chunks_change_nothing(monkeypatch):
    x = shaped(images=7)
    whole = fit_pca(x), pca_maps(x, (4, 5))
    monkeypatch.setattr("vitrail.analysis._inputs.CHUNK", 250)
    assert [part.stop - part.start for part in chunks(7, 120)] == [2, 2, 2, 1]
    assert torch.allclose(fit_pca(x).directions, whole[0].directions, atol=1e-12)
    assert torch.allclose(pca_maps(x, (4, 5)), whole[1], atol=1e-12)


@pytest.mark.parametrize(("dtype", "margin"), [(torch.float32, 1e-4), (torch.float16, 0.02), (torch.bfloat16, 0.1)])
def test_other_dtypes(dtype, margin):
    x = shaped()
    found = pca_maps(x.to(dtype), (4, 5))
    assert found.dtype == torch.float32
    assert (found - pca_maps(x, (4, 5))).abs().max() < margin


def test_a_basis_serves_other_images():
    basis = fit_pca(shaped())
    assert torch.equal(pca_maps(shaped(), (4, 5), basis=basis), pca_maps(shaped(), (4, 5)))
    with pytest.raises(UnsupportedInput, match=r"shape .1, 4, 5. given; expected .B, P, 6."):
        basis.project(seeded(1, 4, 5))


def test_features_that_do_not_vary_are_gray():
    assert (pca_maps(torch.full((2, 4, 5), 0.1), (2, 2)) == 0.5).all()
    line = torch.arange(4.0)[None, :, None] * torch.tensor([1.0, 2.0, 0.0, 0.0])
    found = pca_maps(line, (2, 2), percentiles=(0, 100)).reshape(4, 3)
    assert torch.allclose(found[:, 0], torch.arange(4.0) / 3, atol=1e-5)
    assert fit_pca(line).explained[0] == pytest.approx(1)


def test_errors():
    x = shaped()
    with pytest.raises(UnsupportedInput, match="21 patches"):
        pca_maps(x, (3, 7))
    with pytest.raises(InvalidOption, match="6 channels"):
        pca_maps(x, (4, 5), components=7)
    with pytest.raises(InvalidOption, match="rising"):
        pca_maps(x, (4, 5), percentiles=(99, 1))
    with pytest.raises(UnsupportedInput, match="0 of 60"):
        fit_pca(x, leave_out=torch.ones(3, 20, dtype=torch.bool))
    with pytest.raises(UnsupportedInput, match="expected bool"):
        fit_pca(x, leave_out=torch.ones(3, 20))
    with pytest.raises(InvalidOption, match="grid"):
        pca_maps(x, (0, 5))
    x[1, 3, 2] = torch.nan
    with pytest.raises(UnsupportedInput, match=r"not finite, in 1 of 3 images \(number 1\)"):
        pca_maps(x, (4, 5))
    with pytest.raises(UnsupportedInput, match="floating"):
        pca_maps(torch.ones(1, 20, 3, dtype=torch.long), (4, 5))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu():
    x, mask = shaped(), torch.zeros(3, 20, dtype=torch.bool)
    mask[1, 4] = True
    found = pca_maps(x.cuda(), (4, 5), leave_out=mask)
    assert found.is_cuda
    assert torch.allclose(found.cpu(), pca_maps(x, (4, 5), leave_out=mask), atol=1e-9)
