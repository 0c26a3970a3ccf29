"""The training loop: equivalences, stopping, and log entries."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch

from tests.training.toys import FIELDS, difference, make_photos, same, weights
from vitrail.data import open_dataset
from vitrail.data.augment import images as augment
from vitrail.data.augment import mix as mixing
from vitrail.errors import Diverged, InvalidOption, ModelLoadError
from vitrail.models import ViT
from vitrail.training import Config, Event, Run, evaluate, load_trained, read_log, train
from vitrail.training.objective.learner import Learner
from vitrail.training.objective.objective import Terms


def run(photos: str, folder: Path, **fields: Any) -> Run:
    return train(data=photos, out=str(folder), **{**FIELDS, **fields})


def test_training_learns_and_prints_the_paths(photos: str, tmp_path: Path) -> None:
    events: list[Event] = []
    done = run(photos, tmp_path / "run", epochs=12, validation=0.25, on_event=events.append, lr=3e-3)
    assert done.evaluation.accuracy["fused"] == 1
    written = {"best", "checkpoints", "config.yaml", "last", "log.jsonl", ".vitrail-run"}
    assert {path.name for path in done.folder.iterdir()} == written
    kinds = {"start", "reading", "train", "epoch", "evaluating", "evaluation", "saved"}
    assert {event.kind for event in events} == kinds
    epochs = read_log(done.folder / "log.jsonl", "epoch")
    assert [line["epoch"] for line in epochs] == list(range(12))
    assert epochs[-1]["losses"]["cls"] < epochs[0]["losses"]["cls"]
    assert epochs[-1].keys() >= {"lr", "images_per_s", "seconds", "losses", "step"}
    line = read_log(done.folder / "log.jsonl", "evaluation")[-1]
    assert line["accuracy"].keys() == {"cls", "fused"}
    assert line["collapse"]["within"].keys() == {"register"}
    assert line["outliers"]["outlier_share"] is not None
    assert (
        Config.from_yaml(done.folder / "config.yaml").resolved(18).to_dict()
        == Config.from_yaml(done.folder / "config.yaml").to_dict()
    )


def test_the_same_seed_gives_the_same_weights_and_another_one_others(photos: str, tmp_path: Path) -> None:
    first, second, other = (
        weights(run(photos, tmp_path / str(number), seed=seed).last) for number, seed in enumerate((1, 1, 2))
    )
    assert same(first, second)
    assert not same(first, other)


def test_accumulated_parts_are_one_batch(photos: str, tmp_path: Path) -> None:
    fields = {"mixup": 0.2, "cutmix": 1.0, "augment": "medium", "ema": 0.9}
    whole, parts = (weights(run(photos, tmp_path / str(k), accumulate=k, **fields).last) for k in (1, 4))
    assert difference(whole, parts) < 1e-5


def test_averaged_weights_are_those_that_are_evaluated_and_written(photos: str, tmp_path: Path) -> None:
    """Compare with an average computed separately, from the run's checkpoints."""
    folder = tmp_path / "run"
    done = run(photos, folder, ema=0.6, save_every="1 steps", keep=20, validation=0.25, epochs=2)
    average: dict[str, torch.Tensor] = {}
    for step, path in enumerate(sorted(folder.glob("checkpoints/step-*"))):
        state = torch.load(path / "state.pt", weights_only=True)
        live = {n.removeprefix("learner.model."): v for n, v in state.items() if n.startswith("learner.model.")}
        if step == 0:
            first = load_first(photos, tmp_path)
            average = {name: value.double() for name, value in first.items()}
        decay = min(0.6, (1 + step) / (10 + step))
        average = {name: decay * average[name] + (1 - decay) * live[name].double() for name in live}
    assert difference(average, weights(done.last)) < 1e-6
    assert json.loads((done.last / "labels.json").read_text())["trained"]["weights"] == "averaged"
    again = evaluate(done.last, photos, seconds=0, look=0)
    assert again.count == 24


def load_first(photos: str, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The weights before the first step."""
    from vitrail._distributed import World
    from vitrail.training.model import make_models

    config = Config.from_dict({"data": photos, **FIELDS}).resolved(18)
    models = make_models(config, {"label": ("blue", "green", "red")}, World(0, 1, torch.device("cpu")))
    return {name: value.detach().clone() for name, value in models.model.state_dict().items()}


def test_a_non_finite_loss_stops_with_details(photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, steps = Learner.forward, []

    def forward(self: Learner, *args: Any) -> Terms:
        terms = real(self, *args)
        steps.append(1)
        if len(steps) == 5:
            return Terms(terms.total * float("nan"), {**terms.parts, "cls": terms.parts["cls"] * float("nan")})
        return terms

    monkeypatch.setattr(Learner, "forward", forward)
    with pytest.raises(Diverged) as caught:
        run(photos, tmp_path / "run")
    text = str(caught.value)
    assert "not finite since step 4 (epoch 1, batch 1): cls" in text
    assert "learning rate was 0.000" in text
    assert "step-00000003" in text
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_teacher_is_learned_from_and_not_saved(photos: str, tmp_path: Path) -> None:
    teacher = run(photos, tmp_path / "teacher", epochs=1)
    done = run(photos, tmp_path / "student", teacher=str(teacher.folder), tokens="cls,distillation", validation=0.25)
    assert done.evaluation.accuracy.keys() == {"fused", "cls", "distillation"}
    assert done.evaluation.disagreement is not None
    losses = read_log(done.folder / "log.jsonl", "epoch")[-1]["losses"]
    assert losses["loss"] == pytest.approx((losses["cls"] + losses["distillation"]) / 2)
    state = torch.load(next(done.folder.glob("checkpoints/*/state.pt")), weights_only=True)
    assert not [name for name in state if "teacher" in name]


def test_merging_rises_while_it_trains(photos: str, tmp_path: Path) -> None:
    merge = {"r": 4, "from_epoch": 1, "over_epochs": 2}
    done = run(photos, tmp_path / "run", epochs=4, merge=merge, validation=0.25)
    lines = read_log(done.folder / "log.jsonl", "epoch")
    assert [line["merge"]["r"] for line in lines] == [[0, 0], [1, 1], [3, 3], [4, 4]]
    assert done.evaluation.merge["r"] == [4, 4]
    model, labels = load_trained(done.last)
    assert isinstance(model, ViT)
    assert labels.trained["merge"]["r"] == [4, 4]


def test_every_checkpoint_is_a_model_directory(photos: str, tmp_path: Path) -> None:
    """Evaluating a checkpoint gives the logged values of its epoch, with averaged weights."""
    held = open_dataset(photos, labeled=True).take(0.5, seed=1)
    done = run(photos, tmp_path / "run", epochs=3, validation=held, evaluate_every=1, save_every=1, keep=3, ema=0.5)
    lines = read_log(done.folder / "log.jsonl", "evaluation")
    folders = sorted((done.folder / "checkpoints").iterdir())
    assert len(lines) == len(folders) == 3
    for line, folder in zip(lines, folders, strict=True):
        found = evaluate(folder, held, device="cpu", seconds=0)
        assert found.loss == pytest.approx(line["loss"], rel=1e-4)
        assert load_trained(folder)[1].trained["step"] == line["step"]
    assert same(weights(folders[-1]), weights(done.last))
    merged = [evaluate(folders[-1], held, device="cpu", seconds=0, merge=merge).loss for merge in ("r=2", {"r": 2})]
    assert merged[0] == merged[1] != lines[-1]["loss"]
    for model in (done.folder / "best", done.last):  # as in a run that is still going on
        rmtree(model)
    with pytest.raises(ModelLoadError, match=f"without a model yet; its newest checkpoint, .*{folders[-1].name}"):
        load_trained(done.folder)
    (folders[0] / "config.json").unlink()
    (folders[0] / "shards").mkdir()
    with pytest.raises(ModelLoadError, match="sharded checkpoint"):
        load_trained(folders[0])


def test_merging_needs_a_model_that_can_be_merged(photos: str, tmp_path: Path) -> None:
    fields = {"model": "timm:resnet18", "options": {}, "tokens": None, "patch_size": None}
    with pytest.raises(InvalidOption, match="merge: ResNet is not a supported model"):
        run(photos, tmp_path / "run", merge="r=2", **fields)
    assert not (tmp_path / "run").exists()


def test_only_requested_parts_are_compiled(photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        calls.append(function.__qualname__)
        return function

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: calls.append(type(self).__name__))
    for module in (augment, mixing):
        monkeypatch.setattr(module, "compiled", compiled)
    images = {"Augment.apply", "Mix.apply"}
    wanted = {"off": set(), "augment": images, "blocks": {"Block", *images}, "whole": {"Learner", *images}}
    for how, what in wanted.items():
        calls.clear()
        output: list[Event] = []
        run(photos, tmp_path / how, compile=how, epochs=1, mixup=0.8, on_event=output.append)
        assert set(calls) == what
        notes = [event.text for event in output if event.kind == "note"]
        wait = f"The first steps compile (--compile {how}), up to some minutes on a CPU."
        assert notes == ([] if how == "off" else [wait])


def test_bfloat16_is_autocast(photos: str, tmp_path: Path) -> None:
    done = run(photos, tmp_path / "run", dtype="bf16", epochs=1)
    assert {value.dtype for value in weights(done.last).values()} == {torch.float32}


def test_tasks_have_tokens_or_share_one(tmp_path: Path) -> None:
    from torch.utils.data import TensorDataset

    images = torch.randint(0, 255, (24, 3, 32, 32), dtype=torch.uint8)
    labels = torch.stack([torch.arange(24) % 2, torch.arange(24) % 3], 1)
    data = TensorDataset(images, labels)
    fields = {"tokens": None, "tasks": "shape,colour", "validation": 0.25}
    for heads, names in (("tokens", {"shape", "colour"}), ("shared", {"cls"})):
        done = train(data=data, out=str(tmp_path / heads), heads=heads, **{**FIELDS, **fields})
        model, found = load_trained(done.last)
        assert isinstance(model, ViT)
        assert {name for name, part in model.heads.named_children() if isinstance(part, torch.nn.Linear)} == names
        assert done.evaluation.accuracy.keys() >= {"task.shape", "task.colour"}
        assert {name: len(classes) for name, classes in found.classes.items()} == {"shape": 2, "colour": 3}


def test_learning_without_labels_then_with_labels(photos: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"recipe_options: .*'patchs'; did you mean 'patches'"):
        run(photos, tmp_path / "dino", recipe="dino", recipe_options={"patchs": 1}, validation=0.25, epochs=1)
    alone = run(photos, tmp_path / "dino", recipe="dino", recipe_options={"prototypes": 16}, validation=0.25, epochs=1)
    assert alone.evaluation.accuracy.keys() == {"neighbours"}
    fields = {name: value for name, value in FIELDS.items() if name not in ("options", "tokens", "patch_size")}
    done = train(data=photos, out=str(tmp_path / "fine"), **{**fields, "model": str(alone.last), "epochs": 1})
    model, labels = load_trained(done.last)
    assert isinstance(model, ViT)
    assert model.config.num_classes == len(labels.classes["label"]) == 3


@pytest.mark.parametrize("name", ["timm:resnet10t", "timm:vit_tiny_patch16_224"])
def test_models_of_timm(name: str, photos: str, tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="models of timm are trained")
    fields = {"model": name, "options": {"depth": 1} if "vit" in name else {}, "tokens": None, "patch_size": None}
    done = run(photos, tmp_path / "run", epochs=1, validation=0.25, **fields)
    model, labels = load_trained(done.last)
    assert labels.preprocessing is not None
    assert labels.preprocessing.size == (32, 32)
    assert same({n: v.contiguous() for n, v in model.state_dict().items()}, weights(done.last))
    again = train(data=photos, out=str(tmp_path / "on"), epochs=1, batch_size=8, preset="tiny", model=str(done.folder))
    assert again.evaluation.accuracy["fused"] >= 0


def test_a_model_of_transformers(photos: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="a model of transformers is trained")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    fields = {"model": f"hf:{tmp_path / 'vit'}", "options": {}, "tokens": None, "patch_size": None}
    done = run(photos, tmp_path / "run", epochs=1, validation=0.25, **fields)
    model, labels = load_trained(done.last)
    assert model.config.id2label == {0: "blue", 1: "green", 2: "red"}
    assert labels.classes == {"label": ("blue", "green", "red")}


@pytest.mark.parametrize("keep", ["device", "workers"])
def test_unreadable_images_are_named_on_screen_and_in_the_log(keep: str, tmp_path: Path) -> None:
    folder = make_photos(tmp_path / "photos")
    (folder / "red" / "0.png").write_bytes(b"not an image")
    output: list[Event] = []
    done = run(
        str(folder), tmp_path / "run", epochs=1, max_unreadable=0.1, keep_data=keep, workers=0, on_event=output.append
    )
    messages = [event.text for event in output if event.kind == "note"]
    assert any("1 unreadable images" in text and "0.png" in text for text in messages)
    (line,) = read_log(done.folder / "log.jsonl", "unreadable")
    assert (line["count"], len(line["names"])) == (1, 1)
    (line,) = read_log(done.folder / "log.jsonl", "setting")
    assert line["classes"] == {"label": 3}
    assert any(event.kind == "start" and "3 classes" in event.text for event in output)


def test_features_are_distilled_with_labels_and_with_predictions(photos: str, tmp_path: Path) -> None:
    run(photos, tmp_path / "teacher", epochs=1)
    both = {"teacher": str(tmp_path / "teacher"), "epochs": 1}
    alone = run(photos, tmp_path / "alone", distillation="features", **both)
    (line,) = read_log(alone.folder / "log.jsonl", "epoch")
    assert line["losses"]["loss"] == pytest.approx((line["losses"]["cls"] + line["losses"]["features"]) / 2, rel=1e-4)
    more = run(photos, tmp_path / "more", distillation="hard", feature_weight=0.5, **both)
    (line,) = read_log(more.folder / "log.jsonl", "epoch")
    assert {"features", "distillation", "cls"} <= line["losses"].keys()


def test_the_same_classes_in_another_order_keep_the_heads(photos: str, tmp_path: Path) -> None:
    first = train(data=photos, out=str(tmp_path / "first"), **{**FIELDS, "epochs": 6})
    known = open_dataset(photos, labeled=True).classes["label"]
    turned = open_dataset(photos, classes={"label": known[::-1]}, labeled=True)
    again = train(data=turned, model=str(first.folder), out=str(tmp_path / "again"), epochs=1, batch_size=8, lr=1e-9,
                  preset="tiny", validation=None, device="cpu")  # fmt: skip
    assert again.load()[1].classes["label"] == known
    assert difference(weights(first.folder / "last"), weights(again.folder / "last")) < 1e-6
