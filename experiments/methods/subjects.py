"""The models under comparison with their inputs: the shipped one, a ViT-S/16, and models of clips and sounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vitrail
from experiments.common.datasets import Data, imagenette, moving_shapes, reduced_images
from experiments.sound_and_video.clips.study import STUDY as CLIPS
from experiments.sound_and_video.sounds.study import STUDY as SOUNDS
from vitrail._distributed import choose_device
from vitrail.data import Dataset
from vitrail.data.loading.loader import make_loader
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption
from vitrail.training import load_trained, train
from vitrail.training.data import prepares

HELD_OUT = 0.1
"""Share of the training data that no model is trained on: methods are set, calibrated and tuned on it."""

SHIPPED = "vitrail:tiny"

VIT_S: dict[str, Any] = {
    "model": "vit_small_patch16", "options": {"stem": "convolutions"}, "image_size": 160, "patch_size": 16,
    "preset": "small", "teacher": SHIPPED, "distillation": "soft", "distillation_weight": 0.9, "temperature": 1.0,
    "feature_weight": 2.0, "epochs": 40, "batch_size": 256, "optimizer": "muon", "lr": 1e-3, "warmup_epochs": 3,
    "drop_path": 0.0, "augment": "medium", "crop_min": 0.25, "mixup": 0.5, "cutmix": 1.0, "mixing": 1.0,
    "plain_epochs": 5, "dtype": "bf16-weights",
}  # fmt: skip
"""Training of the ViT-S/16 at 160 pixels: distilled from the shipped model by its own recipe, for fewer epochs."""

REDUCED: dict[str, Any] = {
    "options": {"width": 32, "depth": 4, "heads": 2}, "preset": "tiny", "dtype": "fp32", "epochs": 1, "batch_size": 16,
    "warmup_epochs": 0, "plain_epochs": 0, "teacher": None, "distillation": None, "distillation_weight": None,
    "temperature": None, "feature_weight": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How much of everything: all of it, or what takes seconds.

    Attributes:
        shares: budgets, as shares of the unmerged model's multiply-adds.
        fine: budgets of ToMe, which include those of tuned settings.
        tuned: budgets of tuned settings; ``latencies``: shares of the unmerged model's time, likewise.
        validation, tuning: most images of each part; 0 for all.
        batch: batch size.
        steps, learn_batch: training of learned methods.
        warm_seconds: interleaved timing of a chunk of settings, after warm-up.
        tune_seconds: time for tuning one budget.
        dense: most images of either part of Pets.
    """

    shares: tuple[float, ...] = (0.85, 0.7, 0.6, 0.5, 0.4)
    fine: tuple[float, ...] = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4)
    tuned: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)
    latencies: tuple[float, ...] = (0.667, 0.571, 0.5)
    validation: int = 0
    tuning: int = 900
    batch: int = 256
    steps: int = 150
    learn_batch: int = 128
    warm_seconds: float = 4.0
    tune_seconds: float = 12.0
    dense: int = 700
    reduced: bool = False


FULL = Size()
SMALL = Size((0.8, 0.6), (0.8, 0.6), (0.6,), (0.8,), 24, 16, 8, 2, 8, 1e-3, 20.0, 24, reduced=True)


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        data: its training and validation data.
        options: options of `vitrail.training.train`; None for the shipped model.
        seeds: seeds of the models.
        inputs: ``images``, ``clips`` or ``sounds``.
        reduced: options at the reduced size.
        reduced_data: data at the reduced size.
    """

    data: Callable[[], Data]
    options: Mapping[str, Any] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    inputs: str = "images"
    reduced: Mapping[str, Any] = field(default_factory=lambda: REDUCED)
    reduced_data: Callable[[], Data] = reduced_images


_SMALL_IMAGES = {**REDUCED, "image_size": 32, "patch_size": 4}
KINDS: dict[str, Kind] = {
    "tiny": Kind(imagenette, seeds=(0,)),
    "vit_s": Kind(imagenette, VIT_S, reduced=_SMALL_IMAGES),
    "vit_s with tome": Kind(imagenette, {**VIT_S, "merge": "keep=0.5"}, reduced={**_SMALL_IMAGES, "merge": "r=4"}),
    "clips": Kind(
        CLIPS.data, {**CLIPS.base, "lr": 3e-3}, inputs="clips", reduced_data=partial(moving_shapes, 4, 24, 96),
        reduced={**REDUCED, "patch_size": (2, 4, 4)},
    ),
    "digits": Kind(
        SOUNDS.data, {**SOUNDS.base, "lr": 3e-3}, inputs="sounds", reduced_data=SOUNDS.reduced_data,
        reduced={**REDUCED, "patch_size": (8, 8)},
    ),
}  # fmt: skip
"""Kinds of models by name."""


@dataclass
class Subject:
    """A model in evaluation mode with preprocessed inputs on its device; validation images are in random order.

    Attributes:
        kind, seed: which model.
        inputs, targets: of the validation set.
        tuning, tuning_targets: of the part of the training data that the model was not trained on.
    """

    kind: str
    seed: int
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    tuning: Tensor
    tuning_targets: Tensor

    @property
    def gflops(self) -> float:
        """Multiply-adds of the unmerged model, in 10⁹."""
        with vitrail.merge(self.model, r=0) as merging:
            return merging.flops(merged=False) / 1e9


def parts(kind: str, size: Size) -> tuple[Dataset, Dataset, Dataset]:
    """Return the training part, the tuning part and the validation set of a kind of model."""
    source = KINDS[kind]
    data = source.reduced_data() if size.reduced else source.data()
    return (*data.train.split(HELD_OUT if not size.reduced else 0.25, seed=0), data.validation)


def model_folder(out: Path, kind: str, seed: int) -> Path:
    """Return the run directory of a trained model."""
    return out / "models" / f"{kind.replace(' ', '-')}-{seed}"


def train_model(
    kind: str, seed: int, out: Path, size: Size, device: str | None = None, seconds: float | None = None
) -> Path:
    """Train a model on its training part, or resume its training; return its run directory."""
    source, folder = KINDS[kind], model_folder(out, kind, seed)
    if source.options is None or (folder / "last").is_dir():
        return folder
    options = {**source.options, **(source.reduced if size.reduced else {})}
    resume = any((folder / "checkpoints").glob("step-*"))
    train(
        **options, data=parts(kind, size)[0], validation=None, seed=seed, device=device, out=str(folder), keep=1,
        save_every=max(1, options["epochs"] // 3), resume=resume, overwrite=not resume, seconds=seconds,
    )  # fmt: skip
    return folder


def load_subject(kind: str, seed: int, out: Path, size: Size, device: str | None = None) -> Subject:
    """Load a model with its inputs: weights and inputs in bfloat16 on a GPU, in float32 on a CPU."""
    folder = model_folder(out, kind, seed)
    if KINDS[kind].options is None:
        model, labels = load_trained(SHIPPED)
    elif (folder / "last").is_dir():
        model, labels = load_trained(folder / "last")
    else:
        raise InvalidOption(f"{kind}, seed {seed} is not trained; run the command train first")
    place = choose_device(device)
    model = model.eval().to(place, torch.bfloat16 if place.type == "cuda" else torch.float32)
    for weight in model.parameters():
        weight.requires_grad_(False)
    _, tuning, validation = parts(kind, size)
    column, known = next(iter(labels.classes.items()))
    if not size.reduced and validation.classes[column] != known:
        raise InvalidOption(f"{kind} knows the classes {known}; the data has {validation.classes[column]}")
    assert labels.preprocessing is not None
    inputs, targets = read_inputs(model, labels.preprocessing, validation, size.validation)
    return Subject(kind, seed, model, inputs, targets, *read_inputs(model, labels.preprocessing, tuning, size.tuning))


def read_inputs(model: nn.Module, spec: InputSpec, data: Dataset, limit: int = 0) -> tuple[Tensor, Tensor]:
    """Return preprocessed samples in a fixed random order, and the class of each; at most ``limit`` of them."""
    weight = next(model.parameters())
    loader = make_loader(data, image_size=spec.size[0] if spec.size else 1, device=weight.device)
    prepare = prepares(spec).plain
    found, targets = [], []
    try:
        for samples, labels, _ in loader.sweep(256):
            found.append(prepare(samples).to(weight.dtype))
            targets.append(labels[:, 0])
    finally:
        loader.close()
    order = shuffled(len(data), limit).to(weight.device)
    return torch.cat(found)[order], torch.cat(targets)[order]


def shuffled(count: int, limit: int = 0) -> Tensor:
    """Return a fixed random order of samples; at most ``limit`` of them."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[: limit or None]
