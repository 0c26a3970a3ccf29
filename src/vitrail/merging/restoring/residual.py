"""Residual: what a token differs from its group by, in a few channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._checks import is_int
from vitrail._wording import counted
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.merging.assignment import Assignment
from vitrail.merging.method import ModelShape
from vitrail.merging.restoring.base import Exit, FitOptions, Observe, Restorer, register_restorer, residual_entry
from vitrail.merging.state import MergeState
from vitrail.merging.trained import Trained

DIRECTIONS = 8
"""Principal directions of each layer's residuals for each channel that is kept."""

PENALTIES = (10.0, 3.0, 1.0, 0.3, 0.1, 1e-2, 1e-3)
"""Penalties of least squares to choose from, relative to the mean variance of the features."""

FOLDS = 4
"""One image in this many decides the penalty."""

CODE = "residual"
"""Name of the entry that is kept."""


@register_restorer("residual")
class Residual(Trained, Restorer):
    """Keep ``x_i − x_group`` of every reduction in a few channels, and add it to the group's token at the end.

    A position keeps one code, the sum over layers of ``(x_i − x_group)·encode[layer]``, and gets ``code·decode[layer]``
    when tokens are restored behind a layer. Later layers transform tokens, so both matrices are fitted to images, in
    closed form: least squares from the principal directions of the residuals to what copies lack of the unmerged
    model's tokens, cut to the channels that explain most of it (reduced-rank regression). The rows of ``decode`` behind
    the last layer are orthonormal.

    Args:
        channels: numbers kept for each position; None keeps all, and restores exactly what later blocks leave alone.
            All channels run without being fitted, fewer need ``merging.calibrate_restorer(images)``.
    """

    encode: nn.Parameter
    decode: nn.Parameter

    def __init__(self, channels: int | None = 8) -> None:
        super().__init__()
        if channels is not None and not is_int(channels, 1):
            raise InvalidOption(f"channels is 1 or more, or None for all; got {channels!r}")
        self.channels = channels

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.channels == 8 else {"channels": self.channels}

    def check(self, shape: ModelShape) -> None:
        if self.channels is not None and self.channels > shape.width:
            raise InvalidOption(
                f"channels={self.channels}, but the tokens of this model have {shape.width}; use fewer, or None for all"
            )

    def build(self, shape: ModelShape) -> None:
        width = shape.width
        channels = width if self.channels is None else self.channels
        if "encode" in self._parameters and self.encode.shape == (shape.depth, width, channels):
            return  # fitted for this model before
        self.forget_training()
        start = torch.eye(width) if channels == width else torch.zeros(width, channels)
        self.encode = nn.Parameter(start.repeat(shape.depth, 1, 1))
        self.decode = nn.Parameter(start.t().repeat(shape.depth, 1, 1))

    @property
    def exact(self) -> bool:
        """Whether everything is kept, which needs no fit."""
        return self.channels is None

    def untrained(self) -> str:
        return (
            f"restore={self.label!r} with {counted(self.channels or len(self.encode[0]), 'channel')} has not been "
            "fitted to images; call merging.calibrate_restorer(images), or load fitted weights: "
            "merging.restorer.load_state_dict(states), with the state_dict() of a fitted one. merging.config does not "
            "have them"
        )

    def check_ready(self) -> None:
        if not self.exact:
            self.check_trained()

    def keep(
        self, x: Tensor, merged: Tensor, step: Assignment, before: MergeState, after: MergeState
    ) -> Mapping[str, Tensor]:
        code = before.to_original((x - step.unmerge(merged)) @ self.encode[before.layer].to(x.dtype))
        return {CODE: code + before.kept[CODE] if CODE in before.kept else code}

    def restore(self, x: Tensor, state: MergeState) -> Tensor:
        return state.unmerge(x) + state.kept[CODE].to(x.dtype) @ self.decode[state.layer - 1].to(x.dtype)

    @torch.no_grad()
    def fit(self, observe: Observe, options: FitOptions) -> None:
        depth, width, channels = self.encode.shape
        directions = _principal_directions(observe(), depth, width, min(width, DIRECTIONS * channels))
        parts = [_Moments(directions) for _ in range(FOLDS)]
        seen = 0
        for exits in observe():
            for one in exits:
                missing = one.missing.cpu().double()
                for fold, moments in enumerate(parts):
                    moments.add(one, missing, options.by_block, images=slice((fold - seen) % FOLDS, None, FOLDS))
            seen += len(exits[0].target) if exits else 0
        held_out, rest = parts[0], sum(parts[2:], parts[1])
        spans = _spans(depth, options.by_block)
        penalty = min(PENALTIES, key=lambda value: sum(held_out.error(rest, *span, value, channels) for span in spans))
        encode, decode = (rest + held_out).solve(channels, options.by_block, penalty)
        self.encode.copy_(encode)
        self.decode.copy_(decode)
        self.count_pass()


def _principal_directions(batches: Any, depth: int, width: int, count: int) -> Tensor:
    """Return the ``count`` directions (depth, D, count) along which the residuals of each layer are largest."""
    covariance = torch.zeros(depth, width, width, dtype=torch.float64)
    for exits in batches:
        for layer, residual in _residuals(exits).items():
            flat = residual.flatten(0, 1).cpu().double()
            covariance[layer] += flat.t() @ flat
    if not bool(covariance.any()):
        raise UnsupportedInput("there is nothing to fit a restorer to: nothing merged, or there are no images")
    vectors: Tensor = torch.linalg.eigh(covariance)[1]
    return vectors.flip(-1)[..., :count]


def _residuals(exits: Sequence[Exit]) -> dict[int, Tensor]:
    """Return the residuals of each layer (B, N, D) of a batch, each once."""
    found = {}
    for one in exits:
        for layer in range(one.layer + 1):
            name = residual_entry(layer)
            if name in one.state.kept:
                found[layer] = one.state.kept[name]
    return found


class _Moments:
    """Second moments of residuals along some directions, and of these with what copies lack behind each layer."""

    def __init__(self, directions: Tensor) -> None:
        depth, width, count = directions.shape
        self.directions = directions
        self.own = torch.zeros(depth * count, depth * count, dtype=torch.float64)
        self.cross = torch.zeros(depth, depth * count, width, dtype=torch.float64)

    def __add__(self, other: _Moments) -> _Moments:
        total = _Moments(self.directions)
        total.own, total.cross = self.own + other.own, self.cross + other.cross
        return total

    def add(self, one: Exit, missing: Tensor, by_block: bool, images: slice) -> None:
        """Add some images of an exit, where copies lack ``missing``."""
        depth, _, count = self.directions.shape
        entries = [one.state.kept.get(residual_entry(layer)) for layer in range(depth)]
        missing = missing[images].flatten(0, 1)
        features = torch.zeros(len(missing), depth, count, dtype=torch.float64)
        for layer, entry in enumerate(entries):
            if entry is not None:
                features[:, layer] = entry[images].flatten(0, 1).cpu().double() @ self.directions[layer]
        flat = features.flatten(1)
        flat, missing = flat[flat.any(1)], missing[flat.any(1)]  # what never merged lacks nothing that was kept
        self.cross[one.layer] += flat.t() @ missing
        if by_block or one.layer == depth - 1:
            self.own += flat.t() @ flat

    def _rows(self, first: int, last: int) -> slice:
        """Return the features of layers from the first to the last."""
        count = self.directions.shape[2]
        return slice(first * count, (last + 1) * count)

    def code(self, first: int, last: int, penalty: float, channels: int) -> tuple[Tensor, Tensor]:
        """Return reduced-rank regression behind a layer: from features to the code (…, C), and from it (C, D)."""
        rows = self._rows(first, last)
        own = self.own[rows, rows]
        full = _least_squares(own, self.cross[last, rows], penalty)
        explained = torch.linalg.eigh(full.t() @ own @ full)[1].flip(-1)[:, :channels]
        return full @ explained, explained.t()

    def error(self, fitted: _Moments, first: int, last: int, penalty: float, channels: int) -> float:
        """Return the error of what others fitted behind a layer, up to a constant."""
        rows = self._rows(first, last)
        coding, decoding = fitted.code(first, last, penalty, channels)
        weights = coding @ decoding
        return float((weights * (self.own[rows, rows] @ weights - 2 * self.cross[last, rows])).sum())

    def solve(self, channels: int, by_block: bool, penalty: float) -> tuple[Tensor, Tensor]:
        """Return the matrices to encode (depth, D, C) and to decode (depth, C, D)."""
        depth, width, _ = self.directions.shape
        encode = torch.zeros(depth, width, channels, dtype=torch.float64)
        decode = torch.zeros(depth, channels, width, dtype=torch.float64)
        for first, last in _spans(depth, by_block):
            rows = self._rows(first, last)
            if not bool(self.own[rows, rows].any()):
                continue
            coding, decode[last] = self.code(first, last, penalty, channels)
            for layer in range(first, last + 1):
                encode[layer] = self.directions[layer] @ coding[self._rows(layer - first, layer - first)]
                if layer < last:
                    seen = self._rows(first, layer)
                    code = coding[: seen.stop]
                    own = code.t() @ self.own[seen, seen] @ code
                    decode[layer] = _least_squares(own, code.t() @ self.cross[layer, seen], penalty)
        return encode, decode


def _spans(depth: int, by_block: bool) -> list[tuple[int, int]]:
    """Return the first and last layer of what is kept until each place where tokens are restored."""
    return [(layer, layer) for layer in range(depth)] if by_block else [(0, depth - 1)]


def _least_squares(own: Tensor, cross: Tensor, penalty: float) -> Tensor:
    """Solve ``own · solution = cross`` with a penalty relative to the mean of the diagonal."""
    amount = penalty * own.diagonal().mean().clamp_min(1e-12)
    found: Tensor = torch.linalg.solve(own + amount * torch.eye(len(own), dtype=own.dtype), cross)
    return found
