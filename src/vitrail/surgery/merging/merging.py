"""``vitrail.merge``: merge the tokens of a model in place, and undo it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail.adapters import Found, find
from vitrail.data.media.modality import MODALITIES
from vitrail.errors import InvalidOption
from vitrail.merging import Method, Schedule
from vitrail.merging.foresight import Foresight, as_foresight
from vitrail.merging.restoring import FitOptions, Restorer, as_restorer
from vitrail.runtime.checks import (
    check_changeable,
    embedding,
    merged_trunk,
    refuse_in_windows,
    refuse_merged,
    refuse_packed,
    refuse_replaced_forward,
)
from vitrail.runtime.cost import CostModel
from vitrail.runtime.guide import guiding, present_maps
from vitrail.runtime.install import install, uninstall
from vitrail.runtime.layout import added_to, model_shape
from vitrail.runtime.plan import Plan, parse_map
from vitrail.runtime.sequences.shortening import Shortening
from vitrail.runtime.trace import Trace, tracking
from vitrail.surgery._handle import Handle, check_module
from vitrail.surgery._pretrained import attach, detach
from vitrail.surgery.merging.calibration import Calibration, calibrate
from vitrail.surgery.merging.guidance import (
    By,
    First,
    FirstPass,
    ForesightFit,
    TrainingOptions,
    guided,
    look_ahead,
    train_foresight,
)
from vitrail.surgery.merging.payoff import Payoff, measure_payoff
from vitrail.surgery.merging.prompts import Inputs, shorten_prompts
from vitrail.surgery.merging.restoration import RestorationError, calibrate_restorer, restoration_error
from vitrail.surgery.merging.saved import merge_options, saved_merge
from vitrail.surgery.merging.trained_methods import read_method, save_method
from vitrail.surgery.recording import Images, evaluating
from vitrail.tokens import TokenLayout

if TYPE_CHECKING:
    from PIL.Image import Image

Size = int | tuple[int, ...]


@checked
def merge(
    model: nn.Module,
    r: int | Sequence[int] | None = None,
    *,
    keep: float | None = None,
    gflops: float | None = None,
    schedule: str | float | None = None,
    proportional: bool = True,
    order: str = "paper",
    protect: Any = None,
    unmerge: bool = True,
    method: str | Path | Mapping[str, Any] | Method = "tome",
    restore: str | Mapping[str, Any] | Restorer | None = None,
    foresight: Mapping[str, Any] | Foresight | None = None,
    shorten: int | float | None = None,
) -> Merging:
    """Merge similar tokens in every block of a model, in place.

    Parameters, buffers and the keys of ``state_dict`` stay unchanged, and ``Merging.remove`` (or the end of a
    ``with`` block) restores the model exactly. Pass one of ``r``, ``keep`` and ``gflops``; methods that decide by
    themselves how much to merge need none.

    >>> merging = vitrail.merge(model, r=8)     # doctest: +SKIP
    >>> logits = model(images)                  # doctest: +SKIP
    >>> merging.remove()                        # doctest: +SKIP

    Args:
        model: a supported model, or a module that contains exactly one.
        r: tokens to merge in each layer, or a list with one number per layer.
        keep: share of the patches left after the last layer, protected ones included.
        gflops: budget for one input, in 10⁹ multiply-adds; solved for each input size.
        schedule: distribution of the merges over depth: ``"constant"``, ``"decreasing"`` (most in early layers),
            ``"increasing"``, or ToMe's inflection from −1 to 1. By default the method's own: for most, constant.
        proportional: let attention count a token of size s as s tokens. Models pretrained by masking (MAE) and used
            without fine-tuning do better without.
        order: ``"paper"`` as in ToMe; ``"original"`` keeps tokens in the order of their first member.
        protect: boolean mask of patches that never merge: (patches,) or (height, width) of the grid for all images;
            (images, patches) or (images, height, width) for one batch.
        unmerge: restore a token for every patch after the last block, so that pooling, heads and dense outputs are
            exact. With False the merged tokens come out, special tokens in front.
        method: how tokens merge: a registered name (``"tome"``; for comparisons ``"random"`` and ``"prune"``), an
            instance such as ``ToMe(features="values")``, a dict with a name and options, or the directory of a run
            that trained a method.
        restore: how full length is restored: a registered name (``"copy"``, ``"residual"``, ``"transport"``,
            ``"attention"``), an instance, or a dict with a name and options. By default the method's own way: for most,
            a copy of its group's token for each position.
        foresight: options of a network that predicts where a later layer attends, as a guide of the method, such as
            ``{"layer": 0}``; see :meth:`Merging.train_foresight`.
        shorten: for vision-language models: tokens that the language model receives for each image, as a number or a
            share of all (a float); similar tokens of the projector's output merge. With it alone, nothing merges in
            the tower. Prompts need fewer placeholders then: :meth:`Merging.shorten`.
    """
    check_module(model)
    refuse_merged(model)
    found = find(model)
    check_changeable(model, found)
    for name, value in (("proportional", proportional), ("unmerge", unmerge)):
        if not isinstance(value, bool):
            raise InvalidOption(f"{name} is True or False; got {value!r}")
    if order not in ("paper", "original"):
        raise InvalidOption(f"order is 'paper' or 'original'; got {order!r}")
    chosen, restorer, ahead = read_method(method), as_restorer(restore), as_foresight(foresight)
    if restorer is not None and not unmerge:
        raise InvalidOption("restore= restores full length, and unmerge=False leaves it out; pass one of them")

    shortening = None if shorten is None else _shortening(model, found, shorten)
    depth = len(found.blocks)
    layout = found.adapter.layout(found.trunk)
    layers = chosen.layers(depth)
    if shorten is not None and r is None and keep is None and gflops is None and not chosen.decides:
        r = 0
    given = {"r": r, "keep": keep, "gflops": gflops, "schedule": schedule}
    _refuse_amounts(chosen, [name for name, value in given.items() if value is not None])
    required = chosen.budgeted and not chosen.decides
    wanted = Schedule.parse(depth, r, keep, gflops, schedule, required=required, layers=layers)
    shape = model_shape(found)
    chosen.check(shape)
    resizes = found.adapter.resizes(found.trunk)
    mask = None if protect is None else parse_map("protect", protect, layout.grid, resizes).cpu()
    if mask is not None and mask.dtype != torch.bool:
        raise InvalidOption(
            f"protect is a boolean mask over the patches; got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    if mask is not None and found.adapter.layer_windows(found.trunk):
        raise InvalidOption(
            f"protect= is not supported for {type(found.trunk).__name__}: tokens merge inside windows, each by the "
            "share of the image"
        )
    cost = CostModel.of(model, found)
    added = added_to(found)
    plan = Plan(depth, layout, cost, resizes, wanted, True, proportional, order, unmerge, mask, added, chosen)  # type: ignore[arg-type]
    if plan.tiling is not None:
        refused = {"restore": restore, "foresight": foresight, "unmerge=False": not unmerge or None}
        refuse_in_windows(found, chosen, [name for name, value in refused.items() if value is not None])
    chosen.build(shape._replace(flops=plan.counter(layout.num_special, layout.num_patches, layout.grid)))
    if restorer is not None:
        restorer.check(shape)
        restorer.build(shape)
    if ahead is not None:
        ahead.build(shape)
    plan.restorer, plan.foresight, plan.shortening = restorer, ahead, shortening
    plan.change(wanted)
    install(found, plan)
    attach(model, found)
    return Merging(model, found, plan)


def _refuse_amounts(method: Method, given: Sequence[str]) -> None:
    if method.decides and given:
        raise InvalidOption(
            f"method {method.label} decides how many tokens merge in each layer; leave out {', '.join(given)}"
        )


def _shortening(model: nn.Module, found: Found, wanted: float) -> Shortening:
    tokens = found.adapter.visual_tokens(model, found.trunk)
    is_number = isinstance(wanted, int | float) and not isinstance(wanted, bool)
    if not is_number or not (1 <= wanted <= tokens.count if isinstance(wanted, int) else 0 < wanted <= 1):
        raise InvalidOption(
            f"shorten is a number of tokens for each image, from 1 to {tokens.count} for this model, or a share as a "
            f"float above 0 and at most 1.0; got {wanted!r}"
        )
    refuse_replaced_forward(tokens.owner, tokens.projector)
    return Shortening(tokens, wanted)


@dataclass(eq=False, repr=False)
class Merging(Handle):
    """Handle of a merged model: its settings, costs, traces and drawings, and how to undo the merging."""

    _function = "vitrail.merge"

    _plan: Plan

    @classmethod
    def _find(cls, model: nn.Module) -> Self | None:
        trunk = merged_trunk(model)
        return None if trunk is None else cls(model, find(trunk), trunk._vitrail_plan)  # type: ignore[arg-type]

    @property
    def is_active(self) -> bool:
        """Whether the model runs with this handle's settings."""
        return getattr(self.found.trunk, "_vitrail_plan", None) is self._plan

    @property
    def layout(self) -> TokenLayout:
        """Token layout at the model's own input size, before any merge."""
        return self.found.adapter.layout(self.found.trunk)

    @property
    def r(self) -> list[int]:
        """Merges per layer at the model's own input size. Assign a number or a list to change them.

        A number is distributed over depth by the present schedule; a list is the schedule itself.
        """
        return list(self._planned(self.layout))

    @r.setter
    def r(self, value: int | Sequence[int]) -> None:
        self._change(r=value)

    @property
    def keep(self) -> float | None:
        """Share of the patches left after the last layer, if it was requested. Assign to request another one."""
        return self._plan.schedule.keep

    @keep.setter
    def keep(self, value: float) -> None:
        self._change(keep=value)

    @property
    def gflops(self) -> float | None:
        """Budget for one input, if it was requested. Assign to request another one."""
        return self._plan.schedule.gflops

    @gflops.setter
    def gflops(self, value: float) -> None:
        self._change(gflops=value)

    def _change(self, **wanted: Any) -> None:
        """Request another number of merges, in the present distribution over depth; a list is one itself."""
        self._check_active()
        _refuse_amounts(self.method, list(wanted))
        shape = None if hasattr(wanted.get("r"), "__len__") else self._plan.schedule.shape
        layers = self.method.layers(self._plan.depth)
        self._plan.change(Schedule.parse(self._plan.depth, **wanted, schedule=shape, layers=layers))

    @property
    def config(self) -> dict[str, Any]:
        """The settings as plain data: ``vitrail.merge(model, **config)`` applies the same merging again."""
        plan, wanted = self._plan, self._plan.schedule
        given = {"r": wanted.r, "keep": wanted.keep, "gflops": wanted.gflops}
        config: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if plan.method.decides:
            config["r"] = list(plan.method.counts())
        elif isinstance(wanted.r, tuple):
            config["r"] = list(wanted.r)
        elif wanted.shape is not None:
            config["schedule"] = wanted.shape
        config.update(proportional=plan.proportional, order=plan.order, unmerge=plan.unmerge, method=plan.method.config)
        if plan.restorer is not None:
            config["restore"] = plan.restorer.config
        if plan.foresight is not None:
            config["foresight"] = plan.foresight.config
        if plan.shortening is not None:
            config["shorten"] = plan.shortening.wanted
        if plan.protect is not None:
            config["protect"] = plan.protect.tolist()
        return config

    def tokens_per_layer(self, size: Size | None = None) -> list[int]:
        """Return the number of tokens that leave each block, special tokens included, for a size in pixels.

        With ``protect`` and ``order="original"`` the number depends on the images, and more tokens may be left. Where
        attention runs inside windows, these are the tokens that each block's MLP works on, in all windows.
        """
        layout = self._layout_for(size)
        return self._plan.lengths(layout, self._planned(layout))

    def flops(self, size: Size | None = None, *, merged: bool = True) -> int:
        """Return the multiply-adds for one input of a size in pixels: with merging, or without (``merged=False``)."""
        return self._flops(self._layout_for(size), merged)

    def _flops(self, layout: TokenLayout, merged: bool = True) -> int:
        per_layer = self._planned(layout) if merged else (0,) * self._plan.depth
        return self._plan.counter(layout.num_special, layout.num_patches, layout.grid)(per_layer)

    @property
    def visual_tokens(self) -> int:
        """Tokens that the language model of a vision-language model receives for each image of the model's own size.

        As many placeholders stand for an image in a prompt.
        """
        shortening = self._plan.shortening
        if shortening is None:
            return self.found.adapter.visual_tokens(self.model, self.found.trunk).count
        return shortening.length(shortening.tokens.count)

    def shorten(self, inputs: Inputs) -> Inputs:
        """Return a processor's output with :attr:`visual_tokens` placeholders for each image, for ``shorten=``.

        Tensors with an entry for each token stay in step: attention mask, token types, position ids and labels. Where
        prompts have different numbers of images, the shorter ones are padded, on the side where the batch is padded
        already, otherwise in front. The rest, and the inputs themselves, stay unchanged.

        >>> inputs = merging.shorten(processor(images=images, text=prompts, return_tensors="pt"))  # doctest: +SKIP
        >>> model.generate(**inputs)                                                               # doctest: +SKIP
        """
        shortening = self._plan.shortening
        if shortening is None:
            raise InvalidOption(
                "this model was merged without shorten=, so its prompts keep their placeholders; pass shorten= to "
                "vitrail.merge"
            )
        return shorten_prompts(inputs, shortening.tokens, self.visual_tokens)

    def pays(self, batch: int | Tensor = 8, *, seconds: float = 1.0) -> Payoff:
        """Measure whether merging saves time for this batch on the model's device, interleaved with the unmerged model.

        On a GPU both count with the better of plain calls and `vitrail.capture`; nothing is compiled. The result is
        true where merging pays, and ``print`` shows it in words and numbers. ``vitrail bench`` measures more modes.

        Args:
            batch: number of random inputs of the model's own size, or a preprocessed batch, which methods that decide
                per image need.
            seconds: time for measuring, after warm-up.
        """
        self._check_active()

        def flops_ratio(size: tuple[int, ...]) -> float | None:
            if not self.method.static:
                return None
            layout = self.found.adapter.layout(self.found.trunk, size)
            return self._flops(layout, merged=False) / self._flops(layout)

        return measure_payoff(self.found, batch, seconds, flops_ratio)

    def track(self) -> AbstractContextManager[Trace]:
        """Record where every patch goes in the forward passes of this thread inside a ``with`` block."""
        self._check_active()
        return tracking(self._plan)

    def guide(self, **maps: Any) -> AbstractContextManager[None]:
        """Show maps over the patches to the method, for the forward passes of this thread inside a ``with`` block.

        Each map is (patches,), (height, width), (images, patches) or (images, height, width); methods read them by
        name as ``context.guide``.
        """
        self._check_active()
        resizes = self.found.adapter.resizes(self.found.trunk)
        parsed = {name: parse_map(name, values, self.layout.grid, resizes) for name, values in maps.items()}
        return guiding(self._plan, parsed)

    def guided(
        self,
        images: Images | None = None,
        *,
        by: By = "class_attention",
        layers: int | Sequence[int] = -1,
        first: First = "coarse",
        scale: float = 0.5,
        keep: float = 0.25,
        name: str = "ahead",
    ) -> AbstractContextManager[None]:
        """Show where later layers attend in a first pass to the method, inside a ``with`` block.

        With images, the first pass runs once, for these; without, before each call of the model, so that every call
        runs two passes. Methods read the maps as ``context.guide[name]``. The first pass has no gradients.

        Args:
            images: the batch that the model is called with, as preprocessed tensors or files; None for every call.
            by: attention that counts; see :func:`vitrail.look_ahead`, also for the following options.
            layers: layers whose attention is averaged.
            first: the first pass: ``"coarse"``, ``"merged"`` or ``"full"``.
            scale: size of the smaller images of a coarse pass.
            keep: share of the patches left after the last layer of a merged pass.
            name: name of the guide.
        """
        self._check_active()
        if images is None:

            def first_pass() -> FirstPass:
                return FirstPass.of(self.model, by, layers, first, scale, keep)

            return guided(self.found, self._plan, name, first_pass)
        maps = look_ahead(self.model, images, by=by, layers=layers, first=first, scale=scale, keep=keep)
        return guiding(self._plan, {**present_maps(self._plan), name: maps})

    def train_foresight(
        self,
        images: Images,
        *,
        by: By = "class_attention",
        layers: int | Sequence[int] = -1,
        steps: int = 300,
        learning_rate: float = 1e-3,
        seed: int = 0,
        batch_size: int | None = None,
        limit: int = 512,
        progress: Callable[[int, int, float], None] | None = None,
    ) -> ForesightFit:
        """Train the network of ``foresight=`` to predict where later layers of the unmerged model attend.

        Every fourth image is held out, and the result tells how well the network foresees these.

        Args:
            images: typical images without labels, as files or tensors.
            by: attention to predict; see :func:`vitrail.look_ahead`.
            layers: layers whose attention is averaged.
            steps: steps of training.
            learning_rate: highest learning rate.
            seed: seed of the parameters and the order of the batches.
            batch_size: batch size; by default 8 files, or the whole tensor.
            limit: most images to use.
            progress: called with the steps done, all steps, and the latest loss.
        """
        self._check_active()
        if self._plan.foresight is None:
            raise InvalidOption("there is no network to train; merge with foresight={'layer': 0}")
        options = TrainingOptions(steps, learning_rate, seed, batch_size, limit, progress)
        return train_foresight(
            self.model, self.found, self._plan.foresight, self.suspended, images, by, layers, options
        )

    @property
    def foresight(self) -> Foresight | None:
        """The network that foresees attention; None where there is none."""
        return self._plan.foresight

    def loss(self) -> Tensor:
        """Return the method's own loss for the latest pass, to be added to the training loss; 0 where it has none."""
        found = self.method.loss()
        return torch.zeros((), device=next(self.found.trunk.parameters()).device) if found is None else found

    @property
    def restorer(self) -> Restorer | None:
        """The restorer, whose parameters are trained and saved with the model; None where the method restores."""
        return self._plan.restorer

    def calibrate_restorer(
        self,
        images: Images,
        *,
        steps: int = 300,
        learning_rate: float = 1e-3,
        seed: int = 0,
        batch_size: int | None = None,
        limit: int = 256,
        progress: Callable[[int, int, float], None] | None = None,
    ) -> None:
        """Fit the restorer to images, so that it restores what the model returns without merging.

        ``"residual"`` is fitted in closed form, ``"attention"`` is trained after that. Fit again after the schedule
        changed much; the fitted parameters are part of ``state_dict`` while the model is merged.

        Args:
            images: typical images without labels, as files or tensors; they are read several times.
            steps: steps of training, for ``"attention"``.
            learning_rate: highest learning rate of these.
            seed: seed of these.
            batch_size: batch size; by default 8 files, or the whole tensor.
            limit: most images to use.
            progress: called with the steps done, all steps, and the latest loss.
        """
        self._check_active()
        options = FitOptions(steps=steps, learning_rate=learning_rate, seed=seed, progress=progress)
        calibrate_restorer(self.model, self.found, self._plan, self.suspended, images, options, batch_size, limit)

    def restoration_error(
        self, images: Images, *, batch_size: int | None = None, limit: int | None = None
    ) -> RestorationError:
        """Measure how far restored patches are from those of the model without merging, behind each block.

        Args:
            images: images that the restorer was not fitted to, as files or tensors.
            batch_size: batch size; by default 8 files, or the whole tensor.
            limit: most images to use.
        """
        self._check_active()
        return restoration_error(self.model, self.found, self._plan, self.suspended, images, batch_size, limit)

    def calibrate(
        self,
        images: Images,
        *,
        keep: float | None = None,
        gflops: float | None = None,
        schedule: str | float | None = None,
        batch_size: int | None = None,
        limit: int = 512,
        tolerance: float = 0.005,
    ) -> Calibration:
        """Set what the method decides by from images, so that their mean meets a budget.

        For methods whose numbers of tokens depend on the image, such as ``"threshold"`` and ``"entropy"``. The settings
        found are in :attr:`config`. A method that needs no budget to run (``"threshold"``) runs without a limit
        afterwards; assign :attr:`r` to set one.

        Args:
            images: a few hundred typical images, as files or tensors; they are read several times.
            keep: mean share of the patches left after the last layer. Without ``keep`` and ``gflops``, the amount that
                was requested before.
            gflops: mean budget for one input, in 10⁹ multiply-adds.
            schedule: distribution of the merges over depth; by default as before.
            batch_size: batch size; by default 8 files, or the whole tensor. Each batch measures a layer once, so larger
                batches measure better.
            limit: most images to use.
            tolerance: relative deviation from the budget, on these images, that is accepted.
        """
        self._check_active()
        layers = self.method.layers(self._plan.depth)
        if keep is None and gflops is None:
            target = self._plan.schedule if schedule is None else None
        else:
            shape = self._plan.schedule.shape if schedule is None else schedule
            target = Schedule.parse(self._plan.depth, keep=keep, gflops=gflops, schedule=shape, layers=layers)
        return calibrate(self.model, self.found, self._plan, target, images, batch_size, limit, tolerance)

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return saved_merge(self.config, self._plan)

    @classmethod
    def from_saved(cls, model: nn.Module, options: dict[str, Any], tensors: dict[str, Tensor]) -> Merging:
        return merge(model, **merge_options(model, options, tensors))

    def save_method(self, path: str | Path) -> None:
        """Write the trained method, without the model, to a safetensors file.

        ``vitrail.load_method`` reads it, and ``method=path`` applies it; :attr:`config` does not have the weights.
        """
        save_method(self.method, path)

    @torch.no_grad()
    def draw(self, images: Any) -> list[Image]:
        """Draw each sample as stained glass: one pane per kept token, in the mean color of its patches.

        Clips are drawn as filmstrips, sounds as spectrograms; `vitrail.drawing.draw_groups` also makes films.

        Args:
            images: one image or several: PIL images, paths of files, arrays (H, W, 3) or tensors (3, H, W), in bytes
                or from 0 to 1. The whole image is resized to the model's input size for the model, and drawn at its
                own resolution. For models of video or audio: clips or sounds, or paths of their files.
        """
        from vitrail.data.decode import read_images
        from vitrail.data.media.registry import MEDIA, read_recordings
        from vitrail.data.spec import to_tensor
        from vitrail.drawing import draw_groups
        from vitrail.drawing.film import Film

        refuse_packed(self.found, "drawing")
        spec = self.found.adapter.input_spec(self.found.trunk)
        if spec.modality != "image" and spec.modality in MEDIA:
            recordings = read_recordings(spec.modality, images)
            originals: Sequence[Any] = recordings
            batch = torch.stack([recording.tensor(spec) for recording in recordings])
        else:
            originals = read_images(images)
            channels = next((part.in_channels for part in embedding(self.found) if isinstance(part, nn.Conv2d)), 3)
            if channels != 3:
                raise InvalidOption(f"draw needs a model that takes RGB images; this one takes {channels} channels")
            batch = to_tensor(originals, spec)
        weight = next(self.found.trunk.parameters())
        with evaluating(self.model), self.track() as trace:
            self.found.trunk(batch.to(weight.device, weight.dtype))
        groups = trace.groups.cpu().unflatten(1, trace.layout.grid).numpy()
        drawn = (draw_groups(*pair, spec) for pair in zip(originals, groups, strict=True))
        return [next(one for one in drawings.values() if not isinstance(one, Film)) for drawings in drawn]

    def _repr_html_(self) -> str:
        from vitrail.surgery.cards import merging_card

        return merging_card(self)

    def remove(self) -> None:
        """Restore the model exactly as it was; tokens added by ``vitrail.add_tokens`` stay."""
        self._check_active()
        if self._plan.added is None:
            uninstall(self.found)
        else:
            install(self.found, Plan.bare(self.found, self._plan.cost, self._plan.added))
        detach(self.model)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run the model without this merging inside a ``with`` block; this handle and others stay valid."""
        self.remove()
        try:
            yield
        finally:
            refuse_merged(self.model)
            install(self.found, self._plan)
            attach(self.model, self.found)

    def _planned(self, layout: TokenLayout) -> tuple[int, ...]:
        """Return the merges per layer; raise where they depend on the images."""
        if not self.method.static:
            raise InvalidOption(
                f"with method {self.method.label} the number of tokens depends on the "
                "image; run the model inside `with merging.track() as trace:` and read trace.tokens_per_layer and "
                "trace.flops"
            )
        return self._plan.merges_of(self.found, layout)

    @property
    def method(self) -> Method:
        """The method that decides which tokens merge; its parameters, if any, are trained and saved with the model."""
        return self._plan.method

    def _layout_for(self, size: Size | None) -> TokenLayout:
        if size is None:
            return self.layout
        spec = self.found.adapter.input_spec(self.found.trunk)
        form = MODALITIES[spec.modality].size
        try:
            given = size if hasattr(size, "__len__") else (size, size)
            sides = tuple(operator.index(side) for _, side in zip(spec.size, given, strict=True))  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise InvalidOption(f"size is {form}; got {size!r}") from error
        if sides != spec.size and not self.found.adapter.resizes(self.found.trunk):
            own = " × ".join(map(str, spec.size))
            noun, unit = ("images", " pixels") if spec.modality == "image" else ("inputs", "")
            raise InvalidOption(f"this model takes {noun} of {own}{unit} only; got size={size!r}")
        try:
            return self.found.adapter.layout(self.found.trunk, sides)
        except ValueError as error:
            raise InvalidOption(f"size={size!r} is smaller than one patch of this model") from error
