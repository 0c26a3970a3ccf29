"""The stability diagnostic: gradients and losses of every step, exact on resume, without effect on training."""

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tests.training.toys import FIELDS, same, weights
from vitrail.cli import app
from vitrail.errors import Diverged, InvalidOption, TrainingError
from vitrail.models import create_model
from vitrail.training import Config, Event, Run, read_log, train
from vitrail.training.objective.learner import Learner
from vitrail.training.objective.objective import Terms
from vitrail.training.stability.monitor import KIND, Monitor
from vitrail.training.stability.plot import plot_stability
from vitrail.training.stability.result import find_spikes, read_stability

SCALED = {**FIELDS, "options": {**FIELDS["options"], "layer_scale": 0.01}, "log_every": 4}


def run(photos: str, folder: Path, **fields: Any) -> Run:
    return train(data=photos, out=str(folder), **{**SCALED, **fields})


@pytest.fixture(scope="module")
def watched(photos: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of nine steps with the diagnostic: lines after 4, 8 and 9 steps."""
    return run(photos, tmp_path_factory.mktemp("stability") / "run", diagnostics="stability", drop_path=0.1).folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return read_log(folder / "log.jsonl", KIND)


def test_training_is_the_same_with_and_without(photos: str, watched: Path, tmp_path: Path) -> None:
    plain = run(photos, tmp_path / "plain", drop_path=0.1)
    assert same(weights(watched / "last"), weights(plain.last))
    assert lines(plain.folder) == []


def test_losses_and_gradients_are_those_of_the_steps(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, norms = torch.nn.utils.clip_grad_norm_, []

    def clip(parameters: Any, limit: float) -> Any:
        norms.append(real(parameters, limit))
        return norms[-1]

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    done = run(photos, tmp_path / "run", diagnostics="stability", accumulate=2, epochs=2)
    found = read_stability(done.folder)
    assert found.gradient == pytest.approx([float(one) for one in norms], rel=1e-5)
    epochs = read_log(done.folder / "log.jsonl", "epoch")
    for number, line in enumerate(epochs):
        assert sum(found.loss[3 * number : 3 * number + 3]) / 3 == pytest.approx(line["losses"]["loss"], rel=1e-6)
    for line in lines(done.folder):
        layers = line["layers"]
        assert all(mean <= top for mean, top in zip(layers["gradient"], layers["largest_gradient"], strict=True))
    last = lines(done.folder)[-1]  # the interval of steps 4 and 5
    parts = [*last["layers"]["largest_gradient"], last["other_gradient"]]
    assert max(parts) <= max(last["gradient"])


def test_gradients_by_layer_against_a_loop() -> None:
    model = create_model("vit_tiny_patch16", image_size=16, patch_size=8, width=16, depth=2, heads=2, num_classes=3)
    monitor = Monitor(model, torch.nn.ModuleList([model]), torch.device("cpu"))
    model(torch.randn(2, 3, 16, 16)).square().sum().backward()
    squares: dict[str, float] = {}
    for name, weight in model.named_parameters():
        layer = name.split(".")[1] if name.startswith("blocks.") else "others"
        squares[layer] = squares.get(layer, 0.0) + (0 if weight.grad is None else weight.grad.double().square().sum())
    monitor.record_gradients()
    monitor.add([Terms(torch.tensor(2.0), {}), Terms(torch.tensor(4.0), {})])
    values = monitor.take(None, lambda values: None, 1)
    assert values["loss"] == [3.0]
    assert values["layers"]["gradient"] == pytest.approx([float(squares[layer]) ** 0.5 for layer in ("0", "1")])
    assert values["other_gradient"] == pytest.approx(float(squares["others"]) ** 0.5)
    assert values["gradient"] == pytest.approx([float(sum(squares.values())) ** 0.5])


def test_stopped_and_resumed_logs_the_same(photos: str, watched: Path, tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if event.kind == "train" and event.done == 7:
            raise KeyboardInterrupt

    fields = {"diagnostics": "stability", "drop_path": 0.1, "save_every": "2 steps"}
    with pytest.raises(KeyboardInterrupt):
        run(photos, tmp_path / "run", on_event=stop, **fields)
    resumed = train(out=str(tmp_path / "run"), resume=True)  # from step 6, in the middle of an interval
    assert same(weights(resumed.last), weights(watched / "last"))
    assert [line["step"] for line in lines(resumed.folder)] == [4, 8, 9]
    assert lines(resumed.folder) == lines(watched)


def test_diagnostics_begin_in_a_resumed_run(photos: str, tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if event.kind == "train" and event.done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(photos, tmp_path / "run", on_event=stop, save_every="2 steps")
    found = read_stability(train(out=str(tmp_path / "run"), resume=True, diagnostics="stability").folder)
    assert (found.first, len(found.loss)) == (6, 3)


def test_the_interval_before_a_divergence_is_logged(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, steps = Learner.forward, []

    def forward(self: Learner, *args: Any) -> Terms:
        terms = real(self, *args)
        steps.append(1)
        return terms._replace(total=terms.total * float("nan")) if len(steps) == 6 else terms

    monkeypatch.setattr(Learner, "forward", forward)
    with pytest.raises(Diverged):
        run(photos, tmp_path / "run", diagnostics="stability")
    assert [line["step"] for line in lines(tmp_path / "run")] == [4, 6]
    found = read_stability(tmp_path / "run")
    assert [loss == loss for loss in found.loss] == [True] * 5 + [False]
    assert len(found.intervals) == 2
    assert len(found.measured) == 1


def test_timm_models_have_layers_and_convnets_one_norm_for_all(photos: str, tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="needs timm")
    fields = {"tokens": None, "patch_size": None, "epochs": 1, "diagnostics": "stability"}
    options = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8, "init_values": 0.01}
    vit = run(photos, tmp_path / "vit", model="timm:vit_tiny_patch16_224", **{**fields, "options": options})
    found = read_stability(vit.folder)
    assert found.measured[-1].attention_scale == pytest.approx((0.01,) * 2, rel=0.2)
    assert found.held_back == {"attention": (0, 1), "mlp": (0, 1)}
    notes: list[str] = []
    convnet = run(
        photos, tmp_path / "convnet", model="timm:test_resnet", on_event=lambda event: notes.append(event.text),
        **{**fields, "options": {}},
    )  # fmt: skip
    found = read_stability(convnet.folder)
    assert any("gradients of all layers together only" in note for note in notes)
    assert len(found.gradient) == len(found.loss) == 3
    assert list(found.rows()) == []
    assert Image.open(io.BytesIO(plot_stability(found))).format == "PNG"


def test_self_distillation_is_measured_on_one_view(photos: str, tmp_path: Path) -> None:
    fields = {"recipe": "dino", "recipe_options": {"prototypes": 16}, "epochs": 1, "tokens": "cls"}
    found = read_stability(run(photos, tmp_path / "run", diagnostics="stability", **fields).folder)
    assert len(found.measured[-1].stream) == 2


def test_table_and_plot_of_the_command(watched: Path, tmp_path: Path) -> None:
    out = tmp_path / "plot.png"
    result = CliRunner().invoke(app, ["stability", str(watched), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "9 steps, 0 spikes" in result.output
    assert "attention is scaled to less than a tenth in layers 0, 1" in result.output
    row = next(row for row in read_stability(watched).rows() if row["layer"] == 1)
    assert f"{row['mlp'][-1]:.3g}" in result.output
    assert row["mlp"][-1] == pytest.approx(
        lines(watched)[-1]["layers"]["mlp"][1] / lines(watched)[-1]["layers"]["stream"][1]
    )
    with Image.open(out) as image:
        assert image.width > image.height
    plain = CliRunner().invoke(app, ["stability", str(tmp_path)])
    assert plain.exit_code == 2
    assert "could not be read" in plain.output
    (tmp_path / "log.jsonl").write_text(json.dumps({"kind": "epoch", "step": 1}))
    with pytest.raises(TrainingError, match="no measurements"):
        read_stability(tmp_path)


def noisy(count: int) -> list[float]:
    draw = torch.Generator().manual_seed(0)
    steps = torch.arange(count)
    return (2 * (-steps / 200).exp() + 0.05 * torch.randn(count, generator=draw)).tolist()


def test_spikes() -> None:
    losses = noisy(400)
    assert find_spikes(losses) == []
    for step, more in ((150, 2.0), (151, 3.0), (152, 2.5), (300, float("nan"))):
        losses[step] += more
    first, second = find_spikes(losses, first=10)
    assert (first.first, first.last, first.ended) == (160, 162, True)
    assert first.loss == losses[151]
    assert first.usual == pytest.approx(sorted(losses[50:150])[50], abs=0.1)
    assert (second.first, second.last) == (310, 310)
    (third,) = find_spikes([*noisy(200), *[5.0] * 30])
    assert (third.first, third.last, third.ended) == (200, 229, False)
    assert all(one.last < other.first for one, other in pairwise([first, second]))


def test_split_gradients_are_refused() -> None:
    with pytest.raises(InvalidOption, match="diagnostics=stability needs whole gradients"):
        Config(data="photos", diagnostics="stability", shard="fsdp")
