"""Checks of options against each other, as far as they need neither data nor model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.adapters.registry import split_name
from vitrail.adapters.saved import named
from vitrail.errors import InvalidOption
from vitrail.models import MODELS
from vitrail.training.config.options import suggest
from vitrail.training.config.syntax import token_roles

if TYPE_CHECKING:
    from vitrail.training.config.config import Config

NO_LABELS = "none"
"""Value of ``labels`` for training without labels."""


def check_combinations(config: Config) -> None:
    """Raise `InvalidOption` for options that contradict each other."""
    for check in (
        check_model,
        check_distillation,
        check_patch_drop,
        check_bf16_weights,
        check_tasks,
        check_recipe,
        check_schedule,
    ):
        check(config)


def check_model(config: Config) -> None:
    """Check that the model can be found and takes the tokens, patch size and weights it is given."""
    name = config.model
    folder = named(name).is_dir() or name.startswith("local-dir:")
    if not config.own and not folder and split_name(name)[0] is None:
        known = sorted(MODELS)
        raise InvalidOption(
            f"model={name!r}: expected a run or model directory, timm:NAME, hf:REPO, or one of "
            f"{', '.join(known)}{suggest(name, known)}"
        )
    if not config.own:
        for field in ("tokens", "patch_size"):
            if getattr(config, field) is not None:
                raise InvalidOption(f"{field} is for Vitrail models built by name; model={name!r} has its own")
    elif config.pretrained:
        raise InvalidOption(f"pretrained: {name!r} has no pretrained weights; to fine-tune, give a directory as model")


def check_distillation(config: Config) -> None:
    """Check that distillation has a teacher, and that a temperature is used."""
    if config.teacher is None:
        roles = [] if config.tokens is None else token_roles(config.tokens)
        if config.tokens is None and config.own:
            roles = [spec.role.value for spec in MODELS[config.model].tokens]
        if "distillation" in roles:
            raise InvalidOption(
                f"{'model' if config.tokens is None else 'tokens'}: a distillation token needs a teacher. Pass one "
                "(a run directory, timm:NAME, hf:REPO), or tokens without it, such as tokens='cls'"
            )
        for name in ("distillation", "distillation_weight", "temperature"):
            if getattr(config, name) is not None:
                raise InvalidOption(f"{name}={getattr(config, name)!r} needs a teacher")
        if config.feature_weight:
            raise InvalidOption(f"feature_weight={config.feature_weight} needs a teacher")
    if config.temperature is not None and config.distillation != "soft":
        raise InvalidOption(f"temperature needs distillation='soft'; got distillation={config.distillation!r}")


def check_patch_drop(config: Config) -> None:
    """Check that no loss compares patches one by one while some are dropped."""
    compared = {
        "distillation='features'": config.distillation == "features",
        "feature_weight": config.feature_weight > 0,
        **{f"recipe_options: {name}": bool(config.recipe_options.get(name)) for name in ("patches", "reconstruct")},
    }
    for name, used in compared.items():
        if used and config.options.get("patch_drop"):
            raise InvalidOption(f"{name} needs every patch, but options: patch_drop drops some; give one of them")


def check_bf16_weights(config: Config) -> None:
    """Check that nothing else handles the weights that ``dtype=bf16-weights`` casts."""
    others = {
        f"recipe={config.recipe}": config.recipe != "labels",
        "shard=fsdp": config.shard == "fsdp",  # casts weights itself
        "compile=whole": config.compile == "whole",  # weights are swapped around the model, in Python
    }
    for name, used in others.items():
        if used and config.dtype == "bf16-weights":
            raise InvalidOption(f"dtype=bf16-weights does not work with {name}; use dtype=bf16, or leave {name} out")


def check_tasks(config: Config) -> None:
    """Check the names, heads and weights of tasks."""
    tasks = config.tasks
    for task in tasks:
        if not isinstance(task, str) or not task.isidentifier():
            raise InvalidOption(f"tasks: {task!r} cannot name a token; expected letters, digits and underscores")
    if len(set(tasks)) < len(tasks):
        raise InvalidOption(f"tasks={list(tasks)}: expected each column once")
    if tasks and config.labels is not None:
        raise InvalidOption(f"labels={config.labels!r} and tasks={list(tasks)}: give one of them")
    if config.heads == "shared":
        if not tasks:
            raise InvalidOption("heads='shared' needs tasks")
        if config.tokens is not None and set(token_roles(config.tokens)) & {*tasks, "task"}:
            raise InvalidOption("heads='shared' uses one class token for all tasks, but tokens has task tokens")
    for name in config.task_weights:
        if name not in tasks:
            raise InvalidOption(f"task_weights: {name!r} is not a task{suggest(name, tasks)}")
    if config.task_weights and config.weighting == "uncertainty":
        raise InvalidOption("task_weights are fixed, but weighting='uncertainty' learns them; give one of them")


def check_recipe(config: Config) -> None:
    """Check that training without labels gets no options that need labels."""
    if config.recipe == "labels":
        if config.recipe_options:
            raise InvalidOption("recipe_options need recipe='dino'")
        if config.labels == NO_LABELS:
            raise InvalidOption("labels='none' needs recipe='dino', which trains without labels")
        return
    name = f"recipe={config.recipe!r}"
    if not config.own:
        raise InvalidOption(f"{name} needs a Vitrail model built by name; got model={config.model!r}")
    for field in ("teacher", "merge", "tasks", "mixup", "cutmix", "smoothing", "plain_epochs"):
        if getattr(config, field):
            raise InvalidOption(f"{name} trains without labels and does not take {field}")
    if config.augment in ("none", "flip"):
        raise InvalidOption(f"augment={config.augment!r}: {name} needs views that differ; use light or stronger")
    if config.shard == "fsdp":
        raise InvalidOption(f"shard='fsdp' does not support {name}; use ddp")


def check_schedule(config: Config) -> None:
    """Check epochs, gradient accumulation and the optimizer's sharding."""
    for name in ("warmup_epochs", "plain_epochs"):
        if config.epochs is not None and (getattr(config, name) or 0) > config.epochs:
            raise InvalidOption(f"{name}={getattr(config, name)} exceeds epochs={config.epochs}")
    if config.batch_size is not None and config.batch_size % config.accumulate:
        raise InvalidOption(f"accumulate={config.accumulate} does not divide batch_size={config.batch_size}")
    if config.optimizer == "muon" and config.shard == "fsdp":
        raise InvalidOption("optimizer=muon needs whole matrices, which shard=fsdp splits; use ddp, or adamw")
