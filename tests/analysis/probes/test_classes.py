"""What one token tells about its picture: planted labels, too little of them, and real pictures."""

import io
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from vitrail.analysis.probes.classes import TokenPerImage, one_token_each, probe_classes
from vitrail.errors import UnsupportedInput
from vitrail.tokens.layout import Role, TokenLayout, TokenSpan

GRID, PATCHES = (3, 4), 12
LAYOUT = TokenLayout.of(Role.CLASS, (Role.REGISTER, 2), grid=(1, *GRID))


def sequence(pictures: int = 120, outlier_share: float = 0.25) -> tuple[Tensor, Tensor, Tensor]:
    """Class token and second register hold the label, as do outliers; the first register and normal patches do not."""
    labels, outliers = torch.arange(pictures) % 4, torch.rand(pictures, PATCHES) < outlier_share
    patches = 0.05 * torch.randn(pictures, PATCHES, 16)
    patches[..., :PATCHES] += torch.eye(PATCHES) * ~outliers[..., None]
    patches[..., PATCHES:] += 3 * one_hot(labels, 4)[:, None] * outliers[..., None]
    special = 0.3 * torch.randn(pictures, 3, patches.shape[2])
    special[:, [0, 2], :4] += 2 * one_hot(labels, 4).float()[:, None]
    return torch.cat([special, patches], 1), outliers, labels


class TestClasses:
    def test_planted(self) -> None:
        tokens, outliers, labels = sequence()
        probe = probe_classes(lambda seed: one_token_each(tokens, LAYOUT, outliers, seed=seed), labels)
        assert list(probe.kinds) == ["class", "register 1", "register 2", "normal", "outlier"]
        accuracy = {name: score.accuracy for name, score in probe.kinds.items()}
        for name, high in (("class", 1), ("register 1", 0), ("register 2", 1), ("normal", 0), ("outlier", 1)):
            found = accuracy[name]
            assert found is not None
            assert found.sd is not None
            assert found.low is not None
            assert found.high is not None
            assert found.low <= found.mean <= found.high
            if high:
                assert found.mean > 0.98
            else:
                assert found.low < 0.3
        assert (probe.classes, probe.seeds) == (4, 3)
        score = probe.kinds["class"]
        assert (score.pictures, score.left_out, score.test_pictures) == (120, 0, 36)
        assert score.majority == pytest.approx(0.25)

    def test_pictures_without_an_outlier_are_counted(self) -> None:
        tokens, outliers, labels = sequence(outlier_share=0.12)
        missing = int((~outliers.any(1)).sum())
        assert 0 < missing < 60
        given = one_token_each(tokens, LAYOUT, outliers)
        probe = probe_classes(given, labels)
        assert probe.kinds["outlier"].left_out == missing
        assert probe.kinds["outlier"].pictures == 120 - missing
        assert probe.kinds["normal"].left_out == 0
        same = probe_classes(given, labels, common=True)
        assert {score.left_out for score in same.kinds.values()} == {missing}

    def test_tokens_are_those_of_their_kind(self) -> None:
        tokens, outliers, _ = sequence()
        for seed in range(3):
            kinds = one_token_each(tokens, LAYOUT, outliers, seed=seed)
            assert torch.equal(kinds["register 2"].tokens, tokens[:, 2])
            for name, mask in (("normal", ~outliers), ("outlier", outliers)):
                for token, picture in zip(kinds[name].tokens, kinds[name].images.tolist(), strict=True):
                    among = tokens[picture, LAYOUT.patches][mask[picture]]
                    assert (among == token).all(1).any()

    def test_draws_differ_and_repeat(self) -> None:
        tokens, outliers, _ = sequence()
        first, again, other = (one_token_each(tokens, LAYOUT, outliers, seed=s)["normal"].tokens for s in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_names(self) -> None:
        special = (TokenSpan(Role.REGISTER), TokenSpan(Role.TASK, 1, "breed"), TokenSpan(Role.TASK, 1, "species"))
        layout = TokenLayout(special, (1, 1, 2))
        kinds = one_token_each(torch.randn(3, 5, 4), layout, torch.zeros(3, 2) > 0)
        assert list(kinds) == ["register", "breed", "species", "normal", "outlier"]
        assert kinds["outlier"].tokens.shape == (0, 4)

    def test_no_or_few_outliers_give_a_note(self) -> None:
        tokens, outliers, labels = sequence(outlier_share=0.0)
        outliers[:20, 0] = True
        score = probe_classes(one_token_each(tokens, LAYOUT, outliers), labels).kinds["outlier"]
        assert score.accuracy is None
        assert score.note == "outlier: only 20 images have one; at least 50 are needed"
        none = probe_classes(one_token_each(tokens, LAYOUT, torch.zeros_like(outliers)), labels).kinds["outlier"]
        assert none.note is not None
        assert (none.pictures, none.left_out) == (0, 120)

    def test_a_kind_of_one_class_gives_a_note(self) -> None:
        labels = torch.arange(120) % 2
        even = torch.arange(0, 120, 2)
        kinds: dict[str, Tensor | TokenPerImage] = {
            "all": torch.randn(120, 4),
            "even": TokenPerImage(torch.randn(60, 4), even),
        }
        score = probe_classes(kinds, labels).kinds["even"]
        assert score.note is not None
        assert "all of one class" in score.note

    def test_imbalance(self) -> None:
        labels = (torch.arange(300) % 10 == 0).long()
        score = probe_classes({"noise": torch.randn(300, 3)}, labels).kinds["noise"]
        assert score.accuracy is not None
        assert score.balanced_accuracy is not None
        assert score.accuracy.mean == pytest.approx(0.9, abs=0.02)
        assert score.balanced_accuracy.mean == pytest.approx(0.5, abs=0.05)
        assert score.majority == pytest.approx(0.9)

    def test_a_class_of_one_picture(self) -> None:
        labels = torch.cat([torch.arange(100) % 2, torch.tensor([2])])
        score = probe_classes({"label": one_hot(labels, 3).float().half()}, labels).kinds["label"]
        assert score.accuracy is not None
        assert score.accuracy.mean == 1.0

    def test_refuses(self) -> None:
        features, labels = torch.randn(60, 4), torch.arange(60) % 3
        with pytest.raises(UnsupportedInput, match="all 60 labels are 2"):
            probe_classes({"class": features}, torch.full((60,), 2))
        with pytest.raises(UnsupportedInput, match="2 of 60 vectors in the tokens of kind 'class'"):
            probe_classes({"class": features.index_fill(0, torch.tensor([1, 2]), math.nan)}, labels)
        with pytest.raises(UnsupportedInput, match="for 60 labeled images"):
            probe_classes({"class": features[:50]}, labels)
        with pytest.raises(UnsupportedInput, match="each image once"):
            probe_classes({"class": TokenPerImage(features, torch.zeros(60).long())}, labels)
        with pytest.raises(UnsupportedInput, match="at least one"):
            probe_classes({}, labels)
        with pytest.raises(UnsupportedInput, match="expected \\(B, 15, D\\)"):
            one_token_each(torch.randn(2, 9, 4), LAYOUT, torch.zeros(2, 12) > 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    tokens, outliers, labels = sequence()
    tokens += 0.3 * torch.randn_like(tokens)
    first, again = (
        probe_classes(one_token_each(tokens.cuda(), LAYOUT, outliers.cuda()), labels.cuda()) for _ in range(2)
    )
    assert first == again
    for kind, score in probe_classes(one_token_each(tokens, LAYOUT, outliers), labels).kinds.items():
        found = first.kinds[kind].accuracy
        assert found is not None
        assert score.accuracy is not None
        assert found.mean == pytest.approx(score.accuracy.mean, abs=0.03)


@pytest.mark.slow
def test_mean_colour_of_real_pictures_tells_little(shared_data: Path) -> None:
    """End to end on real pictures: colours tell breeds a little better than chance, a label leaked tells them fully."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="reads the pictures with pyarrow")
    image = pytest.importorskip("PIL.Image", reason="decodes the pictures with Pillow")
    table = parquet.read_table(shared_data / "pets-160-train.parquet", columns=["image", "breed"])
    colours = []
    for cell in table["image"].to_pylist():
        small = image.open(io.BytesIO(cell["bytes"])).convert("RGB").resize((4, 4))
        colours.append(torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).float())
    breeds = torch.tensor(table["breed"].to_pylist())
    probe = probe_classes({"colour": torch.stack(colours), "leak": one_hot(breeds, 37).float()}, breeds)
    colour, leak = probe.kinds["colour"], probe.kinds["leak"]
    assert colour.accuracy is not None
    assert colour.accuracy.low is not None
    assert colour.majority is not None
    assert 2 * colour.majority < colour.accuracy.low < colour.accuracy.mean < 0.25
    assert leak.accuracy is not None
    assert leak.accuracy.mean == 1.0
