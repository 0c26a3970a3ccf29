"""Installing a plan in a model and removing it, by swapping classes. All that can fail has been checked before.

A swapped module is the same object with the same parameters, buffers, hooks and attributes; its class is a subclass
with a mixin in front of the original class, under the original's name. That survives deepcopy, pickle, DataParallel,
DDP, FSDP and ``torch.compile``, and is undone by assigning the class back.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from vitrail.adapters import Found
from vitrail.adapters.forward_pass import is_running
from vitrail.errors import BrokenPass, NotApplied
from vitrail.runtime.carry import MergedBlock
from vitrail.runtime.checks import embedding, has_own_forward
from vitrail.runtime.dense_forward import PatchProduct, patch_convolutions
from vitrail.runtime.plan import BlockPlan, Plan
from vitrail.runtime.windows.block import WindowedBlock

METHOD = "vitrail_method"
"""Name of the submodule that holds a method with parameters: it is moved, saved and trained with the model."""

RESTORER = "vitrail_restorer"
"""Name of the submodule that holds a restorer with parameters, likewise."""

FORESIGHT = "vitrail_foresight"
"""Name of the submodule that holds a network that foresees attention."""

TOKENS = "vitrail_tokens"
"""Name of the submodule that holds added tokens."""

OURS = (METHOD, RESTORER, FORESIGHT, TOKENS)
"""Submodules of a trunk that are not the model's own."""


def install(found: Found, plan: Plan) -> None:
    """Make a model run by a plan, in place of the plan that it may have."""
    is_new = not hasattr(found.trunk, "_vitrail_plan")
    if not is_new:
        _lengthen(found)
    found.trunk._vitrail_plan = plan  # type: ignore[assignment]
    _attach(found.trunk, METHOD, plan.method)
    _attach(found.trunk, RESTORER, plan.restorer)
    _attach(found.trunk, FORESIGHT, plan.foresight)
    for index, (block, parts) in enumerate(zip(found.blocks, found.block_adapters, strict=True)):
        block._vitrail = BlockPlan(plan, index, index == plan.depth - 1, parts)  # type: ignore[assignment]
    if is_new:
        found.trunk._vitrail_adapter = found.adapter  # type: ignore[assignment]
        swap(found.trunk, found.adapter.entry_points())
        for conv in patch_convolutions(embedding(found)):
            swap(conv, PatchProduct)
        for block in found.blocks:
            swap(block, MergedBlock if plan.tiling is None else WindowedBlock)
    if plan.shortening is not None:
        for part, mixin in plan.shortening.mixins():
            part._vitrail_shortening = plan.shortening  # type: ignore[assignment]
            swap(part, mixin)


def _shortened(found: Found) -> list[nn.Module]:
    """Return the modules behind a tower that its plan changes."""
    plan: Any = found.trunk._vitrail_plan
    return [] if plan.shortening is None else [part for part, _ in plan.shortening.mixins()]


def _lengthen(found: Found) -> None:
    """Restore the modules behind a tower."""
    for part in _shortened(found):
        _restore(part)
        del part._vitrail_shortening


def _attach(trunk: nn.Module, name: str, part: nn.Module | None) -> None:
    """Attach a part to its trunk: in the same mode, on the same device, in the same dtype."""
    trunk._modules.pop(name, None)
    if part is None:
        return
    weight = next((one for one in trunk.parameters() if one.is_floating_point()), None)
    if weight is not None:
        part.to(weight.device, weight.dtype)
    if next(part.parameters(), None) is not None or next(part.buffers(), None) is not None:
        trunk.add_module(name, part)
    part.train(trunk.training)


def uninstall(found: Found) -> None:
    """Restore a model exactly as it was; raise while a pass runs, which would go on with other blocks."""
    if is_running(found.trunk):
        raise BrokenPass(
            "the model is running, in a hook's pass or in another thread, and its change cannot be removed meanwhile: "
            "the rest of the pass would run unchanged on changed tokens. Remove it when the pass has ended"
        )
    convolutions = [part for part in embedding(found) if isinstance(part, PatchProduct)]
    parts = [found.trunk, *found.blocks, *convolutions]
    foreign = [part for part in (*parts, *_shortened(found)) if original_class(part) is None]
    if foreign:
        raise NotApplied(
            f"the class of {len(foreign)} modules was changed after merging (now {type(foreign[0]).__name__}, by "
            "FSDP for example), so they cannot be restored; undo that first, or merge after it"
        )
    _lengthen(found)
    for part in parts:
        _restore(part)
    del found.trunk._vitrail_plan, found.trunk._vitrail_adapter
    for name in (METHOD, RESTORER, FORESIGHT):
        found.trunk._modules.pop(name, None)
    for block in found.blocks:
        del block._vitrail


def _restore(module: nn.Module) -> None:
    """Assign a module's class back."""
    _forget_own_forward(module)
    module.__class__ = original_class(module)  # type: ignore[assignment]


@functools.cache
def swapped_class(mixin: type, original: type) -> type:
    """Return the subclass of ``original`` with ``mixin`` in front; cached, so it is the same class every time."""
    names = {
        # libraries key their registries by a class's printed name
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": _reduce,
        "_vitrail_swap": (mixin, original),
    }
    return type(original.__name__, (mixin, original), names)


def swap(module: nn.Module, mixin: type) -> None:
    """Put a mixin in front of a module's class."""
    _forget_own_forward(module)
    original: type = type(module)
    module.__class__ = swapped_class(mixin, original)


def _forget_own_forward(module: nn.Module) -> None:
    """Delete a forward on the object that is its class's own, which would outlive a change of the class."""
    if has_own_forward(module):
        del module.forward


def original_class(module: nn.Module) -> type | None:
    """Return the class that a module had before it was swapped; None if it was not swapped.

    Where another class was put in front since (as FSDP does), return one with that class in front of the original.
    """
    kind: type = type(module)
    return _without_swap(kind)


@functools.cache
def _without_swap(kind: type) -> type | None:
    made = vars(kind).get("_vitrail_swap")
    if made is not None:
        return made[1]
    bases = tuple(_without_swap(base) or base for base in kind.__bases__)
    if bases == kind.__bases__:
        return None
    names = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, bases, names)


def _reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Pickle and copy by mixin and original class: the swapped class itself is not importable by name."""
    mixin, original = type(self)._vitrail_swap  # type: ignore[attr-defined]
    return _rebuild, (mixin, original), self.__dict__.copy()


def _rebuild(mixin: type, original: type) -> nn.Module:
    kind: Any = swapped_class(mixin, original)
    return kind.__new__(kind)
