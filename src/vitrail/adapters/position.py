"""Position inside attention: rotary position, relative bias, and the interface for any other kind.

A merged token lies between its patches, so positions are coordinates, never indices: the runtime averages the
coordinates of merged patches and calls the `Position` object with them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail import kernels
from vitrail.errors import BrokenPass
from vitrail.kernels import ops
from vitrail.tokens import TokenLayout


class Position(ABC):
    """Position of a model that acts inside attention, at any coordinates.

    A kind of position overrides what it needs: rotary position `table`, a relative bias `bias`.
    """

    @abstractmethod
    def coordinates(self, layout: TokenLayout, x: Tensor, table: Tensor | None) -> Tensor:
        """Return the coordinates (1 or B, N, axes) of all tokens before any merge.

        Args:
            layout: the tokens of this pass.
            x: the tokens themselves (B, N, D).
            table: the rotation table that the model passed to its block, if any.
        """

    def table(self, layer: int, positions: Tensor | None) -> Tensor | None:
        """Return the rotation table (B, H or 1, N, 2·d) of a layer at coordinates (B, N, axes); None for no rotation.

        ``BlockAdapter.rotate`` applies it to queries and keys. Until tokens have merged, ``positions`` is None, and the
        table is the model's own; only blocks that are not passed one (``BlockAdapter.rotates``) ask for it.
        """
        return None

    def bias(self, layer: int, positions: Tensor | None) -> Tensor | None:
        """Return the bias (H, N, N) or (B or 1, H, N, N) added to a layer's scaled scores; None for no bias.

        Until tokens have merged, ``positions`` is None, and the bias is the model's own. A block whose model has a bias
        sets ``BlockAdapter.biased``.
        """
        return None

    def query_bias(self, layer: int, positions: Tensor | None, q: Tensor) -> Tensor | None:
        """Return `bias`, where it may depend on the queries (B, H, N, d)."""
        return self.bias(layer, positions)


@dataclass(frozen=True)
class Rotary(Position):
    """Rotary position as ``angle = coordinates · frequencies``.

    It is linear in the coordinates: a token between two patches has an angle, and a token at zero (any special
    token) is not rotated.

    Attributes:
        positions: coordinates of the patches (P, axes); None where only the model's own table has them
            (augmented coordinates, dropped patches), and `read` recovers them.
        frequencies: (L or 1, H or 1, axes, d / 2); one entry serves all layers, or all heads.
        interleaved: whether the two channels of a pair are neighbors, or half a head apart.
    """

    positions: Tensor | None
    frequencies: Tensor
    interleaved: bool

    def coordinates(self, layout: TokenLayout, x: Tensor, table: Tensor | None) -> Tensor:
        """Return the coordinates of the patches, and zero, and so no rotation, for special tokens."""
        assert table is not None
        positions = self.read(table) if self.positions is None else self.positions
        if positions.shape[-2] != table.shape[-2]:
            raise BrokenPass(
                f"rotary positions for {positions.shape[-2]} patches, but the model rotates {table.shape[-2]} tokens"
            )
        positions = positions.expand(1, -1, -1) if positions.dim() == 2 else positions
        special = positions.new_zeros(positions.shape[0], layout.num_special, positions.shape[2])
        return torch.cat([special, positions], 1)

    def table(self, layer: int, positions: Tensor | None) -> Tensor | None:
        """Return sines and cosines at any coordinates (B, N, axes), as one table (B, H or 1, N, 2·d)."""
        if positions is None:
            return None
        frequencies = self.frequencies[min(layer, self.frequencies.shape[0] - 1)]
        angle = positions.unsqueeze(1) @ frequencies.to(positions.dtype)
        angle = angle.repeat_interleave(2, -1) if self.interleaved else torch.cat([angle, angle], -1)
        return torch.cat([angle.sin(), angle.cos()], -1)

    def read(self, table: Tensor) -> Tensor:
        """Return coordinates (P, axes) or (B, P, axes) from a table (…, P, 2·d) whose axes have their own channels.

        The slowest channel of an axis never turns far enough to be ambiguous, so its angle is the coordinate.
        """
        frequencies = self.frequencies[0, 0]
        work = torch.promote_types(table.dtype, torch.float32)
        sine, cosine = table.to(work).chunk(2, -1)
        pair = 2 if self.interleaved else 1
        angle = torch.atan2(sine, cosine)
        slowest = torch.where(frequencies == 0, torch.inf, frequencies.abs()).argmin(-1)
        axes = [angle[..., pair * channel] / frequencies[axis, channel] for axis, channel in enumerate(slowest)]
        positions = torch.stack(axes, -1)
        return positions.squeeze(1) if positions.dim() == 4 else positions


@dataclass(frozen=True)
class RelativeBias(Position):
    """A bias for every pair of tokens, learned or computed, added to the scores.

    The bias between two merged tokens is the mean of that between their members, weighted as the mean of the tokens
    is: by size. So the coordinates of a token are its shares of the original tokens (B, N, tokens), and the bias of
    merged tokens is ``shares · bias · sharesᵀ``.

    Attributes:
        between: returns the bias of a layer between all tokens before any merge, (H, N, N) or (B or 1, H, N, N), or
            None.
    """

    between: Callable[[int], Tensor | None]

    def coordinates(self, layout: TokenLayout, x: Tensor, table: Tensor | None) -> Tensor:
        """Return the shares of unmerged tokens: each is itself."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return torch.eye(layout.num_tokens, dtype=dtype, device=x.device).unsqueeze(0)

    def bias(self, layer: int, positions: Tensor | None) -> Tensor | None:
        """Return the bias between tokens of these shares; None for a layer without one."""
        full = self.between(layer)
        if full is None or positions is None:
            return full
        shares = positions.unsqueeze(1)
        return (shares @ full.to(shares.dtype) @ shares.transpose(-1, -2)).to(full.dtype)


def axial_frequencies(bands: Tensor) -> Tensor:
    """Return frequencies (1, 1, 2, d / 2) of two axes with one half of the channels each, from bands (d / 4,)."""
    zero = torch.zeros_like(bands)
    return torch.stack([torch.cat([bands, zero]), torch.cat([zero, bands])])[None, None]


def rotate(x: Tensor, table: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the last tokens of queries or keys (B, H, N, d), as many as the table (…, P, 2·d) has."""
    if kernels.turns(x, table):
        rotated: Tensor = ops.rotate(x, table, interleaved, False)
        return rotated
    sine, cosine = table.chunk(2, -1)
    front = x.shape[-2] - table.shape[-2]
    patches = x[..., front:, :]
    if interleaved:
        turned = torch.stack([-patches[..., 1::2], patches[..., ::2]], -1).reshape(patches.shape)
    else:
        left, right = patches.chunk(2, -1)
        turned = torch.cat([-right, left], -1)
    turned = patches * cosine + turned * sine
    return torch.cat([x[..., :front, :], turned.to(x.dtype)], -2)
