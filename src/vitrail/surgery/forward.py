"""The merged forward: attend, merge, feed. It exists once, for every library.

The state of a pass is carried by the tokens themselves: a block reads it off the tensor it is given, hands it to its
own forward as an argument, and sets it on the tensor that it returns. Hooks, gradient checkpointing, FSDP and threads
may come between; a block that is given tokens without their state says so instead of guessing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import kernels
from vitrail.adapters.base import BlockAdapter, BlockCall, Rotary
from vitrail.adapters.passes import Pass, current_pass
from vitrail.errors import BrokenPass, UnsupportedInput
from vitrail.merging import MergeState
from vitrail.surgery.dense import dense_block, dense_forward
from vitrail.surgery.plan import BlockPlan, Plan
from vitrail.surgery.trace import TracedPass, is_tracking, record
from vitrail.tokens import TokenLayout

_CARRIER = "_vitrail_carried"


@dataclass(frozen=True)
class Carried:
    """What travels with the tokens from block to block.

    Attributes:
        plan: the plan under which the pass began.
        layout: the tokens of this input before any merge.
        state: what merged so far.
        rotary: the model's rotary position, where it has one.
        expose: whether the tensors between blocks are shown at full length.
        unmasked: whether nobody asked for a mask.
        tokens: the merged tokens, where the tensor that carries this is the full-length copy of them.
    """

    plan: Plan
    layout: TokenLayout
    state: MergeState
    rotary: Rotary | None
    expose: bool
    unmasked: bool = False
    tokens: Tensor | None = None


class Passed(NamedTuple):
    """What a block's forward leaves for after its hooks: tokens, what hooks were shown of them, and the state."""

    tokens: Tensor
    shown: Tensor
    state: MergeState


class Slot:
    """Where a block's forward leaves what it did: an object of its own, which wrappers that rebuild arguments keep."""

    passed: Passed


class MergedBlock:
    """Mixin in front of a library's block: the same parameters, attending, merging and feeding."""

    _vitrail: BlockPlan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mine = self._vitrail
        x, args, kwargs = _split_tokens(mine.parts, args, kwargs)
        carried = _receive(mine, x)
        if carried.tokens is not None:
            x = carried.tokens
        slot = Slot()
        out = super().__call__(x, *args, vitrail_carried=carried, vitrail_slot=slot, **kwargs)  # type: ignore[misc]
        return _send(mine, carried, out, slot.passed)

    def forward(
        self,
        x: Tensor,
        *args: Any,
        vitrail_carried: Carried,
        vitrail_slot: Slot,
        **kwargs: Any,
    ) -> Tensor:
        parts = self._vitrail.parts
        x, state = merged_forward(parts, self, x, parts.read_call(args, kwargs), vitrail_carried)  # type: ignore[arg-type]
        shown = state.unmerge(x) if _shows_full_length(self._vitrail, vitrail_carried) else x
        vitrail_slot.passed = Passed(x, shown, state)
        return shown


def merged_forward(
    parts: BlockAdapter, block: nn.Module, x: Tensor, call: BlockCall, carried: Carried
) -> tuple[Tensor, MergeState]:
    """Run one block: attend in proportion to sizes, merge what is most alike, feed what is left."""
    state = carried.state
    if carried.unmasked:
        call = call._replace(mask=None)
    _refuse_masks(call, state)
    if not torch.compiler.is_compiling():
        carried.plan.report_hooks(parts.attend_parts(block))
    if call.rope is not None:
        state = _with_positions(state, carried, call.rope)
    elif call.mask is None and not call.causal:
        dense = dense_block(parts, block, x, state)
        if dense is not None:
            return dense_forward(dense, x, state, carried.plan.proportional)

    h = parts.attend_norm(block, x)
    q, k, v = parts.qkv(block, h)
    r = state.possible()
    step = kernels.match(k.detach(), r, state.protected, state.order) if r else None
    if call.rope is not None:
        table = call.rope
        if state.size is not None and carried.rotary is not None and state.positions is not None:
            table = carried.rotary.table(state.layer, state.positions)
        q, k = parts.rotate(block, q, table).type_as(v), parts.rotate(block, k, table).type_as(v)
    if k.shape[1] != q.shape[1]:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    size = state.size if carried.plan.proportional else None
    scale, dropout = parts.attention_scale(block), parts.attention_dropout(block)
    if parts.fused:
        attended = kernels.attention(
            q, k, v, size, state.log2_size, mask=call.mask, causal=call.causal, scale=scale, dropout=dropout
        )
    else:
        scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
        if call.mask is not None:
            scores = scores.masked_fill(~call.mask, -torch.inf)
        weights = F.dropout(parts.weigh(block, scores, size), dropout).to(v.dtype)
        attended = (weights @ v).transpose(1, 2).flatten(2)
    x = x + parts.attend_branch(block, parts.attend_output(block, attended, h))
    x, state = (x, state.skip()) if step is None else state.merge(x, step)
    x = x + parts.feed_branch(block, parts.feed(block, parts.feed_norm(block, x)))
    return x, state


def _refuse_masks(call: BlockCall, state: MergeState) -> None:
    if (call.mask is not None or call.causal) and any(state.per_layer):
        raise UnsupportedInput(
            "an attention mask says who sees whom among the original tokens, and merged tokens are several of them; "
            "call the model without a mask, or remove the merging"
        )


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


def _split_tokens(
    parts: BlockAdapter, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop(parts.input_name), args, rest


def _receive(mine: BlockPlan, x: Tensor) -> Carried:
    """Take the state off the incoming tokens, or begin a pass at the first block."""
    carried: Carried | None = getattr(x, _CARRIER, None)
    if mine.index == 0:
        # tokens that come twice are a new pass, unless a checkpoint repeats the old one for its gradients
        if carried is None or torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            carried = _begin(mine.plan, x)
            setattr(x, _CARRIER, carried)
        return carried
    if carried is None:
        raise BrokenPass(
            f"block {mine.index} of a merged model was given tokens without the state of their pass. Something between "
            "the blocks replaced the tensor (a custom forward, or reentrant gradient checkpointing: use "
            "use_reentrant=False), or the block was called by itself"
        )
    if carried.plan is not mine.plan or carried.state.layer != mine.index:
        raise BrokenPass(
            f"block {mine.index} of a merged model was given tokens that come from block {carried.state.layer - 1}"
            f"{' of another model' if carried.plan is not mine.plan else ''}; merged blocks run once each, in order"
        )
    return carried


def _begin(plan: Plan, x: Tensor) -> Carried:
    """Begin a pass: with what the way into the model left, or, where blocks are called by themselves, without."""
    entered = current_pass()
    if entered is None or getattr(entered.trunk, "_vitrail_plan", None) is not plan:
        entered = Pass(None, plan.layout)
    else:
        _refuse_changes(plan, entered)
    layout = entered.layout
    patches = x.shape[1] - layout.num_special
    if patches < 1:
        raise BrokenPass(
            f"{x.shape[1]} tokens cannot hold this model's {layout.num_special} special tokens and a patch"
        )
    if patches != layout.num_patches:  # patches dropped in training, or blocks called by themselves
        layout = layout.with_grid((1, 1, patches))
    solution = plan.solve(patches)
    plan.report(solution, patches)
    per_layer = solution.wanted if plan.pictures_decide else solution.per_layer
    state = MergeState(per_layer, protected=plan.protected(layout, x.shape[0], x.device), order=plan.order)
    return Carried(plan, layout, state, entered.rotary, entered.expose, entered.unmasked)


def _refuse_changes(plan: Plan, entered: Pass) -> None:
    """Refuse what could only come out wrong: other blocks than those merged, or merged tokens as a grid."""
    trunk: Any = entered.trunk
    count = len(trunk._vitrail_adapter.blocks(trunk))
    if count != plan.depth:
        raise BrokenPass(
            f"{plan.depth} blocks were merged and the model now has {count}; remove the merging before blocks are "
            "added or dropped, and merge again"
        )
    if entered.gridded and not plan.unmerge and any(plan.solve(entered.layout.num_patches).per_layer):
        raise UnsupportedInput(
            "feature maps need every patch at its place, and with unmerge=False merged tokens come out; merge with "
            "unmerge=True, or ask for token sequences (timm: output_fmt='NLC')"
        )


def _shows_full_length(mine: BlockPlan, carried: Carried) -> bool:
    return mine.plan.unmerge and (carried.expose or mine.is_last)


def _send(mine: BlockPlan, carried: Carried, out: Tensor, passed: Passed) -> Tensor:
    """Set the state on the outgoing tokens; the last block's are ordinary tokens again."""
    if mine.is_last:
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1:
            _finish(mine.plan, carried, out, passed)
        return out
    tokens = None
    if passed.shown is not passed.tokens:
        # a hook may have put another tensor in its place; a reentrant checkpoint gives gradients to `out` alone
        same = out is passed.shown and out.requires_grad == passed.tokens.requires_grad
        tokens = passed.tokens if same else passed.state.remerge(out)
    setattr(out, _CARRIER, replace(carried, state=passed.state, tokens=tokens))
    return out


def _finish(plan: Plan, carried: Carried, out: Tensor, passed: Passed) -> None:
    """Tell whoever asked how a pass went."""
    if is_tracking():
        record(plan, TracedPass(carried.layout, passed.state, out.shape[0], out.device))
    if plan.pictures_decide:
        done = carried.layout.num_tokens - passed.tokens.shape[1]
        plan.report_done(sum(passed.state.per_layer), done, carried.layout.num_patches)
