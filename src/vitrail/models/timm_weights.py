"""Weights under timm's names, and under those of the original DeiT, CaiT and DINOv2, which differ little from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitrail.errors import ModelLoadError, UnsupportedModel
from vitrail.models.config import ViTConfig
from vitrail.models.saving import check_fit
from vitrail.models.vit import ViT
from vitrail.tokens import Role

TIMM_TOKENS = {Role.CLASS: "cls_token", Role.DISTILLATION: "dist_token", Role.REGISTER: "reg_token"}
"""What timm calls the tokens of a role, in the order in which it has them."""

_ORIGINAL = (
    (re.compile(r"\bgamma_([12])$"), r"ls\1.gamma"),  # CaiT and DeiT III
    (re.compile(r"\bmlp\.w12\."), "mlp.fc1."),  # DINOv2
    (re.compile(r"\bmlp\.w3\."), "mlp.fc2."),
    (re.compile(r"^register_tokens$"), "reg_token"),
)
_UNUSED = frozenset({"mask_token"})  # of masked training, in DINOv2's files
_WRAPPERS = ("model", "state_dict", "teacher", "module")


def timm_state_dict(model: ViT) -> dict[str, Tensor]:
    """Give a model's weights under timm's names."""
    table = _names(model.config)
    states = {_to_timm(name, table, model.config): value for name, value in model.state_dict().items()}
    foreign = [name for name in states if name.startswith(("tokens.", "heads."))]
    if foreign:
        raise UnsupportedModel(f"timm has no name for {', '.join(foreign)}; save this model with save_pretrained")
    return states


def load_timm_state_dict(model: ViT, states: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
    """Load weights of timm, or of the original DeiT, CaiT or DINOv2, or raise and load nothing.

    A file's wrappings (``{"model": ...}``, names that all begin with ``module.``) are taken off. Without ``strict``
    names may be missing or unexpected, so that a model with further tokens can begin with known weights.
    With ``assign`` the model takes the tensors themselves, with their precision and device.
    """
    table = _names(model.config)
    given = {_canonical(name, model.config): value for name, value in _unwrap(states).items()}
    own = {_to_timm(name, table, model.config): name for name in model.state_dict()}
    check_fit("model", {name: model.state_dict()[ours] for name, ours in own.items()}, given, strict)
    fitting = {own[name]: value for name, value in given.items() if name in own}
    model.load_state_dict(fitting, strict=False, assign=assign)


def _names(config: ViTConfig) -> dict[str, str]:
    """Give timm's name for the beginning of each of ours that differs; what timm has not is left out."""
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
    # timm's CaiT is a class of its own, with the names of the original.
    return re.sub(r"\bls([12])\.gamma$", r"gamma_\1", name) if config.class_attention else name


def _canonical(name: str, config: ViTConfig) -> str:
    """Spell an original name as timm does."""
    for pattern, spelling in _ORIGINAL:
        name = pattern.sub(spelling, name)
    return re.sub(r"\bls([12])\.gamma$", r"gamma_\1", name) if config.class_attention else name


def _unwrap(states: Mapping[str, Any]) -> dict[str, Tensor]:
    for wrapper in _WRAPPERS:
        if isinstance(inside := states.get(wrapper), Mapping):
            states = inside
    wrong = [name for name, value in states.items() if not isinstance(value, Tensor)]
    if wrong or not states:
        raise ModelLoadError(
            f"a state_dict is a dict of tensors, maybe inside {' or '.join(map(repr, _WRAPPERS))}; got "
            f"{', '.join(map(str, wrong[:8])) or 'nothing'}"
        )
    while all(name.startswith("module.") for name in states):
        states = {name.removeprefix("module."): value for name, value in states.items()}
    return {name: value for name, value in states.items() if name not in _UNUSED}
