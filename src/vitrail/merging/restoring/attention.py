"""Attention: a small trained network that restores each position from the merged tokens and what was kept of it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail._checks import is_int
from vitrail.errors import InvalidOption
from vitrail.merging.method import ModelShape
from vitrail.merging.restoring.base import Exit, FitOptions, Observe, register_restorer, residual_entry
from vitrail.merging.restoring.residual import CODE, Residual
from vitrail.merging.state import MergeState

FREQUENCIES = (1, 2, 4, 8)
"""Frequencies of the sines and cosines that encode a coordinate, in half periods over the grid."""

POSITION = 3 * 2 * len(FREQUENCIES)
"""Channels that encode a position (t, h, w)."""


@register_restorer("attention")
class Attention(Residual):
    """Correct what ``"residual"`` restores by cross-attention from each position to the merged tokens.

    Queries are the position, its code, and its group's token; keys and values the merged tokens and the mean position
    of their members. Trained by ``merging.calibrate_restorer(images)`` on the unmerged model's tokens; its correction
    starts at zero, so that it starts as ``"residual"``. Tokens that never merged stay as they are.

    Args:
        channels: numbers kept for each position; None keeps all.
        hidden: width of the attention.
        heads: heads of the attention.
    """

    scale: Tensor
    trained: Tensor

    def __init__(self, channels: int | None = 8, *, hidden: int = 64, heads: int = 4) -> None:
        super().__init__(channels)
        if not is_int(heads, 1) or not is_int(hidden, 1) or hidden % heads:
            raise InvalidOption(
                f"hidden is a multiple of heads, both 1 or more; got hidden={hidden!r} and heads={heads!r}"
            )
        self.hidden, self.heads = hidden, heads
        self.restores: tuple[int, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        own = {"hidden": (self.hidden, 64), "heads": (self.heads, 4)}
        return super().options | {name: value for name, (value, default) in own.items() if value != default}

    def build(self, shape: ModelShape) -> None:
        known = self._parameters.get("encode")
        super().build(shape)
        if self.encode is known:
            return
        depth, width, channels = self.encode.shape
        self.query = nn.Linear(width + channels + POSITION, self.hidden)
        self.layer = nn.Parameter(torch.zeros(depth, self.hidden))
        self.key_value = nn.Linear(width + POSITION, 2 * self.hidden)
        self.mlp = nn.Linear(2 * self.hidden, 4 * self.hidden)
        self.out = nn.Linear(4 * self.hidden, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.register_buffer("scale", torch.ones(depth))
        self.register_buffer("trained", torch.zeros(depth))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._read_trained()

    def _read_trained(self) -> None:
        self.restores = tuple(self.trained.nonzero().flatten().tolist())

    @property
    def exact(self) -> bool:
        return False

    def restore(self, x: Tensor, state: MergeState) -> Tensor:
        start, layer = super().restore(x, state), state.layer - 1
        if layer not in self.restores:
            return start
        return start + self._correct(x, state) * self.scale[layer].to(x.dtype)

    def _correct(self, x: Tensor, state: MergeState) -> Tensor:
        """Return the correction of each position (B, N, D), in units of the scale."""
        assignment = state.assignment
        assert assignment is not None
        dtype = self.query.weight.dtype
        normed = F.layer_norm(x.to(dtype), x.shape[-1:])
        place = encode_positions(state, x.device).to(dtype)
        keys = torch.cat([normed, assignment.merge(place.expand(len(x), -1, -1))], 2)
        queries = torch.cat([state.unmerge(normed), self._code(state, dtype), place.expand(len(x), -1, -1)], 2)
        q = self.query(queries) + self.layer[state.layer - 1]
        k, v = self.key_value(keys).chunk(2, 2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        absent = None if state.presence is None else (state.presence > 0)[:, None, None]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=absent)
        both = torch.cat([attended, q], 1).transpose(1, 2).flatten(2)
        members = assignment.merge_sizes(torch.ones_like(assignment.target)).gather(1, assignment.target)
        correction: Tensor = self.out(F.gelu(self.mlp(both)))
        return (correction * (members > 1).unsqueeze(2)).to(x.dtype)

    def _code(self, state: MergeState, dtype: torch.dtype) -> Tensor:
        """Return what was kept, in units of the scale."""
        return state.kept[CODE].to(dtype) / self.scale[state.layer - 1].to(dtype)

    def fit(self, observe: Observe, options: FitOptions) -> None:
        super().fit(observe, options)
        samples = self._collect(observe, options)
        dtype = self.query.weight.dtype
        self._reset(samples, options)
        with torch.enable_grad():
            self._train(samples, options)
        self.to(dtype)
        self._read_trained()

    @torch.no_grad()
    def _collect(self, observe: Observe, options: FitOptions) -> list[Exit]:
        """Return the exits to train on, each with its code instead of whole residuals."""
        depth, found = len(self.encode), []
        for exits in observe():
            for one in exits:
                if one.state.assignment is not None and (options.by_block or one.layer == depth - 1):
                    parts = [
                        one.state.kept[residual_entry(layer)] @ self.encode[layer].to(one.tokens.dtype)
                        for layer in range(depth)
                        if residual_entry(layer) in one.state.kept
                    ]
                    found.append(
                        replace(one, state=replace(one.state, kept={CODE: torch.stack(parts).sum(0)}, restorer=self))
                    )
        return found

    @torch.no_grad()
    def _reset(self, samples: list[Exit], options: FitOptions) -> None:
        self.float()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            for part in (self.query, self.key_value, self.mlp):
                bound = 1 / math.sqrt(part.in_features)
                part.weight.copy_(torch.empty(part.weight.shape).uniform_(-bound, bound))
                part.bias.zero_()
        for parameter in (self.out.weight, self.out.bias, self.layer):
            parameter.zero_()
        for layer in range(len(self.scale)):
            rest = [_left(self, one).square().mean() for one in samples if one.layer == layer]
            self.trained[layer] = float(bool(rest))
            self.scale[layer] = torch.stack(rest).mean().sqrt().clamp_min(1e-6) if rest else 1.0

    def _train(self, samples: list[Exit], options: FitOptions) -> None:
        network = [p for name, p in self.named_parameters() if name not in ("encode", "decode")]
        optimizer = torch.optim.AdamW(network, lr=options.learning_rate, weight_decay=0.01)
        order = random.Random(options.seed)
        for step in range(options.steps):
            warm = min(1.0, (step + 1) / max(1, options.steps // 20))
            for group in optimizer.param_groups:
                cosine = 0.5 * (1 + math.cos(math.pi * step / options.steps))
                group["lr"] = options.learning_rate * warm * cosine
            one = order.choice(samples)
            wanted = (_left(self, one) / self.scale[one.layer]).float()
            state = replace(one.state, layer=one.layer + 1)
            loss = (self._correct(one.tokens.float(), state) - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network, 1.0)
            optimizer.step()
            if options.progress is not None:
                options.progress(step + 1, options.steps, float(loss.detach()))


@torch.no_grad()
def _left(restorer: Residual, one: Exit) -> Tensor:
    """Return what the residuals alone leave to restore (B, N, D)."""
    code = one.state.kept[CODE]
    return one.missing - code @ restorer.decode[one.layer].to(code.dtype)


def encode_positions(state: MergeState, device: torch.device) -> Tensor:
    """Return sines and cosines of the grid coordinates of each original position (1, N, channels); 0 for special."""
    frequencies = torch.tensor(FREQUENCIES, dtype=torch.float32, device=device) * math.pi
    axes = []
    for length in state.grid:
        angles = ((torch.arange(length, device=device) + 0.5) / length).unsqueeze(1) * frequencies
        axes.append(torch.cat([angles.sin(), angles.cos()], 1))
    t, h, w = state.grid
    every = [axes[0][:, None, None], axes[1][None, :, None], axes[2][None, None]]
    grid = torch.cat([axis.expand(t, h, w, -1) for axis in every], 3).flatten(0, 2)
    return torch.cat([grid.new_zeros(state.special, grid.shape[1]), grid]).unsqueeze(0)
