"""Weights under the parameter names of timm, and of the original DeiT, CaiT and DINOv2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor

from vitrail._arguments import checked
from vitrail.errors import ModelLoadError, UnsupportedModel
from vitrail.models.config import ViTConfig
from vitrail.models.position import resample
from vitrail.models.saving import Fit, check_fit
from vitrail.models.vit import ViT
from vitrail.tokens import Role

TIMM_TOKENS = {Role.CLASS: "cls_token", Role.DISTILLATION: "dist_token", Role.REGISTER: "reg_token"}
"""timm's parameter names of tokens by role, in timm's order."""

_ORIGINAL = (
    (re.compile(r"\bgamma_([12])$"), r"ls\1.gamma"),  # CaiT and DeiT III
    (re.compile(r"\bmlp\.w12\."), "mlp.fc1."),  # DINOv2
    (re.compile(r"\bmlp\.w3\."), "mlp.fc2."),
    (re.compile(r"^register_tokens$"), "reg_token"),
)
_UNUSED = frozenset({"mask_token"})  # for masked training, in DINOv2's files
_WRAPPERS = ("model", "state_dict", "teacher", "module")


@checked
def timm_state_dict(model: ViT) -> dict[str, Tensor]:
    """Return a model's weights under timm's names."""
    check_vit(model)
    table = _names(model.config)
    states = {_to_timm(name, table, model.config): value for name, value in model.state_dict().items()}
    foreign = [name for name in states if name.startswith(("tokens.", "heads."))]
    if foreign:
        raise UnsupportedModel(f"timm has no name for {', '.join(foreign)}; use save_pretrained")
    return states


@checked
def load_timm_state_dict(model: ViT, states: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Fit:
    """Load weights of timm or of the original DeiT, CaiT or DINOv2; raise and load nothing if they do not fit.

    Wrappers (``{"model": ...}``, the prefix ``module.``) are removed. Without ``strict``, keys may be missing or
    unexpected, so that a model with further tokens can start from known weights: positions are matched by token, and
    those of patches are resampled to another grid. Shapes must still agree. With ``assign`` the model uses the given
    tensors, with their dtype and device, instead of copying them.

    Returns the missing keys, by the model's own names, and the unexpected ones, as torch's ``load_state_dict`` does.
    """
    check_vit(model)
    table, config = _names(model.config), model.config
    given = {_canonical(name, config): value for name, value in _unwrap(states).items()}
    own = {_to_timm(name, table, config): name for name in model.state_dict()}
    if not strict and model.pos_embed is not None and "pos_embed" in given:
        given |= _placed(model, table, given)
    values = {name: model.state_dict()[ours] for name, ours in own.items()}
    fit = check_fit("model", values, given, strict, hint="; or use strict=False to load the matching keys")
    fitting = {own[name]: value for name, value in given.items() if name in own}
    model.load_state_dict(fitting, strict=False, assign=assign)
    return Fit([own[name] for name in fit.missing_keys], fit.unexpected_keys)


def check_vit(model: Any) -> None:
    """Raise if a model is not a `ViT`."""
    if not isinstance(model, ViT):
        raise UnsupportedModel(f"expected a vitrail.ViT; got {type(model).__name__}")


def _placed(model: ViT, table: Mapping[str, str], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return positions and tokens of a file for a model with other tokens or another grid.

    A token that is not in the file keeps its position. For a token without a position in the model, the file's
    position is added to its value, which is equivalent. Positions of unknown shape are left for the shape check.
    """
    config, positions = model.config, given["pos_embed"]
    counts = {name: given[name].shape[1] for name in TIMM_TOKENS.values() if name in given}
    split = _split(positions.shape[1], counts, config.grid) if positions.shape[2:] == (config.width,) else None
    if split is None:
        return {}
    front, grid = split
    starts = {name: sum(list(counts.values())[:index]) for index, name in enumerate(counts)}
    assert model.pos_embed is not None
    kept, rows, changed, start = model.pos_embed.detach().to(positions), [], {}, 0
    for spec in config.tokens:
        name = table.get(f"tokens.{spec.name}", "")
        known = counts.get(name) == spec.count
        there = known and starts[name] + spec.count <= front
        row = positions[:, starts[name] : starts[name] + spec.count] if there else None
        if config.positioned(spec):
            own = kept[:, start : start + spec.count]
            rows.append(row if row is not None else torch.zeros_like(own) if known else own)
            start += spec.count
        elif row is not None:
            changed[name] = given[name] + row
    rows.append(resample(positions[:, front:], grid, config.grid))
    return {**changed, "pos_embed": torch.cat(rows, 1)}


def _split(length: int, counts: Mapping[str, int], own: tuple[int, int, int]) -> tuple[int, Any] | None:
    """Return how many positions of a file are for special tokens, and the grid of the rest: the model's or a square."""
    fronts = [sum(list(counts.values())[:several]) for several in range(len(counts) + 1)]
    for front in fronts:
        if length - front == prod(own):
            return front, own
    for front in fronts:
        side = isqrt(max(0, length - front))
        if side and side * side == length - front:
            return front, (1, side, side)
    return None


def _names(config: ViTConfig) -> dict[str, str]:
    """Return timm's prefix for each parameter prefix that differs; prefixes without an equal are left out."""
    table: dict[str, str] = {}
    for role, theirs in TIMM_TOKENS.items():
        specs = [spec for spec in config.tokens if spec.role is role]
        if len(specs) == 1:
            table[f"tokens.{specs[0].name}"] = theirs
            if role is Role.DISTILLATION:
                table[f"heads.{specs[0].name}."] = "head_dist."
            if role is Role.CLASS and config.pool == "token":
                table[f"heads.{specs[0].name}."] = "head."
    if config.pool != "token":
        table["heads.patch."] = "head."
    return {**table, "heads.attn_pool.": "attn_pool.", "heads.fc_norm.": "fc_norm."}


def _to_timm(name: str, table: Mapping[str, str], config: ViTConfig) -> str:
    for ours, theirs in table.items():
        if name == ours or (ours.endswith(".") and name.startswith(ours)):
            return theirs + name[len(ours) :]
    return _scale_name(name, config)


def _canonical(name: str, config: ViTConfig) -> str:
    """Return timm's name for an original name."""
    for pattern, spelling in _ORIGINAL:
        name = pattern.sub(spelling, name)
    return _scale_name(name, config)


def _scale_name(name: str, config: ViTConfig) -> str:
    """Return the name of a layer scale; timm's Cait keeps that of the original."""
    return re.sub(r"\bls([12])\.gamma$", r"gamma_\1", name) if config.class_attention else name


def _unwrap(states: Mapping[str, Any]) -> dict[str, Tensor]:
    if not isinstance(states, Mapping):
        raise ModelLoadError(f"expected a state_dict (tensors by name); got {type(states).__name__}")
    for wrapper in _WRAPPERS:
        if isinstance(inside := states.get(wrapper), Mapping):
            states = inside
    wrong = [n for n, value in states.items() if not isinstance(n, str) or not isinstance(value, Tensor)]
    if wrong or not states:
        raise ModelLoadError(
            f"expected a dict of tensors, optionally inside {' or '.join(map(repr, _WRAPPERS))}; got "
            f"{', '.join(map(str, wrong[:8])) or 'nothing'}"
        )
    while all(name.startswith("module.") for name in states):
        states = {name.removeprefix("module."): value for name, value in states.items()}
    return {name: value for name, value in states.items() if name not in _UNUSED}
