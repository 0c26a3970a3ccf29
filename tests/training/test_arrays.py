"""Arrays: training on spectrograms and clips, evaluation, saving, and resuming."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.toys import FIELDS, same, weights
from vitrail.data import open_dataset
from vitrail.data.augment.arrays import ArrayAugment
from vitrail.data.augment.mix import Mix
from vitrail.data.loading.loader import make_loader
from vitrail.data.loading.order import generator
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption, TrainingError
from vitrail.models import ViT
from vitrail.training import Arrays, Config, Event, checkpoint, evaluate, load_trained, train
from vitrail.training.run_directory import Labels

SMALL = {name: value for name, value in FIELDS.items() if name not in ("image_size", "patch_size", "tokens")}
SOUND = {**SMALL, "patch_size": (8, 4), "tasks": "tone,voice", "epochs": 6, "batch_size": 16, "lr": 4e-3}
CLIP = {**SMALL, "patch_size": (2, 8, 8), "epochs": 6, "batch_size": 16, "lr": 4e-3}


def sounds(count: int = 64, seed: int = 0) -> Arrays:
    """Spectrograms far from zero: a tone that is loud or soft, by a voice that is bright or dark."""
    draw = generator("cpu", seed)
    tone, voice = torch.randint(2, (2, count), generator=draw)
    values = 40 + torch.randn(count, 1, 16, 24, generator=draw)
    for row in range(count):
        values[row] += 4 * tone[row]
        values[row] += (1 - 2 * voice[row]) * torch.linspace(-6, 6, 16).view(16, 1)
    return Arrays(values, {"tone": tone, "voice": ["bright" if one == 0 else "dark" for one in voice]})


def clips(count: int = 64, seed: int = 0) -> Arrays:
    """Clips of bytes, the same images in either class: they grow brighter from frame to frame, or darker."""
    draw = generator("cpu", seed)
    darker = torch.randint(2, (count,), generator=draw)
    values = torch.randint(100, (count, 3, 4, 16, 16), generator=draw) + 50 * torch.arange(4).view(4, 1, 1)
    values = torch.where(darker.view(-1, 1, 1, 1, 1) == 1, values.flip(2), values)
    return Arrays(values.clamp(max=255).byte(), darker, classes=["brighter", "darker"])


# ---------------------------------------------------------------- training


def test_spectrograms_are_learned_with_a_token_per_task(tmp_path: Path) -> None:
    fields = {**SOUND, "validation": sounds(32, 1), "merge": "r=1", "evaluate_every": 6}
    run = train(data=sounds(), out=str(tmp_path / "run"), **fields)
    found = run.evaluation
    assert found.accuracy["task.tone"] > 0.9
    assert found.accuracy["task.voice"] > 0.9
    assert found.notes == ()
    assert found.outliers["num_images"] == 32
    assert set(found.collapse["within"]) == {"task"}

    model, labels = load_trained(run.last)
    assert model.config.image_size == (16, 24)
    assert model.config.in_chans == 1
    assert labels.classes == {"tone": ("0", "1"), "voice": ("bright", "dark")}
    values = sounds()._values.double()
    assert isinstance(labels.preprocessing, InputSpec)
    assert labels.preprocessing.mean == pytest.approx((values.mean().item(),))
    assert labels.preprocessing.std == pytest.approx((values.std(correction=0).item(),))

    # What is loaded gives the outputs that the run gave.
    again = evaluate(run.last, sounds(32, 1), merge={"r": 1}, seconds=0)
    assert again.loss == pytest.approx(found.loss, rel=1e-5)
    normal = (sounds(32, 1)._values - values.mean()) / values.std(correction=0)
    with torch.no_grad():
        output = model.forward_output(normal.float()).by_role["tone"].argmax(1)
    truth = torch.tensor(sounds(32, 1).labels("tone").numbers)
    plain = evaluate(run.last, sounds(32, 1), seconds=0, look=0)
    assert plain.accuracy["task.tone"] == pytest.approx((output == truth).double().mean().item())


def test_clips_are_learned_in_blocks_of_time_and_space(tmp_path: Path) -> None:
    run = train(data=clips(), out=str(tmp_path / "run"), **{**CLIP, "validation": 0.25, "augment": "none"})
    assert run.evaluation.accuracy["fused"] > 0.9
    assert run.evaluation.count == 16
    model, labels = load_trained(run.last)
    assert model.config.image_size == (4, 16, 16)
    assert labels.preprocessing == InputSpec.of_arrays((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 255)
    assert evaluate(run.folder, clips(16, 1), merge={"r": 1}, seconds=0).accuracy["fused"] > 0.9
    # Bytes are normalized as the model declares for colors.
    assert evaluate(model, clips(16, 1), seconds=0, look=0).accuracy == (
        evaluate(run.last, clips(16, 1), seconds=0, look=0).accuracy
    )


def test_stopped_and_resumed_gives_the_same_bits(tmp_path: Path) -> None:
    random = {"mixup": 0.2, "cutmix": 1.0, "augment": "medium", "drop_path": 0.2, "ema": 0.9}
    fields = {**CLIP, **random, "epochs": 2, "save_every": "2 steps"}

    def stop(event: Event) -> None:
        if event.kind == "train" and event.done == 3:
            raise KeyboardInterrupt

    def floats(seed: int) -> Arrays:
        return Arrays(clips(32, seed)._values.float(), clips(32, seed).labels(None).numbers)

    with pytest.raises(KeyboardInterrupt):
        train(data=floats(0), out=str(tmp_path / "run"), on_event=stop, **{**fields, "validation": floats(1)})
    with pytest.raises(InvalidOption, match="data: the run was started with a dataset from Python"):
        train(out=str(tmp_path / "run"), resume=True)
    with pytest.raises(InvalidOption, match="validation: the run was started with a dataset from Python"):
        train(out=str(tmp_path / "run"), resume=True, data=floats(0))
    resumed = train(out=str(tmp_path / "run"), resume=True, data=floats(0), validation=floats(1))
    whole = train(data=floats(0), out=str(tmp_path / "whole"), **{**fields, "validation": floats(1)})
    assert same(weights(resumed.last), weights(whole.last))
    assert resumed.evaluation.loss == whole.evaluation.loss


def test_a_run_resumes_with_the_same_data(tmp_path: Path) -> None:
    values, labels = clips(32)._values, torch.arange(32) % 2
    out = str(tmp_path / "run")

    def stop(event: Event) -> None:
        if event.kind == "train" and event.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(data=Arrays(values, labels), out=out, on_event=stop, **{**CLIP, "save_every": "1 steps"})

    def on(values: Tensor, labels: Tensor) -> Any:
        return train(data=Arrays(values, labels), out=out, resume=True)

    with pytest.raises(
        TrainingError, match=r"data: the samples have other values than before\. Resume with the same data"
    ):
        on(values + 1, labels)
    with pytest.raises(TrainingError, match="data: the samples have other classes than before, or another order"):
        on(values, labels.flip(0))
    with pytest.raises(TrainingError, match="data: label had 16 samples of '0', and now has 15"):
        on(values, torch.cat([torch.ones(1).long(), labels[1:]]))

    # A checkpoint without fingerprints is resumed, whatever the values.
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    meta = json.loads((folder / "meta.json").read_text())
    assert meta.pop("data")["counts"] == {"label": [16, 16]}
    (folder / "meta.json").write_text(json.dumps(meta))
    listed = json.loads((folder / "complete.json").read_text())
    listed["files"]["meta.json"] = checkpoint._fingerprint(folder / "meta.json")
    (folder / "complete.json").write_text(json.dumps(listed))
    assert on(values + 1, labels).last.is_dir()


def test_models_of_other_libraries_and_trained_ones(tmp_path: Path) -> None:
    options = {"depth": 1, "embed_dim": 32, "num_heads": 2, "patch_size": 8}
    fields = {**SMALL, "epochs": 1, "labels": "voice", "model": "timm:vit_tiny_patch16_224", "options": options}
    first = train(data=sounds(), out=str(tmp_path / "timm"), **fields)
    narrow = Arrays(sounds()._values[..., :16], sounds().labels("voice").numbers)
    fields = {**SMALL, "epochs": 1, "model": str(first.last), "options": {}}
    half = open_dataset(narrow, labeled=True).take(0.5, 0)
    second = train(data=half, out=str(tmp_path / "on"), **fields)
    model, labels = load_trained(second.last)
    assert model.patch_embed.img_size == (16, 16)  # type: ignore[union-attr]
    assert labels.preprocessing == half.statistics() != open_dataset(narrow, labeled=True).statistics()
    assert evaluate(second.last, narrow, seconds=0).count == 64


# ---------------------------------------------------------------- the way to the model


@pytest.mark.parametrize("keep", ["device", "workers"])
@pytest.mark.parametrize("make", [sounds, clips])
def test_two_ranks_see_what_one_sees(keep: Any, make: Any) -> None:
    """From the array to the mixed batch."""
    arrays = make(12)
    examples = open_dataset(arrays, labels=tuple(arrays._labels), labeled=True)
    expects = examples.statistics()
    assert expects is not None
    augment, mix = ArrayAugment("strong", expects), Mix(0.8, 1.0)

    def batch(rank: int, world: int) -> tuple[Tensor, ...]:
        feed = make_loader(
            examples, image_size=1, device="cpu", batch=8, seed=3, rank=rank, world_size=world, keep=keep
        )
        rows = slice(rank * 8 // world, (rank + 1) * 8 // world)
        found = feed.batch(2)
        for value, index in zip(found.images, found.indices, strict=True):
            assert torch.equal(value, arrays._values[index])
        mixed = mix(augment(found.images, generator("cpu", 4), rows, 8), generator("cpu", 5), rows, 8)
        return mixed.images, mixed.share, found.labels, found.indices

    parts = zip(batch(0, 2), batch(1, 2), strict=True)
    for whole, (first, second) in zip(batch(0, 1), parts, strict=True):
        assert torch.equal(torch.cat([first, second]), whole)


# ---------------------------------------------------------------- labels and refusals


def test_sizes_in_a_config(tmp_path: Path) -> None:
    config = Config(data="x", patch_size=[2, 8, 8], image_size=(4, 16, 16))  # type: ignore[arg-type]
    assert config.patch_size == (2, 8, 8)
    assert Config(data="x", patch_size="2,8,8", image_size="4x16x16") == config  # as on the command line
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert Config.from_yaml(tmp_path / "config.yaml") == config
    for wrong in ([8], (0, 4), (8, 4.0), True, 0, (1, 2, 3, 4), "8,a", "0"):
        with pytest.raises(InvalidOption, match=r"patch_size=.*expected an integer of at least 1, or two or three"):
            Config(data="x", patch_size=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 16}, r"image_size=16: the data is arrays of \(1, 16, 24\) in float32, and is not resized"),
        ({"image_size": (24, 16)}, r"image_size=\(24, 16\)"),
        ({"options": {"in_chans": 3}}, "in_chans=3"),
        ({"patch_size": (2, 8, 8)}, r"patch_size=\(2, 8, 8\).*one number, or \(height, width\)"),
        ({"patch_size": 7}, r"image_size \(16, 24\) is not a whole number of patches"),
        ({"side": 16}, "side=16 is for images"),
        ({"augment": "flip"}, "augment='flip' is for images; arrays take none, light"),
        ({"recipe": "dino", "tasks": "", "labels": "tone"}, "recipe='dino' is for images"),
        ({"teacher": "timm:resnet10t"}, "teacher='timm:resnet10t' is for images"),
        ({"validation": clips(4)}, "labels='tone': no such column"),
        (
            {"labels": "tone", "tasks": "", "validation": Arrays(torch.zeros(4, 1, 8, 8), {"tone": [0] * 4})},
            "validation: ",
        ),
        ({"data": clips(), "tasks": ""}, r"patch_size=\(8, 4\).*Expected \(time, height, width\)"),
        ({"tasks": ""}, "no label column is chosen.*tone, voice"),
    ],
)
def test_runs_that_contradict_their_data(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        train(**({"data": sounds(), "out": str(tmp_path / "run")} | SOUND | fields))
    assert not (tmp_path / "run").exists()


def test_models_that_do_not_fit_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(data=sounds(16), out=str(tmp_path / "run"), **{**SOUND, "epochs": 1})
    columns = {"tone": [0] * 4, "voice": ["dark"] * 4}
    with pytest.raises(InvalidOption, match="trained on floating point numbers of 1 channels, and the data is arrays"):
        evaluate(run.last, Arrays(torch.zeros(4, 1, 16, 24, dtype=torch.uint8), columns))
    with pytest.raises(InvalidOption, match="ViT has no known normalization"):
        evaluate(ViT(load_trained(run.last)[0].config), sounds(16), labels=("tone", "voice"))
    images = [(torch.zeros(3, 16, 16), 0)] * 16
    with pytest.raises(InvalidOption, match="was trained on arrays"):
        train(data=images, model=str(run.last), out=str(tmp_path / "on"), preset="tiny", device="cpu")
    student = {"tokens": "cls,distillation", "distillation": "features", "teacher": str(run.last)}
    with pytest.raises(InvalidOption, match="needs a teacher and a student for images"):
        train(data=images, out=str(tmp_path / "student"), **{**FIELDS, **student})
    labels = Labels({}, load_trained(run.last)[1].preprocessing)
    monkeypatch.setattr(
        "vitrail.training.evaluation.evaluator.load_classifier", lambda path: (load_trained(run.last)[0], labels)
    )
    with pytest.raises(InvalidOption, match="trained on arrays"):
        evaluate(run.last, images)
