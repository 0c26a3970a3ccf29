"""tools/embed.py: it writes the model and its card, and rejects what does not belong in the package."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tools import embed as tool

import vitrail
from tests.training.toys import FIELDS, make_photos
from vitrail.data import InputSpec
from vitrail.errors import InvalidOption
from vitrail.models import ViT
from vitrail.training import load_trained, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    photos = make_photos(folder / "photos")
    return train(data=str(photos), out=str(folder / "run"), **{**FIELDS, "validation": str(photos)}).folder


def test_model_in_half_precision_with_card(run: Path, tmp_path: Path) -> None:
    out = tool.embed(run, tmp_path / "tiny", "Noise in three colours.", "CC0-1.0")
    assert sorted(path.name for path in out.iterdir()) == [
        "CARD.md", "config.json", "labels.json", "log.jsonl", "model.safetensors",
    ]  # fmt: skip
    model, labels = load_trained(run)
    written = load_file(out / "model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.float16}
    assert all(torch.equal(written[name], value.half()) for name, value in model.state_dict().items())
    embedded, known = load_trained(out)
    assert known.classes == labels.classes
    images = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(embedded(images).softmax(-1), model(images).softmax(-1), atol=1e-2, rtol=0)

    card = (out / "CARD.md").read_text(encoding="utf-8")
    assert card.startswith("# vitrail:tiny\n")
    assert f"{sum(value.numel() for value in model.parameters()):,} parameters" in card
    assert "- Data: Noise in three colours.\n" in card
    assert "- License of the weights: CC0-1.0.\n" in card
    assert f"| fused | {100 * labels.trained['evaluation']['accuracy']['fused']:.2f} % (" in card
    assert "32 × 32 pixels, patches of 8 × 8" in card
    assert "before rounding" in card
    assert "blue, green, red" in card
    assert "tokens: cls,register=2\n" in card
    assert str(run.parent) not in card


def test_card_with_several_seeds(run: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{seed}.json" for seed in range(3)]
    for file, share in zip(files, (0.5, 0.6, 0.7), strict=True):
        file.write_text(json.dumps({"count": 1234, "dtype": "float32", "accuracy": {"fused": share}, "loss": 1.0}))
    out = tool.embed(run / "last", tmp_path / "tiny", "Noise.", evaluations=files, notes=["Its teacher is a wall."])
    card = (out / "CARD.md").read_text(encoding="utf-8")
    assert "| fused | 50.00 % (47.2–52.8) | 60.00 ± 10.00 % |\n" in card  # Wilson: 0.5 ± 1.96 √(0.25 / (1234 + 1.96²))
    assert "on 1,234 held-out images" in card
    assert "before rounding" not in card
    assert "- Its teacher is a wall.\n" in card
    assert (out / "log.jsonl").read_bytes() == (run / "log.jsonl").read_bytes()
    files[1].write_text("{}")
    with pytest.raises(InvalidOption, match=r"1\.json is not from vitrail evaluate"):
        tool.embed(run, tmp_path / "other", "Noise.", evaluations=files)
    assert not (tmp_path / "other").exists()


def test_card_of_a_sweep_has_tokens_and_flops_of_each_merge(run: Path, tmp_path: Path) -> None:
    one = {"count": 100, "dtype": "float32"}
    sweep = {"unmerged": {**one, "accuracy": {"fused": 0.75}}, "r=4": {**one, "accuracy": {"fused": 0.7}}}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    out = tool.embed(run, tmp_path / "tiny", "Noise.", evaluations=[tmp_path / "sweep.json"])
    card = (out / "CARD.md").read_text(encoding="utf-8")
    model = load_trained(run)[0]
    with vitrail.merge(model, r=4) as merging:
        left, flops = merging.tokens_per_layer()[-1], merging.flops() / 1e6
    assert isinstance(model, ViT)
    total = 4 * 4 + 3
    assert f"| unmerged | {total} | {vitrail.count(model).flops / 1e6:.1f} | 75.00 % |\n" in card
    assert f"| r=4 | {left} | {flops:.1f} | 70.00 % |\n" in card
    assert left == total - 4 * model.config.depth


@pytest.mark.parametrize(("size", "patch", "expected"), [
    ((1, 16, 24), 8, "16 mel bands × 24 frames (0.2 seconds of sound at 16,000 samples/s), patches of 8 × 8"),
    ((3, 4, 16, 16), (2, 8, 8), "4 × 16 × 16 (frames of a clip, height, width), patches of 2 × 8 × 8"),
])  # fmt: skip
def test_input_of_other_media(size: tuple[int, ...], patch: int, expected: str) -> None:
    spec = InputSpec(size[1:], (0.0,) * size[0], (1.0,) * size[0], "audio" if size[0] == 1 else "video")
    given = {"image_size": size[1:], "patch_size": patch, "in_chans": size[0]}
    model = vitrail.create_model("vit_tiny_patch16", width=32, depth=1, heads=2, **given)
    assert tool._input(model, spec) == expected
    assert tool._sides(model) == size[1:]


def test_rejected_models_write_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str, folder: Path = run, about: str = "Noise.") -> None:
        with pytest.raises(InvalidOption, match=message):
            tool.embed(folder, tmp_path / "out", about)
        assert not (tmp_path / "out").exists()

    refused("about is empty", about=" ")
    vitrail.create_model("vit_tiny_patch16", width=32, depth=1, heads=2).save_pretrained(tmp_path / "alone")
    refused("is not in a run directory", tmp_path / "alone")
    with monkeypatch.context() as patch:
        patch.setattr(tool, "MOST_PARAMETERS", 1000)
        refused("expected at most 1,000")
    with monkeypatch.context() as patch:
        patch.setattr(tool, "MOST_BYTES", 1000)
        refused("MiB of weights")
    with monkeypatch.context() as patch:
        patch.setattr(tool, "CLOSE", 0.0)
        refused("half precision changes a probability")
