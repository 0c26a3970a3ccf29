"""The forward of one block of a changed model: attend, reduce, feed. Written once, for every library and method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import kernels
from vitrail.adapters.base import BlockAdapter, BlockCall, DenseBlock, Position, QkvName, repeat_heads
from vitrail.adapters.forward_pass import Exposed
from vitrail.errors import BrokenPass, UnsupportedInput
from vitrail.merging import Assignment, Context, MergeState, Reduction
from vitrail.merging.attention import key_bias
from vitrail.merging.method import Projections, check_amount
from vitrail.runtime.dense_forward import dense_block, dense_forward
from vitrail.runtime.layout import first_class_token
from vitrail.runtime.plan import BlockPlan, Plan
from vitrail.runtime.side_tokens import Reading, SideTokens, advance, prepare, widen
from vitrail.runtime.trace import TracedPass, record
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
        position: position that acts inside attention, where the model has one.
        expose: whether the tensors between blocks, or behind some blocks, have full length.
        unmasked: whether the caller passed no mask.
        side: side tokens that have entered (B, E, D).
        tokens: the merged tokens, where the tensor that carries this is a full-length copy of them.
        padding: number of keys of zeros behind the tokens, which nothing merges.
    """

    plan: Plan
    layout: TokenLayout
    state: MergeState
    r: int
    position: Position | None
    expose: Exposed
    unmasked: bool = False
    side: Tensor | None = None
    tokens: Tensor | None = None
    padding: int = 0

    def run(self, parts: BlockAdapter, block: nn.Module, x: Tensor, call: BlockCall) -> tuple[Tensor, Carried]:
        """Run one block; return the tokens, and the state for the next block."""
        x, side, state = merged_forward(parts, block, x, call, self)
        return x, replace(self, state=state, side=side, tokens=None)

    def sent(self, tokens: Tensor | None) -> Carried:
        """Return the state as the outgoing tokens carry it; ``tokens`` as in the attribute."""
        return replace(self, r=self.state.r, tokens=tokens)

    def ends(self, mine: BlockPlan) -> bool:
        """Return whether tokens are restored behind a block."""
        return mine.is_last

    def restore(self, x: Tensor) -> Tensor:
        """Return merged tokens at full length."""
        return self.state.restore(x, self.plan.method)

    def remerge(self, x: Tensor) -> Tensor:
        """Return full-length tokens reduced to the present ones."""
        return self.state.remerge(x)

    def enter(self, added: SideTokens, layer: int, x: Tensor) -> Carried:
        """Return the state after the added tokens of a layer entered."""
        return replace(self, side=added.enter(layer, self.side, x))

    def unmerge(self, x: Tensor) -> Tensor:
        """Return values of the present tokens (B, N, D) at full length, each group's for its members."""
        return self.state.unmerge(x)

    def record(self, out: Tensor) -> None:
        """Add a finished pass to the traces of this thread, from the full-length tokens ``out``."""
        record(self.plan, TracedPass(self.layout, self.state, out.shape[0], out.device))

    def with_tokens(self, places: Sequence[int], special: tuple[TokenSpan, ...]) -> Carried:
        """Return the state after tokens entered at these places among the special tokens, which are now ``special``."""
        layout = TokenLayout(special, self.layout.grid)
        return replace(self, layout=layout, state=self.state.insert(places))


def merged_forward(
    parts: BlockAdapter, block: nn.Module, x: Tensor, call: BlockCall, carried: Carried
) -> tuple[Tensor, Tensor | None, MergeState]:
    """Run one block; return the tokens, the side tokens, and the state for the next block."""
    side, added = carried.side, carried.plan.added
    call, state = prepare_block(parts, block, x, call, carried)
    gate = added.gate(state.layer) if added is not None and side is not None else None
    if not parts.biased and call.mask is None and not call.causal and gate is None and not carried.padding:
        dense = dense_block(parts, block, x, carried.plan, state)
        if dense is not None:
            carried = carried if state is carried.state else replace(carried, state=state)
            return _dense_forward(parts, block, dense, x, call, carried)

    attending = attend_block(parts, block, x, call, carried, state)
    own = attention = attending.attention
    if side is not None:
        reading = prepare(parts, block, side)
        mask = None if call.mask is None else call.mask[-1:]  # side tokens attend to what a patch may attend to
        side = advance(parts, block, side, reading, own.k, own.v, key_bias(own.size, mask, reading.q), gate)
        if gate is not None:
            attention = own.widened(reading, gate)
    x, state = feed_block(attending, attention.attend(call.causal))
    return x, side, state


def prepare_block(
    parts: BlockAdapter, block: nn.Module, x: Tensor, call: BlockCall, carried: Carried
) -> tuple[BlockCall, MergeState]:
    """Return the call with the mask of the present tokens, and the state with what the block needs."""
    call, state = read_mask(call, carried, x.shape[1]), carried.state
    if carried.plan.foresight is not None:
        state = carried.plan.foresight.look(x, state)
    if not torch.compiler.is_compiling():
        carried.plan.report_hooks(parts.attend_parts(block))
    return call, _with_positions(state, carried, x, call.rope)


class Attending(NamedTuple):
    """A block whose attention is about to run.

    Attributes:
        entered, state: the state with which the tokens entered, and after a reduction before attention.
        x: the tokens (B, N, D); ``h`` their norm, ``projected`` their queries, keys and values.
    """

    call: BlockCall
    carried: Carried
    entered: MergeState
    state: MergeState
    x: Tensor
    h: Tensor
    projected: Projections
    attention: Attention


def attend_block(
    parts: BlockAdapter, block: nn.Module, x: Tensor, call: BlockCall, carried: Carried, state: MergeState
) -> Attending:
    """Run a block up to its attention."""
    entered = state
    if carried.plan.method.place == "before":
        x, state = _reduce_before(parts, block, x, call, carried, state)
    h = parts.attend_norm(block, x)
    projected = project(parts, block, h, carried.layout, state)
    attention = Attention.of(parts, block, projected, call, carried, state)
    return Attending(call, carried, entered, state, x, h, projected, attention)


def feed_block(attending: Attending, attended: Tensor) -> tuple[Tensor, MergeState]:
    """Run a block from its attended values (B, N, H·d) on; return the tokens and the state for the next block."""
    call, carried, entered, state, x, h, projected, own = attending
    parts, block, method = own.parts, own.block, carried.plan.method
    attended = parts.attended(block, attended, projected[0])
    x = parts.add(x, parts.attend_branch(block, parts.attend_output(block, attended, h)))
    if method.place == "between":
        context = _context(carried, state, x, lambda: projected)
        context.norm = lambda: h
        context.rotate = lambda qkv: rotated(parts, block, qkv, call.rope, carried.position, entered)
        context.attend = partial(own.weights, state.presence)
        x, state = _reduce(carried, state, x, context)
    x = parts.add(x, parts.feed_branch(block, parts.feed(block, parts.feed_norm(block, x))))
    if method.scope == "block" and state is not entered:
        x, state = state.next_layer().restore(x, method), replace(entered, archive=state.archive)
    return x, state.next_layer(x)


def project(parts: BlockAdapter, block: nn.Module, h: Tensor, layout: TokenLayout, state: MergeState) -> Projections:
    """Return queries, keys and values (B, H, N, d) of the present tokens, from their norm (B, N, D).

    Where a block mixes neighbors, each token has the mean over its members of what they get on the whole grid.
    """
    q, k, v = parts.qkv(block, h)
    if not parts.mixes:
        return q, k, v

    def mixed(x: Tensor, part: QkvName) -> Tensor:
        width, (_, *grid) = x.shape[3], layout.grid
        full = state.unmerge(x.transpose(1, 2).flatten(2)).unflatten(2, (-1, width)).transpose(1, 2)
        full = parts.mix(block, full, part, (grid[0], grid[1]))
        return state.remerge(full.transpose(1, 2).flatten(2)).unflatten(2, (-1, width)).transpose(1, 2)

    return mixed(q, "q"), mixed(k, "k"), mixed(v, "v")


def _reduce_before(
    parts: BlockAdapter, block: nn.Module, x: Tensor, call: BlockCall, carried: Carried, state: MergeState
) -> tuple[Tensor, MergeState]:
    """Reduce a block's input; projections and attention are computed only if the method uses them."""
    context = _context(carried, state, x, lambda: project(parts, block, context.normed, carried.layout, state))
    context.norm = lambda: parts.attend_norm(block, x)

    def attend(queries: Sequence[int] | None) -> Tensor:
        projected = context.q, context.k, context.v
        return Attention.of(parts, block, projected, call, carried, state).weights(state.presence, queries)

    context.rotate = lambda qkv: rotated(parts, block, qkv, call.rope, carried.position, state)
    context.attend = attend
    return _reduce(carried, state, x, context)


def _context(carried: Carried, state: MergeState, x: Tensor, project: Callable[[], Projections]) -> Context:
    return Context(
        state.layer, carried.layout.grid, x, state.size, state.protected, state.memory, state.archive, state.guide,
        state.padded, class_token=first_class_token(carried.layout), depth=carried.plan.depth, project=project,
    )  # fmt: skip


def _reduce(carried: Carried, state: MergeState, x: Tensor, context: Context) -> tuple[Tensor, MergeState]:
    """Reduce the tokens by the plan's method, where this block is planned to."""
    reduction = _decide(carried, state, context)
    return (x, state) if reduction is None else state.apply(x, reduction, carried.plan.method)


def _decide(carried: Carried, state: MergeState, context: Context) -> Reduction | None:
    """Return the reduction of the plan's method; None where this block is not planned to reduce."""
    plan, method, planned = carried.plan, carried.plan.method, carried.r
    if planned and (plan.images_decide or state.counts is not None):
        if torch.compiler.is_compiling():
            raise UnsupportedInput(
                "here the number of tokens depends on the images, which cannot be compiled; use a static method and "
                "order='paper', or run without torch.compile"
            )
        if method.static and state.counts is None:
            # others get the plan itself: the length of a padded batch must not decide for its images
            planned = min(planned, method.capacity(context.x.shape[1], state.protected))
    if not planned:
        return None
    if not context.x.shape[0]:
        return _of_nothing(context.x, planned if method.static and not (method.relaxes and method.training) else 0)
    unlimited = not method.static and carried.r >= carried.layout.num_tokens
    context.planned = None if unlimited or state.counts is not None else planned
    r = method.amount(context, planned)
    if state.planned is not None:
        r = torch.minimum(torch.as_tensor(r, device=context.x.device), state.planned)
    check_amount(method, r, context)
    if isinstance(r, int) and r == 0 and not state.padded:
        return None
    return kernels.reduce(method, context, r, plan.order)


def _of_nothing(x: Tensor, r: int) -> Reduction:
    """Return the reduction of a batch without images by ``r`` tokens."""
    return Reduction(Assignment(torch.zeros(x.shape[:2], dtype=torch.long, device=x.device), x.shape[1] - r))


def _dense_forward(
    parts: BlockAdapter, block: nn.Module, dense: DenseBlock, x: Tensor, call: BlockCall, carried: Carried
) -> tuple[Tensor, Tensor | None, MergeState]:
    """Run one block with plain norms and sums."""
    state, side, plan, method = carried.state, carried.side, carried.plan, carried.plan.method
    r, rotate, reduce = carried.r, None, None
    if method.twin not in kernels.TWINS:
        if r and method.place == "between":
            reduce = partial(_decide_between, parts, block, call, carried)
        elif r:
            x, state = _reduce_before(parts, block, x, call, carried, state)
        r = 0
    if call.rope is not None or parts.rotates:
        entered = state

        def rotate(qkv: Projections) -> tuple[Tensor, Tensor]:
            return rotated(parts, block, qkv, call.rope, carried.position, entered)

    size = attention_size(plan, state)
    if side is None:
        x, state = dense_forward(parts, block, dense, x, state, r, size, method, rotate, None, reduce)
        return x, None, state
    reading, outputs = prepare(parts, block, side), []

    def read_side(k: Tensor, v: Tensor) -> None:
        outputs.append(advance(parts, block, side, reading, k, v, key_bias(size, None, reading.q), None))

    x, state = dense_forward(parts, block, dense, x, state, r, size, method, rotate, read_side, reduce)
    return x, outputs[0], state


def _decide_between(
    parts: BlockAdapter, block: nn.Module, call: BlockCall, carried: Carried, x: Tensor, h: Tensor, qkv: Projections
) -> Reduction | None:
    """Return the reduction of tokens between attention and MLP of a dense block."""
    state = carried.state

    def attend(queries: Sequence[int] | None) -> Tensor:
        return Attention.of(parts, block, qkv, call, carried, state).weights(state.presence, queries)

    context = _context(carried, state, x, lambda: qkv)
    context.norm, context.attend = (lambda: h), attend
    context.rotate = lambda qkv: rotated(parts, block, qkv, call.rope, carried.position, state)
    return _decide(carried, state, context)


class Attention(NamedTuple):
    """Attention of one block: rotated queries, and keys and values (B, H, N, d), and what is added to the scores.

    Attributes:
        parts, block: the block and its adapter.
        size: sizes by which keys count (B, N), and their log₂ where known; None where all are 1.
        mask: mask of the present tokens, boolean or additive.
        bias: position bias (…, H, N, N).
        padding: number of keys behind the tokens that are no tokens.
    """

    parts: BlockAdapter
    block: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    size: Tensor | None
    log2_size: Tensor | None
    mask: Tensor | None
    bias: Tensor | None
    padding: int = 0

    @classmethod
    def of(
        cls,
        parts: BlockAdapter,
        block: nn.Module,
        qkv: Projections,
        call: BlockCall,
        carried: Carried,
        state: MergeState,
    ) -> Attention:
        """Return the attention of a block from its projections."""
        q, k = rotated(parts, block, qkv, call.rope, carried.position, state)
        k, v = repeat_heads(q, k, qkv[2])
        size = attention_size(carried.plan, state)
        log2_size = state.log2_size if carried.plan.proportional else None
        bias, padding = position_bias(carried.position, state, qkv[0]), carried.padding
        if padding:
            k, v = pad_keys(parts, block, k, v, padding)
            size, log2_size = None if size is None else F.pad(size, (0, padding), value=1.0), None
        return cls(parts, block, q, k, v, size, log2_size, call.mask, bias, padding)

    def widened(self, reading: Reading, gate: Tensor) -> Attention:
        """Append side tokens to the keys: visible to all, without a position."""
        mask, bias, extra = self.mask, self.bias, reading.k.shape[2]
        keys = widen(self.k, self.v, self.size, self.log2_size, reading, gate)
        mask = None if mask is None else F.pad(mask, (0, extra), value=mask.dtype == torch.bool)
        bias = None if bias is None else F.pad(bias, (0, extra))
        return Attention(self.parts, self.block, self.q, *keys, mask, bias)

    def attend(self, causal: bool) -> Tensor:
        """Compute proportional attention; return (B, N, H·d)."""
        parts, block, q, k, v, size, log2_size, mask, bias, _ = self
        scale, dropout = parts.attention_scale(block), parts.attention_dropout(block)
        mask = mask_with_bias(mask, bias)
        if parts.fused:
            return kernels.attention(q, k, v, size, log2_size, mask=mask, causal=causal, scale=scale, dropout=dropout)
        scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
        weights = F.dropout(parts.weigh(block, scores, key_bias(size, mask, scores)), dropout).to(v.dtype)
        return (weights @ v).transpose(1, 2).flatten(2)

    def weights(self, present: Tensor | None, queries: Sequence[int] | None) -> Tensor:
        """Compute attention rows (B, H, Q, N), or the mean attention that each token receives (B, H, N)."""
        found = self._weights(present, queries)
        return found[..., : found.shape[-1] - self.padding] if self.padding else found

    def _weights(self, present: Tensor | None, queries: Sequence[int] | None) -> Tensor:
        parts, block = self.parts, self.block
        scale = parts.attention_scale(block) or self.q.shape[-1] ** -0.5

        def weigh(scores: Tensor, bias: Tensor | None) -> Tensor:
            return parts.weigh(block, scores, key_bias(self.size, bias, scores))

        def weigh_rows(scores: Tensor, rows: slice) -> Tensor:
            return weigh(scores, None if self.bias is None else self.bias[..., rows, :])

        if queries is None:
            plain = parts.fused and self.bias is None
            return kernels.received_attention(self.q, self.k, self.size, present, scale, None if plain else weigh_rows)
        # not by a list of indices, which would be copied to the device each time
        some = torch.stack([self.q[:, :, query] for query in queries], 2)
        bias = None if self.bias is None else torch.stack([self.bias[..., query, :] for query in queries], -2)
        return weigh((some * scale) @ self.k.transpose(-2, -1), bias)


def rotated(
    parts: BlockAdapter,
    block: nn.Module,
    qkv: Projections,
    table: Tensor | None,
    position: Position | None,
    state: MergeState,
) -> tuple[Tensor, Tensor]:
    """Return queries and keys with rotary position, by the model's own table until tokens have merged."""
    q, k, v = qkv
    merged = None if state.size is None else state.positions
    if position is not None and (parts.rotates if table is None else merged is not None):
        own = position.table(state.layer, merged)
        table = table if own is None else own
    if table is None:
        return q, k
    return parts.rotate(block, q, table).type_as(v), parts.rotate(block, k, table).type_as(v)


def attention_size(plan: Plan, state: MergeState) -> Tensor | None:
    """Return the sizes (B, N) by which attention counts keys; padding never counts."""
    counts = plan.proportional or (state.size is not None and state.size.requires_grad)
    return state.size if counts else state.presence


def pad_keys(parts: BlockAdapter, block: nn.Module, k: Tensor, v: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Append the keys and values (B, H, N, d) that a block computes from zeros."""
    last: Any = parts.feed_last(block)
    _, key, value = parts.qkv(block, k.new_zeros(1, 1, last.out_features))
    key, value = (one.expand(k.shape[0], k.shape[1], padding, -1) for one in repeat_heads(k, key, value))
    return torch.cat([k, key], 2), torch.cat([v, value], 2)


def position_bias(position: Position | None, state: MergeState, q: Tensor) -> Tensor | None:
    """Return the position bias (…, H, N, N) of a layer's scores, between the tokens as they are merged now.

    ``q`` are the queries (B, H, N, d) before any rotation.
    """
    if position is None:
        return None
    return position.query_bias(state.layer, None if state.size is None else state.positions, q)


def mask_with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return a mask, boolean or additive, and a position bias as one mask."""
    hidden = None if bias is None else key_bias(None, mask, bias)
    return mask if bias is None else bias if hidden is None else hidden + bias


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


def _with_positions(state: MergeState, carried: Carried, x: Tensor, table: Tensor | None) -> MergeState:
    """Return the state with coordinates, before the first merge."""
    if state.positions is not None or not any(state.per_layer):
        return state
    if carried.position is not None:
        return replace(state, positions=carried.position.coordinates(carried.layout, x, table))
    if table is not None:
        raise BrokenPass(
            "this model has rotary position, and its blocks were called without it: call the model, its "
            "forward_features or forward_intermediates instead of its blocks"
        )
    return state
