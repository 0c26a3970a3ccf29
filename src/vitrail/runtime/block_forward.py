"""Running one block of a changed model: attend, merge, feed. It exists once, for every library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import kernels
from vitrail.adapters.base import BlockAdapter, BlockCall, DenseBlock, Rotary, repeat_heads
from vitrail.errors import BrokenPass, UnsupportedInput
from vitrail.merging import MergeState
from vitrail.merging.attention import key_bias
from vitrail.runtime.dense_forward import dense_block, dense_forward
from vitrail.runtime.plan import Plan
from vitrail.runtime.side_tokens import Reading, finish, prepare, read, widen
from vitrail.tokens import TokenLayout, TokenSpan


@dataclass(frozen=True)
class Carried:
    """What travels with the tokens from block to block.

    Attributes:
        plan: the plan under which the pass began.
        layout: the tokens of this input before any merge.
        state: what merged so far.
        r: how many tokens merge in the block that comes next. Taken from the state before the block runs, for there it
            would be looked up by the layer, and a compiler would make each block anew.
        rotary: the model's rotary position, where it has one.
        expose: whether the tensors between blocks are shown at full length.
        unmasked: whether nobody asked for a mask.
        beside: tokens that were added and have entered (B, E, D).
        tokens: the merged tokens, where the tensor that carries this is the full-length copy of them.
    """

    plan: Plan
    layout: TokenLayout
    state: MergeState
    r: int
    rotary: Rotary | None
    expose: bool
    unmasked: bool = False
    beside: Tensor | None = None
    tokens: Tensor | None = None

    def with_tokens(self, places: Sequence[int], special: tuple[TokenSpan, ...]) -> Carried:
        """Give the same after tokens entered at places of the special ones, which are then these."""
        layout = TokenLayout(special, self.layout.grid)
        return replace(self, layout=layout, state=self.state.insert(places))


def merged_forward(
    parts: BlockAdapter, block: nn.Module, x: Tensor, call: BlockCall, carried: Carried
) -> tuple[Tensor, Tensor | None, MergeState]:
    """Run one block: attend in proportion to sizes, merge what is most alike, feed what is left.

    Gives the tokens, those beside them, and the state.
    """
    state, beside, added = carried.state, carried.beside, carried.plan.added
    call = read_mask(call, carried, x.shape[1])
    gate = added.gate(state.layer) if added is not None and beside is not None else None
    if not torch.compiler.is_compiling():
        carried.plan.report_hooks(parts.attend_parts(block))
    if call.rope is not None:
        state = _with_positions(state, carried, call.rope)
    elif call.mask is None and not call.causal:
        dense = dense_block(parts, block, x, state) if gate is None else None
        if dense is not None:
            return _dense_forward(parts, block, dense, x, carried)

    h = parts.attend_norm(block, x)
    q, k, v = parts.qkv(block, h)
    r = state.possible(carried.r)
    step = kernels.match(k.detach(), r, state.protected, state.order, state.method) if r else None
    if call.rope is not None:
        table = call.rope
        if state.size is not None and carried.rotary is not None and state.positions is not None:
            table = carried.rotary.table(state.layer, state.positions)
        q, k = parts.rotate(block, q, table).type_as(v), parts.rotate(block, k, table).type_as(v)
    k, v = repeat_heads(q, k, v)
    size = state.size if carried.plan.proportional else None
    log2_size = state.log2_size
    if beside is not None:
        reading = prepare(parts, block, beside)
        beside = _read(parts, block, beside, reading, k, v, size, call.mask, gate)
        if gate is not None:
            k, v, size, log2_size = widen(k, v, size, log2_size, reading, gate)
            if call.mask is not None:
                call = call._replace(mask=F.pad(call.mask, (0, reading.k.shape[2]), value=True))
    attended = _attend(parts, block, q, k, v, size, log2_size, call)
    x = x + parts.attend_branch(block, parts.attend_output(block, attended, h))
    x, state = (x, state.skip()) if step is None else state.merge(x, step)
    x = x + parts.feed_branch(block, parts.feed(block, parts.feed_norm(block, x)))
    return x, beside, state


def _dense_forward(
    parts: BlockAdapter, block: nn.Module, dense: DenseBlock, x: Tensor, carried: Carried
) -> tuple[Tensor, Tensor | None, MergeState]:
    """Run one block that is nothing but its matrices."""
    state, beside, proportional = carried.state, carried.beside, carried.plan.proportional
    if beside is None:
        x, state = dense_forward(dense, x, state, carried.r, proportional)
        return x, None, state
    size, reading, found = state.size if proportional else None, prepare(parts, block, beside), []

    def reads(k: Tensor, v: Tensor) -> None:
        found.append(_read(parts, block, beside, reading, k, v, size, None, None))

    x, state = dense_forward(dense, x, state, carried.r, proportional, reads)
    return x, found[0], state


def _attend(
    parts: BlockAdapter,
    block: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor | None,
    log2_size: Tensor | None,
    call: BlockCall,
) -> Tensor:
    """Attend (B, H, N, d) in proportion to sizes; gives (B, N, H·d)."""
    scale, dropout = parts.attention_scale(block), parts.attention_dropout(block)
    if parts.fused:
        return kernels.attention(
            q, k, v, size, log2_size, mask=call.mask, causal=call.causal, scale=scale, dropout=dropout
        )
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    weights = F.dropout(parts.weigh(block, scores, key_bias(size, call.mask, scores)), dropout).to(v.dtype)
    return (weights @ v).transpose(1, 2).flatten(2)


def _read(
    parts: BlockAdapter,
    block: nn.Module,
    beside: Tensor,
    reading: Reading,
    k: Tensor,
    v: Tensor,
    size: Tensor | None,
    mask: Tensor | None,
    gate: Tensor | None,
) -> Tensor:
    """Run a block for the tokens beside, which read what a patch may read."""
    bias = key_bias(size, None if mask is None else mask[-1:], reading.q)
    return finish(parts, block, beside, reading, read(parts, block, reading, k, v, bias, gate))


def read_mask(call: BlockCall, carried: Carried, length: int) -> BlockCall:
    """Give the mask of the present tokens, where there is one."""
    if carried.unmasked:
        call = call._replace(mask=None)
    if call.mask is not None and call.among_special:
        return call._replace(mask=call.mask[:length, :length])
    changed = any(carried.state.per_layer) or carried.beside is not None
    if changed and (call.mask is not None or call.causal):
        raise UnsupportedInput(
            "an attention mask says who sees whom among the original tokens, and merged or added tokens are others; "
            "call the model without a mask, or remove the merging or the added tokens"
        )
    return call


def _with_positions(state: MergeState, carried: Carried, table: Tensor) -> MergeState:
    """Give the state its coordinates before the first merge: zero, and so no rotation, for special tokens."""
    rotary = carried.rotary
    if state.positions is not None or not any(state.per_layer):
        return state
    if rotary is None:
        raise BrokenPass(
            "this model rotates by position, and its blocks were called without it: call the model, its "
            "forward_features or forward_intermediates instead of its blocks"
        )
    positions = rotary.read(table) if rotary.positions is None else rotary.positions
    if positions.shape[-2] != table.shape[-2]:
        raise BrokenPass(
            f"rotary positions for {positions.shape[-2]} patches, but the model rotates {table.shape[-2]} tokens"
        )
    if positions.dim() == 2:
        positions = positions.unsqueeze(0)
    special = positions.new_zeros(positions.shape[0], carried.layout.num_special, positions.shape[2])
    return replace(state, positions=torch.cat([special, positions], 1))
