"""Side tokens: added tokens that pass through the blocks alongside the model's own.

They are a separate sequence, so that the model's tokens attend, merge and pass the MLP exactly as without them. Each
block projects them with its own layers, and they attend to the model's keys and values. Other tokens attend to them
with the bias of the block's gate: an open gate of bias b gives each the weight of exp(b) tokens, a closed one none.
Each attends to itself in any case.

Shapes: B batch, H heads, N tokens of the model, E side tokens, d channels of a head, D channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, repeat_heads
from vitrail.adapters.forward_pass import Place
from vitrail.tokens import TokenSpec

CLOSED = -torch.inf


class SideTokens(nn.Module):
    """The parameters of side tokens, and the gate of each block.

    Attributes:
        values: tokens by name, (1, count, D).
        gates: bias of their keys in each block while the gates are open.
        opened: whether the gates are open; the buffer is saved, ``is_open`` is its copy for use in a forward pass.
    """

    gates: Tensor
    opened: Tensor

    def __init__(self, specs: Sequence[TokenSpec], width: int, depth: int) -> None:
        super().__init__()
        self.specs = tuple(specs)
        self.values = nn.ParameterDict(
            {spec.name: nn.Parameter(torch.randn(1, spec.count, width) * spec.std) for spec in specs}
        )
        self.gates = nn.Parameter(torch.zeros(depth), requires_grad=False)
        self.register_buffer("opened", torch.zeros((), dtype=torch.uint8))
        self.is_open = False
        self.register_load_state_dict_post_hook(_restore_is_open)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters without weight decay: tokens, unless their spec sets ``decay``."""
        return {f"values.{spec.name}" for spec in self.specs if not spec.decay}

    def turn(self, is_open: bool) -> None:
        """Open or close the gates; open gates require gradients."""
        self.opened.fill_(int(is_open))
        self.is_open = is_open
        self.gates.requires_grad_(is_open)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or convert the parameters, but keep the gates in float32: half precision would lose small updates."""
        super()._apply(fn, recurse)
        if self.gates.dtype in (torch.float16, torch.bfloat16):
            self.gates.data = self.gates.data.float()
        return self

    def enter(self, layer: int, side: Tensor | None, like: Tensor) -> Tensor | None:
        """Insert the tokens that enter before a layer into the present ones (B, E, D), in the order of the specs."""
        if not any(spec.enters == layer for spec in self.specs):
            return side
        pieces, start = [], 0
        for spec in self.specs:
            if spec.enters == layer:
                pieces.append(self.values[spec.name].to(like.dtype).expand(like.shape[0], -1, -1))
            elif spec.enters < layer:
                assert side is not None
                pieces.append(side[:, start : start + spec.count])
                start += spec.count
        return torch.cat(pieces, 1)

    def counts(self) -> list[int]:
        """Return the number of side tokens in each layer."""
        return [sum(spec.count for spec in self.specs if spec.enters <= layer) for layer in range(len(self.gates))]

    def gate(self, layer: int) -> Tensor | None:
        """Return the bias of the side tokens' keys in a layer; None if the gates are closed."""
        return self.gates[layer] if self.is_open else None


def _restore_is_open(module: nn.Module, _: object) -> None:
    assert isinstance(module, SideTokens)
    module.turn(bool(module.opened))


class Reading(NamedTuple):
    """Side tokens prepared for attention: normalized (B, E, D), and projected (B, H, E, d)."""

    h: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def prepare(parts: BlockAdapter, block: nn.Module, side: Tensor) -> Reading:
    """Project side tokens with a block's own layers."""
    h = parts.attend_norm(block, side)
    q, k, v = parts.qkv(block, h)
    return Reading(h, q, *repeat_heads(q, k, v))


def side_bias(bias: Tensor | None, itself: Tensor, gate: Tensor | None, scores: Tensor) -> Tensor:
    """Return the bias of scores (B, H, Q, N + E) whose last keys are side tokens.

    Args:
        bias: bias of the other keys (B or 1, H or 1, Q or 1, N); None for none.
        itself: (Q, E), true where query and key are the same token, which has no gate.
        gate: gate of the layer; None if closed.
        scores: the scores.
    """
    rows, extra = itself.shape
    front = scores.new_zeros(1, 1, 1, 1) if bias is None else bias.to(scores.dtype)
    front = front.expand(-1, -1, rows, scores.shape[-1] - extra)
    own = torch.where(itself, 0.0, scores.new_full((), CLOSED) if gate is None else gate.to(scores.dtype))
    return torch.cat([front, own.expand(*front.shape[:2], -1, -1)], -1)


def advance(
    parts: BlockAdapter,
    block: nn.Module,
    side: Tensor,
    reading: Reading,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
) -> Tensor:
    """Run a block for the side tokens: attend to its keys and values (B, H, N, d), with a bias (B or 1, 1, 1, N); feed.

    The scores are few, so they are computed explicitly, which works for every kind of attention and gives the gates
    gradients.
    """
    scale = parts.attention_scale(block) or reading.q.shape[-1] ** -0.5
    work = torch.promote_types(reading.q.dtype, torch.float32)
    q = reading.q * scale
    scores = torch.cat([q @ k.transpose(-2, -1), q @ reading.k.transpose(-2, -1)], -1).to(work)
    others = k.shape[2]
    itself = torch.eye(q.shape[2], dtype=torch.bool, device=q.device)
    weights = parts.weigh(block, scores, side_bias(bias, itself, gate, scores)).to(v.dtype)
    weights = F.dropout(weights, parts.attention_dropout(block))
    attended = weights[..., :others] @ v + weights[..., others:] @ reading.v
    attended = attended.transpose(1, 2).flatten(2)
    side = side + parts.attend_branch(block, parts.attend_output(block, attended, reading.h))
    return side + parts.feed_branch(block, parts.feed(block, parts.feed_norm(block, side)))


def widen(
    k: Tensor, v: Tensor, size: Tensor | None, log2_size: Tensor | None, reading: Reading, gate: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Append the side tokens to a block's keys and values, with sizes (B, N + E) that include the gate."""
    batch, _, extra, _ = reading.k.shape
    if size is None:
        size = torch.ones(batch, k.shape[2], dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
        log2_size = torch.zeros_like(size)
    elif log2_size is None:
        log2_size = size.log2()
    gate = gate.to(size.dtype).expand(batch, extra)
    return (
        torch.cat([k, reading.k], 2),
        torch.cat([v, reading.v], 2),
        torch.cat([size, gate.exp()], 1),
        torch.cat([log2_size, gate / math.log(2)], 1),
    )


_waiting = Place()
"""The list that `receiving` collects side tokens in, or None."""


@contextmanager
def receiving() -> Iterator[list[Tensor]]:
    """Yield a list that collects the final side tokens (B, E, D) of each forward pass of this thread."""
    found: list[Tensor] = []
    with _waiting.holding(found):
        yield found


def deliver(side: Tensor) -> None:
    """Append side tokens that left the last block to the list of `receiving`, if any."""
    waiting = _waiting.here().current
    if waiting is not None:
        waiting.append(side)
