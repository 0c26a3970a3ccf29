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
from vitrail.runtime.block_forward import Attention, Carried, attend_block, feed_block, prepare_block
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
        together: layers in which the windows of an image attend to each other.
    """

    segments: tuple[Segments, ...] = ()
    batches: tuple[Carried, ...] = ()
    shapes: tuple[tuple[int, int], ...] | None = None
    together: frozenset[int] = frozenset()

    def run(self, parts: BlockAdapter, block: nn.Module, x: Tensor, call: BlockCall) -> tuple[Tensor, Carried]:
        calls = [
            call if call.rope is None else call._replace(rope=_pick(call.rope, segments).unsqueeze(1))
            for segments in self.segments
        ]
        batches = list(zip(self.batches, self._split(x), calls, strict=True))
        if self.state.layer in self.together:
            ran = self._run_together(parts, block, batches)
        else:
            ran = [one.run(parts, block, tokens, own) for one, tokens, own in batches]
        outputs, after = [output for output, _ in ran], [carried for _, carried in ran]
        shapes = tuple((len(output), output.shape[1]) for output in outputs)
        packed = torch.cat([output.flatten(0, 1) for output in outputs])
        return packed, replace(self, state=after[0].state, batches=tuple(after), shapes=shapes, tokens=None)

    def _run_together(
        self, parts: BlockAdapter, block: nn.Module, batches: Sequence[tuple[Carried, Tensor, BlockCall]]
    ) -> list[tuple[Tensor, Carried]]:
        """Run a block in which all tokens of an image attend to each other, and then merge in their windows."""
        started = []
        for one, tokens, own in batches:
            call, state = prepare_block(parts, block, tokens, own, one)
            started.append(attend_block(parts, block, tokens, call, one, state))
        owners = [segments.owners for segments in self.segments]
        attended = _attend_together([one.attention for one in started], owners)
        ran = [feed_block(one, values) for one, values in zip(started, attended, strict=True)]
        return [(tokens, replace(one, state=state)) for (tokens, state), (one, _, _) in zip(ran, batches, strict=True)]

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
            replace(
                entered, layout=one.layout, position=one.position, inputs=one.inputs, segments=None, whole=one.whole
            ),
            _pick(x, one),
        )
        for one in segments
    ]
    for whole in {one.whole for one in segments if one.whole is not None}:
        pairs = zip(segments, batches, strict=True)
        if not any(any(batch.state.per_layer) for one, batch in pairs if one.whole == whole):
            batches[0].plan.report_windows(whole)
    first: dict[str, Any] = {name: getattr(batches[0], name) for name in Carried.__dataclass_fields__}
    return PackedCarried(**first, segments=tuple(segments), batches=tuple(batches), together=entered.together)


def _attend_together(attentions: Sequence[Attention], owners: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the attended values (B, N, H·d) of each batch, where segments with one owner attend to each other."""
    first = attentions[0]
    weighed = any(one.size is not None for one in attentions)
    found: list[list[Tensor]] = [[] for _ in attentions]
    for owner in sorted({owner for each in owners for owner in each}):
        rows = [_range_of(each, owner) for each in owners]
        parts = [(one, own) for one, own in zip(attentions, rows, strict=True) if own.start < own.stop]
        q, k, v = (torch.cat([_joined(getattr(one, name)[own]) for one, own in parts], 2) for name in ("q", "k", "v"))
        size = torch.cat([_sizes(one)[own].flatten() for one, own in parts]).unsqueeze(0) if weighed else None
        values = first._replace(q=q, k=k, v=v, size=size, log2_size=None).attend(False)[0]
        counts = [(own.stop - own.start, one.q.shape[2]) for one, own in zip(attentions, rows, strict=True)]
        pieces = values.split([count * length for count, length in counts])
        for batch, piece, shape in zip(found, pieces, counts, strict=True):
            batch.append(piece.unflatten(0, shape))
    return [torch.cat(batch) for batch in found]


def _range_of(owners: Sequence[int], owner: int) -> slice:
    """Return where the segments of an owner are in a batch: they are neighbors."""
    start = owners.index(owner) if owner in owners else 0
    return slice(start, start + owners.count(owner))


def _joined(x: Tensor) -> Tensor:
    """Return the heads (B, H, N, d) of several segments as those of one (1, H, B·N, d)."""
    return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _sizes(attention: Attention) -> Tensor:
    """Return sizes (B, N), ones where tokens have none."""
    q = attention.q
    ones = torch.ones(q.shape[0], q.shape[2], device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
    return ones if attention.size is None else attention.size


def _pick(values: Tensor, segments: Segments) -> Tensor:
    """Return the entries (B, N, …) of a packed tensor that belong to a batch."""
    return values[segments.places]
