"""Everything that a training run is asked for, as one frozen object that YAML can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vitrail.errors import InvalidOption
from vitrail.models import MODELS
from vitrail.tokens import TokenSpec
from vitrail.training.config.checks import check_together, check_value
from vitrail.training.config.presets import PRESETS, batch_for, ema_for, lr_for
from vitrail.training.config.syntax import MergePlan, nearest, read_every, read_merge


@dataclass(frozen=True)
class Config:
    """A training run. ``None`` is derived: from the preset, the model, the data or the machine.

    The data:

    - ``data``: what `open_examples` takes: a folder of class folders, parquet files, ``hf:OWNER/NAME``,
      ``torchvision:NAME:ROOT``, shards; from Python also a torch data set of (picture, label), `Examples`, `Arrays`.
    - ``validation``: the same, or a share that is held out of the training data, or None for no evaluation.
    - ``labels``: the column of classes, where there are several and no tasks. ``tasks``: several columns to learn.
    - ``share``: of the training data that is used, after holding out. ``side``: pixels that pictures are kept at.
    - ``keep_data``: on the ``device`` (or in memory), by ``workers``, or ``auto``. ``max_unreadable``: the share of
      pictures that may be skipped because they cannot be read.

    The model and what it learns:

    - ``model``: one of `vitrail.models.list_models`, ``timm:NAME``, ``hf:REPO-OR-FOLDER``, or the folder of a run or
      a model, to go on from it. ``options``: more of the model's own options. ``pretrained``: begin with the
      library's weights.
    - ``tokens``: ``"cls,distillation,register=4"`` or specs, for our models. ``heads``: where tasks are given and
      tokens are not, a token for each (``"tokens"``), or one class token with a head for each (``"shared"``).
    - ``weighting``: of tasks, ``"fixed"`` (with ``task_weights``) or ``"uncertainty"``.
    - ``teacher``: a model to learn from, by name or folder; ``distillation``: ``hard``, ``soft`` or ``features``, with
      ``distillation_weight`` and, for soft, ``temperature``; ``feature_weight`` puts features beside hard or soft.
    - ``merge``: merging while training, ``"r=8,from_epoch=0,over_epochs=5"`` or a mapping.
    - ``recipe``: ``"labels"``, or ``"dino"``, which learns without them and takes ``recipe_options`` (those of
      `SelfLearner`). With ``labels="none"`` it is not evaluated either; else, by nearest neighbours.

    The recipe: ``epochs``, ``batch_size`` (over all processes), ``accumulate`` (parts that a batch is computed in),
    ``optimizer`` (``adamw``, or ``muon``, which moves hidden layers by orthogonal matrices), ``lr``, ``min_lr`` (share
    of it at the end), ``weight_decay``, ``warmup_epochs``, ``clip`` (norm of gradients; 0 for none), ``ema`` (decay; 0
    for none), ``drop_path``, ``smoothing``, ``mixup``, ``cutmix``, ``mixing`` (share of the pictures that either is
    done to), ``augment``, ``crop_min``, ``erasing``, ``plain_epochs`` (so many last ones show pictures as evaluation
    does, flipped at most: nothing is cropped, coloured or mixed), ``repeats``, ``seed``.

    The machine: ``device``, ``dtype`` (``bf16`` is autocast; with ``bf16-weights`` all that the model computes is bf16,
    and weights are rounded for each step from float32 ones), ``compile`` (``whole``, ``blocks``, ``pictures``: only
    what augments them, which the others do too, or ``off``), ``graphs`` (record a step as a CUDA graph and replay it;
    by default where one process trains on a GPU), ``shard`` (``ddp``, or ``fsdp`` for what one device cannot hold),
    ``workers``.

    The files: ``out``, ``evaluate_every`` and ``save_every`` (epochs, or ``"200 steps"``), ``keep`` (checkpoints),
    ``log_every`` (steps), ``tensorboard``.

    >>> Config(data="photos", preset="tiny").resolved(1000).batch_size
    64
    """

    data: Any
    model: str = "vit_tiny_patch16"
    out: str | None = None
    preset: str = "small"
    validation: Any = 0.1
    labels: str | None = None
    tasks: tuple[str, ...] = ()
    share: float = 1.0
    side: int | None = None
    keep_data: str = "auto"
    max_unreadable: float = 0.01

    options: dict[str, Any] = field(default_factory=dict)
    pretrained: bool | None = None
    image_size: Any = None
    patch_size: int | tuple[int, ...] | None = None
    tokens: Any = None
    heads: str = "tokens"
    weighting: str = "fixed"
    task_weights: dict[str, float] = field(default_factory=dict)
    teacher: str | None = None
    distillation: str | None = None
    distillation_weight: float | None = None
    temperature: float | None = None
    feature_weight: float = 0.0
    merge: Any = None
    recipe: str = "labels"
    recipe_options: dict[str, Any] = field(default_factory=dict)

    epochs: int | None = None
    batch_size: int | None = None
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float | None = None
    min_lr: float = 0.01
    weight_decay: float | None = None
    warmup_epochs: int | None = None
    clip: float = 1.0
    ema: float | None = None
    drop_path: float | None = None
    smoothing: float | None = None
    mixup: float | None = None
    cutmix: float | None = None
    mixing: float = 1.0
    augment: str | None = None
    crop_min: float | None = None
    erasing: float | None = None
    plain_epochs: int = 0
    repeats: int | None = None
    seed: int = 0

    device: str | None = None
    dtype: str | None = None
    compile: str | None = None
    graphs: bool | None = None
    shard: str = "ddp"
    workers: int | None = None

    evaluate_every: Any = None
    save_every: Any = None
    keep: int = 2
    log_every: int = 50
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("tasks", "tokens"):
            value = getattr(self, name)
            if name == "tasks" and isinstance(value, str):
                value = [part.strip() for part in value.split(",") if part.strip()]
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.validation, str) and self.validation.lower() in ("none", ""):
            object.__setattr__(self, "validation", None)
        for each in fields(self):
            if getattr(self, each.name) is None and each.default not in (None, MISSING) and each.name != "validation":
                raise InvalidOption(f"{each.name} is empty; give a value, or leave it out for {each.default!r}")
            object.__setattr__(self, each.name, check_value(each.name, getattr(self, each.name)))
        object.__setattr__(self, "merge", read_merge(self.merge))
        for name in ("evaluate_every", "save_every"):
            if getattr(self, name) is not None:
                read_every(name, getattr(self, name))
        check_together(self)

    @property
    def own(self) -> bool:
        """Whether the model is one of ours, built by name."""
        return self.model in MODELS

    @property
    def half(self) -> bool:
        """Whether bf16 is computed in, one way or the other."""
        return self.dtype in ("bf16", "bf16-weights")

    @property
    def folder(self) -> Path:
        """Where the run is written."""
        name = self.model.replace(":", "-").replace("/", "-").strip(".-")
        return Path(self.out) if self.out else Path("runs") / f"{name}-{self.preset}"

    def resolved(self, count: int, *, cuda: bool = False) -> Config:
        """Fill in everything that the preset, the number of training pictures and the machine decide."""
        preset = PRESETS[self.preset]
        values = {name: preset[name] for name in preset if getattr(self, name) is None and name not in ("lr", "ema")}
        if not self.own:
            values.update(image_size=self.image_size, patch_size=self.patch_size)
        repeats = self.repeats or preset["repeats"]
        batch = self.batch_size or batch_for(self.preset, count, repeats)
        epochs = self.epochs or preset["epochs"]
        if self.warmup_epochs is None:
            values["warmup_epochs"] = min(preset["warmup_epochs"], epochs // 5)
        if self.ema is None:
            values["ema"] = preset["ema"] if preset["ema"] == 0 else ema_for(epochs * max(count // batch, 1))
        if self.recipe != "labels":
            values.update(dict.fromkeys(("mixup", "cutmix", "smoothing"), 0.0))
            values["crop_min"] = self.crop_min or 0.4  # large views show much; small ones are cut by the recipe
        now_and_then = max(1, epochs // 20)
        derived = {
            "out": str(self.folder),
            "batch_size": batch,
            "lr": lr_for(self.preset, batch),
            "dtype": "bf16" if cuda else "fp32",
            "compile": ("blocks" if self.own else "pictures") if cuda else "off",  # convnets take minutes to compile
            "device": "cuda" if cuda else "cpu",
            "evaluate_every": now_and_then,
            "save_every": now_and_then,
        }
        values |= {name: value for name, value in derived.items() if getattr(self, name) is None}
        if self.teacher is not None:
            kind = self.distillation or "hard"
            weights = {"hard": 0.5, "soft": 0.1, "features": 0.5}  # the first two are DeiT's
            values["distillation"] = kind
            if self.distillation_weight is None:
                values["distillation_weight"] = weights[kind]
            if kind == "soft" and self.temperature is None:
                values["temperature"] = 3.0
        return replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        """Give plain values, ready for YAML or JSON."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build a config from plain values, as `to_dict` gives them; what is left out has its default."""
        if not isinstance(values, Mapping):
            raise InvalidOption(f"a config is a mapping of names to values; got {type(values).__name__}")
        known = [each.name for each in fields(cls)]
        for name in values:
            if name not in known:
                raise InvalidOption(f"a training run has no option {name!r}{nearest(str(name), known)}")
        if values.get("data") is None:
            raise InvalidOption("data is missing: where are the pictures to learn from?")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: Any) -> Config:
        """Read a YAML file with the fields' names; ``changes`` win over it."""
        return cls.from_dict({**read_yaml(path), **changes})

    def to_yaml(self) -> str:
        """Give the config as the text of a YAML file."""
        return str(_yaml().safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read the fields in a YAML file."""
    yaml = _yaml()
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidOption(f"{path} could not be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise InvalidOption(f"{path} holds {type(values).__name__}; expected names of fields with their values")
    return values


def read_value(text: str) -> Any:
    """Read one value as YAML reads it."""
    yaml = _yaml()
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidOption(f"{text!r} could not be read as a value: {' '.join(str(error).split())}") from error


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise InvalidOption("YAML files need PyYAML; install it with `pip install vitrail[train]`") from error
    return yaml


def _plain(value: Any) -> Any:
    if isinstance(value, TokenSpec | MergePlan):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else f"<{type(value).__name__}>"
