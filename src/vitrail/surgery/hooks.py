"""Hooks that record the activations of a model while it runs as usual, with fused attention.

Queries, keys and values are recomputed from the input of each block with the block's own modules, and attention rows
from these, so that they equal what the model uses and only the requested ones are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitrail._checks import as_tuple, is_int
from vitrail.adapters import Found, find
from vitrail.adapters.base import BlockAdapter, BlockCall, repeat_heads
from vitrail.adapters.windows import LayerWindows, WindowedAdapter, flat_tokens
from vitrail.errors import BrokenPass, InvalidOption, UnsupportedModel
from vitrail.merging import MergeState
from vitrail.merging.attention import key_bias
from vitrail.merging.method import Projections
from vitrail.runtime.block_forward import (
    Carried,
    attention_size,
    mask_with_bias,
    position_bias,
    project,
    read_mask,
    rotated,
)
from vitrail.runtime.carry import Slot
from vitrail.runtime.checks import refuse_packed
from vitrail.runtime.layout import MARK, added_to, layout_of
from vitrail.runtime.side_tokens import Reading, prepare, side_bias
from vitrail.runtime.trace import eagerly
from vitrail.runtime.windows.attention import attention_in_windows
from vitrail.tokens import TokenLayout

BY_LAYER = ("tokens", "norms", "q", "k", "v", "attention", "mlp")
"""Activations that each layer has."""

ATTENDING = frozenset(("q", "k", "v", "attention"))
"""Those of them that blocks which pool their queries (Hiera) do not have."""

WHAT = ("embedding", "entry", *BY_LAYER)


def watch(
    model: nn.Module,
    what: str | Sequence[str],
    layers: int | Sequence[int] | None = None,
    queries: Any = None,
    keep: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Recorder:
    """Return a recorder for a model; `Recorder.hooked` attaches its hooks.

    Args:
        model: a supported model.
        what: some of :data:`WHAT`.
        layers: blocks to record; negative numbers count from the end; by default all.
        queries: roles or positions of the tokens whose attention rows to compute; by default all special tokens.
        keep: function applied to each tensor before it is stored, to change its dtype or device.
    """
    found = find(model)
    refuse_packed(found, "recording")
    names = as_tuple(what)
    wrong = [name for name in names if name not in WHAT]
    if wrong or not names:
        raise InvalidOption(f"what is one or more of {', '.join(WHAT)}; got {', '.join(map(str, wrong)) or what!r}")
    queries = None if queries is None else as_tuple(queries)  # an iterator is needed for every batch
    recorder = Recorder(found, frozenset(names), check_layers(layers, len(found.blocks)), queries, keep)
    if recorder.what & ATTENDING and all(map(recorder._pools, recorder.layers)):
        last = recorder.layers[-1]
        raise UnsupportedModel(
            f"block {last} of {len(found.blocks)} in this {type(found.trunk).__name__} pools its queries or ends in a "
            "convolution, so Vitrail runs it as it is, and its queries, keys, values and attention are not recorded; "
            "record other layers, or tokens and norms"
        )
    return recorder


def check_layers(layers: int | Sequence[int] | None, depth: int) -> tuple[int, ...]:
    """Return layer numbers, sorted and counted from 0; negative numbers count from the end, None is all."""
    if layers is None:
        return tuple(range(depth))
    given = as_tuple(layers)
    wrong = [layer for layer in given if not is_int(layer) or not -depth <= layer < depth]
    if wrong or not given:
        raise InvalidOption(f"layers are integers from {-depth} to {depth - 1} for this model; got {wrong or given}")
    return tuple(sorted({layer % depth for layer in given}))


Layers = dict[int, Tensor]


@dataclass(frozen=True)
class Recording:
    """Activations of B images, with N tokens, P patches, D channels, H heads; empty where not requested.

    Attributes:
        layout: the token layout; of the last block, where blocks have grids of their own.
        layers: the recorded blocks.
        queries: positions of the tokens that attention rows belong to.
        embedding: patches after the patch embedding, before positions (B, P, D).
        entry: L2 norms in float32 of the patches that enter the first block, with their positions (B, P); where blocks
            have grids of their own, of those that enter the first block with the last grid.
        tokens: outputs of each block, before the final norm (B, N, D).
        norms: their L2 norms in float32 (B, N).
        q: queries (B, H, N, d) after their norm and before rotary position; ``k`` and ``v`` likewise.
        attention: attention rows of the queries (B, H, Q, N); each sums to one. Inside windows a row is 0 outside the
            query's window, padding has what is missing to one, and in a finer grid the query is the first token there.
        mlp: inputs of the MLP's last linear layer (B, N, hidden).
        class_attention: attention rows (B, H, Q, N) in the layers of a class-attention stage, counted from 0, where
            ``attention`` is recorded. Q are the tokens that gather there; they are the first of the N, then come the
            other special tokens, then the patches.
    """

    layout: TokenLayout
    layers: tuple[int, ...]
    queries: tuple[int, ...] = ()
    embedding: Tensor | None = None
    entry: Tensor | None = None
    tokens: Layers = field(default_factory=dict)
    norms: Layers = field(default_factory=dict)
    q: Layers = field(default_factory=dict)
    k: Layers = field(default_factory=dict)
    v: Layers = field(default_factory=dict)
    attention: Layers = field(default_factory=dict)
    mlp: Layers = field(default_factory=dict)
    class_attention: Layers = field(default_factory=dict)

    @property
    def by_layer(self) -> dict[str, Layers]:
        """The activations that each layer has, by name."""
        return {name: getattr(self, name) for name in BY_LAYER}

    def _repr_html_(self) -> str:
        from vitrail.surgery.cards import recording_card

        return recording_card(self)

    def __len__(self) -> int:
        tensors = [one for one in (self.embedding, self.entry) if one is not None]
        tensors += [tensor for layers in (*self.by_layer.values(), self.class_attention) for tensor in layers.values()]
        return len(tensors[0]) if tensors else 0


@dataclass
class Recorder:
    """Hooks that store activations; :meth:`take` returns them, one entry per forward pass. See :func:`watch`."""

    found: Found
    what: frozenset[str]
    layers: tuple[int, ...]
    queries: Any
    keep: Callable[[Tensor], Tensor]
    passes: list[Recording] = field(default_factory=list)
    patches: tuple[int, int, int] | None = None

    def take(self) -> list[Recording]:
        """Return the activations recorded since the last call."""
        passes, self.passes = self.passes, []
        wanted = [name for name in BY_LAYER if name in self.what]
        for one in passes:
            missing = [
                layer
                for layer in self.layers
                for name in wanted
                if layer not in one.by_layer[name] and not (name in ATTENDING and self._pools(layer))
            ]
            if missing:
                raise BrokenPass(
                    f"layer {missing[0]} of {len(self.found.blocks)} did not run, so nothing was recorded; call the "
                    "whole model"
                )
        return passes

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Attach the hooks inside a ``with`` block; compiled models run eagerly meanwhile."""
        handles: list[RemovableHandle] = []
        try:
            adapter, trunk = self.found.adapter, self.found.trunk
            handles.append(adapter.image_module(trunk).register_forward_pre_hook(self._start_pass, with_kwargs=True))
            if "embedding" in self.what:
                handles.append(adapter.patch_embedding(trunk).register_forward_hook(self._record_embedding))
            if "entry" in self.what:
                block = self.found.blocks[self._entered]
                handles.append(block.register_forward_pre_hook(self._record_entry, with_kwargs=True))
            for layer in self.layers:
                handles += self._hook_block(layer)
            for layer, block in enumerate(adapter.stage(trunk) if "attention" in self.what else ()):
                handles.append(block.register_forward_pre_hook(self._record_stage(layer), with_kwargs=True))
            with eagerly():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _start_pass(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        size, changed = self.found.adapter.read_images(self.found.trunk, args, kwargs)
        layout = layout_of(self.found, size)
        self.patches = self.found.adapter.layout(self.found.trunk, size).grid
        queries: tuple[int, ...] = ()
        gathers = bool(self.found.adapter.stage(self.found.trunk))
        if "attention" in self.what and not (self.queries is None and gathers and not layout.num_special):
            queries = layout.find(self.queries)
        self.passes.append(Recording(layout, self.layers, queries))
        return None if changed is None else ((), {**kwargs, **changed})

    def _record_embedding(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        now = self.passes[-1]
        tokens = _as_tokens(output[0] if isinstance(output, tuple) else output, now.layout.with_grid(self._patches))
        self.passes[-1] = replace(now, embedding=self.keep(tokens))

    def _record_entry(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now = self._current(0)
        x = args[0] if args else kwargs[self.found.block_adapters[0].input_name]
        windows = self._windows(self._entered)
        x = x if windows is None else self._by_rows(self._entered, windows, x)
        if x.shape[1] < now.layout.num_patches or (windows is not None and x.shape[1] != now.layout.num_tokens):
            return  # the grid changes from stage to stage, and patches with it
        patches = x[:, x.shape[1] - now.layout.num_patches :]  # added and late special tokens may not be there yet
        self.passes[-1] = replace(now, entry=self.keep(patches.float().norm(dim=-1)))

    def _record_stage(self, layer: int) -> Callable[..., None]:
        def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rows = self.found.adapter.stage_attention(block, args, kwargs)
            self._current(layer).class_attention[layer] = self.keep(rows)

        return before

    def _hook_block(self, layer: int) -> list[RemovableHandle]:
        block, parts = self.found.blocks[layer], self.found.block_adapters[layer]
        handles = []
        if self.what & ATTENDING:

            def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._record_attention(layer, block, parts, args, dict(kwargs))

            handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        if self.what & {"tokens", "norms"}:

            def after(_: nn.Module, __: Any, kwargs: dict[str, Any], output: Any) -> None:
                self._record_tokens(layer, kwargs, output[0] if isinstance(output, tuple) else output)

            # after hooks that change tokens, but before test-time registers are dropped
            first = hasattr(self.found.trunk, MARK) and layer == len(self.found.blocks) - 1
            handles.append(block.register_forward_hook(after, with_kwargs=True, prepend=first))
        if "mlp" in self.what:

            def neurons(_: nn.Module, args: tuple[Any, ...]) -> None:
                self._store("mlp", layer, args[0])

            handles.append(block.register_forward_pre_hook(_refuse_changed, with_kwargs=True))
            handles.append(parts.feed_last(block).register_forward_pre_hook(neurons))
        return handles

    def _record_tokens(self, layer: int, kwargs: dict[str, Any], output: Tensor) -> None:
        slot = kwargs.get("vitrail_slot")
        if slot is not None:
            if slot.passed.output is slot.passed.tokens:
                output = slot.passed.carried.unmerge(output)
            output = self._insert_added(layer, output, slot.passed.carried.side)
        windows = self._windows(layer)
        output = self._spread(layer, output) if windows is None else self._by_rows(layer, windows, output)
        if "tokens" in self.what:
            self._store("tokens", layer, output)
        if "norms" in self.what:
            self._store("norms", layer, output.float().norm(dim=-1))

    def _record_attention(
        self, layer: int, block: nn.Module, parts: BlockAdapter, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        now = self._current(layer)
        carried = _carried(kwargs.pop("vitrail_slot", None))
        if carried is not None and carried.plan.method.place == "before" and carried.r:
            raise InvalidOption(
                "q, k, v and attention cannot be recorded with a method that reduces tokens before attention; record "
                "tokens or norms, or remove the merging"
            )
        x = args[0] if args else kwargs.pop(parts.input_name)
        windows = self._windows(layer)
        if windows is not None:
            self._record_in_windows(layer, windows, block, parts, x if carried is None else carried.unmerge(x))
            return
        call = parts.read_call(args[1:] if args else args, kwargs)
        state = carried.state if carried is not None else MergeState(())
        q, k, v = parts.qkv(block, parts.attend_norm(block, x))
        side = None if carried is None or carried.side is None else prepare(parts, block, carried.side)
        for name, part in (("q", q), ("k", k), ("v", v)):
            if name in self.what:
                full = self._insert_added(layer, _unmerge_heads(state, part), side and getattr(side, name), dim=2)
                self._store(name, layer, self._spread(layer, full, dim=2))
        if "attention" in self.what:
            places, special = self._places(layer), self._num_special(layer)
            present = [query for query in now.queries if query in places]
            queries = [places.index(query) for query in present]
            rows = self._attention_rows(layer, block, (q, k, v), call, carried, queries, side)
            rows, added = rows[..., : k.shape[2]], rows[..., k.shape[2] :]
            if state.assignment is not None:
                members = state.assignment.merge_sizes(rows.new_ones(len(rows), state.assignment.target.shape[1]))
                rows = (rows / members.clamp_min(1)[:, None, None]).transpose(1, 3)  # equal shares in a group
                rows = state.unmerge(rows.flatten(2)).unflatten(2, rows.shape[2:]).transpose(1, 3)
            rows = torch.cat([rows[..., :special], added, rows[..., special:]], -1)
            rows = _scatter(rows, places, now.layout.num_tokens, 3)
            rows = _scatter(rows, [now.queries.index(query) for query in present], len(now.queries), 2)
            self._store("attention", layer, rows)

    def _record_in_windows(
        self, layer: int, windows: LayerWindows, block: nn.Module, parts: BlockAdapter, x: Tensor
    ) -> None:
        """Record queries, keys, values and attention of a block whose attention runs inside windows, if it fits."""
        if windows.windows is None:
            return
        layout = TokenLayout((), (1, *windows.grid(self._patches)))
        tokens = parts.attend_norm(block, self._by_rows(layer, windows, x))
        qkv = project(parts, block, tokens, layout, MergeState(()))
        for name, part in zip(("q", "k", "v"), qkv, strict=True):
            if name in self.what:
                self._store(name, layer, part)
        if "attention" in self.what:
            now = self._current(layer)
            rows = attention_in_windows(parts, block, windows, self._patches, qkv, now.queries, now.layout.grid)
            self._store("attention", layer, rows)

    def _attention_rows(
        self,
        layer: int,
        block: nn.Module,
        qkv: Projections,
        call: BlockCall,
        carried: Carried | None,
        queries: list[int],
        side: Reading | None,
    ) -> Tensor:
        """Compute the attention weights (B, H, Q, N) of some queries as the block does, with rotation, mask and sizes.

        Queries are positions before merging; the row of a merged token is that of its group. Added tokens are queries
        behind the special ones, and the last keys; they have no position.
        """
        parts, special = self.found.block_adapters[layer], self._num_special(layer)
        state, position, size = MergeState((), layer), None, None
        if carried is not None:
            state, position = carried.state, carried.position
            call, size = read_mask(call, carried, qkv[1].shape[2]), attention_size(carried.plan, state)
        elif parts.biased or parts.rotates:
            position = self.found.adapter.position(self.found.trunk, self._current(layer).layout.grid)
        q, k = rotated(parts, block, qkv, call.rope, position, state)
        q, k = _unmerge_heads(state, q), repeat_heads(q, k, k)[0]
        bias = position_bias(position, state, qkv[0])
        if bias is not None:
            bias = _unmerge_heads(state, bias.unsqueeze(0) if bias.dim() == 3 else bias)
        rows, extra = queries, 0
        if side is not None:
            extra = side.q.shape[2]
            q, k = self._insert_added(layer, q, side.q, 2), torch.cat([k, side.k], 2)
            if bias is not None:
                none = bias.new_zeros(*bias.shape[:2], extra, bias.shape[3])
                bias = self._insert_added(layer, bias, none, 2)
            # an added token has the mask of a patch
            rows = [-1 if special <= row < special + extra else row - extra * (row >= special) for row in queries]
        work = torch.promote_types(q.dtype, torch.float32)
        scale = parts.attention_scale(block) or q.shape[-1] ** -0.5
        scores = (q[:, :, queries] @ k.transpose(-1, -2)).to(work) * scale
        mask = call.mask
        if mask is not None and mask.shape[-2] != 1:
            mask = mask[..., [min(row, mask.shape[-2] - 1) for row in rows], :]
        bias = key_bias(size, mask_with_bias(mask, None if bias is None else bias[:, :, queries]), scores)
        if side is not None:
            added = added_to(self.found)
            assert added is not None
            itself = torch.tensor(queries, device=k.device).unsqueeze(1) - special == torch.arange(
                extra, device=k.device
            )
            bias = side_bias(bias, itself, added.gate(layer), scores)
        return parts.weigh(block, scores, bias)

    def _store(self, name: str, layer: int, value: Tensor) -> None:
        self._current(layer).by_layer[name][layer] = self.keep(value)

    def _current(self, layer: int) -> Recording:
        if not self.passes:
            raise BrokenPass(
                f"block {layer} ran before any input was embedded; call the model, not its blocks, to record it"
            )
        return self.passes[-1]

    def _windows(self, layer: int) -> LayerWindows | None:
        """Return the windows of a block; None where attention sees all tokens."""
        windows = self.found.adapter.layer_windows(self.found.trunk)
        return windows[layer] if windows else None

    def _pools(self, layer: int) -> bool:
        windows = self._windows(layer)
        return windows is not None and windows.windows is None

    def _by_rows(self, layer: int, windows: LayerWindows, tokens: Tensor) -> Tensor:
        """Return the tokens of a grid (B, N, D), row by row."""
        parts = self.found.block_adapters[layer]
        assert isinstance(parts, WindowedAdapter)
        tokens = flat_tokens(tokens, parts.channels_first)
        sequence = windows.sequence(windows.grid(self._patches), tokens.device)
        return tokens if sequence is None else tokens[:, sequence]

    @property
    def _entered(self) -> int:
        """The first block with the grid of the last one, that does not pool."""
        adapter, trunk = self.found.adapter, self.found.trunk
        windows, last = adapter.layer_windows(trunk), adapter.layout_in(trunk, -1).grid
        fit = (
            layer
            for layer in range(len(self.found.blocks))
            if adapter.layout_in(trunk, layer).grid == last and not (windows and windows[layer].pooling)
        )
        return next(fit, 0)

    @property
    def _patches(self) -> tuple[int, int, int]:
        """Patch grid of the latest pass."""
        return self.patches or self.found.adapter.layout(self.found.trunk).grid

    def _layout_in(self, layer: int) -> TokenLayout:
        return self.found.adapter.layout_in(self.found.trunk, layer)

    def _num_special(self, layer: int) -> int:
        return self._layout_in(layer).num_special

    def _places(self, layer: int) -> range | list[int]:
        """Return the positions, in the recording's layout, of the tokens that have entered by a layer."""
        full = self._current(layer).layout
        here = {(span.role, span.name) for span in self._layout_in(layer).special}
        added = added_to(self.found)
        late = {spec.name for spec in added.specs if spec.enters > layer} if added is not None else set()
        own = {(span.role, span.name) for span in self._layout_in(-1).special}
        absent = {
            place
            for span, where in full.spans()
            if (span.name in late) or ((span.role, span.name) in own - here)
            for place in where
        }
        return [place for place in range(full.num_tokens) if place not in absent] if absent else range(full.num_tokens)

    def _insert_added(self, layer: int, own: Tensor, added: Tensor | None, dim: int = 1) -> Tensor:
        """Insert added tokens behind the model's own special tokens."""
        if added is None:
            return own
        special = self._num_special(layer)
        front, patches = own.split([special, own.shape[dim] - special], dim)
        return torch.cat([front, added, patches], dim)

    def _spread(self, layer: int, tokens: Tensor, dim: int = 1) -> Tensor:
        """Return tokens at their positions in the recording's layout, zeros for tokens that have not entered."""
        return _scatter(tokens, self._places(layer), self._current(layer).layout.num_tokens, dim)


def _scatter(tokens: Tensor, places: Sequence[int], length: int, dim: int) -> Tensor:
    """Return tokens at their places in a dimension of ``length``, with zeros elsewhere."""
    if len(places) == length:
        return tokens
    full = tokens.new_zeros(*tokens.shape[:dim], length, *tokens.shape[dim + 1 :])
    return full.index_copy(dim, torch.tensor(list(places), device=tokens.device), tokens)


def _carried(slot: Slot | None) -> Carried | None:
    """Return what a block of a merged model received with its tokens; None in other models."""
    return None if slot is None else slot.carried


def _refuse_changed(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
    carried = _carried(kwargs.get("vitrail_slot"))
    if carried is not None and any(carried.state.per_layer):
        raise InvalidOption("'mlp' cannot be recorded in a merged model; remove the merging first")
    if carried is not None and carried.plan.added is not None:
        raise InvalidOption("'mlp' cannot be recorded in a model with added tokens; remove them first")


def _as_tokens(embedded: Tensor, layout: TokenLayout) -> Tensor:
    """Return the output of a patch embedding, tokens or a map with channels first or last, as (B, P, D)."""
    if embedded.dim() == 3:
        return embedded
    if embedded.dim() == 4 and tuple(embedded.shape[1:3]) == layout.grid[1:]:
        return embedded.flatten(1, 2)
    return embedded.flatten(2).transpose(1, 2)


def _unmerge_heads(state: MergeState, part: Tensor) -> Tensor:
    """Unmerge queries, keys or values (B, H, N, d)."""
    if state.assignment is None:
        return part
    batch, heads, length, width = part.shape
    full = state.unmerge(part.transpose(1, 2).reshape(batch, length, heads * width))
    return full.unflatten(-1, (heads, width)).transpose(1, 2)
