"""What a run is made of: data, model, teacher, objective, merging, optimiser. Contradictions are found here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import nn

from vitrail._distributed import Crew
from vitrail.adapters.saved import is_saved, model_folder, named, read_labels
from vitrail.data.augment.mix import Mix
from vitrail.data.augment.views import Views
from vitrail.data.dataset import Dataset, open_dataset
from vitrail.data.loading.loader import Loader, make_loader
from vitrail.data.loading.order import mix
from vitrail.errors import InvalidOption, VitrailError
from vitrail.models import ViT
from vitrail.surgery import Merging, merge
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.config.checks import NO_LABELS
from vitrail.training.config.config import Config
from vitrail.training.config.syntax import nearest
from vitrail.training.distributed import repeated, wrap_ddp, wrap_fsdp
from vitrail.training.input_size import check_fits, prepares
from vitrail.training.log import Event, Log, Tell
from vitrail.training.model import Built, build, load_teacher
from vitrail.training.objective.learner import Learner
from vitrail.training.objective.objective import Objective
from vitrail.training.objective.self_distillation import SelfLearner
from vitrail.training.objective.targets import ask, heads_of
from vitrail.training.objective.teacher import Teacher
from vitrail.training.optim.optimizer import Ema, make_optimizer
from vitrail.training.parts import Parts
from vitrail.training.run_directory import CHECKPOINTS, LOG

Made = tuple[Built, Teacher | None, nn.Module, Merging | None, tuple[int, ...]]


START = 0
"""Number of the step that the first weights are drawn for; steps of training are counted apart."""


def open_data(config: Config) -> tuple[Dataset, Dataset | None]:
    """Open the training data, and that to evaluate on: data of its own, or a share that is held out."""
    columns: tuple[str, ...] | None = config.tasks or ((config.labels,) if config.labels else ())
    if config.labels == NO_LABELS:
        columns = None
    examples = _in_known_order(config, open_dataset(config.data, labels=columns, labeled=True))
    held = None
    if isinstance(config.validation, float) and columns is not None:
        examples, held = examples.split(config.validation, config.seed)
    elif config.validation is not None and columns is not None:
        if isinstance(config.validation, str) and config.validation.startswith("<"):
            raise InvalidOption("validation: the run was started with a data set from Python; give it again")
        held = open_dataset(config.validation, labels=columns, classes=examples.classes, labeled=True)
    check_fits(config, examples, held)
    return examples.take(config.share, config.seed), held


def _in_known_order(config: Config, examples: Dataset) -> Dataset:
    """Number the classes as the model does that is gone on from, where they are the same: its heads then fit."""
    if config.own or not is_saved(config.model):
        return examples
    known = read_labels(model_folder(named(config.model))).get("classes", {})
    same = {name: set(names) for name, names in known.items()} == {n: set(own) for n, own in examples.classes.items()}
    return open_dataset(examples, classes=known, labeled=True) if same and examples.classes else examples


def assemble(config: Config, classes: Mapping[str, tuple[str, ...]], crew: Crew) -> Made:
    """Build the model, its teacher, its objective and its merging; all that can contradict is found here."""
    torch.manual_seed(mix(config.seed, START))
    built = build(config, classes)
    built.model.train()
    if config.recipe != "labels":
        return built, None, _without_labels(config, built.model).to(crew.device), None, ()
    ask(built.model, classes)
    teacher = None
    if config.teacher is not None:
        teacher = _teacher(config, built, classes, crew)
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
    r: tuple[int, ...] = ()
    if config.merge is not None:
        try:
            merging = merge(built.model, **config.merge.options)
        except VitrailError as error:
            raise InvalidOption(f"merge: {error}") from error
        r = tuple(merging.r)
    _lay_out(built.model, crew)
    learner = Learner(built.model, objective, rounds=config.dtype == "bf16-weights").to(crew.device)
    return built, teacher, learner, merging, r


def _lay_out(model: nn.Module, crew: Crew) -> None:
    """Let convolutional nets keep channels together on CUDA, where they run faster so."""
    if crew.device.type == "cuda" and sum(isinstance(part, nn.Conv2d) for part in model.modules()) > 2:
        model.to(memory_format=torch.channels_last)


def _without_labels(config: Config, model: nn.Module) -> nn.Module:
    known = [name for name in signature(SelfLearner).parameters if name != "model"]
    for name in config.recipe_options:
        if name not in known:
            raise InvalidOption(f"recipe_options: {name!r} is none of {', '.join(known)}{nearest(name, known)}")
    return SelfLearner(model, **config.recipe_options)


def _teacher(config: Config, built: Built, classes: Mapping[str, tuple[str, ...]], crew: Crew) -> Teacher:
    assert config.teacher is not None
    model, labels = load_teacher(config.teacher)
    known = [name for names in labels.classes.values() for name in names]
    wanted = [name for names in classes.values() for name in names]
    outputs = None
    if known and known != wanted and config.distillation != "features":
        missing = [name for name in wanted if name not in known]
        if missing:
            raise InvalidOption(f"teacher={config.teacher!r} does not know the classes {', '.join(missing[:5])}")
        outputs = [known.index(name) for name in wanted]
    size = heads_of(model).sizes.get(heads_of(model).own[0]) if heads_of(model).own else None
    if outputs is None and config.distillation != "features" and size not in (None, len(wanted)):
        raise InvalidOption(
            f"teacher={config.teacher!r} has {size} outputs and there are {len(wanted)} classes; finetune it on the "
            "same classes first, or learn its features (distillation='features')"
        )
    if built.preprocessing.is_array or (labels.preprocessing is not None and labels.preprocessing.is_array):
        raise InvalidOption(f"teacher={config.teacher!r}: teachers are for pictures, and one of the two models is not")
    half = torch.bfloat16 if config.half and crew.device.type == "cuda" else None
    _lay_out(model, crew)
    if config.compile == "whole":
        model.compile()
    return Teacher(
        model, given=built.preprocessing, expects=labels.preprocessing,
        features=config.distillation == "features" or config.feature_weight > 0,
        outputs=outputs, device=crew.device, dtype=half,
    )  # fmt: skip


def make_parts(
    config: Config,
    crew: Crew,
    examples: Dataset,
    held: Dataset | None,
    made: Made,
    tell: Tell,
) -> Parts:
    """Read the pictures, compile and wrap the model, and make the optimiser."""
    built, teacher, learner, merging, r = made
    steps = {"batch": config.batch_size or 1, "seed": config.seed, "repeats": config.repeats or 1}
    feed = _feed(config, crew, examples, tell, "pictures to learn from", **steps)
    evaluated = None if held is None else _feed(config, crew, held, tell, "pictures to evaluate on")
    built = replace(built, preprocessing=examples.statistics() or built.preprocessing)
    compiled = config.compile != "off"
    augment: Any = prepares(built.preprocessing, config.augment, config.crop_min or 1.0, config.erasing, compiled)
    views = augment if config.recipe == "labels" else Views(augment)
    wrapped = wrap(learner, config, crew)
    optimizer = make_optimizer(learner, config.lr or 0.0, config.weight_decay or 0.0, config.optimizer)
    folder = config.folder
    board = folder / "tensorboard" if config.tensorboard else None
    return Parts(
        config=config,
        crew=crew,
        built=built,
        classes=dict(feed.classes),
        learner=learner,
        wrapped=wrapped,
        optimizer=optimizer,
        ema=Ema(built.model, config.ema) if config.ema else None,
        feed=feed,
        data=examples.fingerprint(),
        held=evaluated,
        augment=views,
        settled=augment.settled(),
        mixing=Mix(config.mixup or 0.0, config.cutmix or 0.0, config.mixing, compiled=compiled),
        teacher=teacher,
        merging=merging,
        r=r,
        checkpoints=Checkpoints(folder / CHECKPOINTS, config.keep, crew),
        log=Log(folder / LOG, board) if crew.first else Log(None),
        tell=tell,
    )


def wrap(learner: nn.Module, config: Config, crew: Crew) -> nn.Module:
    """Compile a learner as asked, then let several processes share it."""
    model: nn.Module = learner.model  # type: ignore[assignment]
    sharded = config.shard == "fsdp" and crew.world > 1
    if config.compile == "blocks" or (config.compile == "whole" and sharded):
        for block in repeated(learner):
            block.compile()
    elif config.compile == "whole":
        learner.compile()
    if crew.world == 1:
        return learner
    if sharded:
        return wrap_fsdp(learner, model, crew, config.dtype or "fp32")
    return wrap_ddp(learner, crew, unused=not isinstance(model, ViT))


def _feed(config: Config, crew: Crew, examples: Dataset, tell: Tell, what: str, **steps: int) -> Loader:
    """Make a feed; without a word about its steps it is for sweeps alone."""

    def reading(done: int, total: int) -> None:
        tell(Event("reading", done, total, text=what))

    return make_loader(
        examples,
        image_size=config.side or 1,
        device=crew.device,
        rank=crew.rank,
        world_size=crew.world,
        keep=config.keep_data,  # type: ignore[arg-type]
        workers=config.workers,
        max_unreadable=config.max_unreadable,
        progress=reading,
        **steps,
    )
