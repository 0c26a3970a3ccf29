"""The training configuration: every option, declared once."""
# ruff: noqa: RUF009 (`option` returns a dataclass field)

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from vitrail.adapters.registry import split_name
from vitrail.adapters.saved import named
from vitrail.data.labels.targets import KINDS
from vitrail.data.media.modality import MODALITIES
from vitrail.errors import InvalidOption
from vitrail.models import MODELS
from vitrail.surgery.added_tokens import LARGEST_GATE
from vitrail.tokens import TokenSpec
from vitrail.training.config.options import (
    Kind,
    Option,
    choice,
    flag,
    integer,
    mapping,
    number,
    only,
    option,
    options_of,
    read_value,
    read_yaml,
    sizes,
    suggest,
    text,
    to_yaml,
    weights,
)
from vitrail.training.config.presets import ADDED_LR, OPEN_GATE, PRESETS, batch_for, ema_for, lr_for
from vitrail.training.config.syntax import MergePlan, read_interval, read_merge, token_roles

_data, _model, _objective, _recipe = (partial(option, group) for group in ("Data", "Model", "Objective", "Recipe"))
_machine, _output = (partial(option, group, resumable=True) for group in ("Machine", "Output"))

NO_LABELS = "none"
"""Value of ``labels`` for training without labels."""

DISTILLATION_WEIGHTS = {"hard": 0.5, "soft": 0.1, "features": 0.5}
"""Default weight of the teacher's loss by kind of distillation; the first two are DeiT's."""


def _parse_validation(value: Any) -> Any:
    if isinstance(value, str):
        if value.lower() in ("none", ""):
            return None
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, int | float) and (isinstance(value, bool) or not 0 < value < 1):
        raise ValueError
    return value


def _parse_tasks(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, list | tuple):
        raise ValueError
    return tuple(value)


def _parse_kind(value: Any) -> Any:
    if isinstance(value, str) and value not in KINDS:
        pairs = [part.partition("=") for part in value.split(",")] if "=" in value else []
        value = {name.strip(): kind.strip() for name, _, kind in pairs} or read_value(value)
    kinds = value.values() if isinstance(value, Mapping) else [value]
    if not kinds or any(kind not in KINDS for kind in kinds):
        raise ValueError
    return dict(value) if isinstance(value, Mapping) else value


def _parse_mask_classes(value: Any) -> Any:
    if isinstance(value, str):
        value = value.strip()
        value = int(value) if value.isdigit() else [part.strip() for part in value.split(",")]
    if isinstance(value, bool) or not isinstance(value, int | list | tuple):
        raise ValueError
    return value if isinstance(value, int) else tuple(value)


def _parse_compile(value: Any) -> Any:
    if isinstance(value, bool):  # as YAML reads on and off
        return "whole" if value else "off"
    return _COMPILE.parse("augment" if value == "pictures" else value)  # its name before 0.3


_COMPILE = choice("whole", "blocks", "augment", "off")
_INTERVAL = Kind(
    "a number of epochs, or text such as '2 epochs' or '200 steps'",
    "EVERY",
    only(lambda value: bool(read_interval(value, 1))),
)


@dataclass(frozen=True)
class Config:
    """A training run. Options that are None are derived from the preset, the model, the data or the machine.

    >>> Config(data="photos", preset="tiny").resolved(1000).batch_size
    64
    """

    data: Any = _data(
        Kind("a path or a dataset", "DATA", only(lambda value: not isinstance(value, str) or bool(value))),
        "Training data: a folder with one subfolder per class, parquet files, shards (wds:…), hf:OWNER/NAME, "
        "torchvision:NAME:ROOT; files of images, video clips or sounds; from Python also a dataset or `Arrays`.",
        MISSING,
        resumable=True,
    )
    validation: Any = _data(
        Kind("a fraction between 0 and 1, data, or none", "DATA", _parse_validation),
        "Held-out data, the fraction of the training data to hold out, or none for no evaluation.",
        0.1,
        resumable=True,
    )
    labels: str | None = _data(text("COLUMN"), "Column with the class labels; none (with recipe=dino) ignores labels.")
    kind: Any = _data(
        Kind(
            "one of classification, regression, multilabel, dense, depth, or a mapping of columns to these",
            "KIND",
            _parse_kind,
        ),
        "What label columns hold; by default numbers with fractions are values, lists several classes.",
    )
    masks: str | None = _data(
        text("DIR"),
        "Folder of masks, or depth maps, for a folder of images, with files of the same names.",
        resumable=True,
    )
    validation_masks: str | None = _data(text("DIR"), "Folder of masks for the held-out data.", resumable=True)
    mask_classes: Any = _data(
        Kind("a number of classes, or their names separated by commas", "CLASSES", _parse_mask_classes),
        "Classes whose numbers are the values of masks; by default foreground and background.",
    )
    tasks: tuple[str, ...] = _data(
        Kind("column names separated by commas", "COLUMNS", _parse_tasks), "Columns to learn as tasks.", ()
    )
    modality: str | None = _data(
        choice(*(name for name in MODALITIES if name != "array")),
        "What files hold; by default what their endings say (a GIF is an image).",
    )
    sampling: dict[str, Any] = _data(
        mapping(), "Which frames of clips are seen, such as {frames: segments}; spectrograms, such as {rate: 8000}.", {}
    )
    share: float = _data(number(0, 1, above=True), "Fraction of the training data to use.", 1.0)
    side: int | None = _data(integer(1), "Size in pixels at which decoded images are kept.")
    keep_data: str = _data(
        choice("auto", "device", "workers"),
        "Decode once and keep images in memory (device), or read them with workers.",
        "auto",
        resumable=True,
    )
    max_unreadable: float = _data(number(0, 1), "Fraction of images that may be unreadable.", 0.01, resumable=True)

    model: str = _model(
        text("MODEL"),
        "A Vitrail model, timm:NAME, hf:REPO, torchvision:NAME, or a run or model directory to fine-tune.",
        "vit_tiny_patch16",
    )
    options: dict[str, Any] = _model(mapping(), "More options of the model's constructor.", {})
    pretrained: bool | None = _model(flag(), "Start from the library's pretrained weights.")
    image_size: Any = _model(
        sizes(), "Input size: height and width; frames, height and width of clips; bands and frames of spectrograms."
    )
    patch_size: int | tuple[int, ...] | None = _model(sizes(), "Patch size, with as many numbers as the input size.")
    tokens: Any = _model(
        Kind(
            "text such as 'cls,register=4', or token specs",
            "TOKENS",
            lambda value: tuple(value) if isinstance(value, list) else value,
        ),
        "Special tokens of a Vitrail model, such as cls,distillation,register=4.",
    )
    add_tokens: Any = _model(
        Kind(
            "text such as 'register=4,breed', or token specs",
            "TOKENS",
            lambda value: tuple(value) if isinstance(value, list) else value,
        ),
        "Tokens to add to a model that is trained already: register=N, distillation, and task tokens by their column.",
    )
    gate: float = _model(
        number(-20, LARGEST_GATE),
        "Initial gate of added tokens: each has exp(gate) of the weight of another.",
        OPEN_GATE,
    )
    heads: str = _model(
        choice("tokens", "shared"), "One token per task, or one class token shared by all tasks.", "tokens"
    )

    weighting: str = _objective(choice("fixed", "uncertainty"), "Fixed or learned task weights.", "fixed")
    task_weights: dict[str, float] = _objective(weights(), "Fixed weight of each task.", {})
    teacher: str | None = _objective(
        text("MODEL"), "Teacher model: a run directory, timm:NAME or hf:REPO.", resumable=True
    )
    distillation: str | None = _objective(
        choice("hard", "soft", "features"), "What to learn from the teacher; hard by default."
    )
    distillation_weight: float | None = _objective(
        number(0, 1, above=True), "Weight of the teacher's loss; 0.5, or 0.1 for soft, by default."
    )
    temperature: float | None = _objective(number(0, above=True), "Temperature of soft distillation; 3 by default.")
    feature_weight: float = _objective(
        number(0), "Weight of a feature loss in addition to hard or soft distillation.", 0.0
    )
    merge: Any = _objective(
        Kind("text such as 'r=8,over_epochs=10', or a mapping", "MERGE", read_merge),
        "Merge tokens during training, such as r=8,from_epoch=0,over_epochs=10.",
    )
    train_only: str | None = _objective(
        choice("method", "tokens"),
        "Freeze the model and train only its merging method, such as merge=r=8,method=dtem, or its added tokens.",
    )
    recipe: str = _objective(
        choice("labels", "dino"), "Learn from labels, or without them by self-distillation.", "labels"
    )
    recipe_options: dict[str, Any] = _objective(
        mapping(), "Options of recipe=dino, such as {prototypes: 1024, patches: 1}.", {}
    )

    preset: str | None = _recipe(
        choice(*PRESETS), "Defaults for the recipe; by default small, or finetune for a model that is trained already."
    )
    epochs: int | None = _recipe(integer(1), "Number of epochs.")
    batch_size: int | None = _recipe(integer(1), "Global batch size, over all ranks.")
    accumulate: int = _recipe(
        integer(1), "Gradient accumulation: parts that a batch is computed in.", 1, resumable=True
    )
    optimizer: str = _recipe(choice("adamw", "muon"), "Optimizer; muon updates hidden layers.", "adamw")
    lr: float | None = _recipe(number(0, 1000, above=True), "Peak learning rate.")
    added_lr: float = _recipe(
        number(0, 1000, above=True),
        "Peak learning rate of added tokens and their heads; gates have ten times it.",
        ADDED_LR,
    )
    min_lr: float = _recipe(number(0, 1), "Final learning rate as a fraction of the peak.", 0.01)
    weight_decay: float | None = _recipe(number(0), "Weight decay.")
    warmup_epochs: int | None = _recipe(integer(0), "Epochs of linear warm-up.")
    clip: float = _recipe(number(0), "Maximum gradient norm; 0 disables clipping.", 1.0)
    ema: float | None = _recipe(number(0, 1, below=True), "Decay of the weights' EMA; 0 disables it.")
    drop_path: float | None = _recipe(number(0, 1, below=True), "Drop path (stochastic depth) rate of the last block.")
    smoothing: float | None = _recipe(number(0, 1, below=True), "Label smoothing.")
    mixup: float | None = _recipe(number(0), "Mixup alpha; 0 disables it.")
    cutmix: float | None = _recipe(number(0), "CutMix alpha; 0 disables it.")
    mixing: float = _recipe(number(0, 1), "Fraction of images to which Mixup or CutMix applies.", 1.0)
    augment: str | None = _recipe(choice("none", "flip", "light", "medium", "strong"), "Strength of the augmentation.")
    crop_min: float | None = _recipe(
        number(0, 1, above=True), "Smallest area of a random crop, as a fraction of the image."
    )
    erasing: float | None = _recipe(number(0, 1), "Probability of random erasing.")
    plain_epochs: int = _recipe(integer(0), "Final epochs without augmentation and mixing, except for flips.", 0)
    repeats: int | None = _recipe(integer(1), "Repeated augmentation: views of an image per batch.")
    seed: int = _recipe(integer(0), "Random seed.", 0)

    device: str | None = _machine(choice("cpu", "cuda"), "Device; CUDA if available by default.")
    dtype: str | None = _machine(
        choice("fp32", "bf16", "bf16-weights"),
        "float32, bfloat16 autocast (default on CUDA), or bfloat16 throughout with float32 master weights.",
        resumable=False,
    )
    compile: str | None = _machine(
        replace(_COMPILE, parse=_parse_compile),
        "Compile the whole step, the model's blocks, only the augmentation, or nothing.",
    )
    graphs: bool | None = _machine(flag(), "Capture the step as a CUDA graph; default on a single GPU.")
    shard: str = _machine(choice("ddp", "fsdp"), "Data parallel, or fully sharded for large models.", "ddp")
    patience: float = _machine(
        number(0, 10_000, above=True), "Minutes that ranks wait for one that is busy, or stopped.", 30.0
    )
    workers: int | None = _machine(integer(0), "Data loader workers.")

    out: str | None = _output(text("DIR"), "Run directory.", short="-o")
    evaluate_every: Any = _output(_INTERVAL, "Evaluation interval; 20 evaluations per run by default.")
    save_every: Any = _output(_INTERVAL, "Checkpoint interval; 20 checkpoints per run by default.")
    keep: int = _output(integer(1), "Checkpoints to keep.", 2)
    log_every: int = _output(integer(1), "Steps between log lines.", 50)
    diagnostics: str | None = _output(
        choice("stability"), "Also log gradient and residual norms by layer and the loss of every step."
    )
    tensorboard: bool = _output(flag(), "Also log to TensorBoard.", False)

    def __post_init__(self) -> None:
        for name, declared in OPTIONS.items():
            object.__setattr__(self, name, declared.check(getattr(self, name)))
        for problem in chain(_model_problems(self), _target_problems(self), _recipe_problems(self)):
            raise InvalidOption(problem)

    @property
    def own(self) -> bool:
        """Whether ``model`` names a Vitrail model."""
        return self.model in MODELS

    @property
    def half(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self.dtype in ("bf16", "bf16-weights")

    @property
    def folder(self) -> Path:
        name = self.model.replace(":", "-").replace("/", "-").strip(".-")
        return Path(self.out) if self.out else Path("runs") / f"{name}-{self.known_preset}"

    @property
    def known_preset(self) -> str:
        """The preset, by default chosen by whether the model starts from trained weights."""
        trained = self.pretrained or (not self.own and named(self.model).is_dir())
        return self.preset or ("finetune" if trained and self.train_only != "method" else "small")

    def resolved(self, count: int, *, cuda: bool = False) -> Config:
        """Return a config with every option that preset, number of training samples and machine decide filled in."""
        preset = PRESETS[self.known_preset]
        values = {name: preset[name] for name in preset if getattr(self, name) is None and name not in ("lr", "ema")}
        if not self.own:
            values.update(image_size=self.image_size, patch_size=self.patch_size)
        batch = self.batch_size or batch_for(self.known_preset, count, self.repeats or preset["repeats"])
        epochs = self.epochs or preset["epochs"]
        if self.warmup_epochs is None:
            values["warmup_epochs"] = min(preset["warmup_epochs"], epochs // 5)
        if self.ema is None:
            values["ema"] = preset["ema"] if preset["ema"] == 0 else ema_for(epochs * max(count // batch, 1))
        if self.train_only is not None and self.drop_path is None:
            values["drop_path"] = 0.0
        if self.recipe != "labels":
            values.update(dict.fromkeys(("mixup", "cutmix", "smoothing"), 0.0))
            values["crop_min"] = self.crop_min or 0.4  # of global views; local views have their own crops
        derived: dict[str, Any] = {
            "out": str(self.folder),
            "preset": self.known_preset,
            "batch_size": batch,
            "lr": lr_for(self.known_preset, batch),
            "dtype": "bf16" if cuda else "fp32",
            "compile": ("blocks" if self.own else "augment") if cuda else "off",  # convnets take minutes to compile
            "device": "cuda" if cuda else "cpu",
            "evaluate_every": max(1, epochs // 20),
            "save_every": max(1, epochs // 20),
        }
        if self.teacher is not None:
            kind = self.distillation or "hard"
            derived |= {"distillation": kind, "distillation_weight": DISTILLATION_WEIGHTS[kind]}
            if kind == "soft":
                derived["temperature"] = 3.0
        values |= {name: value for name, value in derived.items() if getattr(self, name) is None}
        return replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML or JSON."""
        return {name: _plain(getattr(self, name)) for name in OPTIONS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Return a config from plain values, as `to_dict` returns them; missing options take their defaults."""
        for name in values:
            if name not in OPTIONS:
                raise InvalidOption(f"unknown training option {name!r}{suggest(str(name), OPTIONS)}")
        if values.get("data") is None:
            raise InvalidOption("data is missing: give the training data, data= (--data)")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: Any) -> Config:
        """Return the config in a YAML file; ``changes`` take precedence over it."""
        return cls.from_dict({**read_yaml(path), **changes})

    def to_yaml(self) -> str:
        return to_yaml(self.to_dict())


OPTIONS = options_of(Config)
"""Every training option by name: type, default, allowed values, help text, spelling."""


def fixed_options(config: Config) -> dict[str, Any]:
    """Return the options that affect the result, as plain values: a run is resumed with the same ones."""
    return {name: value for name, value in config.to_dict().items() if not OPTIONS[name].resumable}


def default_text(declared: Option) -> str:
    """Return an option's default as help and docs show it; empty if there is none."""
    if declared.name in PRESETS["small"]:
        return "by preset"
    return "" if declared.default in (None, MISSING, (), {}) else str(declared.default).lower()


def options_table() -> str:
    """Return the table of options in ``docs/training.md``."""
    lines = []
    for group in dict.fromkeys(one.group for one in OPTIONS.values()):
        lines += [f"| {group} | default | values | |", "| --- | --- | --- | --- |"]
        for one in (one for one in OPTIONS.values() if one.group == group):
            mark = "" if one.resumable else " *"
            lines.append(
                f"| `{one.flags[-1].split('/')[0]}`{mark} | {default_text(one)} | {one.kind.expected} | {one.help} |"
            )
        lines.append("")
    return "\n".join(lines)


Config.__doc__ = f"{Config.__doc__}\n\nOptions:\n" + "\n".join(f"- {one.name}: {one.help}" for one in OPTIONS.values())


def _plain(value: Any) -> Any:
    if isinstance(value, TokenSpec | MergePlan):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else f"<{type(value).__name__}>"


def _model_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the model: its name, and options that it does not take."""
    name = config.model
    folder = named(name).is_dir() or name.startswith("local-dir:")
    if not config.own and not folder and split_name(name)[0] is None:
        known = sorted(MODELS)
        yield (
            f"model={name!r}: expected a run or model directory, timm:NAME, hf:REPO, or one of "
            f"{', '.join(known)}{suggest(name, known)}"
        )
    if config.add_tokens is not None and (config.own or config.recipe != "labels"):
        yield "add_tokens is for models that are trained already, to learn labels; use tokens for others"
    if config.add_tokens is not None and config.shard == "fsdp":
        yield "add_tokens does not work with shard=fsdp; use ddp"
    if config.add_tokens is not None and config.compile == "whole":
        yield "add_tokens does not work with compile=whole; use blocks"
    for field in ("tokens", "patch_size"):
        if not config.own and getattr(config, field) is not None:
            yield f"{field} is for Vitrail models built by name; model={name!r} has its own"
    if config.own and config.pretrained:
        yield f"pretrained: {name!r} has no pretrained weights; to fine-tune, give a directory as model"
    for field, compares_patches in {
        "distillation='features'": config.distillation == "features",
        "feature_weight": config.feature_weight > 0,
        **{f"recipe_options: {name}": bool(config.recipe_options.get(name)) for name in ("patches", "reconstruct")},
    }.items():
        if compares_patches and config.options.get("patch_drop"):
            yield f"{field} needs every patch, but options: patch_drop drops some; give one of them"
    for field, handles_weights in {
        f"recipe={config.recipe}": config.recipe != "labels",
        "shard=fsdp": config.shard == "fsdp",  # casts weights itself
        "compile=whole": config.compile == "whole",  # weights are swapped around the model, in Python
    }.items():
        if handles_weights and config.dtype == "bf16-weights":
            yield f"dtype=bf16-weights does not work with {field}; use dtype=bf16, or leave {field} out"


def _target_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with teacher and tasks."""
    if config.teacher is None:
        roles = [role for tokens in (config.tokens, config.add_tokens) if tokens for role in token_roles(tokens)]
        if config.tokens is None and config.own:
            roles = [spec.role.value for spec in MODELS[config.model].tokens]
        if "distillation" in roles:
            yield (
                f"{'model' if config.tokens is None else 'tokens'}: a distillation token needs a teacher. Give one "
                "(a run directory, timm:NAME, hf:REPO), or tokens without it, such as tokens='cls'"
            )
        for name in ("distillation", "distillation_weight", "temperature", "feature_weight"):
            if getattr(config, name):
                yield f"{name}={getattr(config, name)!r} needs a teacher"
    if config.temperature is not None and config.distillation != "soft":
        yield f"temperature needs distillation='soft'; got distillation={config.distillation!r}"
    tasks = config.tasks
    for task in tasks:
        if not isinstance(task, str) or not task.isidentifier():
            yield f"tasks: {task!r} cannot name a token; expected letters, digits and underscores"
    if len(set(tasks)) < len(tasks):
        yield f"tasks={list(tasks)}: expected each column once"
    if tasks and config.labels is not None:
        yield f"labels={config.labels!r} and tasks={list(tasks)}: give one of them"
    if config.heads == "shared" and not tasks:
        yield "heads='shared' needs tasks"
    if config.heads == "shared" and config.tokens is not None and set(token_roles(config.tokens)) & {*tasks, "task"}:
        yield "heads='shared' uses one class token for all tasks, but tokens has task tokens"
    for name in config.task_weights:
        if name not in tasks:
            yield f"task_weights: {name!r} is not a task{suggest(name, tasks)}"
    if config.task_weights and config.weighting == "uncertainty":
        yield "task_weights are fixed, but weighting='uncertainty' learns them; give one of them"


def _recipe_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with training without labels, epochs, gradient accumulation and the optimizer."""
    name = f"recipe={config.recipe!r}"
    if config.recipe == "labels":
        if config.recipe_options:
            yield "recipe_options need recipe='dino'"
        if config.labels == NO_LABELS:
            yield "labels='none' needs recipe='dino', which trains without labels"
    else:
        if not config.own:
            yield f"{name} needs a Vitrail model built by name; got model={config.model!r}"
        for field in ("teacher", "merge", "train_only", "tasks", "mixup", "cutmix", "smoothing", "plain_epochs"):
            if getattr(config, field):
                yield f"{name} trains without labels and does not take {field}"
        if config.augment in ("none", "flip"):
            yield f"augment={config.augment!r}: {name} needs views that differ; use light or stronger"
        if config.shard == "fsdp":
            yield f"shard='fsdp' does not support {name}; use ddp"
    if config.train_only == "method" and config.merge is None:
        yield "train_only='method' needs a merging method with parameters, such as merge='r=8,method=dtem'"
    if (
        config.train_only == "method"
        and config.merge is not None
        and (config.merge.from_epoch or config.merge.over_epochs)
    ):
        yield "train_only='method' merges from the beginning; leave out from_epoch and over_epochs"
    for field in ("warmup_epochs", "plain_epochs"):
        if config.epochs is not None and (getattr(config, field) or 0) > config.epochs:
            yield f"{field}={getattr(config, field)} exceeds epochs={config.epochs}"
    if config.batch_size is not None and config.batch_size % config.accumulate:
        yield f"accumulate={config.accumulate} does not divide batch_size={config.batch_size}"
    if config.diagnostics and config.shard == "fsdp":
        yield f"diagnostics={config.diagnostics} needs whole gradients, which shard=fsdp splits; use ddp"
    if config.optimizer == "muon" and config.shard == "fsdp":
        yield "optimizer=muon needs whole matrices, which shard=fsdp splits; use ddp, or adamw"
