"""Installing a plan in a model and removing it: everything that can fail has been checked before."""

from __future__ import annotations

from torch import nn

from vitrail.adapters import Found
from vitrail.errors import NotApplied
from vitrail.runtime.carry import MergedBlock
from vitrail.runtime.checks import embedding
from vitrail.runtime.class_swap import original_class, swap
from vitrail.runtime.patch_matmul import PatchProduct, patch_convolutions
from vitrail.runtime.plan import BlockPlan, Plan

METHOD = "vitrail_method"
"""Name of the submodule that holds a method with parameters: it is moved, saved and trained with the model."""

RESTORER = "vitrail_restorer"
"""Name of the submodule that holds a restorer with parameters, likewise."""

FORESIGHT = "vitrail_foresight"
"""Name of the submodule that holds a network that foresees attention."""


def install(found: Found, plan: Plan) -> None:
    """Make a model run by a plan, in place of the plan that it may have."""
    is_new = not hasattr(found.trunk, "_vitrail_plan")
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
            swap(block, MergedBlock)


def _attach(trunk: nn.Module, name: str, part: nn.Module | None) -> None:
    trunk._modules.pop(name, None)
    if part is None:
        return
    if next(part.parameters(), None) is not None or next(part.buffers(), None) is not None:
        trunk.add_module(name, part)
    part.train(trunk.training)


def uninstall(found: Found) -> None:
    """Restore a model exactly as it was."""
    parts = _swapped(found)
    for part in parts:
        part.__class__ = original_class(part)  # type: ignore[assignment]
    del found.trunk._vitrail_plan, found.trunk._vitrail_adapter
    for name in (METHOD, RESTORER, FORESIGHT):
        found.trunk._modules.pop(name, None)
    for block in found.blocks:
        del block._vitrail


def _swapped(found: Found) -> list[nn.Module]:
    """Return all modules whose class was changed; raise where one cannot be restored."""
    convolutions = [part for part in embedding(found) if isinstance(part, PatchProduct)]
    parts = [found.trunk, *found.blocks, *convolutions]
    foreign = [part for part in parts if original_class(part) is None]
    if foreign:
        raise NotApplied(
            f"the class of {len(foreign)} modules was changed after merging (now {type(foreign[0]).__name__}, by "
            "FSDP for example), so they cannot be restored; undo that first, or merge after it"
        )
    return parts
