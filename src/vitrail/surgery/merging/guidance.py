"""Guidance by other layers: attention of a first pass as a guide of the second, and networks that foresee it.

``look_ahead`` runs a cheap first pass (a smaller image, or merged hard) or a full one, and returns where its later
layers attend. ``Merging.guided`` shows these maps to the method, ``Merging.train_foresight`` teaches a small network to
predict them from early tokens, so that no second pass is needed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from threading import Lock, local
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail._checks import is_int, is_number
from vitrail.adapters import Found, find, image_model
from vitrail.data.batches import Batches, open_batches
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.merging.foresight import Foresight
from vitrail.runtime.checks import merged_trunk, refuse_windowed
from vitrail.runtime.guide import guiding, present_maps
from vitrail.runtime.layout import first_class_token, layout_of
from vitrail.runtime.trace import eagerly
from vitrail.surgery.copies import copy_unmerged
from vitrail.surgery.hooks import check_layers, watch
from vitrail.surgery.recording import (
    Images,
    check_finite,
    evaluating,
    input_axes,
    read_batches,
    taking,
    to_model,
)

By = Literal["class_attention", "received_attention"]
First = Literal["full", "coarse", "merged"]


@checked
def look_ahead(
    model: nn.Module,
    images: Images,
    *,
    by: By = "class_attention",
    layers: int | Sequence[int] = -1,
    first: First = "full",
    scale: float = 0.5,
    keep: float = 0.25,
    batch_size: int | None = None,
) -> Tensor:
    """Run a first pass and return where its later layers attend, as maps over the patches (images, patches).

    Each map sums to 1 over the patches of its image. The model, merged or not, is unchanged.

    >>> maps = vitrail.look_ahead(model, images, first="coarse")     # doctest: +SKIP
    >>> with merging.guide(ahead=maps):                              # doctest: +SKIP
    ...     logits = model(images)

    Args:
        model: a supported model.
        images: images as files or tensors.
        by: ``"class_attention"``, that of the class token, or ``"received_attention"``, the mean over all tokens.
        layers: layers whose attention is averaged; negative numbers count from the end.
        first: the first pass: ``"full"``, without merging; ``"coarse"``, on smaller images, for models that take other
            sizes; ``"merged"``, by ToMe.
        scale: size of the smaller images, as a share of each side.
        keep: share of the patches left after the last layer of the merged pass.
        batch_size: batch size; by default 8 files, or the whole tensor.
    """
    first_pass = FirstPass.of(model, by, layers, first, scale, keep)
    maps = [first_pass.maps(to_model(model, batch)) for batch in read_batches(find(model), images, batch_size)]
    if not maps:
        raise UnsupportedInput("there are no images to look ahead on")
    if len({one.shape[1] for one in maps}) > 1:
        raise UnsupportedInput("images of several sizes have different patch grids; look ahead on them separately")
    return torch.cat(maps)


@dataclass(frozen=True)
class FirstPass:
    """A first pass through a model; see :func:`look_ahead`.

    Attributes:
        model: the model, or a copy with other merging that shares its weights.
        found: its trunk and blocks.
        by: attention that counts.
        layers: layers whose attention is averaged.
        scale: size of the images as a share; None for their own.
        lock: held while the model runs, since hooks record it.
    """

    model: nn.Module
    found: Found
    by: By
    layers: tuple[int, ...]
    scale: float | None
    lock: Lock = field(default_factory=Lock)

    @classmethod
    def of(
        cls, model: nn.Module, by: By, layers: int | Sequence[int], first: First, scale: float, keep: float
    ) -> FirstPass:
        """Check the options, and return the first pass."""
        found = find(model)
        refuse_windowed(found, "looking ahead")
        numbers = check_layers(layers, len(found.blocks))
        if by not in ("class_attention", "received_attention"):
            raise InvalidOption(f"by is 'class_attention' or 'received_attention'; got {by!r}")
        if first not in ("full", "coarse", "merged"):
            raise InvalidOption(f"first is 'full', 'coarse' or 'merged'; got {first!r}")
        for name, value in (("scale", scale), ("keep", keep)):
            if not is_number(value) or not 0 < value <= 1:
                raise InvalidOption(f"{name} is a share above 0, up to 1; got {value!r}")
        if by == "class_attention" and first_class_token(layout_of(found)) is None:
            raise UnsupportedModel(
                "by='class_attention' needs a class token, and this model has none; use 'received_attention'"
            )
        if first == "coarse" and not found.adapter.resizes(found.trunk):
            raise UnsupportedModel(
                "first='coarse' needs a model that takes images of other sizes, and this one does not; use 'merged', "
                "or build the model so that it does (timm: dynamic_img_size=True)"
            )
        own = model
        if first == "merged" or merged_trunk(model) is not None:
            own = copy_unmerged(model)
        if first == "merged":
            from vitrail.surgery.merging import merge

            merge(own, keep=keep)
        return cls(own, find(own), by, numbers, scale if first == "coarse" else None)

    def maps(self, x: Tensor) -> Tensor:
        """Return the maps (B, P) of a batch of the model's inputs."""
        adapter, trunk = self.found.adapter, self.found.trunk
        with taking(self.found, x):
            grid = adapter.layout(trunk, tuple(adapter.channels_first(trunk, x).shape[2:])).grid
        small = x if self.scale is None else _shrink(x, grid, self.scale)
        layout = layout_of(self.found, tuple(adapter.channels_first(trunk, small).shape[2:]))
        queries: Any = range(layout.num_tokens) if self.by == "received_attention" else first_class_token(layout)
        recorder = watch(self.model, "attention", self.layers, queries)
        with self.lock, recorder.hooked(), evaluating(self.model), torch.no_grad(), taking(self.found, small):
            image_model(self.found.trunk)(small)
        (recorded,) = recorder.take()
        total: Tensor | float = 0.0
        for rows in recorded.by_layer["attention"].values():
            received = rows.float().mean((1, 2))[:, -layout.num_patches :]
            total = total + received / received.sum(1, keepdim=True)
        assert isinstance(total, Tensor)
        if layout.grid != grid:
            total = F.interpolate(total.view(len(x), *layout.grid), grid[1:], mode="bilinear", antialias=False)
            total = total.flatten(1)
        return total / total.sum(1, keepdim=True)


def _shrink(x: Tensor, grid: tuple[int, int, int], scale: float) -> Tensor:
    """Return smaller images (B, C, …, H, W) of a whole number of patches."""
    sides = [max(1, round(count * scale)) * (side // count) for side, count in zip(x.shape[-2:], grid[1:], strict=True)]
    flat = x.reshape(-1, 1, *x.shape[-2:])
    return F.interpolate(flat, sides, mode="bilinear", antialias=True).reshape(*x.shape[:-2], *sides)


@contextmanager
def guided(found: Found, plan: object, name: str, first_pass: Callable[[], FirstPass]) -> Iterator[None]:
    """Run a first pass before each call of a merged model inside a ``with`` block; compiled models run eagerly."""
    ahead, open_calls = first_pass(), local()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs[found.adapter.argument]
        calls = open_calls.__dict__.setdefault("stack", [])
        calls.append(ExitStack())
        calls[-1].enter_context(guiding(plan, {**present_maps(plan), name: ahead.maps(x)}))

    def after(*_: Any) -> None:
        calls = open_calls.__dict__.get("stack")
        if calls:
            calls.pop().close()

    handles = [
        found.trunk.register_forward_pre_hook(before, with_kwargs=True),
        found.trunk.register_forward_hook(after, always_call=True),
    ]
    try:
        with eagerly():
            yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class ForesightFit:
    """How well a network foresees attention on images that it was not trained on.

    Attributes:
        images: number of these images.
        divergence: mean Kullback–Leibler divergence of its maps from the true ones, in nats.
        divergence_of_uniform: the same for uniform maps.
        divergence_of_mean: the same for the mean map of the training images.
    """

    images: int
    divergence: float
    divergence_of_uniform: float
    divergence_of_mean: float


@dataclass(frozen=True)
class TrainingOptions:
    """Options of :func:`train_foresight`; see ``Merging.train_foresight``."""

    steps: int
    learning_rate: float
    seed: int
    batch_size: int | None
    limit: int
    progress: Callable[[int, int, float], None] | None = None


def train_foresight(
    model: nn.Module,
    found: Found,
    foresight: Foresight,
    suspended: Callable[[], AbstractContextManager[None]],
    images: Images,
    by: By,
    layers: int | Sequence[int],
    options: TrainingOptions,
) -> ForesightFit:
    """Train a predictor on images; see ``Merging.train_foresight``."""
    if not is_int(options.steps, 1) or not is_number(options.learning_rate) or options.learning_rate <= 0:
        raise InvalidOption(
            f"steps is 1 or more and learning_rate above 0; got {options.steps!r} and {options.learning_rate!r}"
        )
    numbers = check_layers(layers, len(found.blocks))
    if min(numbers) < foresight.layer:
        raise InvalidOption(
            f"layers={layers!r} cannot be foreseen from the input of layer {foresight.layer}; choose this one or "
            "later ones"
        )
    with suspended():
        first_pass = FirstPass.of(model, by, numbers, "full", 1.0, 1.0)
        pairs = _pairs(found, first_pass, foresight.layer, images, options)
    if sum(len(maps) for _, maps in pairs) < 2:
        raise UnsupportedInput("training foresight needs two images or more")
    held_out = [(x[::4], maps[::4]) for x, maps in pairs]
    train = [(x[keep], maps[keep]) for x, maps in pairs if len(x) > 1 for keep in [_others(len(x))]]
    if not train:
        raise UnsupportedInput("training foresight needs batches of two images or more")
    before = {name: value.clone() for name, value in foresight.state_dict().items()}
    dtype = next(foresight.parameters()).dtype
    try:
        foresight.float().requires_grad_(True)
        with torch.enable_grad():
            _train(foresight, train, options)
    except BaseException:
        foresight.load_state_dict(before)
        raise
    finally:
        foresight.to(dtype).requires_grad_(False)
    foresight.count_pass()
    return _evaluate(foresight, train, held_out)


def _others(count: int) -> Tensor:
    """Return the places of the images that are not held out."""
    return torch.tensor([place for place in range(count) if place % 4])


def _pairs(
    found: Found, first_pass: FirstPass, layer: int, images: Images, options: TrainingOptions
) -> list[tuple[Tensor, Tensor]]:
    """Return the patches' tokens that enter a layer (B, P, D), and the maps to foresee (B, P), of each batch."""
    data = images
    if not isinstance(images, Batches):
        data = open_batches(images, limit=options.limit, with_labels=False, axes=input_axes(found))
    parts, inputs = found.block_adapters[layer], []

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs[parts.input_name])

    handle = found.blocks[layer].register_forward_pre_hook(take, with_kwargs=True)
    pairs = []
    try:
        for batch in read_batches(found, data, options.batch_size):
            x = to_model(found.trunk, batch)
            maps = first_pass.maps(x)
            tokens = inputs.pop()[:, -maps.shape[1] :]
            check_finite(tokens, "tokens")
            check_finite(maps, "attention maps")
            pairs.append((tokens.detach().float(), maps))
    finally:
        handle.remove()
    return pairs


def _train(foresight: Foresight, pairs: list[tuple[Tensor, Tensor]], options: TrainingOptions) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(options.seed)
        linear = [part for part in foresight.network if isinstance(part, nn.Linear)]
        for part in linear:
            bound = 0.0 if part is linear[-1] else 1 / math.sqrt(part.in_features)
            part.weight.copy_(torch.empty(part.weight.shape).uniform_(-bound, bound))
            part.bias.zero_()
    optimizer = torch.optim.AdamW(foresight.parameters(), lr=options.learning_rate, weight_decay=0.01)
    order = random.Random(options.seed)
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        tokens, maps = order.choice(pairs)
        loss = _divergence(foresight(tokens).log_softmax(1), maps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.progress is not None:
            options.progress(step + 1, options.steps, float(loss.detach()))


def _divergence(log_share: Tensor, maps: Tensor) -> Tensor:
    return F.kl_div(log_share, maps, reduction="batchmean")


@torch.no_grad()
def _evaluate(
    foresight: Foresight, train: list[tuple[Tensor, Tensor]], held_out: list[tuple[Tensor, Tensor]]
) -> ForesightFit:
    count = sum(len(maps) for _, maps in held_out)

    def mean(log_share: Callable[[Tensor, Tensor], Tensor]) -> float:
        return sum(float(_divergence(log_share(x, maps), maps)) * len(maps) for x, maps in held_out) / count

    average = torch.cat([maps for _, maps in train if maps.shape[1] == train[0][1].shape[1]]).mean(0)

    def of_mean(_: Tensor, maps: Tensor) -> Tensor:
        return average.log().expand_as(maps) if maps.shape[1] == len(average) else uniform(_, maps)

    def uniform(_: Tensor, maps: Tensor) -> Tensor:
        return torch.zeros_like(maps) - math.log(prod(maps.shape[1:]))

    return ForesightFit(count, mean(lambda x, _: foresight(x).float().log_softmax(1)), mean(uniform), mean(of_mean))
