"""``vitrail.merge``: one line patches a model, one gives it back."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from vitrail.adapters import Found, find
from vitrail.errors import InvalidOption, UnsupportedModel
from vitrail.merging import METHODS, Schedule
from vitrail.runtime.checks import (
    as_pictures,
    merged_trunk,
    refuse_merged,
    refuse_meta,
    refuse_other_channels,
    refuse_patched,
    refuse_registers,
)
from vitrail.runtime.cost import CostModel
from vitrail.runtime.install import install, uninstall
from vitrail.runtime.layout import added_to
from vitrail.runtime.plan import Plan, parse_protect
from vitrail.runtime.trace import Trace, tracking
from vitrail.surgery._handle import Handle
from vitrail.surgery.recording import evaluating
from vitrail.tokens import TokenLayout

if TYPE_CHECKING:
    from PIL.Image import Image

Size = int | tuple[int, ...]


def merge(
    model: nn.Module,
    r: int | Sequence[int] | None = None,
    *,
    keep: float | None = None,
    gflops: float | None = None,
    schedule: str | float = "constant",
    proportional: bool = True,
    order: str = "paper",
    protect: Any = None,
    unmerge: bool = True,
    method: str = "tome",
) -> Merging:
    """Merge similar tokens between attention and MLP in every block of a model, in place.

    Parameters, buffers and the keys of ``state_dict`` stay as they are, and ``Merging.remove`` (or the end of a
    ``with`` block) gives the model back exactly. Give one of ``r``, ``keep`` and ``gflops``.

    >>> merging = vitrail.merge(model, r=8)     # doctest: +SKIP
    >>> logits = model(images)                  # doctest: +SKIP
    >>> merging.remove()                        # doctest: +SKIP

    Args:
        model: a supported model, or a module that has exactly one inside.
        r: tokens to merge in each layer, or a list with one number per layer.
        keep: share of the patches that is left after the last layer.
        gflops: budget for one input, in 10⁹ multiply-adds; solved for each input size.
        schedule: how merges spread over depth: ``"constant"``, ``"decreasing"`` (most in early layers),
            ``"increasing"``, or Token Merging's inflection from −1 to 1.
        proportional: count a merged token in attention as often as it has members. Models pretrained by masking
            (MAE) and used without finetuning do better without.
        order: ``"paper"`` as in Token Merging; ``"original"`` keeps tokens in the order of their first member.
        protect: boolean mask of patches that never merge: (patches,) or (height, width) of the grid for all pictures;
            (pictures, patches) or (pictures, height, width) for one batch.
        unmerge: give every patch its token back after the last block, so that pooling, heads and dense outputs are
            exact. With False the merged tokens come out, special ones in front.
        method: ``"tome"``, Token Merging. For comparisons, ``"random"`` merges tokens whichever they are, and
            ``"prune"`` leaves out the tokens that Token Merging would merge; neither has fast kernels.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a torch.nn.Module; got {type(model).__name__}")
    refuse_merged(model)
    found = find(model)
    refuse_patched(found)
    refuse_registers(found)
    refuse_meta(model)
    for name, value in (("proportional", proportional), ("unmerge", unmerge)):
        if not isinstance(value, bool):
            raise InvalidOption(f"{name} is True or False; got {value!r}")
    if order not in ("paper", "original"):
        raise InvalidOption(f"order is 'paper' or 'original'; got {order!r}")
    if method not in METHODS:
        raise InvalidOption(f"method is one of {', '.join(METHODS)}; got {method!r}")

    depth = len(found.blocks)
    layout = found.adapter.layout(found.trunk)
    wanted = Schedule.parse(depth, r, keep, gflops, schedule)
    resizes = found.adapter.resizes(found.trunk)
    mask = parse_protect(protect, layout.grid, resizes)
    cost = CostModel.of(model, found)
    added = added_to(found)
    plan = Plan(depth, layout, wanted, proportional, order, unmerge, mask, cost, resizes, added=added, method=method)  # type: ignore[arg-type]
    plan.change(wanted)
    install(found, plan)
    return Merging(model, found, plan)


class Merging(Handle):
    """A merged model's handle: settings, figures, pictures, and the way back.

    Attributes:
        model: the model as it was given.
        found: the merged trunk in it, its blocks and their adapters.
    """

    _function = "vitrail.merge"

    def __init__(self, model: nn.Module, found: Found, plan: Plan) -> None:
        self.model = model
        self.found = found
        self._plan = plan

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Find the merging of a model again, also of a copied or unpickled one."""
        trunk = merged_trunk(model)
        if trunk is None:
            raise cls._not_found(model)
        return cls(model, find(trunk), trunk._vitrail_plan)  # type: ignore[arg-type]

    @property
    def is_active(self) -> bool:
        """Whether the model is merged by this handle's settings."""
        return getattr(self.found.trunk, "_vitrail_plan", None) is self._plan

    @property
    def layout(self) -> TokenLayout:
        """Which index is which token, at the model's own input size and before any merge."""
        return self.found.adapter.layout(self.found.trunk)

    @property
    def r(self) -> list[int]:
        """Merges per layer at the model's own input size. Assign a number or a list to change them.

        A number is spread over depth by the schedule that the merging has; a list is the schedule itself.
        """
        return list(self._plan.solve(self.layout.num_patches).per_layer)

    @r.setter
    def r(self, value: int | Sequence[int]) -> None:
        self._check_active()
        shape = 0.0 if hasattr(value, "__len__") else self._plan.schedule.inflection
        self._plan.change(Schedule.parse(self._plan.depth, value, schedule=shape))

    @property
    def config(self) -> dict[str, Any]:
        """The settings as plain data: ``vitrail.merge(model, **config)`` gives the same merging again."""
        plan, wanted = self._plan, self._plan.schedule
        given = {"r": wanted.r, "keep": wanted.keep, "gflops": wanted.gflops}
        config: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if isinstance(wanted.r, tuple):
            config["r"] = list(wanted.r)
        else:
            config["schedule"] = wanted.shape
        config.update(proportional=plan.proportional, order=plan.order, unmerge=plan.unmerge, method=plan.method)
        if plan.protect is not None:
            config["protect"] = plan.protect.tolist()
        return config

    def tokens_per_layer(self, size: Size | None = None) -> list[int]:
        """How many tokens leave each block, special ones included, for inputs of a size in pixels.

        With ``protect`` and ``order="original"`` the pictures decide, and more may be left.
        """
        layout = self._layout_for(size)
        lengths, length = [], layout.num_tokens
        for merges, late in zip(self._plan.solve(layout.num_patches).per_layer, self._plan.cost.late, strict=True):
            length -= merges
            lengths.append(length + late)
        return lengths

    def flops(self, size: Size | None = None, *, merged: bool = True) -> int:
        """Multiply-adds for one input of a size in pixels: with merging, or without (``merged=False``).

        One multiply-add is one FLOP, as in the literature.
        """
        layout = self._layout_for(size)
        per_layer = self._plan.solve(layout.num_patches).per_layer if merged else (0,) * self._plan.depth
        return self._plan.counter(layout.num_special, layout.num_patches)(per_layer)

    def track(self) -> AbstractContextManager[Trace]:
        """Collect where every patch goes in the forward passes of this thread inside a ``with`` block."""
        self._check_active()
        return tracking(self._plan)

    @torch.no_grad()
    def draw(self, images: Any) -> list[Image]:
        """Paint each picture as stained glass: one pane per kept token, in the mean colour of its patches.

        Args:
            images: one picture or several: PIL images, or paths of files. The whole picture is resized to the
                model's size for the model, and painted at its own resolution.
        """
        from vitrail.data import to_tensor
        from vitrail.drawing import stained_glass

        pictures = as_pictures(images)
        refuse_other_channels(self.found)
        batch = to_tensor(pictures, self.found.adapter.preprocessing(self.found.trunk))
        weight = next(self.found.trunk.parameters())
        with evaluating(self.model), self.track() as trace:
            self.found.trunk(batch.to(weight.device, weight.dtype))
        grid = trace.layout.grid[1:]
        groups = trace.groups.cpu()
        return [
            stained_glass(picture, group.reshape(grid).numpy()) for picture, group in zip(pictures, groups, strict=True)
        ]

    def remove(self) -> None:
        """Give the model back exactly as it was, but for tokens that were added to it."""
        self._check_active()
        if self._plan.added is None:
            uninstall(self.found)
        else:
            install(self.found, self._plan.without_merging())

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Have the model without this merging inside a ``with`` block; this handle and others stay good."""
        self.remove()
        try:
            yield
        finally:
            refuse_merged(self.model)
            install(self.found, self._plan)

    def _layout_for(self, size: Size | None) -> TokenLayout:
        if size is None:
            return self.layout
        try:
            height, width = map(operator.index, size if hasattr(size, "__len__") else (size, size))  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise InvalidOption(f"size is a number of pixels, or (height, width); got {size!r}") from error
        pair = (height, width)
        own = self.found.adapter.preprocessing(self.found.trunk).size
        if pair != own and not self.found.adapter.resizes(self.found.trunk):
            raise InvalidOption(f"this model takes pictures of {own[0]} × {own[1]} pixels only; got size={size!r}")
        try:
            return self.found.adapter.layout(self.found.trunk, pair)
        except ValueError as error:
            raise InvalidOption(f"size={size!r} is smaller than one patch of this model") from error
