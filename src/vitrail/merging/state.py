"""MergeState: sizes, positions and assignments of the tokens of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitrail.merging.assignment import Assignment, insert
from vitrail.merging.bipartite import Protected
from vitrail.merging.method import Method, Reduction

if TYPE_CHECKING:
    from vitrail.merging.restoring.base import Restorer


@dataclass(frozen=True)
class MergeState:
    """Sizes, positions and the composed assignment of one forward pass.

    The state is never changed: :meth:`apply` and :meth:`next_layer` return the next one. It travels with the tokens, so
    that nothing is shared between two passes.

    Attributes:
        per_layer: number of tokens planned to merge in each layer.
        layer: index of the next layer.
        protected: which of the present tokens must not merge.
        size: members of each present token (B, N); None while all are 1. A token of size 0 is padding.
        log2_size: log₂ of ``size``, where a kernel computed it.
        assignment: where each original token is now; None while nothing merged.
        positions: coordinates of each present token (B, N, axes), for models with rotary position.
        memory: the method's own tensors (B, N, …), merged along.
        archive: the method's own tensors, carried unchanged.
        guide: maps from outside (B, N, …), merged along.
        padded: whether images of the batch may keep different numbers of tokens.
        lengths: tokens (B,) that each image kept in each layer so far, where ``padded``.
        present: False for padding in the input itself (B, N at the start); None where there is none.
        counts: tokens planned to merge in each layer of each image (layers, B), where images of the input differ.
        special: number of special tokens in front.
        grid: patch grid (t, h, w) of the input before any merge.
        restorer: keeps what a reduction loses, and restores it; None: the method restores.
        kept: what the restorer keeps of each original position (B, N at the start, …).
    """

    per_layer: tuple[int, ...]
    layer: int = 0
    protected: Protected = 0
    size: Tensor | None = None
    log2_size: Tensor | None = None
    assignment: Assignment | None = None
    positions: Tensor | None = None
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    archive: Mapping[str, Tensor] = field(default_factory=dict)
    guide: Mapping[str, Tensor] = field(default_factory=dict)
    padded: bool = False
    lengths: tuple[Tensor, ...] = ()
    present: Tensor | None = None
    counts: Tensor | None = None
    special: int = 0
    grid: tuple[int, int, int] = (1, 1, 1)
    restorer: Restorer | None = None
    kept: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def r(self) -> int:
        """Number of tokens planned to merge in the next layer."""
        return self.per_layer[self.layer]

    @property
    def planned(self) -> Tensor | None:
        """Number of tokens planned to merge in this layer of each image (B,); None where all have the same."""
        return None if self.counts is None else self.counts[self.layer]

    @property
    def presence(self) -> Tensor | None:
        """Sizes of 1 for tokens and 0 for padding (B, N); None where nothing is padded."""
        return (self.size > 0).to(self.size.dtype) if self.padded and self.size is not None else None

    def next_layer(self, tokens: Tensor | None = None) -> MergeState:
        """Return the state for the next layer; ``tokens`` are those that leave this one, for the lengths."""
        lengths = self.lengths
        if self.padded and tokens is not None:
            full = tokens.new_full(tokens.shape[:1], tokens.shape[1], dtype=torch.long)
            lengths = (*lengths, full if self.size is None else (self.size > 0).sum(1))
        return replace(self, layer=self.layer + 1, lengths=lengths)

    def apply(self, x: Tensor, reduction: Reduction, method: Method | None = None) -> tuple[Tensor, MergeState]:
        """Reduce tokens (B, N, D); return them with the state after the reduction, still in the same layer."""
        merged, after = self._apply(x, reduction, method)
        if self.restorer is None:
            return merged, after
        kept = self.restorer.keep(x, merged, reduction.assignment, self, after)
        return merged, replace(after, kept={**self.kept, **kept})

    def _apply(self, x: Tensor, reduction: Reduction, method: Method | None) -> tuple[Tensor, MergeState]:
        state = self.with_entries(reduction)
        if reduction.soft is not None:
            return state._apply_soft(x, reduction, reduction.soft)
        step, weight = reduction.assignment, reduction.weight
        averages = method is None or method.averages
        if averages and weight is None and reduction.size is None:
            merged, size, log2_size = step.merge_all(x, self.size)
            return merged, state.after(step, size, log2_size)
        weight = self.size if weight is None else weight
        merged = step.merge(x, weight) if method is None else method.pool(x, step, weight)
        added = weight if reduction.size is None else reduction.size
        if added is None:
            added = torch.ones(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        return merged, state.after(step, step.merge_sizes(added), weight=weight)

    def with_entries(self, reduction: Reduction) -> MergeState:
        """Return the state with the new entries of memory and archive, before the reduction."""
        if not reduction.memory and not reduction.archive:
            return self
        return replace(self, memory={**self.memory, **reduction.memory}, archive={**self.archive, **reduction.archive})

    def after(
        self, step: Assignment, size: Tensor, log2_size: Tensor | None = None, weight: Tensor | None = None
    ) -> MergeState:
        """Return the state after a step that left tokens of these sizes, in the same layer.

        Args:
            weight: weights of the means, where they are not the sizes.
        """
        weight = self.size if weight is None else weight
        return self._advance(step, size, log2_size, lambda values: step.merge(values, weight))

    def _apply_soft(self, x: Tensor, reduction: Reduction, soft: Tensor) -> tuple[Tensor, MergeState]:
        """Reduce by a relaxed assignment (B, N, M): every token goes to every group, in parts."""
        weight = self.size if reduction.weight is None else reduction.weight
        mass = soft if weight is None else soft * weight.unsqueeze(2)
        total = mass.sum(1)
        share = (mass / total.masked_fill(total == 0, 1).unsqueeze(1)).transpose(1, 2)

        def mix(values: Tensor) -> Tensor:
            return share.to(values.dtype) @ values

        size = total if reduction.size is None else (soft * reduction.size.unsqueeze(2)).sum(1)
        return mix(x), self._advance(reduction.assignment, size, None, mix)

    def _advance(
        self, step: Assignment, size: Tensor, log2_size: Tensor | None, mix: Callable[[Tensor], Tensor]
    ) -> MergeState:
        """Return the state after a step; ``mix`` turns values (B, N, C) of the tokens into those of the groups."""

        def mix_all(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
            shape = step.target.shape[0], step.length
            return {
                name: mix(one.flatten(2) if one.dim() > 2 else one.unsqueeze(2)).view(*shape, *one.shape[2:])
                for name, one in entries.items()
            }

        return replace(
            self,
            protected=self._protected_after(step),
            size=size,
            log2_size=log2_size,
            assignment=step if self.assignment is None else self.assignment.then(step),
            positions=None if self.positions is None else mix(self.positions),
            memory=mix_all(self.memory),
            guide=mix_all(self.guide),
        )

    def insert(self, places: Sequence[int]) -> MergeState:
        """Return the state after protected tokens entered, at places counted in the sequence that has them."""
        count = len(places)

        def put(values: Tensor | None, value: float) -> Tensor | None:
            return None if values is None else insert(values, places, [value] * count)

        def put_all(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: insert(values, places, [0.0] * count) for name, values in entries.items()}

        mask = self.protected
        return replace(
            self,
            protected=mask + count if isinstance(mask, int) else insert(mask, places, [True] * count),
            size=put(self.size, 1.0),
            log2_size=put(self.log2_size, 0.0),
            assignment=None if self.assignment is None else self.assignment.insert(places),
            positions=put(self.positions, 0.0),
            memory=put_all(self.memory),
            guide=put_all(self.guide),
            special=self.special + count,
            kept=self.kept if self.restorer is None else self.restorer.insert(self.kept, places),
        )

    def unmerge(self, x: Tensor, method: Method | None = None) -> Tensor:
        """Return a token for every original position: (B, N now, D) becomes (B, N at the start, D)."""
        if self.assignment is None:
            return x
        if method is None:
            return self.assignment.unmerge(x)
        return method.restore(x, self.assignment, self.memory, self.archive)

    def restore(self, x: Tensor, method: Method | None = None) -> Tensor:
        """Return the model's tokens (B, N now, D) at full length (B, N at the start, D), by the restorer if any."""
        if self.restorer is None or self.assignment is None:
            return self.unmerge(x, method)
        return self.restorer.restore(x, self)

    def to_original(self, values: Tensor) -> Tensor:
        """Return values of the present tokens (B, N now, …) for every original position (B, N at the start, …)."""
        if self.assignment is None:
            return values
        original = self.assignment.unmerge(values.flatten(2))
        return original.view(*original.shape[:2], *values.shape[2:])

    def remerge(self, x: Tensor) -> Tensor:
        """Return full-length tokens reduced to the present ones, each the mean of its members."""
        return x if self.assignment is None else self.assignment.merge(x)

    def _protected_after(self, step: Assignment) -> Protected:
        if isinstance(self.protected, int):
            return self.protected
        mask = self.protected.expand_as(step.target)
        kept = torch.zeros(mask.shape[0], step.length, dtype=torch.long, device=mask.device)
        return kept.scatter_add(1, step.target, mask.long()) > 0
