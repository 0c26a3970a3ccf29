"""Tokens added to a trained model by training: gates that move, weights in files, resuming, and what stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import vitrail
from tests.training.toys import FIELDS, same, weights
from vitrail._distributed import World
from vitrail.errors import InvalidOption
from vitrail.surgery.saving import Settings
from vitrail.training import Event, evaluate, load_trained, train
from vitrail.training.config import Config
from vitrail.training.config.presets import ADDED_LR, GATE_RATE
from vitrail.training.model import make_models
from vitrail.training.optim.optimizer import make_optimizer, set_lr
from vitrail.training.run_directory import Run

ADDED = {name: value for name, value in FIELDS.items() if name not in ("options", "image_size", "patch_size", "tokens")}
ADDED |= {"validation": 0.25, "add_tokens": "register=2"}


@pytest.fixture(scope="module")
def base(photos: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A trained model whose patch embedding has batch norms."""
    fields = {**FIELDS, "options": {**FIELDS["options"], "stem": "convolutions"}, "validation": 0.25, "epochs": 1}
    return train(data=photos, out=str(tmp_path_factory.mktemp("base") / "run"), **fields)


@pytest.fixture(scope="module")
def run(base: Run, photos: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = str(tmp_path_factory.mktemp("added") / "run")
    return train(data=photos, out=out, **{**ADDED, "model": str(base.last)})


def added_weights(folder: Path) -> dict[str, Tensor]:
    return dict(Settings.read(folder).of("tokens"))


def test_the_tokens_are_saved_beside_the_model_and_open(run: Run) -> None:
    assert not [name for name in weights(run.last) if "vitrail_tokens" in name]
    model, labels = run.load()
    added = vitrail.AddedTokens.of(model)
    assert added.is_open
    assert [(spec.name, spec.role, spec.count) for spec in added.specs] == [("added_registers", "register", 2)]
    assert same(dict(added.tokens.state_dict()), added_weights(run.last))
    assert labels.classes["label"] == ("blue", "green", "red")
    for folder in (run.folder / "best", *sorted((run.folder / "checkpoints").glob("step-*"))):
        assert added_weights(folder).keys() == added_weights(run.last).keys()
    again = vitrail.from_pretrained(run.last)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(x), model(x))


def test_evaluation_runs_the_model_with_its_tokens(run: Run, photos: str) -> None:
    model, labels = run.load()
    whole = evaluate(run.last, photos, look=0, seconds=0).loss
    vitrail.AddedTokens.of(model).close()
    closed = evaluate((model, labels), photos, look=0, seconds=0).loss
    assert whole != closed


def test_gates_and_tokens_have_rates_of_their_own(base: Run) -> None:
    config = Config(data="x", lr=1e-4, **{**ADDED, "model": str(base.last)}).resolved(24)
    models = make_models(config, {"label": ("blue", "green", "red")}, World(0, 1, torch.device("cpu")))
    optimizer = make_optimizer(models.learner, 1e-4, 0.05, "adamw", models.rates)
    set_lr(optimizer, 5e-5)  # half of the peak
    found = {name: group for group in optimizer.param_groups for name in group["names"]}
    tokens = next(name for name in found if "values.added_registers" in name)
    gates = next(name for name in found if name.endswith("gates"))
    assert found[tokens]["lr"] == pytest.approx(ADDED_LR / 2)
    assert found[gates]["lr"] == pytest.approx(GATE_RATE * ADDED_LR / 2)
    assert found[tokens]["weight_decay"] == found[gates]["weight_decay"] == 0
    assert {group["lr"] for name, group in found.items() if "vitrail_tokens" not in name} == {5e-5}


def test_the_model_stays_if_only_the_tokens_learn(base: Run, photos: str, tmp_path: Path) -> None:
    fields = {**ADDED, "model": str(base.last), "train_only": "tokens", "gate": -1}
    done = train(data=photos, out=str(tmp_path / "run"), **fields)
    assert any("running_mean" in name for name in weights(base.last))
    assert same(weights(done.last), weights(base.last)), "weights, and statistics of batch norms"
    gates = added_weights(done.last)["gates"]
    assert (gates + 1).abs().min() > 0.05
    kept = Config.from_yaml(done.folder / "config.yaml")
    assert (kept.preset, kept.train_only, kept.gate) == ("tiny", "tokens", -1)


def test_resuming_is_exact(base: Run, photos: str, tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if event.kind == "train" and event.done == 4:
            raise KeyboardInterrupt

    fields = {**ADDED, "model": str(base.last), "ema": 0.9}
    with pytest.raises(KeyboardInterrupt):
        train(data=photos, out=str(tmp_path / "stopped"), save_every="1 steps", on_event=stop, **fields)
    resumed = train(out=str(tmp_path / "stopped"), resume=True)
    whole = train(data=photos, out=str(tmp_path / "whole"), **fields)
    assert same(weights(resumed.last), weights(whole.last))
    assert same(added_weights(resumed.last), added_weights(whole.last))


def test_fine_tuning_again_keeps_the_tokens(run: Run, photos: str, tmp_path: Path) -> None:
    fields = {**ADDED, "model": str(run.last), "add_tokens": None, "lr": 1e-30, "added_lr": 1e-30}
    again = train(data=photos, out=str(tmp_path / "again"), **fields)
    before, after = added_weights(run.last), added_weights(again.last)
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    with pytest.raises(InvalidOption, match="added tokens already"):
        train(data=photos, out=str(tmp_path / "twice"), **{**fields, "add_tokens": "register=1"})


def test_a_task_token_learns_its_column_and_the_model_keeps_its_head(base: Run, tmp_path: Path) -> None:
    images = torch.randint(0, 50, (24, 3, 32, 32), dtype=torch.uint8)
    shape = torch.arange(24) % 2
    images[shape == 1] += 200
    data = TensorDataset(images, torch.stack([shape, torch.arange(24) % 3], 1))
    fields = {**ADDED, "model": str(base.last), "tasks": "shape,colour", "add_tokens": "shape,colour"}
    done = train(
        data=data, out=str(tmp_path / "run"), **{**fields, "train_only": "tokens", "epochs": 16, "augment": "none"}
    )
    assert done.evaluation.accuracy["task.shape"] == 1
    assert done.evaluation.accuracy.keys() == {"task.shape", "task.colour"}
    assert same(weights(done.last), weights(base.last))
    model, labels = load_trained(done.last)
    assert {name: len(classes) for name, classes in labels.classes.items()} == {"shape": 2, "colour": 3}
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    other = TensorDataset(images, torch.stack([torch.arange(24) % 4, torch.arange(24) % 3], 1))
    with pytest.raises(InvalidOption, match="'shape' with 2 outputs"):
        train(data=other, out=str(tmp_path / "other"), **{**fields, "model": str(done.last), "add_tokens": None})


def test_an_added_distillation_token_learns_from_the_teacher(base: Run, photos: str, tmp_path: Path) -> None:
    fields = {**ADDED, "model": str(base.last), "teacher": str(base.last), "add_tokens": "distillation", "epochs": 1}
    done = train(data=photos, out=str(tmp_path / "run"), **fields)
    assert done.evaluation.accuracy.keys() == {"fused", "cls", "distillation"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"add_tokens": "cls"}, "'cls' is a class token"),
        ({"add_tokens": "shape"}, "add_tokens: unknown token 'shape'"),
        ({"add_tokens": "register=0"}, "add_tokens: 'register=0'"),
        ({"add_tokens": "distillation"}, "needs a teacher"),
        ({"add_tokens": None, "train_only": "tokens"}, "needs tokens to train"),
        ({"model": "vit_tiny_patch16"}, "add_tokens is for models that are trained"),
        ({"shard": "fsdp"}, "shard=fsdp"),
        ({"compile": "whole"}, "compile=whole"),
        ({"gate": 21}, "gate=21"),
        ({"added_lr": 0}, "added_lr=0"),
    ],
)
def test_what_cannot_be_added_is_refused_first(
    base: Run, photos: str, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidOption, match=words):
        train(data=photos, out=str(tmp_path / "run"), **{**ADDED, "model": str(base.last), **options})
    assert not (tmp_path / "run").exists()


def test_other_libraries_get_tokens(photos: str, tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="a model of timm gets tokens")
    fields = {**ADDED, "model": "timm:vit_tiny_patch16_224", "options": {"depth": 2, "img_size": 32}, "epochs": 1}
    done = train(data=photos, out=str(tmp_path / "run"), **fields)
    model, _ = load_trained(done.last)
    assert vitrail.AddedTokens.of(model).is_open
    assert not [name for name in weights(done.last) if "vitrail_tokens" in name]
