"""``Base``: which model settings were saved for, so that another one is refused with the reason."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.adapters import Found
from vitrail.adapters.registry import SOURCE_ATTRIBUTE
from vitrail.errors import InvalidOption
from vitrail.runtime.layout import model_shape
from vitrail.surgery._pretrained import own_states

Check = Literal["structure", "weights"]
"""What must be the same: blocks, parameters' names and shapes and the library's config; or the weights as well."""

CHECKS = ("structure", "weights", None)


@dataclass(frozen=True)
class Base:
    """The trunk that a change was saved for, without the change itself.

    Attributes:
        model: class of the trunk.
        blocks, width, heads: number of blocks, and channels and heads of the first.
        tokens: its special tokens: role, number and name.
        parameters: digest of the names and shapes of its parameters and saved buffers.
        config: digest of the library's config; None for libraries without one.
        weights: digest of its weights, in float32 where they have fewer bits; None if they were not there as a whole.
        name: name with which `vitrail.load_model` loaded the model around it, if it did.
    """

    model: str
    blocks: int
    width: int
    heads: int
    tokens: tuple[str, ...]
    parameters: str
    config: str | None = None
    weights: str | None = None
    name: str | None = None

    @classmethod
    def of(cls, model: nn.Module, found: Found, *, weights: bool = True) -> Base:
        """Describe the trunk of a model; ``weights`` reads all of them, about a second for each gigabyte."""
        trunk, shape = found.trunk, model_shape(found)
        states = own_states(trunk)
        special = found.adapter.layout_in(trunk, -1).special
        config = found.adapter.config(trunk)
        return cls(
            model=type(trunk).__name__.removeprefix("FSDP"),
            blocks=shape.depth,
            width=shape.width,
            heads=shape.heads,
            tokens=tuple(" ".join([one.role, str(one.count), *([one.name] if one.name else [])]) for one in special),
            parameters=digest(f"{name} {tuple(value.shape)}" for name, value in sorted(states.items())),
            config=digest([json.dumps(config, sort_keys=True, default=str)]) if config else None,
            weights=weights_hash(trunk) if weights else None,
            name=next((vars(one)[SOURCE_ATTRIBUTE] for one in model.modules() if SOURCE_ATTRIBUTE in vars(one)), None),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Base:
        """Read what :meth:`to_dict` returned; raise ``ValueError`` for anything else."""
        kinds = {"blocks": int, "width": int, "heads": int, "tokens": list}
        for one in fields(cls):
            value, optional = values.get(one.name), one.name in ("config", "weights", "name")
            if not (isinstance(value, kinds.get(one.name, str)) or (optional and value is None)):
                raise ValueError(f"base.{one.name} is {value!r:.80}")
        known = {one.name: values.get(one.name) for one in fields(cls)}
        return cls(**{**known, "tokens": tuple(map(str, values["tokens"]))})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "tokens": list(self.tokens)}

    def difference(self, other: Base) -> str | None:
        """Describe the first difference from a model that is there now; None if it is the same."""
        for name, what in _DIFFERENCES.items():
            before, now = getattr(self, name), getattr(other, name)
            if before != now and None not in (before, now):
                shown = [", ".join(one) or "none" if isinstance(one, tuple) else one for one in (before, now)]
                return what.format(*shown)
        return None


_DIFFERENCES = {
    "model": "they are for a {}, and this model is a {}",
    "blocks": "they are for {} blocks, and this model has {}",
    "width": "they are for {} channels, and this model has {}",
    "heads": "they are for {} heads, and this model has {}",
    "tokens": "they are for a model with the special tokens {}, and this one has {}",
    "parameters": "names or shapes of its parameters differ (digest {} then, {} now)",
    "config": "its config differs (digest {} then, {} now), although parameters have the same names and shapes",
    "weights": "its weights are others (digest {} then, {} now)",
}


def check_kind(check: Check | None) -> None:
    """Raise unless a kind of check is known."""
    if check not in CHECKS:
        raise InvalidOption(f"check={check!r}: expected 'structure', 'weights', or None for no check")


@torch.no_grad()
def weights_hash(model: nn.Module) -> str | None:
    """Return a digest of a model's weights, the same in half precision and when cast to float32; without our parts.

    None where they are not there as a whole: on the meta device, or sharded.
    """
    found = hashlib.sha256()
    for name, value in sorted(own_states(model).items()):
        if value.is_meta or type(value) not in (Tensor, nn.Parameter):
            return None
        wide = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        found.update(f"{name} {tuple(wide.shape)} {wide.dtype}".encode())
        found.update(wide.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]


def digest(lines: Iterable[str]) -> str:
    """Return a short digest of text."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
