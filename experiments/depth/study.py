"""12, 24 and 36 layers, plain and with LayerScale and class attention: accuracy and training stability."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import vitrail
from experiments.common.datasets import imagenette
from experiments.common.inputs import batches
from experiments.common.plots import COLORS, dots, figure, jitter, legend, lines
from experiments.common.results import SEARCH, by_arm, finished, run_key
from experiments.common.study import Arm, Column, Rows, Study, TrainedModel
from vitrail.models import ViT
from vitrail.models.config import depth_rule
from vitrail.tokens import Role, TokenSpec
from vitrail.training import Run, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEPTHS = (12, 24, 36)
PLAIN, BOTH, LAYER_SCALE, CLASS_ATTENTION = "plain", "both", "LayerScale", "class attention"
STYLES: dict[str, dict[str, Any]] = {
    f"{kind}, {depth}": {"color": color, "linestyle": dash}
    for kind, color in zip((PLAIN, BOTH, LAYER_SCALE, CLASS_ATTENTION), COLORS, strict=False)
    for depth, dash in zip(DEPTHS, (":", "--", "-"), strict=True)
}


def depth_arm(kind: str, depth: int) -> Arm:
    """Return a model of one kind and depth; LayerScale starts at the CaiT paper's value for that depth."""
    options: dict[str, Any] = {"depth": depth}
    extra: dict[str, Any] = {}
    if kind in (LAYER_SCALE, BOTH):
        options["layer_scale"] = depth_rule(depth)
    if kind in (CLASS_ATTENTION, BOTH):
        options["class_attention"] = 2
        extra["tokens"] = (TokenSpec("cls", Role.CLASS, enters=-1, position=False),)
    against = None if kind == PLAIN else f"{PLAIN}, {depth}"
    return Arm(f"{kind}, {depth}", against=against, options=options, **extra)


# Measurements.


def measure(run: Run, trained: TrainedModel) -> dict[str, Any]:
    """Measure the loss by epoch, and token and gradient norms by layer of the untrained and the trained model.

    Norms are measured on training images. The untrained model is a new one of the same shape.
    """
    losses = [line["losses"]["loss"] for line in read_log(run.folder / "log.jsonl", "epoch")]
    model = trained.model
    assert isinstance(model, ViT)
    images, targets = next(batches(model, trained.labels, trained.data.monitored(128)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        untrained = ViT(model.config).to(images.device).eval()
    return {
        "losses": losses,
        "rise": largest_rise(losses),
        "start": norms_by_layer(untrained, images, targets[:, 0]),
        "end": norms_by_layer(model, images, targets[:, 0]),
        "flops": vitrail.count(model).flops,
    }


def norms_by_layer(model: ViT, images: Tensor, targets: Tensor) -> dict[str, list[float]]:
    """Return, after each block, the mean token norm and the mean gradient norm of the loss of one image."""
    outputs: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, x: outputs.append(x)) for block in model.blocks]
    try:
        logits = model(images)
    finally:
        for hook in hooks:
            hook.remove()
    assert isinstance(logits, Tensor)
    gradients = torch.autograd.grad(F.cross_entropy(logits, targets, reduction="sum"), outputs)
    return {
        "tokens": [x.detach().norm(dim=-1).mean().item() for x in outputs],
        "gradients": [x.flatten(1).norm(dim=1).mean().item() for x in gradients],
    }


def largest_rise(losses: list[float]) -> float:
    """Return how far the loss of an epoch ever was above the best one before it; 0 if it only fell.

    >>> largest_rise([2.0, 1.5, 1.75, 1.0])
    0.25
    """
    return max(loss - best for loss, best in zip(losses, accumulate(losses, min), strict=True))


def growth(row: Mapping[str, Any], when: str, name: str) -> float:
    """Return the ratio of the last layer to the first."""
    values = row[when][name]
    return float(values[-1] / values[0])


# Plots.


def plot(study: Study, rows: Rows, folder: Path) -> None:
    """Plot accuracy, every point of the search, the loss, and norms by layer."""
    arms = by_arm(rows)
    colors = {name: str(style["color"]) for name, style in STYLES.items()}
    with figure(folder / "accuracy.png", columns=2, width=9.0) as (left, right):
        accuracy = {name: [100 * row["accuracy"][study.output] for row in own] for name, own in arms.items()}
        dots(left, accuracy, "validation accuracy, %", colors=colors, title="best settings")
        plot_search(study, arms, folder, right, colors)
        right.set_title("all points of the search", fontsize=9)
    with figure(folder / "loss.png") as (axes,):
        lines(
            axes,
            {name: [list(enumerate(row["losses"], 1)) for row in own] for name, own in arms.items()},
            "epoch", "training loss", styles=STYLES,
        )  # fmt: skip
        legend(axes)
    with figure(folder / "layers.png", columns=4, width=14.0) as panels:
        views = [(when, name) for name in ("tokens", "gradients") for when in ("start", "end")]
        for axes, (when, name) in zip(panels, views, strict=True):
            curves = {arm: [list(enumerate(row[when][name])) for row in own] for arm, own in arms.items()}
            lines(axes, curves, "layer", f"norm of {name}", styles=STYLES)
            axes.set(title=f"{name}, at the {when}", yscale="linear" if name == "tokens" else "log")
        legend(panels[0])


def plot_search(study: Study, arms: Iterable[str], folder: Path, axes: Axes, colors: Mapping[str, str]) -> None:
    """Plot the held-out accuracy of every point of the search, and a cross for each run that diverged."""
    rows = finished(folder / SEARCH)
    points, diverged = {}, []
    for position, name in enumerate(arms):
        found = [rows[run_key(study, study.arm(name), 0, point, folder)] for point in study.points()]
        points[name] = [100 * one["held"] for one in found if "diverged" not in one]
        diverged += [(y, colors[name]) for y in jitter(position, len(found) - len(points[name]))]
    note = " (×: diverged)" if diverged else ""
    dots(axes, points, f"held-out accuracy, %{note}", colors=colors, spread=False)
    edge = axes.get_xlim()[0]
    for y, color in diverged:
        axes.plot(edge, y, "x", color=color, markersize=5, clip_on=False)


STUDY = Study(
    name="depth",
    question="Do LayerScale and class attention let a deep vision transformer train where a plain one does not?",
    data=imagenette,
    base={
        "model": "vit_tiny_patch16", "options": {}, "preset": "small", "image_size": 128, "patch_size": 16,
        "epochs": 14, "mixing": 0.5,
    },
    arms=(
        *(depth_arm(kind, depth) for depth in DEPTHS for kind in (PLAIN, BOTH)),
        depth_arm(LAYER_SCALE, DEPTHS[-1]),
        depth_arm(CLASS_ATTENTION, DEPTHS[-1]),
    ),
    reference=f"{PLAIN}, {DEPTHS[0]}",
    search=[
        {"lr": 5e-4, "warmup_epochs": 1, "drop_path": 0.0},
        {"lr": 5e-4, "warmup_epochs": 5, "drop_path": 0.2},
        {"lr": 2e-3, "warmup_epochs": 1, "drop_path": 0.2},
        {"lr": 2e-3, "warmup_epochs": 5, "drop_path": 0.0},
    ],
    measure=measure,
    columns=(
        Column("loss of the last epoch", lambda row: row["losses"][-1], "{:.3f}"),
        Column("largest rise of the loss", lambda row: row["rise"], "{:.3f}"),
        Column("token norm, last / first layer, start", lambda row: growth(row, "start", "tokens"), "{:.2f}"),
        Column("the same, end", lambda row: growth(row, "end", "tokens"), "{:.2f}"),
        Column("gradient norm, last / first layer, start", lambda row: growth(row, "start", "gradients"), "{:.2f}"),
        Column("parameters, M", lambda row: row["parameters"] / 1e6, "{:.2f}"),
        Column("G multiply-adds", lambda row: row["flops"] / 1e9, "{:.2f}"),
    ),
    plot=plot,
    reduced={
        "options": {"width": 32, "heads": 2}, "preset": "tiny", "image_size": 32, "patch_size": 8, "epochs": 5,
        "batch_size": 80,
    },
)  # fmt: skip
