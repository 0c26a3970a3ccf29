"""Look at what passes through a model's blocks, by hooks: the model runs as it always does, fused attention and all.

Queries, keys and values are computed once more from what a block was given, with the block's own modules; attention
rows come from them. So they are what the model used, and only those that were asked for are ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitrail.adapters import Found, find
from vitrail.adapters.base import BlockAdapter, BlockCall, repeat_heads
from vitrail.errors import BrokenPass, InvalidOption
from vitrail.merging import MergeState
from vitrail.merging.attention import key_bias
from vitrail.runtime.block_forward import Carried, read_mask
from vitrail.runtime.eager import eagerly
from vitrail.runtime.layout import MARK, added_to, layout_of
from vitrail.runtime.side_tokens import Reading, prepare, with_beside
from vitrail.surgery.selection import BY_LAYER, check_layers, check_what, find_queries, listed
from vitrail.tokens import Role, TokenLayout


@dataclass(frozen=True)
class Wanted:
    """What to look at.

    Attributes:
        what: some of :data:`vitrail.surgery.selection.WHAT`.
        layers: blocks to look into.
        queries: roles and positions of the tokens whose attention rows are computed; None for all but patches.
        keep: what is done to each tensor before it is kept: another dtype, another device.
    """

    what: frozenset[str]
    layers: tuple[int, ...]
    queries: Any
    keep: Callable[[Tensor], Tensor]


@dataclass
class Seen:
    """What one forward run showed: by name, and for most of it by layer."""

    layout: TokenLayout
    queries: tuple[int, ...] = ()
    embedding: Tensor | None = None
    by_layer: dict[str, dict[int, Tensor]] = field(default_factory=lambda: {name: {} for name in BY_LAYER})


class Watch:
    """Hooks in a model that take down what was asked for; :meth:`take` gives it, one entry for each forward run."""

    def __init__(self, found: Found, wanted: Wanted) -> None:
        self.found = found
        self.wanted = wanted
        self.seen: list[Seen] = []

    def take(self) -> list[Seen]:
        """Give what was seen since the last time."""
        seen, self.seen = self.seen, []
        for one in seen:
            missing = [
                layer for layer in self.wanted.layers for name in one.by_layer if not self._complete(one, name, layer)
            ]
            if missing:
                raise BrokenPass(
                    f"layer {missing[0]} of {len(self.found.blocks)} did not run, so there is nothing to see of it; "
                    "call the whole model"
                )
        return seen

    def _complete(self, one: Seen, name: str, layer: int) -> bool:
        return name not in self.wanted.what or layer in one.by_layer[name]

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Have the hooks in the model for as long as this lasts; compiled models run eagerly meanwhile."""
        handles: list[RemovableHandle] = []
        try:
            embedding = self.found.adapter.patch_embedding(self.found.trunk)
            handles.append(embedding.register_forward_hook(self._begin))
            for layer in self.wanted.layers:
                handles += self._hook_block(layer)
            with eagerly():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen = Seen(layout_of(self.found, tuple(args[0].shape[2:])))
        if "attention" in self.wanted.what:
            seen.queries = find_queries(self.wanted.queries, seen.layout)
        if "embedding" in self.wanted.what:
            tokens = output[0] if isinstance(output, tuple) else output
            seen.embedding = self.wanted.keep(as_tokens(tokens, seen.layout))
        self.seen.append(seen)

    def _hook_block(self, layer: int) -> list[RemovableHandle]:
        block, parts, what = self.found.blocks[layer], self.found.block_adapters[layer], self.wanted.what
        handles = []
        if what & {"q", "k", "v", "attention"}:

            def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._see_attention(layer, block, parts, args, dict(kwargs))

            handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        if what & {"tokens", "norms"}:

            def after(_: nn.Module, __: Any, kwargs: dict[str, Any], output: Any) -> None:
                self._see_tokens(layer, kwargs, output[0] if isinstance(output, tuple) else output)

            # after whoever changes the tokens, but before those that were appended are taken away
            first = hasattr(self.found.trunk, MARK) and layer == len(self.found.blocks) - 1
            handles.append(block.register_forward_hook(after, with_kwargs=True, prepend=first))
        if "mlp" in what:

            def neurons(_: nn.Module, args: tuple[Any, ...]) -> None:
                self._now(layer).by_layer["mlp"][layer] = self.wanted.keep(args[0])

            handles.append(block.register_forward_pre_hook(_refuse_merged, with_kwargs=True))
            handles.append(parts.feed_last(block).register_forward_pre_hook(neurons))
        return handles

    def _see_tokens(self, layer: int, kwargs: dict[str, Any], output: Tensor) -> None:
        seen = self._now(layer)
        slot = kwargs.get("vitrail_slot")
        if slot is not None:
            if slot.passed.shown is slot.passed.tokens:
                output = slot.passed.state.unmerge(output)
            output = self._beside(layer, output, slot.passed.beside)
        output = self._placed(layer, output)
        if "tokens" in self.wanted.what:
            seen.by_layer["tokens"][layer] = self.wanted.keep(output)
        if "norms" in self.wanted.what:
            seen.by_layer["norms"][layer] = self.wanted.keep(output.float().norm(dim=-1))

    def _see_attention(
        self, layer: int, block: nn.Module, parts: BlockAdapter, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        seen, what = self._now(layer), self.wanted.what
        carried: Carried | None = kwargs.pop("vitrail_carried", None)
        kwargs.pop("vitrail_slot", None)
        x = args[0] if args else kwargs.pop(parts.input_name)
        call = parts.read_call(args[1:] if args else args, kwargs)
        state = carried.state if carried is not None else MergeState(())
        q, k, v = parts.qkv(block, parts.attend_norm(block, x))
        beside = None if carried is None or carried.beside is None else prepare(parts, block, carried.beside)
        for name, part in (("q", q), ("k", k), ("v", v)):
            if name in what:
                full = self._beside(layer, _unmerge_heads(state, part), beside and getattr(beside, name), dim=2)
                seen.by_layer[name][layer] = self.wanted.keep(self._placed(layer, full, dim=2))
        if "attention" in what:
            places = self._places(layer)
            present = [query for query in seen.queries if query in places]
            special = self._special(layer)
            rows = attention_rows(
                parts, block, q, k, call, carried, [places.index(query) for query in present], beside, special
            )
            rows, added = rows[..., : k.shape[2]], rows[..., k.shape[2] :]
            if state.assignment is not None and state.size is not None:
                rows = (rows / state.size[:, None, None]).transpose(1, 3)  # a merged token's share for each member
                rows = state.unmerge(rows.flatten(2)).unflatten(2, rows.shape[2:]).transpose(1, 3)
            rows = torch.cat([rows[..., :special], added, rows[..., special:]], -1)
            rows = spread(rows, places, seen.layout.num_tokens, 3)
            rows = spread(rows, [seen.queries.index(query) for query in present], len(seen.queries), 2)
            seen.by_layer["attention"][layer] = self.wanted.keep(rows)

    def _special(self, layer: int) -> int:
        """Say how many special tokens of its own the model has in a layer."""
        return self._layout_in(layer).num_special

    def _layout_in(self, layer: int) -> TokenLayout:
        return self.found.adapter.layout_in(self.found.trunk, layer)

    def _places(self, layer: int) -> range | list[int]:
        """Say where in the recording's layout the tokens are that have entered by a layer."""
        full = self._now(layer).layout
        here = {(span.role, span.name) for span in self._layout_in(layer).special}
        added = added_to(self.found)
        late = {spec.name for spec in added.specs if spec.enters > layer} if added is not None else set()
        own = {(span.role, span.name) for span in self._layout_in(-1).special}
        gone = {
            place
            for span, where in full.spans()
            if (span.name in late) or ((span.role, span.name) in own - here)
            for place in where
        }
        return [place for place in range(full.num_tokens) if place not in gone] if gone else range(full.num_tokens)

    def _beside(self, layer: int, own: Tensor, added: Tensor | None, dim: int = 1) -> Tensor:
        """Put the tokens that were added behind the model's own special ones."""
        if added is None:
            return own
        special = self._special(layer)
        front, patches = own.split([special, own.shape[dim] - special], dim)
        return torch.cat([front, added, patches], dim)

    def _placed(self, layer: int, tokens: Tensor, dim: int = 1) -> Tensor:
        return spread(tokens, self._places(layer), self._now(layer).layout.num_tokens, dim)

    def _now(self, layer: int) -> Seen:
        if not self.seen:
            raise BrokenPass(
                f"block {layer} ran before any picture was embedded; call the model, not its blocks, to record it"
            )
        return self.seen[-1]


def watch(
    model: nn.Module,
    what: Sequence[str],
    layers: int | Sequence[int] | None = None,
    queries: Any = None,
    keep: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Watch:
    """Prepare to look into a model; nothing is hooked yet."""
    found = find(model)
    names = check_what(what)
    if "attention" in names and queries is not None:
        queries = listed(queries, str | Role)  # what can be walked over once is needed for every batch
    return Watch(found, Wanted(names, check_layers(layers, len(found.blocks)), queries, keep))


def attention_rows(
    parts: BlockAdapter,
    block: nn.Module,
    q: Tensor,
    k: Tensor,
    call: BlockCall,
    carried: Carried | None,
    queries: list[int],
    beside: Reading | None = None,
    special: int = 0,
) -> Tensor:
    """Give the attention (B, H, Q, N) of some tokens, as the block attends: rotated, scaled, masked, by size.

    Queries are counted as at the start: where tokens have merged, a query is the token that it went into. Tokens that
    go beside the others are queries behind the special ones, and the last keys.
    """
    if call.rope is not None:
        table = call.rope
        if carried is not None and carried.state.size is not None and carried.rotary is not None:
            assert carried.state.positions is not None
            table = carried.rotary.table(carried.state.layer, carried.state.positions)
        q, k = parts.rotate(block, q, table), parts.rotate(block, k, table)
    k, _ = repeat_heads(q, k, k)
    scale = parts.attention_scale(block) or q.shape[-1] ** -0.5
    work = torch.promote_types(q.dtype, torch.float32)
    if carried is not None:
        call, q = read_mask(call, carried, k.shape[2]), _unmerge_heads(carried.state, q)
    rows, extra = queries, 0
    if beside is not None:
        extra = beside.q.shape[2]
        q = torch.cat([q[:, :, :special], beside.q, q[:, :, special:]], 2)
        k = torch.cat([k, beside.k], 2)
        # an added token reads what a patch reads
        rows = [-1 if special <= query < special + extra else query - extra * (query >= special) for query in queries]
    scores = (q[:, :, queries] @ k.transpose(-1, -2)).to(work) * scale
    mask = call.mask
    if mask is not None and mask.shape[-2] != 1:
        mask = mask[..., [min(row, mask.shape[-2] - 1) for row in rows], :]
    weighted = carried is not None and carried.plan.proportional
    bias = key_bias(carried.state.size if weighted else None, mask, scores)  # type: ignore[union-attr]
    if extra:
        assert carried is not None
        assert carried.plan.added is not None
        gate = carried.plan.added.gate(carried.state.layer)
        itself = torch.tensor(queries, device=k.device).unsqueeze(1) == special + torch.arange(extra, device=k.device)
        bias = with_beside(bias, itself, gate, scores)
    return parts.weigh(block, scores, bias)


def spread(tokens: Tensor, places: Sequence[int], length: int, dim: int) -> Tensor:
    """Put tokens at their places among ``length``, with zeros for those that are not there."""
    if len(places) == length:
        return tokens
    full = tokens.new_zeros(*tokens.shape[:dim], length, *tokens.shape[dim + 1 :])
    return full.index_copy(dim, torch.tensor(list(places), device=tokens.device), tokens)


def _refuse_merged(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
    carried: Carried | None = kwargs.get("vitrail_carried")
    if carried is not None and any(carried.state.per_layer):
        raise InvalidOption("neurons of a merged model belong to merged tokens; remove the merging to record them")
    if carried is not None and carried.plan.added is not None:
        raise InvalidOption("neurons are recorded for a model's own tokens alone; remove those that were added")


def as_tokens(embedded: Tensor, layout: TokenLayout) -> Tensor:
    """Give what a patch embedding returns, tokens or a map with channels first or last, as (B, P, D)."""
    if embedded.dim() == 3:
        return embedded
    if tuple(embedded.shape[1:3]) == layout.grid[1:]:
        return embedded.flatten(1, 2)
    return embedded.flatten(2).transpose(1, 2)


def _unmerge_heads(state: MergeState, part: Tensor) -> Tensor:
    if state.assignment is None:
        return part
    batch, heads, length, width = part.shape
    full = state.unmerge(part.transpose(1, 2).reshape(batch, length, heads * width))
    return full.unflatten(-1, (heads, width)).transpose(1, 2)
