"""Class probe: planted labels, too few images, and real images."""

import io
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tests.analysis.probes.estimates import measured
from vitrail.analysis.probes import TokenPerImage, one_token_each, probe_classes
from vitrail.errors import UnsupportedInput
from vitrail.tokens.layout import Role, TokenLayout, TokenSpan

GRID, PATCHES = (3, 4), 12
LAYOUT = TokenLayout.of(Role.CLASS, (Role.REGISTER, 2), grid=(1, *GRID))


def sequence(images: int = 120, outlier_share: float = 0.25) -> tuple[Tensor, Tensor, Tensor]:
    """Class token and second register hold the label, as do outliers; the first register and normal patches do not."""
    labels, outliers = torch.arange(images) % 4, torch.rand(images, PATCHES) < outlier_share
    patches = 0.05 * torch.randn(images, PATCHES, 16)
    patches[..., :PATCHES] += torch.eye(PATCHES) * ~outliers[..., None]
    patches[..., PATCHES:] += 3 * one_hot(labels, 4)[:, None] * outliers[..., None]
    special = 0.3 * torch.randn(images, 3, patches.shape[2])
    special[:, [0, 2], :4] += 2 * one_hot(labels, 4).float()[:, None]
    return torch.cat([special, patches], 1), outliers, labels


def test_planted() -> None:
    tokens, outliers, labels = sequence()
    probe = probe_classes(lambda seed: one_token_each(tokens, LAYOUT, outliers, seed=seed), labels)
    assert list(probe.kinds) == ["class", "register 1", "register 2", "normal", "outlier"]
    for name, score in probe.kinds.items():
        found = measured(score.accuracy)
        assert found.sd is not None
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.mean <= found.high
        if name in ("class", "register 2", "outlier"):
            assert found.mean > 0.98
        else:
            assert found.low < 0.3
    assert (probe.classes, probe.seeds) == (4, 3)
    score = probe.kinds["class"]
    assert (score.images, score.left_out, score.test_images) == (120, 0, 36)
    assert score.majority == pytest.approx(0.25)


def test_images_without_an_outlier_are_counted() -> None:
    tokens, outliers, labels = sequence(outlier_share=0.12)
    missing = int((~outliers.any(1)).sum())
    assert 0 < missing < 60
    given = one_token_each(tokens, LAYOUT, outliers)
    probe = probe_classes(given, labels)
    assert probe.kinds["outlier"].left_out == missing
    assert probe.kinds["outlier"].images == 120 - missing
    assert probe.kinds["normal"].left_out == 0
    same = probe_classes(given, labels, common=True)
    assert {score.left_out for score in same.kinds.values()} == {missing}


def test_tokens_are_those_of_their_kind() -> None:
    tokens, outliers, _ = sequence()
    for seed in range(3):
        kinds = one_token_each(tokens, LAYOUT, outliers, seed=seed)
        assert torch.equal(kinds["register 2"].tokens, tokens[:, 2])
        for name, mask in (("normal", ~outliers), ("outlier", outliers)):
            for token, image in zip(kinds[name].tokens, kinds[name].images.tolist(), strict=True):
                among = tokens[image, LAYOUT.patches][mask[image]]
                assert (among == token).all(1).any()
    first, again, other = (one_token_each(tokens, LAYOUT, outliers, seed=s)["normal"].tokens for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_names() -> None:
    special = (TokenSpan(Role.REGISTER), TokenSpan(Role.TASK, 1, "breed"), TokenSpan(Role.TASK, 1, "species"))
    layout = TokenLayout(special, (1, 1, 2))
    kinds = one_token_each(torch.randn(3, 5, 4), layout, torch.zeros(3, 2) > 0)
    assert list(kinds) == ["register", "breed", "species", "normal", "outlier"]
    assert kinds["outlier"].tokens.shape == (0, 4)


def test_no_or_few_outliers_give_a_note() -> None:
    tokens, outliers, labels = sequence(outlier_share=0.0)
    outliers[:20, 0] = True
    score = probe_classes(one_token_each(tokens, LAYOUT, outliers), labels).kinds["outlier"]
    assert score.accuracy is None
    assert "outlier: only 20" in str(score.note)
    none = probe_classes(one_token_each(tokens, LAYOUT, torch.zeros_like(outliers)), labels).kinds["outlier"]
    assert none.note is not None
    assert (none.images, none.left_out) == (0, 120)


def test_a_kind_of_one_class_gives_a_note() -> None:
    even = TokenPerImage(torch.randn(60, 4), torch.arange(0, 120, 2))
    score = probe_classes({"all": torch.randn(120, 4), "even": even}, torch.arange(120) % 2).kinds["even"]
    assert "all of one class" in str(score.note)


def test_imbalance() -> None:
    labels = (torch.arange(300) % 10 == 0).long()
    score = probe_classes({"noise": torch.randn(300, 3)}, labels).kinds["noise"]
    assert measured(score.accuracy).mean == pytest.approx(0.9, abs=0.02)
    assert measured(score.balanced_accuracy).mean == pytest.approx(0.5, abs=0.05)
    assert score.majority == pytest.approx(0.9)


def test_a_class_of_one_image() -> None:
    labels = torch.cat([torch.arange(100) % 2, torch.tensor([2])])
    score = probe_classes({"label": one_hot(labels, 3).float().half()}, labels).kinds["label"]
    assert measured(score.accuracy).mean == 1.0


def test_errors() -> None:
    features, labels = torch.randn(60, 4), torch.arange(60) % 3
    with pytest.raises(UnsupportedInput, match="all 60 labels are 2"):
        probe_classes({"class": features}, torch.full((60,), 2))
    with pytest.raises(UnsupportedInput, match="2 of 60 vectors in the tokens of kind 'class'"):
        probe_classes({"class": features.index_fill(0, torch.tensor([1, 2]), math.nan)}, labels)
    with pytest.raises(UnsupportedInput, match="50 tokens"):
        probe_classes({"class": features[:50]}, labels)
    with pytest.raises(UnsupportedInput, match="each image once"):
        probe_classes({"class": TokenPerImage(features, torch.zeros(60).long())}, labels)
    with pytest.raises(UnsupportedInput, match="at least one"):
        probe_classes({}, labels)
    with pytest.raises(UnsupportedInput, match="15, D"):
        one_token_each(torch.randn(2, 9, 4), LAYOUT, torch.zeros(2, 12) > 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_deterministic_and_agrees_with_the_cpu() -> None:
    tokens, outliers, labels = sequence()
    tokens += 0.3 * torch.randn_like(tokens)
    first, again = (
        probe_classes(one_token_each(tokens.cuda(), LAYOUT, outliers.cuda()), labels.cuda()) for _ in range(2)
    )
    assert first == again
    for kind, score in probe_classes(one_token_each(tokens, LAYOUT, outliers), labels).kinds.items():
        found = measured(first.kinds[kind].accuracy)
        assert found.mean == pytest.approx(measured(score.accuracy).mean, abs=0.03)


@pytest.mark.slow
def test_mean_color_of_real_images(shared_data: Path) -> None:
    """Colors classify breeds a little better than chance, a leaked label perfectly."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="reads the images with pyarrow")
    image = pytest.importorskip("PIL.Image", reason="decodes the images with Pillow")
    table = parquet.read_table(shared_data / "pets-160-train.parquet", columns=["image", "breed"])
    colors = []
    for cell in table["image"].to_pylist():
        small = image.open(io.BytesIO(cell["bytes"])).convert("RGB").resize((4, 4))
        colors.append(torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).float())
    breeds = torch.tensor(table["breed"].to_pylist())
    probe = probe_classes({"color": torch.stack(colors), "leak": one_hot(breeds, 37).float()}, breeds)
    color = measured(probe.kinds["color"].accuracy)
    majority = probe.kinds["color"].majority
    assert majority is not None
    assert color.low is not None
    assert 2 * majority < color.low < color.mean < 0.25
    assert measured(probe.kinds["leak"].accuracy).mean == 1.0
