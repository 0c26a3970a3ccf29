"""The models of a run: the one to train, with heads for the given classes, its teacher, objective and merging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._distributed import World
from vitrail.adapters import ModelRequest, find, load_model
from vitrail.adapters.registry import declared_spec, library_of, split_name
from vitrail.adapters.saved import is_saved, model_folder, named, read_labels, read_targets
from vitrail.adapters.vitrail import with_kinds
from vitrail.data.dataset import Dataset
from vitrail.data.labels.targets import PIXEL_BYTES, Targets
from vitrail.data.loading.order import mix
from vitrail.data.sample import TensorSpec
from vitrail.data.sources.arrays import Arrays
from vitrail.data.spec import MEAN, STD, InputSpec
from vitrail.errors import InvalidOption, ModelLoadError, VitrailError
from vitrail.merging.methods.learned import LearnedMethod
from vitrail.models import MODELS, ViT
from vitrail.models.registry import model_config
from vitrail.runtime.layout import layout_of
from vitrail.surgery import Merging, add_tokens, merge
from vitrail.surgery.added_tokens import AddedModule, added_module
from vitrail.tokens import Role, TokenSpec
from vitrail.training.config import Config
from vitrail.training.config.options import suggest
from vitrail.training.config.presets import GATE_RATE
from vitrail.training.config.syntax import read_tokens
from vitrail.training.objective.learner import Learner
from vitrail.training.objective.objective import Objective, check_distillation
from vitrail.training.objective.self_distillation import SelfLearner
from vitrail.training.objective.targets import assign_targets, find_heads
from vitrail.training.objective.teacher import Teacher
from vitrail.training.run_directory import Labels, load_trained

INITIALIZATION = 0
"""Random stream of the initial weights; those of training steps are in `vitrail.training.loop`."""

Classes = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Built:
    """A model to train, the ``config.json`` of a library's model, and the input specification."""

    model: nn.Module
    architecture: dict[str, Any]
    preprocessing: InputSpec


@dataclass(frozen=True)
class Models(Built):
    """The models of a run; ``final_r`` is the merging at the end of its ramp; empty where the method decides.

    ``targets`` says what columns hold that hold no classes; ``rates`` are learning rates of parameters that have one of
    their own, as multiples of the run's.
    """

    learner: nn.Module
    teacher: Teacher | None = None
    merging: Merging | None = None
    final_r: tuple[int, ...] = ()
    targets: Targets = field(default_factory=dict)
    rates: dict[nn.Parameter, float] = field(default_factory=dict)


def make_models(
    config: Config, classes: Classes, world: World, arrays: TensorSpec | None = None, targets: Targets | None = None
) -> Models:
    """Build the model, its teacher, its objective and its merging.

    ``arrays`` is the shape of unresized data, ``targets`` what columns hold that hold no classes.
    """
    torch.manual_seed(mix(config.seed, INITIALIZATION))
    targets = _with_trained_scale(config, classes, targets or {})
    built = build(config, classes, arrays, targets)
    built.model.train()
    if config.recipe != "labels":
        known = [name for name in signature(SelfLearner).parameters if name != "model"]
        for name in config.recipe_options:
            if name not in known:
                raise InvalidOption(f"recipe_options: expected {', '.join(known)}; got {name!r}{suggest(name, known)}")
        return Models(**vars(built), learner=SelfLearner(built.model, **config.recipe_options).to(world.device))
    assigned = assign_targets(built.model, classes, targets)  # before a teacher is loaded
    check_distillation(assigned, config.distillation if config.teacher else None)
    teacher = None if config.teacher is None else _make_teacher(config, built, classes, world)
    objective = Objective.of(config, built.model, classes, teacher, targets)
    merging: Merging | None = None
    if config.merge is not None:
        try:
            merging = merge(built.model, **config.merge.options)
        except VitrailError as error:
            raise InvalidOption(f"merge: {error}") from error
    _use_channels_last(built.model, world)
    if merging is not None and config.shard == "fsdp" and next(merging.method.parameters(), None) is not None:
        raise InvalidOption(f"shard='fsdp' does not support method {merging.method.label}, which learns; use ddp")
    learns = merging is not None and isinstance(merging.method, LearnedMethod)
    learner = Learner(
        built.model, objective, bf16_weights=config.dtype == "bf16-weights",
        method_loss=merging.loss if merging is not None and learns else None,
    ).to(world.device)  # fmt: skip
    added = added_module(built.model)
    if config.train_only == "method":
        _freeze_all_but(learner, _method_parameters(merging))
    elif config.train_only == "tokens":
        _freeze_all_but(learner, _added_parameters(added))
    fixed = merging is not None and merging.method.static and not merging.method.decides
    final_r = tuple(merging.r) if merging is not None and fixed else ()
    rest: dict[str, Any] = {"teacher": teacher, "merging": merging, "final_r": final_r, "targets": targets}
    rest["rates"] = {} if added is None else _rates(added, config)
    return Models(**vars(built), learner=learner, **rest)


def _with_trained_scale(config: Config, classes: Classes, targets: Targets) -> Targets:
    """Return the targets of a run; a model fine-tuned on the same columns keeps their scale, as its heads do."""
    if config.own or not is_saved(config.model):
        return targets
    labels = read_labels(model_folder(named(config.model)))
    known = {name: tuple(names) for name, names in labels.get("classes", {}).items()}
    trained = read_targets(labels)
    same = known == {name: tuple(names) for name, names in classes.items()}
    same = same and {name: one.kind for name, one in trained.items()} == {n: one.kind for n, one in targets.items()}
    return trained if same else targets


def _freeze_all_but(learner: nn.Module, own: set[nn.Parameter]) -> None:
    """Let these parameters learn alone; statistics of batch norms stay, too."""
    for parameter in learner.parameters():
        parameter.requires_grad_(parameter in own)
    for part in learner.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.eval()


def _added_parameters(added: AddedModule | None) -> set[nn.Parameter]:
    if added is None:
        raise InvalidOption("train_only='tokens' needs tokens to train: add_tokens='register=4', or a model with some")
    return set(added.parameters())


def _rates(added: AddedModule, config: Config) -> dict[nn.Parameter, float]:
    """Return the learning rates of added parameters, as multiples of the run's."""
    rate = config.added_lr / (config.lr or 1.0)
    return {one: rate * (GATE_RATE if one is added.gates else 1) for one in added.parameters()}


def _method_parameters(merging: Merging | None) -> set[nn.Parameter]:
    """Return the parameters of the merging method; raise if it has none, or none that learn."""
    own = set() if merging is None else set(merging.method.parameters())
    if merging is None or not own:
        raise InvalidOption(
            "train_only='method' freezes the model and needs a merging method with parameters, such as "
            f"merge='r=8,method=dtem'; {'tome' if merging is None else merging.method.label} has none"
        )
    if merging.method.static and not merging.method.decides and not any(merging.r):
        raise InvalidOption("train_only='method' needs merges to learn from; got r=0 in every layer")
    return own


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


def build(config: Config, classes: Classes, arrays: TensorSpec | None = None, targets: Targets | None = None) -> Built:
    """Build the model of a resolved config with heads for these classes, for the data's own size where it has one.

    A trained model is rebuilt for the new classes; its heads are kept where the classes are the same. It keeps the
    tokens that were added to it, or gets those of the config; task tokens take their columns from its own heads.
    """
    if arrays is None and isinstance(config.data, Arrays | Dataset):
        arrays = config.data.tensor_spec
    if arrays is not None:
        own = {**config.options, "in_chans": arrays.channels}
        config = replace(config, image_size=arrays.sizes, options=own)
    size, trained_on = config.image_size, None
    names = {column: tuple(each) for column, each in classes.items()}
    targets = targets or {}
    library, name = split_name(config.model)
    is_trained = not config.own and (library is None or named(config.model).is_dir())
    trained, labels = load_trained(config.model) if is_trained else (None, Labels({}, None))
    added = _tokens_to_add(config, None if trained is None else added_module(trained), names, targets)
    known = {column: each for column, each in labels.classes.items() if column not in added.tasks}
    names = {column: each for column, each in names.items() if column not in added.tasks}
    targets = {column: target for column, target in targets.items() if column not in added.tasks}
    if added.tasks and not names:
        names = known  # the model keeps its own heads, though nothing trains them
    request = ModelRequest(names, config.pretrained, size, config.drop_path, config.options, targets)
    made: tuple[nn.Module, dict[str, Any]]
    if config.own:
        made = ViT(own_config(config, classes, targets)), {}
    elif trained is None:
        assert library is not None
        made = library.build(name, request)
    else:
        trained_on = labels.preprocessing
        if arrays is None and trained_on is not None and trained_on.is_array:
            raise InvalidOption(f"model={config.model!r} was trained on arrays; give Arrays as data, not images")
        made = library_of(labels.architecture).rebuild(
            trained,
            labels.folder,
            labels.architecture,
            request,
            keep_heads=names == known and targets.keys() == labels.targets.keys() - added.tasks,
        )
    if added.specs:
        added.add(made[0], config.gate)
    if arrays is not None:
        return Built(*made, InputSpec.of_arrays((0.0,) * arrays.channels, (1.0,) * arrays.channels))
    expected = _expected(made[0], size or (trained_on.size[0] if trained_on else None))
    if trained_on is not None and not expected.is_array:
        expected = replace(trained_on, size=expected.size)
    return Built(*made, expected)


@dataclass(frozen=True)
class _Added:
    """Tokens to add to a trained model: new ones, or those that it had, with their weights."""

    specs: tuple[TokenSpec, ...] = ()
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def tasks(self) -> set[str]:
        """Columns of labels that added task tokens learn."""
        return {spec.name for spec in self.specs if spec.role is Role.TASK}

    def add(self, model: nn.Module, gate: float) -> None:
        """Add the tokens; new ones have open gates."""
        try:
            added = add_tokens(model, tokens=self.specs if self.weights else _with_free_names(self.specs, model))
        except VitrailError as error:
            raise InvalidOption(f"add_tokens: {error}") from error
        if self.weights:
            added.tokens.load_state_dict(self.weights)
        else:
            added.open(gate)


def _with_free_names(specs: Sequence[TokenSpec], model: nn.Module) -> list[TokenSpec]:
    """Return specs in which registers have other names than the tokens that a model has."""
    taken = {span.name for span in layout_of(find(model)).special}
    return [
        replace(spec, name=f"added_{spec.name}") if spec.role is Role.REGISTER and spec.name in taken else spec
        for spec in specs
    ]


def _tokens_to_add(config: Config, present: AddedModule | None, classes: Classes, targets: Targets) -> _Added:
    """Return the tokens of a config, or those that the trained model has; columns give task tokens their outputs."""
    if present is not None:
        if config.add_tokens is not None:
            raise InvalidOption(f"add_tokens: {config.model} has added tokens already; leave it out")
        for spec in present.specs:
            if spec.role is Role.TASK and spec.name in classes and len(classes[spec.name]) != spec.outputs(0):
                raise InvalidOption(
                    f"model={config.model!r} has a task token {spec.name!r} with {spec.outputs(0)} outputs, and its "
                    f"column has {len(classes[spec.name])} classes; expected the classes that it was trained on"
                )
        return _Added(present.specs, present.state_dict())
    if config.add_tokens is None:
        return _Added()
    counts = {name: len(classes[name]) for name in config.tasks if name in classes}
    specs = with_kinds(read_tokens(config.add_tokens, counts, option="add_tokens"), classes, targets)
    if refused := [spec.name for spec in specs if spec.role is Role.CLASS]:
        raise InvalidOption(f"add_tokens: {refused[0]!r} is a class token; expected registers, distillation or tasks")
    return _Added(specs)


def own_config(config: Config, classes: Classes, targets: Targets | None = None) -> Any:
    """Return the configuration of one of our models: the requested tokens, and heads for the classes."""
    base = MODELS[config.model]
    kinds = {name: target.kind for name, target in (targets or {}).items()}
    dense = sum(len(names) for name, names in classes.items() if kinds.get(name) in PIXEL_BYTES)
    counts = {name: len(names) for name, names in classes.items() if kinds.get(name) not in PIXEL_BYTES}
    tasks = {name: counts[name] for name in config.tasks if name in counts}
    if config.tokens is not None:
        tokens = read_tokens(config.tokens, tasks)
    elif tasks and config.heads == "tokens":
        tokens = read_tokens(",".join(tasks), tasks)
    else:
        tokens = base.tokens
    tokens = with_kinds(tokens, classes, targets or {})
    if base.class_attention:  # tokens with a head enter where it begins; registers are among the patches from the start
        tokens = tuple(
            spec if spec.role is Role.REGISTER or spec.enters == -1 else replace(spec, enters=-1, position=False)
            for spec in tokens
        )
    own_tasks = {spec.name for spec in tokens if spec.role is Role.TASK}  # with heads of their own
    options: dict[str, Any] = {
        "tokens": tokens,
        "num_classes": sum(counts[name] for name in counts if name not in own_tasks and config.recipe == "labels"),
        "drop_path": config.drop_path or 0.0,
        **({"dense": dense} if dense else {}),
        **{name: getattr(config, name) for name in ("image_size", "patch_size") if getattr(config, name) is not None},
    }
    twice = sorted(set(options) & set(config.options))
    if twice:
        raise InvalidOption(f"options: {', '.join(twice)} has a field of its own; give it there")
    try:
        return model_config(config.model, **options, **config.options)
    except InvalidOption as error:
        raise InvalidOption(f"model={config.model!r}: {error}") from error


def _expected(model: nn.Module, size: Any) -> InputSpec:
    found = declared_spec(model) or InputSpec((224, 224), MEAN, STD)
    axes = len(found.size)
    return replace(found, size=(size,) * axes if isinstance(size, int) else size[-axes:]) if size else found


def load_teacher(name: str) -> tuple[nn.Module, Labels]:
    """Load a teacher: a run directory, a saved model, or a model of a library by name."""
    if named(name).is_dir():
        return load_trained(name)
    if ":" not in name:
        raise ModelLoadError(
            f"teacher={name!r}: there is no such directory; expected a run directory, or a name like timm:NAME"
        )
    try:
        model = load_model(name)
    except ModelLoadError as error:
        raise ModelLoadError(f"teacher={name!r}: {error}") from error
    return model, Labels({}, _expected(model, None), {}, {}, Path(name))
