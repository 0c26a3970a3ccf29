"""Packed sequences: images of different sizes in one sequence (tokens, D) without a batch axis.

Segments of the same layout make a batch (`vitrail.adapters.forward_pass.Segments`), and each batch is a pass of its
own, with its own schedule, so that methods, kernels and traces see ordinary tokens (B, N, D). Between blocks the
batches are one tensor again, one behind the other; where the model reads it, at full length and in its own order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, BlockCall
from vitrail.adapters.forward_pass import Pass, Segments
from vitrail.errors import UnsupportedInput
from vitrail.runtime.block_forward import Carried
from vitrail.runtime.side_tokens import SideTokens
from vitrail.runtime.trace import TracedPass, record


@dataclass(frozen=True)
class PackedCarried(Carried):
    """The state of a pass over a packed sequence: those of its batches.

    The state of the first batch stands for all, where only the layer is read.

    Attributes:
        segments: where the tokens of each batch are in the packed sequence.
        batches: the state of each batch.
        shapes: number of segments in each batch, and of tokens present in each of them; None where the tokens are at
            full length, in the order of the packed sequence.
    """

    segments: tuple[Segments, ...] = ()
    batches: tuple[Carried, ...] = ()
    shapes: tuple[tuple[int, int], ...] | None = None

    def run(self, parts: BlockAdapter, block: nn.Module, x: Tensor, call: BlockCall) -> tuple[Tensor, Carried]:
        outputs, after = [], []
        for one, segments, tokens in zip(self.batches, self.segments, self._split(x), strict=True):
            own = call if call.rope is None else call._replace(rope=_pick(call.rope, segments).unsqueeze(1))
            output, carried = one.run(parts, block, tokens, own)
            outputs.append(output)
            after.append(carried)
        shapes = tuple((len(output), output.shape[1]) for output in outputs)
        packed = torch.cat([output.flatten(0, 1) for output in outputs])
        return packed, replace(self, state=after[0].state, batches=tuple(after), shapes=shapes, tokens=None)

    def restore(self, x: Tensor) -> Tensor:
        parts = [one.restore(tokens) for one, tokens in zip(self.batches, self._split(x), strict=True)]
        places = torch.cat([segments.places.flatten() for segments in self.segments])
        packed = torch.cat([part.flatten(0, 1) for part in parts])
        return torch.empty_like(packed).index_copy(0, places, packed)

    def remerge(self, x: Tensor) -> Tensor:
        parts = [one.remerge(_pick(x, own)) for one, own in zip(self.batches, self.segments, strict=True)]
        return torch.cat([part.flatten(0, 1) for part in parts])

    def enter(self, added: SideTokens, layer: int, x: Tensor) -> Carried:
        raise UnsupportedInput("added tokens are not supported in a model that packs images into one sequence")

    def sent(self, tokens: Tensor | None) -> Carried:
        return replace(self, batches=tuple(one.sent(None) for one in self.batches), tokens=tokens)

    def record(self, out: Tensor) -> None:
        for one, segments in zip(self.batches, self.segments, strict=True):
            record(self.plan, TracedPass(one.layout, one.state, len(segments.places), out.device))

    def _split(self, x: Tensor) -> list[Tensor]:
        """Return the present tokens (B, N, D) of each batch."""
        if self.shapes is None:
            return [_pick(x, segments) for segments in self.segments]
        pieces = x.split([count * length for count, length in self.shapes])
        return [piece.unflatten(0, shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


def begin_packed(
    segments: Sequence[Segments], entered: Pass, x: Tensor, begin: Callable[[Pass, Tensor], Carried]
) -> PackedCarried:
    """Start a pass of a packed sequence; ``begin`` starts that of a batch."""
    total = sum(one.places.numel() for one in segments)
    if x.dim() != 2 or x.shape[0] != total:
        raise UnsupportedInput(f"a packed sequence of {total} tokens was announced; got a tensor of {tuple(x.shape)}")
    batches = [
        begin(
            replace(entered, layout=one.layout, position=one.position, inputs=one.inputs, segments=None), _pick(x, one)
        )
        for one in segments
    ]
    first: dict[str, Any] = {name: getattr(batches[0], name) for name in Carried.__dataclass_fields__}
    return PackedCarried(**first, segments=tuple(segments), batches=tuple(batches))


def _pick(values: Tensor, segments: Segments) -> Tensor:
    """Return the entries (B, N, …) of a packed tensor that belong to a batch."""
    return values[segments.places]
