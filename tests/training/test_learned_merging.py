"""Training with a merging method that learns: its loss, its weights in files, resuming, and applying it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import vitrail
from tests.training.models import ANIMALS, tiny
from tests.training.toys import FIELDS, same, weights
from vitrail.errors import InvalidOption, ModelLoadError, UntrainedMethod
from vitrail.merging.methods.learned import DTEM
from vitrail.models import ViT
from vitrail.training import evaluate, read_log, train
from vitrail.training.config import Config
from vitrail.training.objective.learner import Learner
from vitrail.training.objective.objective import Objective
from vitrail.training.run_directory import Run

LEARNED: dict[str, Any] = {**FIELDS, "validation": 0.25, "merge": "r=3,method=dtem,method.reconstruction=0.5"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.training.toys import make_photos

    return str(make_photos(tmp_path_factory.mktemp("learned") / "photos"))


@pytest.fixture(scope="module")
def run(photos: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(data=photos, out=str(tmp_path_factory.mktemp("learned") / "run"), **LEARNED)


def method_weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "method.safetensors")


def test_the_weights_of_the_method_are_beside_the_model(run: Run) -> None:
    model, labels = run.load()
    assert not [name for name in (*model.state_dict(), *weights(run.last)) if "vitrail_method" in name]
    assert sorted(method_weights(run.last)) == sorted(
        [f"metric.{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias")] + ["passes"]
    )
    assert labels.trained["merge"]["method"] == {"name": "dtem", "reconstruction": 0.5}
    assert labels.trained["merge"]["r"] == 3
    for folder in (run.folder / "best", *sorted((run.folder / "checkpoints").glob("step-*"))):
        assert method_weights(folder).keys() == method_weights(run.last).keys()


def test_the_loss_of_the_method_is_part_of_the_objective(run: Run) -> None:
    losses = [line["losses"] for line in read_log(run.folder / "log.jsonl", "epoch")]
    assert all(0 < each["merging"] < each["loss"] for each in losses)
    assert all(each["loss"] == pytest.approx(each["cls"] + each["merging"], rel=1e-4) for each in losses)


def test_a_learner_adds_the_loss_of_the_method() -> None:
    torch.manual_seed(0)
    model = tiny().train()
    merging = vitrail.merge(model, r=3, method={"name": "dtem", "reconstruction": 2.0})
    plain = Learner(model, Objective(model, ANIMALS))
    learner = Learner(model, plain.objective, method_loss=merging.loss)
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([[0], [1], [2], [0]])
    without, terms = plain(images, labels), learner(images, labels)
    assert float(merging.loss().detach()) > 0.01
    torch.testing.assert_close(terms.total, without.total + merging.loss())
    assert terms.parts.keys() == {*without.parts, "merging"}
    terms.total.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in merging.method.parameters())


@pytest.mark.parametrize("form", ["run", "last", "vitrail:", "file", "path"])
def test_a_trained_method_is_applied_by_its_path(run: Run, form: str) -> None:
    path: Any = {
        "run": str(run.folder), "last": str(run.last), "vitrail:": f"vitrail:{run.last}",
        "file": str(run.last / "method.safetensors"), "path": run.last,
    }[form]  # fmt: skip
    model, _ = run.load()
    before = model(images())
    with vitrail.merge(model, r=3, method=path) as merging:
        assert isinstance(merging.method, DTEM)
        stored = method_weights(run.folder / "best" if form == "run" else run.last)
        assert same(dict(merging.method.state_dict()), stored)
        assert merging.method.reconstruction == 0.5
        merged = model(images())
        config = merging.config
    assert not torch.equal(merged, before)
    assert torch.equal(model(images()), before)
    assert config["method"] == str(path)
    with vitrail.merge(model, **config):
        assert torch.equal(model(images()), merged)


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_a_method_is_saved_and_loaded_without_training_runs(tmp_path: Path, run: Run) -> None:
    """The loop of the documentation."""
    model, _ = run.load()
    model.train()
    merging = vitrail.merge(model, r=3, method={"name": "dtem", "reconstruction": 0.1})
    optimizer = torch.optim.AdamW(merging.method.parameters(), lr=1e-3)  # the model itself stays as it is
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(images()), torch.tensor([0, 1])) + merging.loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    merging.save_method(tmp_path / "dtem.safetensors")
    wanted = model.eval()(images())

    again, _ = run.load()
    with vitrail.merge(again, r=3, method=vitrail.load_method(tmp_path / "dtem.safetensors")) as found:
        assert torch.equal(again(images()), wanted)
        assert int(found.method.passes) == 2  # type: ignore[arg-type]


def test_evaluation_merges_by_the_method_of_the_run(run: Run, photos: str) -> None:
    found = evaluate(run.last, photos, merge="r=3", look=0, seconds=0)
    named = evaluate(run.last, photos, merge="r=3,method=dtem", look=0, seconds=0)
    by_path = evaluate(run.last, photos, merge=f"r=3,method={run.last}", look=0, seconds=0)
    assert found.merge is not None
    assert found.merge["method"] == str(run.last)
    assert found.merge == named.merge == by_path.merge
    assert found.loss == named.loss == by_path.loss
    tome = evaluate(run.last, photos, merge="r=3,method=tome", look=0, seconds=0)
    assert tome.merge is not None
    assert tome.merge["method"] == "tome"
    assert tome.loss != found.loss
    model, _ = run.load()
    with pytest.raises(UntrainedMethod, match="directory of a run"):
        evaluate(model, photos, merge="r=3,method=dtem", look=0, seconds=0)


def test_the_method_alone_learns(run: Run, photos: str, tmp_path: Path) -> None:
    fields = {**LEARNED, "model": str(run.last), "train_only": "method", "out": str(tmp_path / "run")}
    for name in ("options", "tokens", "image_size", "patch_size"):
        fields.pop(name)
    again = train(data=photos, **fields)
    assert same(weights(again.last), weights(run.last))
    assert not same(method_weights(again.last), method_weights(run.last))
    settings = Config.from_yaml(again.folder / "config.yaml")
    assert settings.train_only == "method"
    assert settings.drop_path == 0
    more = train(data=photos, **{**fields, "merge": f"r=3,method={again.last}", "out": str(tmp_path / "more")})
    passes = [int(method_weights(each)["passes"]) for each in (again.last, more.last)]
    assert passes[1] == 2 * passes[0]
    assert vitrail.load_method(more.last).config == str(more.last)


@pytest.mark.parametrize(
    ("merge", "words"),
    [
        ("r=3,method=tome", "method with parameters"),
        (None, "method with parameters"),
        ("r=3,method=dtem,from_epoch=1", "leave out from_epoch"),
        ("r=0,method=dtem", "r=0 in every layer"),
    ],
)
def test_training_only_a_method_needs_one_that_learns(
    photos: str, tmp_path: Path, merge: str | None, words: str
) -> None:
    with pytest.raises(InvalidOption, match=words):
        train(data=photos, out=str(tmp_path / "run"), **{**FIELDS, "merge": merge, "train_only": "method"})
    assert not (tmp_path / "run").exists()


def test_resuming_is_exact(photos: str, tmp_path: Path, run: Run) -> None:
    def stop(event: Any) -> None:
        if event.kind == "train" and event.done == 4:
            raise KeyboardInterrupt

    folder = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        train(data=photos, out=str(folder), save_every="1 steps", on_event=stop, **{**LEARNED, "ema": 0.9})
    resumed = train(out=str(folder), resume=True)
    whole = train(data=photos, out=str(tmp_path / "whole"), **{**LEARNED, "ema": 0.9})
    assert same(weights(resumed.last), weights(whole.last))
    assert same(method_weights(resumed.last), method_weights(whole.last))
    assert not same(method_weights(whole.last), method_weights(run.last)), "weights are averaged"


def test_r_ramps_up(photos: str, tmp_path: Path) -> None:
    fields = {**LEARNED, "merge": "r=3,method=dtem,from_epoch=1"}
    found = train(data=photos, out=str(tmp_path / "run"), **fields)
    lines = list(read_log(found.folder / "log.jsonl", "epoch"))
    assert [line["merge"]["r"] for line in lines] == [[0, 0], [3, 3], [3, 3]]
    assert int(method_weights(found.last)["passes"]) == 4


def test_a_method_that_decides_by_itself_trains(photos: str, tmp_path: Path) -> None:
    found = train(data=photos, out=str(tmp_path / "run"), **{**LEARNED, "merge": "method=avit", "validation": None})
    model = ViT.from_pretrained(found.last)
    with vitrail.merge(model, method=found.last) as merging, merging.track() as trace:
        model(images())
    assert merging.method.name == "avit"
    assert trace.tokens_per_layer.shape == (2, 2)


def test_learned_numbers_are_saved_as_a_schedule(photos: str, tmp_path: Path) -> None:
    merge = {"method": {"name": "diffrate", "target": 0.7, "step": 1}}
    fields = {**LEARNED, "merge": merge, "train_only": "method", "lr": 0.3, "ema": 0}
    found = train(data=photos, out=str(tmp_path / "run"), **fields)
    model, labels = found.load()
    trained = labels.trained["merge"]
    assert trained["method"] == "tome"
    assert sum(trained["r"]) > 0
    with vitrail.merge(model, **trained) as merging:
        output, counts = model(images()), merging.r
        share = merging.flops() / merging.flops(merged=False)
    assert 0.5 < share < 0.9
    with vitrail.merge(model, method=found.last) as merging:
        assert merging.r == counts == trained["r"]
        assert torch.equal(model(images()), output)
    lines = list(read_log(found.folder / "log.jsonl", "epoch"))
    assert lines[-1]["merge"]["r"] == counts
    learned = evaluate(found.last, photos, merge="method=diffrate", look=0, seconds=0)
    assert learned.merge is not None
    assert learned.merge["r"] == counts
    other = evaluate(found.last, photos, merge="r=1", look=0, seconds=0)
    assert other.merge is not None
    assert other.merge["r"] == 1


def test_directories_without_a_method_are_refused(tmp_path: Path, run: Run) -> None:
    model, _ = run.load()
    for call in (lambda: vitrail.merge(model, r=3, method=tmp_path), lambda: vitrail.load_method(tmp_path)):
        with pytest.raises(ModelLoadError, match="has no trained merging method"):
            call()
    broken = tmp_path / "method.safetensors"
    broken.write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match="is not a file of save_method"):
        vitrail.merge(model, r=3, method=str(tmp_path))
    with vitrail.merge(model, r=3) as merging, pytest.raises(InvalidOption, match="methods with parameters"):
        merging.save_method(broken)
    assert broken.read_bytes() == b"nothing"


@pytest.mark.parametrize(
    ("text", "words"), [("r=3,keep=0.5,method=dtem", "exactly one"), ("r=3,method.reconstruction=1", "method=dtem")]
)
def test_wrong_settings_are_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        Config(data="photos", merge=text)
