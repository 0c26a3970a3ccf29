"""Training configuration: every mistake is an error that names the field, and every value is saved."""

from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest

from tests.training.toys import ROOT
from vitrail.errors import InvalidOption, TrainingError
from vitrail.models import ViT
from vitrail.tokens import Role, TokenSpec
from vitrail.training import PRESETS, Config, train
from vitrail.training.config import OPTIONS, options_table, read_yaml
from vitrail.training.config.presets import batch_for, ema_for, lr_for
from vitrail.training.config.syntax import MergePlan, read_interval, read_merge, read_tokens
from vitrail.training.model import build

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"data": None}, "data is missing"),
    "unknown field": ({"epoch": 3}, r"unknown training option 'epoch'; did you mean 'epochs'"),
    "unknown model": ({"model": "vit_tiny_patch_16"}, r"model='vit_tiny_patch_16'.*did you mean 'vit_tiny_patch16'"),
    "unknown preset": ({"preset": "smal"}, r"preset='smal'.*did you mean 'small'"),
    "unknown augmentation": ({"augment": "heavy"}, "augment='heavy': expected one of none, flip, light"),
    "no epochs": ({"epochs": 0}, "epochs=0: expected an integer of at least 1"),
    "half an epoch": ({"epochs": 0.5}, r"epochs=0\.5: expected an integer"),
    "true epochs": ({"epochs": True}, "epochs=True: expected an integer"),
    "negative lr": ({"lr": -1.0}, r"lr=-1\.0: expected a number above 0"),
    "lr is a word": ({"lr": "fast"}, "lr='fast': expected a number above 0"),
    "all smoothed": ({"smoothing": 1.0}, r"smoothing=1\.0: expected a number of at least 0 and below 1"),
    "more than all": ({"share": 1.5}, r"share=1\.5: expected a number above 0 and at most 1"),
    "validation of all": ({"validation": 1.0}, r"validation=1\.0: expected a fraction between 0 and 1"),
    "distillation without teacher": (
        {"tokens": "cls,distillation"},
        "tokens: a distillation token needs a teacher",
    ),
    "distilled model without teacher": (
        {"model": "deit_tiny_patch16_distilled"},
        "model: a distillation token needs a teacher",
    ),
    "outputs for dropped patches": (
        {"recipe": "dino", "recipe_options": {"patches": 1.0}, "options": {"patch_drop": 0.5}},
        "recipe_options: patches needs every patch",
    ),
    "features of dropped patches": (
        {"teacher": "timm:x", "feature_weight": 1.0, "options": {"patch_drop": 0.5}},
        "feature_weight needs every patch",
    ),
    "graphs of a word": ({"graphs": "yes"}, "graphs='yes': expected true or false"),
    "soft without teacher": ({"distillation": "soft"}, "distillation='soft' needs a teacher"),
    "temperature of hard": (
        {"teacher": "t", "distillation": "hard", "temperature": 2},
        "temperature needs distillation='soft'",
    ),
    "unknown token": ({"tokens": "cls,registr=4"}, r"tokens: unknown token 'registr'.*did you mean 'register'"),
    "no number of tokens": ({"tokens": "register=many"}, "tokens: 'register=many' has no valid count"),
    "shared by nothing": ({"heads": "shared"}, "heads='shared' needs tasks"),
    "tasks and labels": ({"tasks": "a,b", "labels": "c"}, "labels='c' and tasks="),
    "task twice": ({"tasks": "a,a"}, r"tasks=\['a', 'a'\]: expected each column once"),
    "task is no name": ({"tasks": "a b"}, "tasks: 'a b' cannot name a token"),
    "weight of no task": ({"tasks": "a,b", "task_weights": {"c": 1}}, "task_weights: 'c' is not a task"),
    "tokens of another model": ({"model": "timm:resnet18", "tokens": "cls"}, "tokens is for Vitrail models"),
    "patches of another model": ({"model": "timm:resnet18", "patch_size": 8}, "patch_size is for Vitrail models"),
    "weights that do not exist": ({"pretrained": True}, "no pretrained weights"),
    "long warm-up": ({"epochs": 2, "warmup_epochs": 3}, "warmup_epochs=3 exceeds epochs=2"),
    "parts that do not fit": ({"batch_size": 8, "accumulate": 3}, "accumulate=3 does not divide batch_size=8"),
    "merge without amount": ({"merge": "schedule=constant"}, "exactly one of r, keep and gflops"),
    "merge by unknown": ({"merge": {"rr": 8}}, "merge: unknown key 'rr'"),
    "merge without value": ({"merge": "r"}, "merge: 'r' has no value"),
    "merge from half": ({"merge": {"r": 8, "from_epoch": 0.5}}, r"merge: from_epoch=0\.5"),
    "save now and then": ({"save_every": "often"}, "save_every='often': expected a number of epochs"),
    "options is a list": ({"options": [1]}, r"options=\[1\]: expected a mapping"),
    "dino with labels' things": (
        {"recipe": "dino", "mixup": 0.2},
        "recipe='dino' .*does not take mixup",
    ),
    "dino with one view": ({"recipe": "dino", "augment": "flip"}, "needs views that differ"),
    "no labels to learn": ({"labels": "none"}, "labels='none' needs recipe='dino'"),
    "width given twice": ({"options": {"drop_path": 0.1}}, "options: drop_path has a field of its own"),
    "odd size": ({"image_size": 30}, r"image_size \(30, 30\) is not a whole number of patches"),
    "mixed in pairs": (
        {"mixup": 0.1, "batch_size": 6, "accumulate": 2},
        "batch_size=6 is not divisible by 4.*mixed in pairs",
    ),
    "larger than the data": ({"batch_size": 512}, "batch_size=512 exceeds the 24 training images"),
    "no such column": ({"tasks": "colour,shape"}, "colour"),
    "no such teacher": ({"teacher": "timm:no_such_model"}, "teacher='timm:no_such_model'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_name_the_field_and_write_nothing(mistake: str, photos: str, tmp_path: Path) -> None:
    given, expected = MISTAKES[mistake]
    fields = {"data": photos, "preset": "tiny", "validation": None, "device": "cpu", **given}
    with pytest.raises(InvalidOption if "teacher=" not in expected else Exception, match=expected):
        train(out=str(tmp_path / "run"), **fields)
    assert not list(tmp_path.iterdir())


def test_a_non_empty_directory_is_left_alone(photos: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(TrainingError, match="not a run directory; nothing was changed"):
            train(data=photos, out=str(tmp_path), preset="tiny", overwrite=overwrite, device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_decide_everything(preset: str) -> None:
    for count in (9, 100, 9469, 1_281_167):
        config = Config(data="x", preset=preset).resolved(count)
        derived = ("side", "image_size", "patch_size", "workers", "pretrained", "labels", "graphs", "modality")
        derived += ("kind", "masks", "validation_masks", "mask_classes")
        given = ("tokens", "teacher", "distillation", "distillation_weight", "temperature", "merge", "train_only")
        given += ("add_tokens", "diagnostics")
        assert [n for n, v in config.to_dict().items() if v is None and n not in derived + given] == []
        assert config.batch_size is not None
        assert config.repeats is not None
        assert config.batch_size <= count
        assert config.batch_size % config.repeats == 0
        assert config.resolved(count) == config


def test_given_options_override_the_preset() -> None:
    config = Config(data="x", preset="full", epochs=7, lr=0.5, ema=0.0, mixup=0.0).resolved(9469)
    assert (config.epochs, config.lr, config.ema, config.mixup, config.cutmix) == (7, 0.5, 0.0, 0.0, 1.0)
    assert config.warmup_epochs == 1


def test_numbers_that_presets_derive() -> None:
    assert lr_for("full", 960) == pytest.approx(5e-4 * 960 / 512, rel=0.01)
    assert lr_for("small", 64) == pytest.approx(5e-4)
    assert batch_for("small", 100, 1) == 64
    assert batch_for("full", 100, 3) == 60
    assert ema_for(5000) == pytest.approx(0.99)
    assert ema_for(10**9) == 0.9999


def test_yaml_round_trip(tmp_path: Path) -> None:
    tokens = (TokenSpec("cls", Role.CLASS), TokenSpec("memory", Role.REGISTER, 2))
    config = Config(
        data="x", tokens=tokens, merge="r=8,schedule=decreasing,over_epochs=3", teacher="t", save_every="20 steps"
    ).resolved(1000)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    again = Config.from_yaml(path)
    assert again.to_dict() == config.to_dict()
    assert again.merge == config.merge
    assert Config.from_yaml(path, epochs=30).epochs == 30
    path.write_text("data: x\nlr: 1e-3\ncompile: off\n")  # YAML 1.1 reads text and a truth value
    read = Config.from_yaml(path)
    assert (read.lr, read.compile) == (1e-3, "off")
    for text, expected in (("- 1", "holds a list"), ("a: [", "cannot read .* as YAML")):
        path.write_text(text)
        with pytest.raises(InvalidOption, match=expected):
            Config.from_yaml(path)


def test_tokens_by_text() -> None:
    specs = read_tokens("cls=2, register=4, breed", {"breed": 37})
    assert [(spec.name, spec.role.value, spec.count, spec.classes) for spec in specs] == [
        ("cls", "class", 2, None),
        ("registers", "register", 4, None),
        ("breed", "task", 1, 37),
    ]
    assert read_tokens([{"name": "breed", "role": "task"}], {"breed": 37})[0].classes == 37


def test_tokens_of_class_attention_enter_there() -> None:
    config = Config(
        data="x", model="cait_xxs24", tokens="cls,register=2", options={"depth": 2, "width": 32, "heads": 2}
    )
    model = build(config.resolved(100), {"label": ("a", "b")}).model
    assert isinstance(model, ViT)
    assert [(spec.name, spec.enters) for spec in model.config.tokens] == [("cls", -1), ("registers", 0)]


def test_columns_without_a_token_are_for_the_class_token() -> None:
    fields = {"tasks": "breed,species", "tokens": "cls,species", "preset": "tiny", "options": {"depth": 1}}
    classes = {"breed": ("a", "b", "c"), "species": ("cat", "dog")}
    model = build(Config(data="x", **fields).resolved(100), classes).model  # type: ignore[arg-type]
    assert isinstance(model, ViT)
    assert model.config.num_classes == 3
    assert model.heads.species.out_features == 2  # type: ignore[union-attr]


def test_merging_by_text_and_by_epoch() -> None:
    plan = read_merge("r=8/4/0,from_epoch=2,over_epochs=8,proportional=false")
    assert plan == MergePlan({"r": [8, 4, 0], "proportional": False}, 2, 8)
    shares = [plan.share_at(epoch) for epoch in range(12)]
    assert shares == [0, 0, 0.2, 0.2, 0.4, 0.4, 0.6, 0.6, 0.8, 0.8, 1, 1]
    assert [MergePlan({}, 0, 1).share_at(epoch) for epoch in range(2)] == [0.5, 1]
    assert read_merge(plan) is plan
    assert read_merge(None) is None


def test_intervals() -> None:
    assert [read_interval(value, 4) for value in ("3 steps", "1 step", 2, "5 epochs")] == [3, 1, 8, 20]


RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipes_of_ours_can_be_read_and_built(file: Path) -> None:
    given = {"data": "photos", **read_yaml(file)}
    if given.get("distillation"):
        given["teacher"] = "timm:resnet18"
    config = Config.from_dict(given).resolved(9469)
    labels = dict.fromkeys(config.tasks or ("label",), tuple("abcdefghij"))
    model = build(config, labels).model
    if file.stem == "imagenette-tiny":
        assert sum(value.numel() for value in model.parameters()) <= 6_000_000
        assert [(spec.role, spec.count) for spec in model.config.tokens] == [  # type: ignore[union-attr]
            (Role.CLASS, 1), (Role.DISTILLATION, 1), (Role.REGISTER, 4),
        ]  # fmt: skip


@pytest.mark.parametrize("name", ["optimizer", "model", "seed", "recipe", "keep_data", "share", "shard"])
def test_a_field_that_is_empty_is_named(name: str) -> None:
    with pytest.raises(InvalidOption, match=f"^{name} is empty; give a value, or leave it out for "):
        Config(data="photos", **{name: None})


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_declared_in_full(name: str) -> None:
    option = OPTIONS[name]
    assert option.help.endswith(".")
    assert option.flags[-1].startswith("--" + name.replace("_", "-"))
    if option.default is not MISSING and option.default is not None:
        assert option.check(option.default) == option.default
    if name not in ("data", "validation", "tokens", "add_tokens"):  # these take any object
        with pytest.raises(InvalidOption, match=name):
            option.check(object())


def test_the_docs_have_the_table_of_options() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    found = page.partition("<!-- options -->\n")[2].partition("<!-- end of options -->")[0]
    assert found == options_table(), "run python tools/training_options.py"
