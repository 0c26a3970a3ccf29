"""The depth study at its reduced size, and its norms by layer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import vitrail
from experiments.common import runner as runner_module
from experiments.common.readme import write_readme
from experiments.common.results import RESULTS, SEARCH, best_point, read_rows, rows_of
from experiments.common.runner import Runner
from experiments.common.tables import result_table
from experiments.depth.study import STUDY, largest_rise, norms_by_layer
from vitrail.errors import Diverged
from vitrail.models import ViT, ViTConfig, create_model
from vitrail.models.config import depth_rule

REDUCED = replace(
    STUDY.at_reduced_size(),
    base={**STUDY.at_reduced_size().base, "epochs": 2},
    search=[point for point in STUDY.points() if point["warmup_epochs"] == 1],
    draws=1,
    seeds=(0,),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a shallow plain model, and a shallow and a deep one with both additions."""
    out = tmp_path_factory.mktemp("depth")
    runner = Runner(REDUCED, out, device="cpu")
    runner.search("(plain|both), 12|both, 36")
    runner.run("(plain|both), 12|both, 36")
    assert runner.failed == 0
    return out


def test_arms_differ_only_in_depth_layer_scale_and_class_attention() -> None:
    for arm in STUDY.arms:
        kind, depth = arm.name.split(", ")
        fields = STUDY.fields(arm)
        model = create_model(fields["model"], **fields["options"], **{k: fields[k] for k in ("tokens",) if k in fields})
        config = model.config
        assert config.depth == int(depth)
        assert config.layer_scale == (depth_rule(int(depth)) if kind in ("LayerScale", "both") else None)
        assert config.class_attention == (2 if kind in ("class attention", "both") else 0)
        entered = "tokens" not in fields or config.gathers(config.tokens[0])
        assert entered
        assert arm.against == (None if kind == "plain" else f"plain, {depth}")
        assert {name for name in fields if fields[name] != STUDY.base.get(name)} <= {"options", "tokens"}


def test_search_is_balanced() -> None:
    """Any two options take each pair of their values once."""
    tried = STUDY.points()
    assert len(tried) == 4
    for one, other in (("lr", "warmup_epochs"), ("lr", "drop_path"), ("warmup_epochs", "drop_path")):
        assert len({(point[one], point[other]) for point in tried}) == 4
        assert len({point[one] for point in tried}) == len({point[other] for point in tried}) == 2


def test_rows_have_norms_by_layer(trained: Path) -> None:
    rows = {row["arm"]: row for row in read_rows(trained / RESULTS)}
    assert set(rows) == {"plain, 12", "both, 12", "both, 36"}
    for name, row in rows.items():
        depth = int(name.split(", ")[1])
        assert [len(row[when][what]) for when in ("start", "end") for what in ("tokens", "gradients")] == [depth] * 4
        assert len(row["losses"]) == REDUCED.base["epochs"]
        assert row["rise"] == pytest.approx(largest_rise(row["losses"]))
    start = rows["both, 36"]["start"]["tokens"]
    assert start == pytest.approx([start[0]] * 36, rel=1e-4)  # a scale of 1e-6 starts as the identity
    deep = create_model(
        "vit_tiny_patch16", width=32, heads=2, depth=36, image_size=32, patch_size=8, class_attention=2,
        layer_scale=1e-6, tokens=STUDY.arm("both, 36").fields["tokens"], num_classes=6,
    )  # fmt: skip
    assert rows["both, 36"]["flops"] == vitrail.count(deep).flops
    assert rows["both, 36"]["parameters"] == sum(weight.numel() for weight in deep.parameters())


def test_table_compares_arms_of_the_same_depth(trained: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    rows = rows_of(REDUCED, trained)
    lines = {line.split(" | ")[0].strip("| "): line for line in result_table(REDUCED, rows).splitlines()}
    assert "to plain, 12 |" in lines["both, 12"]
    assert "| – |" in lines["both, 36"]  # its baseline was not trained
    write_readme(REDUCED, trained)
    for name in ("accuracy.png", "loss.png", "layers.png"):
        assert (trained / name).read_bytes().startswith(b"\x89PNG")


def test_norms_by_layer_match_finite_differences() -> None:
    torch.manual_seed(0)
    model = ViT(ViTConfig(image_size=16, patch_size=8, width=8, depth=3, heads=2, num_classes=3)).double().eval()
    images, truth = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 2])
    found = norms_by_layer(model, images, truth)
    x, special = model._embed(images, model.config.grid)
    x = torch.cat([special["cls"], x], 1)
    for layer, block in enumerate(model.blocks):
        x = block(x)
        assert found["tokens"][layer] == pytest.approx(x.norm(dim=-1).mean().item())

    def loss(last: torch.Tensor) -> torch.Tensor:
        logits = model.forward_head(model.norm(last))
        assert isinstance(logits, torch.Tensor)
        return F.cross_entropy(logits, truth, reduction="sum")

    last = x.detach()
    step = 1e-5
    slopes = torch.zeros_like(last).flatten()
    for place in range(last.numel()):
        moved = torch.zeros_like(slopes)
        moved[place] = step
        moved = moved.view_as(last)
        slopes[place] = (loss(last + moved) - loss(last - moved)).item() / (2 * step)
    expected = slopes.view_as(last).flatten(1).norm(dim=1).mean().item()
    assert found["gradients"][-1] == pytest.approx(expected, rel=1e-5)


def test_diverged_point_is_the_worst_of_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = replace(STUDY.at_reduced_size(), seeds=(0,))
    first, second = study.points()
    train = runner_module.train

    def diverges(**given: Any) -> Any:
        if all(given[name] == value for name, value in first.items()):
            raise Diverged("The loss is not finite since step 3 (epoch 1): class. The learning rate was 0.002.")
        return train(**given)

    monkeypatch.setattr(runner_module, "train", diverges)
    runner = Runner(study, tmp_path, device="cpu")
    runner.search("plain, 12")
    assert runner.failed == 0
    rows = read_rows(tmp_path / SEARCH)
    assert [("diverged" in row, row["held"] > 0) for row in rows] == [(True, False), (False, True)]
    assert best_point(study, study.arm("plain, 12"), tmp_path) == second
