"""The forward of one block of a changed model: attend, reduce, feed. Written once, for every library and method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import kernels
from vitrail.adapters.base import BlockAdapter, BlockCall, DenseBlock, Rotary, repeat_heads
from vitrail.errors import BrokenPass, UnsupportedInput
from vitrail.merging import Context, MergeState
from vitrail.merging.attention import key_bias
from vitrail.merging.method import check_amount
from vitrail.runtime.dense_forward import dense_block, dense_forward
from vitrail.runtime.layout import first_class_token
from vitrail.runtime.plan import Plan
from vitrail.runtime.side_tokens import Reading, finish, prepare, read, widen
from vitrail.tokens import TokenLayout, TokenSpan


@dataclass(frozen=True)
class Carried:
    """The state of a forward pass, which travels with the tokens from block to block.

    Attributes:
        plan: the plan under which the pass started.
        layout: the tokens of this input before any merge.
        state: sizes and assignments so far.
        r: number of tokens planned to merge in the next block. Read from the state before the block runs: inside, it
            would depend on the layer, and a compiler would specialize every block.
        rotary: the model's rotary position, where it has one.
        expose: whether the tensors between blocks have full length.
        unmasked: whether the caller passed no mask.
        side: side tokens that have entered (B, E, D).
        tokens: the merged tokens, where the tensor that carries this is a full-length copy of them.
    """

    plan: Plan
    layout: TokenLayout
    state: MergeState
    r: int
    rotary: Rotary | None
    expose: bool
    unmasked: bool = False
    side: Tensor | None = None
    tokens: Tensor | None = None

    def with_tokens(self, places: Sequence[int], special: tuple[TokenSpan, ...]) -> Carried:
        """Return the state after tokens entered at these places among the special tokens, which are now ``special``."""
        layout = TokenLayout(special, self.layout.grid)
        return replace(self, layout=layout, state=self.state.insert(places))


def merged_forward(
    parts: BlockAdapter, block: nn.Module, x: Tensor, call: BlockCall, carried: Carried
) -> tuple[Tensor, Tensor | None, MergeState]:
    """Run one block; return the tokens, the side tokens, and the state for the next block."""
    state, side, added = carried.state, carried.side, carried.plan.added
    call = read_mask(call, carried, x.shape[1])
    if carried.plan.foresight is not None:
        state = carried.plan.foresight.look(x, state)
    gate = added.gate(state.layer) if added is not None and side is not None else None
    if not torch.compiler.is_compiling():
        carried.plan.report_hooks(parts.attend_parts(block))
    if call.rope is not None:
        state = _with_positions(state, carried, call.rope)
    elif call.mask is None and not call.causal:
        dense = dense_block(parts, block, x, carried.plan, state) if gate is None else None
        if dense is not None:
            return _dense_forward(parts, block, dense, x, carried)

    method, entered = carried.plan.method, state
    if method.place == "before":
        x, state = _reduce_before(parts, block, x, call, carried, state)
    h = parts.attend_norm(block, x)
    projected = parts.qkv(block, h)
    q, k = _rotate(parts, block, projected, call, carried, state)
    k, v = repeat_heads(q, k, projected[2])
    size, log2_size = _attention_sizes(carried.plan, state)
    attend = partial(_attention_weights, parts, block, q, k, size, state)
    if side is not None:
        reading = prepare(parts, block, side)
        side = _read(parts, block, side, reading, k, v, size, call.mask, gate)
        if gate is not None:
            k, v, size, log2_size = widen(k, v, size, log2_size, reading, gate)
            if call.mask is not None:
                call = call._replace(mask=F.pad(call.mask, (0, reading.k.shape[2]), value=True))
    attended = _attend(parts, block, q, k, v, size, log2_size, call)
    x = x + parts.attend_branch(block, parts.attend_output(block, attended, h))
    if method.place == "between":
        context = _context(carried, state, x)
        context.project, context.rotate, context.attend = (lambda: projected), (lambda _: (q, k)), attend
        x, state = _reduce(carried, state, x, context)
    x = x + parts.feed_branch(block, parts.feed(block, parts.feed_norm(block, x)))
    if method.scope == "block" and state is not entered:
        x, state = state.next_layer().restore(x, method), replace(entered, archive=state.archive)
    return x, side, state.next_layer(x)


def _reduce_before(
    parts: BlockAdapter, block: nn.Module, x: Tensor, call: BlockCall, carried: Carried, state: MergeState
) -> tuple[Tensor, MergeState]:
    """Reduce a block's input; projections and attention are computed only if the method uses them."""
    context = _context(carried, state, x)
    context.project = lambda: parts.qkv(block, parts.attend_norm(block, x))
    context.rotate = lambda projected: _rotate(parts, block, projected, call, carried, state)

    def attend(queries: Sequence[int] | None) -> Tensor:
        q = context.rotated_q
        k, _ = repeat_heads(q, context.rotated_k, context.v)
        return _attention_weights(parts, block, q, k, _attention_sizes(carried.plan, state)[0], state, queries)

    context.attend = attend
    return _reduce(carried, state, x, context)


def _context(carried: Carried, state: MergeState, x: Tensor) -> Context:
    return Context(
        state.layer, carried.layout.grid, x, state.size, state.protected, state.memory, state.archive, state.guide,
        state.padded, class_token=first_class_token(carried.layout), depth=carried.plan.depth,
    )  # fmt: skip


def _reduce(carried: Carried, state: MergeState, x: Tensor, context: Context) -> tuple[Tensor, MergeState]:
    """Reduce the tokens by the plan's method, where this block is planned to."""
    plan, method, planned = carried.plan, carried.plan.method, carried.r
    if planned and plan.images_decide:
        if torch.compiler.is_compiling():
            raise UnsupportedInput(
                "here the number of tokens depends on the images, which cannot be compiled; use a static method and "
                "order='paper', or run without torch.compile"
            )
        planned = min(planned, method.capacity(x.shape[1], state.protected))
    if not planned:
        return x, state
    context.planned = planned
    r = method.amount(context, planned)
    check_amount(method, r, context)
    if isinstance(r, int) and r == 0 and not state.padded:
        return x, state
    reduction = kernels.reduce(method, context, r, plan.order)
    return (x, state) if reduction is None else state.apply(x, reduction, method)


def _dense_forward(
    parts: BlockAdapter, block: nn.Module, dense: DenseBlock, x: Tensor, carried: Carried
) -> tuple[Tensor, Tensor | None, MergeState]:
    """Run one block that consists of its matrices alone."""
    state, side, proportional = carried.state, carried.side, carried.plan.proportional
    if side is None:
        x, state = dense_forward(dense, x, state, carried.r, proportional)
        return x, None, state
    size, reading, outputs = state.size if proportional else None, prepare(parts, block, side), []

    def read_side(k: Tensor, v: Tensor) -> None:
        outputs.append(_read(parts, block, side, reading, k, v, size, None, None))

    x, state = dense_forward(dense, x, state, carried.r, proportional, read_side)
    return x, outputs[0], state


def _rotate(
    parts: BlockAdapter,
    block: nn.Module,
    projected: tuple[Tensor, Tensor, Tensor],
    call: BlockCall,
    carried: Carried,
    state: MergeState,
) -> tuple[Tensor, Tensor]:
    """Return queries and keys with rotary position, by the model's own table until tokens have merged."""
    q, k, v = projected
    if call.rope is None:
        return q, k
    table = call.rope
    if state.size is not None and carried.rotary is not None and state.positions is not None:
        table = carried.rotary.table(state.layer, state.positions)
    return parts.rotate(block, q, table).type_as(v), parts.rotate(block, k, table).type_as(v)


def _attention_sizes(plan: Plan, state: MergeState) -> tuple[Tensor | None, Tensor | None]:
    """Return the sizes by which attention counts keys, and their log₂ where known; padding never counts."""
    if plan.proportional or (state.size is not None and state.size.requires_grad):
        return state.size, state.log2_size
    return state.presence, None


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
    """Compute proportional attention (B, H, N, d); return (B, N, H·d)."""
    scale, dropout = parts.attention_scale(block), parts.attention_dropout(block)
    if parts.fused:
        return kernels.attention(
            q, k, v, size, log2_size, mask=call.mask, causal=call.causal, scale=scale, dropout=dropout
        )
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    weights = F.dropout(parts.weigh(block, scores, key_bias(size, call.mask, scores)), dropout).to(v.dtype)
    return (weights @ v).transpose(1, 2).flatten(2)


def _attention_weights(
    parts: BlockAdapter,
    block: nn.Module,
    q: Tensor,
    k: Tensor,
    size: Tensor | None,
    state: MergeState,
    queries: Sequence[int] | None,
) -> Tensor:
    """Compute attention rows (B, H, Q, N), or the mean attention that each token receives (B, H, N)."""
    scale = parts.attention_scale(block) or q.shape[-1] ** -0.5

    def weigh(scores: Tensor) -> Tensor:
        return parts.weigh(block, scores, key_bias(size, None, scores))

    if queries is not None:
        return weigh((q[:, :, list(queries)] * scale) @ k.transpose(-2, -1))
    return kernels.received_attention(q, k, size, state.presence, scale, None if parts.fused else weigh)


def _read(
    parts: BlockAdapter,
    block: nn.Module,
    side: Tensor,
    reading: Reading,
    k: Tensor,
    v: Tensor,
    size: Tensor | None,
    mask: Tensor | None,
    gate: Tensor | None,
) -> Tensor:
    """Run a block for the side tokens, which attend to what a patch may attend to."""
    bias = key_bias(size, None if mask is None else mask[-1:], reading.q)
    return finish(parts, block, side, reading, read(parts, block, reading, k, v, bias, gate))


def read_mask(call: BlockCall, carried: Carried, length: int) -> BlockCall:
    """Return the call with the mask of the present tokens, where there is one."""
    if carried.unmasked:
        call = call._replace(mask=None)
    if call.mask is not None and call.among_special:
        return call._replace(mask=call.mask[:length, :length])
    changed = any(carried.state.per_layer) or carried.side is not None
    if changed and (call.mask is not None or call.causal):
        raise UnsupportedInput(
            "an attention mask is defined over the original tokens, which merging and added tokens change; call the "
            "model without a mask, or remove the merging or the added tokens"
        )
    return call


def _with_positions(state: MergeState, carried: Carried, table: Tensor) -> MergeState:
    """Return the state with coordinates, before the first merge: zero, and so no rotation, for special tokens."""
    rotary = carried.rotary
    if state.positions is not None or not any(state.per_layer):
        return state
    if rotary is None:
        raise BrokenPass(
            "this model has rotary position, and its blocks were called without it: call the model, its "
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
