"""Transport of a pass's state from block to block.

The tokens carry it: a block reads the state off the tensor that it receives, passes it to its own forward as an
argument, and sets it on the tensor that it returns. That holds with hooks, gradient checkpointing, FSDP and threads in
between; a block that receives tokens without their state raises ``BrokenPass``.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.adapters.base import BlockAdapter
from vitrail.adapters.forward_pass import CARRIER, Grid, Pass, current_pass
from vitrail.errors import BrokenPass, UnsupportedInput
from vitrail.merging import MergeState
from vitrail.runtime.block_forward import Carried
from vitrail.runtime.guide import current_guide, method_maps
from vitrail.runtime.plan import BlockPlan, Plan
from vitrail.runtime.sequences.packed import begin_packed
from vitrail.runtime.side_tokens import deliver
from vitrail.runtime.trace import is_tracking
from vitrail.tokens import TokenLayout


class Passed(NamedTuple):
    """Results of a block's forward, read after its hooks: tokens, the output that hooks see, and what they carry."""

    tokens: Tensor
    output: Tensor
    carried: Carried


class Slot:
    """What a block's forward receives and where it stores its result.

    An object that is neither a container nor a dataclass, since wrappers (FSDP with mixed precision) rebuild those
    among the arguments and cast the tensors in them.
    """

    passed: Passed

    def __init__(self, carried: Carried) -> None:
        self.carried = carried


class MergedBlock:
    """Mixin in front of a library's block: the same parameters; attends, reduces and feeds."""

    _vitrail: BlockPlan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mine = self._vitrail
        x, args, kwargs = _split_tokens(mine.parts, args, kwargs)
        carried = self._vitrail_receive(x, args, kwargs)
        if carried is None:
            return super().__call__(x, *args, **kwargs)  # type: ignore[misc]
        if carried.tokens is not None:
            x = carried.tokens
        if mine.plan.added is not None:
            carried = carried.enter(mine.plan.added, mine.index, x)
        slot = Slot(carried)
        out = super().__call__(x, *args, vitrail_slot=slot, **kwargs)  # type: ignore[misc]
        if isinstance(out, tuple):
            return (_send(mine, out[0], slot.passed), *out[1:])
        return _send(mine, out, slot.passed)

    def _vitrail_receive(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Carried | None:
        """Return the state that the incoming tokens carry; None for a block that runs as it is."""
        return _receive(self._vitrail, x)

    def forward(self, x: Tensor, *args: Any, vitrail_slot: Slot, **kwargs: Any) -> Any:
        mine = self._vitrail
        call = mine.parts.read_call(args, kwargs)
        x, after = vitrail_slot.carried.run(mine.parts, self, x, call)  # type: ignore[arg-type]
        expose = after.expose
        is_shown = after.ends(mine) or (expose if isinstance(expose, bool) else mine.index in expose)
        output = after.restore(x) if after.plan.unmerge and is_shown else x
        vitrail_slot.passed = Passed(x, output, after)
        return mine.parts.returned(output, call)


def _split_tokens(
    parts: BlockAdapter, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop(parts.input_name), args, rest


def _receive(mine: BlockPlan, x: Tensor) -> Carried:
    """Return the state that the incoming tokens carry; the first block starts a pass."""
    carried: Carried | None = getattr(x, CARRIER, None)
    if mine.index == 0:
        # the same tensor again is a new pass, unless gradient checkpointing repeats the old one
        if carried is None or torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            carried = _begin(mine, x)
            setattr(x, CARRIER, carried)
        return carried
    if carried is None:
        raise BrokenPass(
            f"block {mine.index} of a merged model received tokens without the state of their pass. Something between "
            "the blocks replaced the tensor (a custom forward, or reentrant gradient checkpointing: use "
            "use_reentrant=False), or the block was called by itself"
        )
    if carried.plan is not mine.plan or carried.state.layer != mine.index:
        raise BrokenPass(
            f"block {mine.index} of a merged model received tokens that come from block {carried.state.layer - 1}"
            f"{' of another model' if carried.plan is not mine.plan else ''}; merged blocks run once each, in order"
        )
    return carried


def _begin(mine: BlockPlan, x: Tensor) -> Carried:
    """Start a pass, with what the model's entry point left, or without where blocks are called by themselves."""
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(x):
        raise UnsupportedInput(
            "a merged model does not run under torch.vmap, as every image merges tokens of its own; call the model "
            "with the whole batch instead, or remove the merging first"
        )
    plan, entered = mine.plan, current_pass()
    if entered is None or getattr(entered.trunk, "_vitrail_plan", None) is not plan:
        if mine.parts.biased or mine.parts.rotates:
            raise BrokenPass("the position inside these blocks belongs to their model; call the model instead")
        entered = Pass(None, plan.layout)
    else:
        refuse_changes(plan, entered)
    if entered.segments is not None:
        return begin_packed(entered.segments, entered, x, partial(_begin_batch, plan))
    return _begin_batch(plan, entered, x)


def _begin_batch(plan: Plan, entered: Pass, x: Tensor) -> Carried:
    """Start a pass of tokens (B, N, D)."""
    if x.dim() != 3:
        raise BrokenPass("the blocks of this model take packed sequences of images; call the model instead")
    layout = entered.layout
    patches = x.shape[1] - layout.num_special
    if patches < 1:
        raise BrokenPass(
            f"{x.shape[1]} tokens cannot hold this model's {layout.num_special} special tokens and a patch"
        )
    if patches != layout.num_patches:  # patches dropped in training, or blocks called by themselves
        layout = layout.with_grid((1, 1, patches))
    if entered.grids is not None:
        return _begin_padded(plan, entered, x, entered.grids)
    per_layer = planned(plan, layout, entered.whole)
    if any(per_layer):
        plan.check_ready()
    state = MergeState(
        per_layer,
        protected=plan.protected(layout, x.shape[0], x.device),
        guide=current_guide(plan, layout, x.shape[0], x.device) | method_maps(plan.method, layout, entered.inputs, x),
        padded=not plan.method.static,
        special=layout.num_special,
        grid=layout.grid,
        restorer=plan.restorer,
    )
    return Carried(plan, layout, state, state.r, entered.position, entered.expose, entered.unmasked)


def planned(plan: Plan, layout: TokenLayout, whole: TokenLayout | None = None) -> tuple[int, ...]:
    """Return how many tokens of an input, or of a window of it, are planned to merge in each layer."""
    if plan.method.decides and plan.method.relaxes and plan.method.training:
        return (layout.num_tokens - 1,) * plan.depth
    solution = plan.solve((whole or layout).num_patches, (whole or layout).grid)
    plan.report(solution, (whole or layout).num_patches)
    solution = solution if whole is None else plan.share(layout, whole)
    return solution.wanted if plan.images_decide else solution.per_layer


def _begin_padded(plan: Plan, entered: Pass, x: Tensor, grids: tuple[Grid, ...]) -> Carried:
    """Start a pass of images of different grids, padded behind: padding is tokens of size 0.

    Each image has the schedule of its own grid.
    """
    layout, special = entered.layout, entered.layout.num_special
    per_image = [planned(plan, layout.with_grid(grid)) for grid in grids]
    if any(map(any, per_image)):
        refused = _refused_in_padded(plan)
        if refused is not None:
            raise UnsupportedInput(
                f"images of different grids in one batch do not merge with {refused}; call the model with images of "
                "one grid and without padding, or one by one"
            )
        plan.check_ready()
    lengths = torch.tensor([special + prod(grid) for grid in grids], device=x.device)
    present = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
    counts = torch.tensor(per_image, device=x.device).T
    state = MergeState(
        tuple(map(max, zip(*per_image, strict=True))),
        protected=special,
        size=present.to(torch.promote_types(x.dtype, torch.float32)),
        guide=current_guide(plan, layout, x.shape[0], x.device),
        padded=True,
        present=present,
        counts=counts,
        special=special,
        grid=layout.grid,
    )
    return Carried(plan, layout, state, state.r, entered.position, entered.expose, entered.unmasked)


def _refused_in_padded(plan: Plan) -> str | None:
    """Return the setting that images of different grids cannot merge with; None where there is none."""
    if not plan.method.takes_padding:
        return f"method={plan.method.label!r}, which merges by one number for all images, or by their grid"
    if plan.protect is not None:
        return "protect=, a mask over one grid"
    if plan.restorer is not None:
        return "restore="
    return None


def refuse_changes(plan: Plan, entered: Pass) -> None:
    """Raise where the result would be silently wrong: blocks added or dropped since, or merged tokens as a grid."""
    trunk: Any = entered.trunk
    count = len(trunk._vitrail_adapter.blocks(trunk))
    if count != plan.depth:
        raise BrokenPass(
            f"{plan.depth} blocks were merged and the model now has {count}; remove the merging before blocks are "
            "added or dropped, and merge again"
        )
    layout = entered.layout
    if entered.gridded and not plan.unmerge and any(plan.solve(layout.num_patches, layout.grid).per_layer):
        raise UnsupportedInput(
            "feature maps need every patch at its place, and with unmerge=False merged tokens come out; merge with "
            "unmerge=True, or request token sequences (timm: output_fmt='NLC')"
        )


def _send(mine: BlockPlan, out: Tensor, passed: Passed) -> Tensor:
    """Set the state on the outgoing tokens; those of the last block are ordinary tokens again."""
    carried = passed.carried
    if carried.ends(mine):
        if carried.side is not None:
            deliver(carried.side)
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1:
            _finish(mine.plan, carried, out, passed.tokens)
        return out
    tokens = None
    if passed.output is not passed.tokens:
        # a hook may have replaced the tensor; a reentrant checkpoint gives gradients to `out` alone
        same = out is passed.output and out.requires_grad == passed.tokens.requires_grad
        tokens = passed.tokens if same else carried.remerge(out)
    setattr(out, CARRIER, carried.sent(tokens))
    return out


def _finish(plan: Plan, carried: Carried, out: Tensor, tokens: Tensor) -> None:
    """Record a finished pass where it is tracked, and warn where it merged less than requested."""
    if is_tracking():
        carried.record(out)
    if plan.images_decide and plan.method.static:
        done = carried.layout.num_tokens - tokens.shape[1]
        plan.report_done(sum(carried.state.per_layer), done, carried.layout.num_patches)
