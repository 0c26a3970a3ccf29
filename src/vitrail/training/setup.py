"""Setup of a run: data, model, teacher, objective, merging, optimizer. Contradictions between them raise here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature

import torch
from torch import nn

from vitrail._distributed import World
from vitrail.adapters.saved import is_saved, model_folder, named, read_labels
from vitrail.data.dataset import Dataset, open_dataset
from vitrail.data.loading.order import mix
from vitrail.errors import InvalidOption, VitrailError
from vitrail.surgery import Merging, merge
from vitrail.training.config import Config
from vitrail.training.config.config import NO_LABELS
from vitrail.training.config.options import suggest
from vitrail.training.data_checks import check_fits
from vitrail.training.model import Built, build, load_teacher
from vitrail.training.objective.learner import Learner
from vitrail.training.objective.objective import Objective
from vitrail.training.objective.self_distillation import SelfLearner
from vitrail.training.objective.targets import assign_targets, find_heads
from vitrail.training.objective.teacher import Teacher

Classes = Mapping[str, tuple[str, ...]]

INITIALIZATION = 0
"""Random stream of the initial weights; those of training steps are in `vitrail.training.loop`."""


@dataclass(frozen=True)
class Models:
    """The models of a run; ``final_r`` is the merging at the end of its ramp."""

    built: Built
    learner: nn.Module
    teacher: Teacher | None = None
    merging: Merging | None = None
    final_r: tuple[int, ...] = ()

    @property
    def model(self) -> nn.Module:
        """The model that is trained, evaluated and saved."""
        return self.built.model


def open_data(config: Config) -> tuple[Dataset, Dataset | None]:
    """Return the training data and the held-out data: separate data, or a fraction of the training data."""
    columns: tuple[str, ...] | None = config.tasks or ((config.labels,) if config.labels else ())
    if config.labels == NO_LABELS:
        columns = None
    dataset = open_dataset(config.data, labels=columns, labeled=True)
    if not config.own and is_saved(config.model):  # number the same classes as the model does, so that its heads fit
        known = read_labels(model_folder(named(config.model))).get("classes", {})
        theirs, ours = ({name: set(names) for name, names in each.items()} for each in (known, dataset.classes))
        if ours and theirs == ours:
            dataset = open_dataset(dataset, classes=known, labeled=True)
    held = None
    if isinstance(config.validation, float) and columns is not None:
        dataset, held = dataset.split(config.validation, config.seed)
    elif config.validation is not None and columns is not None:
        held = open_dataset(config.validation, labels=columns, classes=dataset.classes, labeled=True)
    check_fits(config, dataset, held)
    return dataset.take(config.share, config.seed), held


def make_models(config: Config, classes: Classes, world: World) -> Models:
    """Build the model, its teacher, its objective and its merging."""
    torch.manual_seed(mix(config.seed, INITIALIZATION))
    built = build(config, classes)
    built.model.train()
    if config.recipe != "labels":
        known = [name for name in signature(SelfLearner).parameters if name != "model"]
        for name in config.recipe_options:
            if name not in known:
                raise InvalidOption(f"recipe_options: expected {', '.join(known)}; got {name!r}{suggest(name, known)}")
        return Models(built, SelfLearner(built.model, **config.recipe_options).to(world.device))
    assign_targets(built.model, classes)  # before a teacher is loaded
    teacher = None if config.teacher is None else _make_teacher(config, built, classes, world)
    objective = Objective(
        built.model,
        classes,
        smoothing=config.smoothing or 0.0,
        distillation=config.distillation,  # type: ignore[arg-type]
        teacher=teacher,
        share=config.distillation_weight,
        temperature=config.temperature or 3.0,
        feature_weight=config.feature_weight,
        weights="uncertainty" if config.weighting == "uncertainty" else config.task_weights or None,
    )
    merging: Merging | None = None
    if config.merge is not None:
        try:
            merging = merge(built.model, **config.merge.options)
        except VitrailError as error:
            raise InvalidOption(f"merge: {error}") from error
    final_r = () if merging is None else tuple(merging.r)
    _use_channels_last(built.model, world)
    learner = Learner(built.model, objective, bf16_weights=config.dtype == "bf16-weights").to(world.device)
    return Models(built, learner, teacher, merging, final_r)


def _use_channels_last(model: nn.Module, world: World) -> None:
    """Use the channels-last memory format for convnets on CUDA, where it is faster."""
    if world.device.type == "cuda" and sum(isinstance(part, nn.Conv2d) for part in model.modules()) > 2:
        model.to(memory_format=torch.channels_last)


def _make_teacher(config: Config, built: Built, classes: Classes, world: World) -> Teacher:
    assert config.teacher is not None
    model, labels = load_teacher(config.teacher)
    outputs = None
    if config.distillation != "features":
        outputs = _teacher_outputs(config.teacher, model, labels.classes, classes)
    if built.preprocessing.is_array or (labels.preprocessing is not None and labels.preprocessing.is_array):
        raise InvalidOption(f"teacher={config.teacher!r}: distillation needs a teacher and a student for images")
    half = torch.bfloat16 if config.half and world.device.type == "cuda" else None
    _use_channels_last(model, world)
    if config.compile == "whole":
        model.compile()
    return Teacher(
        model, given=built.preprocessing, expects=labels.preprocessing,
        features=config.distillation == "features" or config.feature_weight > 0,
        outputs=outputs, device=world.device, dtype=half,
    )  # fmt: skip


def _teacher_outputs(name: str, teacher: nn.Module, known: Classes, classes: Classes) -> list[int] | None:
    """Return the indices of the student's classes among the teacher's outputs; None if they are the same."""
    teachers = [each for names in known.values() for each in names]
    students = [each for names in classes.values() for each in names]
    if teachers and teachers != students:
        missing = [each for each in students if each not in teachers]
        if missing:
            raise InvalidOption(f"teacher={name!r} was not trained on the classes {', '.join(missing[:5])}")
        return [teachers.index(each) for each in students]
    heads = find_heads(teacher)
    size = heads.sizes.get(heads.own[0]) if heads.own else None
    if size not in (None, len(students)):
        raise InvalidOption(
            f"teacher={name!r} has {size} outputs, but there are {len(students)} classes; fine-tune it on the same "
            "classes first, or use distillation='features'"
        )
    return None
