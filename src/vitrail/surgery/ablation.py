"""``vitrail.ablate``: replace special tokens or outliers by zeros, means, noise, or those of another image.

Zeros are out of distribution and overstate how much a model depends on a token. The mean over images, noise with the
same statistics, or another image's token remove the information about this image only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail._checks import is_int, is_number
from vitrail.adapters import find
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.runtime.checks import refuse_extended, refuse_merged, refuse_packed, refuse_windowed
from vitrail.runtime.layout import layout_of
from vitrail.surgery._handle import HookHandle
from vitrail.surgery.hooks import check_layers
from vitrail.surgery.recording import Images, stream
from vitrail.tokens import Role

OUTLIERS = "outlier"
"""Stands for the patches of each image whose norm is above a threshold."""

How = Literal["zero", "mean", "noise", "shuffle"]
Moments = tuple[Tensor, Tensor]
"""Mean and standard deviation (Q, D) over images of Q tokens."""


@checked
def ablate(
    model: nn.Module,
    how: How,
    data: Images = None,
    *,
    tokens: Any = "register",
    layers: int | Sequence[int] | None = None,
    threshold: float | None = None,
    give_back: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Ablation:
    """Replace tokens after some of a model's blocks, in place. A model has at most one ablation.

    Args:
        model: a supported model, without merging or added tokens.
        how: ``zero``; ``mean`` over the images of ``data``; ``noise`` with their mean and standard deviation in each
            channel; ``shuffle``, the tokens of another image in the batch.
        data: images for ``mean`` and ``noise`` (see :data:`~vitrail.surgery.recording.Images`), read once, one batch
            at a time.
        tokens: roles or positions of special tokens, by default registers; or ``"outlier"``: in each image, the patches
            whose norm after the block is above ``threshold``. Their mean is one over all outliers of ``data``.
        layers: blocks after which to replace tokens; by default all.
        threshold: norm of an outlier, such as ``report.norms["per_layer"][layer]["threshold"]``.
        give_back: a later block, after which outliers get back what they held when they were replaced. If the output
            recovers, the model uses what they store later than that.
        batch_size: batch size for ``data``.
        seed: random seed of ``noise`` and ``shuffle``.
    """
    found = find(model)
    refuse_packed(found, "ablation")
    refuse_windowed(found, "ablation")
    refuse_merged(model)
    refuse_extended(model)
    Ablation._refuse_twice(found)
    if how not in get_args(How):
        raise InvalidOption(f"how is one of {', '.join(get_args(How))}; got {how!r}")
    if not is_int(seed):
        raise InvalidOption(f"seed must be an integer; got {seed!r}")
    chosen = check_layers(layers, len(found.blocks))
    layout = layout_of(found)
    if tokens == OUTLIERS:
        _check_outliers(how, threshold, give_back, chosen, len(found.blocks))
        of_outliers = {} if how == "zero" else _moments(model, _needed(data, how), threshold, chosen, batch_size)
        return Ablation(model, found, how, [], chosen, of_outliers, seed, threshold, give_back)
    if threshold is not None or give_back is not None:
        raise InvalidOption(f"threshold and give_back are for tokens={OUTLIERS!r}; got tokens={tokens!r}")
    places = layout.find(tokens) if tokens is not None else ()
    if not places or any(layout.role_of(place) is Role.PATCH for place in places):
        raise InvalidOption(f"only special tokens can be replaced; the model has {layout.describe()}, got {tokens!r}")
    moments: dict[int, Moments] = {}
    if how in ("mean", "noise"):
        moments = _moments(model, _needed(data, how), places, chosen, batch_size)
    return Ablation(model, found, how, list(places), chosen, moments, seed)


def _needed(data: Images, how: How) -> Any:
    if data is None:
        raise InvalidOption(f"how={how!r} needs images to compute the mean from; pass data")
    return data


def _check_outliers(
    how: How, threshold: float | None, give_back: int | None, layers: tuple[int, ...], depth: int
) -> None:
    """Raise for options that do not fit outliers."""
    if how == "shuffle":
        raise InvalidOption("how='shuffle' swaps tokens between images, and outliers are at other places in each")
    if not is_number(threshold) or threshold <= 0:
        raise InvalidOption(f"tokens={OUTLIERS!r} needs threshold, the norm of an outlier, above 0; got {threshold!r}")
    if give_back is not None and (not is_int(give_back) or not max(layers) < give_back < depth):
        raise InvalidOption(
            f"give_back is a block after the last one of layers, {max(layers) + 1} to {depth - 1}; got {give_back!r}"
        )


@dataclass(eq=False, repr=False)
class Ablation(HookHandle):
    """The handle of replaced tokens.

    Attributes:
        how, places, layers, seed, threshold, give_back: see :func:`ablate`; ``places`` are positions, none for
            outliers.
        moments: mean and standard deviation (Q, D) over images after each block, for ``mean`` and ``noise``.
    """

    _function = "vitrail.ablate"
    _mark, _name = "_vitrail_ablation", "an ablation"

    how: How
    places: list[int]
    layers: tuple[int, ...]
    moments: dict[int, Moments]
    seed: int
    threshold: float | None = None
    give_back: int | None = None

    def __post_init__(self) -> None:
        blocks = self.found.blocks
        self._taken: dict[int, tuple[Tensor, Tensor]] = {}  # by thread: where outliers were, and what they held
        hooks = [blocks[layer].register_forward_hook(partial(self._replace, layer)) for layer in self.layers]
        if self.give_back is not None:
            hooks.append(blocks[self.give_back].register_forward_hook(self._return))
        self._attach(hooks)

    @property
    def config(self) -> dict[str, Any]:
        """The options as plain data; ``mean`` and ``noise`` need ``data`` in addition."""
        tokens = list(self.places) if self.threshold is None else OUTLIERS
        options = {"how": self.how, "tokens": tokens, "layers": list(self.layers), "seed": self.seed}
        outliers = {"threshold": self.threshold, "give_back": self.give_back}
        return options | {name: value for name, value in outliers.items() if value is not None}

    def _replace(self, layer: int, _: nn.Module, __: Any, output: Any) -> Any:
        x = (output[0] if isinstance(output, tuple) else output).clone()
        if self.threshold is None:
            x[:, self.places] = self._replacement(layer, x[:, self.places])
        else:
            special = self.found.adapter.layout_in(self.found.trunk, layer).num_special
            outliers = _above(x, special, self.threshold)
            here = get_ident()
            if self.give_back is not None:
                where, held = (outliers, x) if layer == self.layers[0] else self._taken[here]
                held = torch.where(outliers.unsqueeze(-1), x, held)
                self._taken[here] = where | outliers, held.clone()
            x[outliers] = self._replacement(layer, x[outliers])
        return (x, *output[1:]) if isinstance(output, tuple) else x

    def _return(self, _: nn.Module, __: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        where, held = self._taken.pop(get_ident())
        x = torch.where(where.unsqueeze(-1), held, x)
        return (x, *output[1:]) if isinstance(output, tuple) else x

    def _replacement(self, layer: int, tokens: Tensor) -> Tensor:
        """Return the replacement of tokens (B, Q, D), or of outliers (n, D)."""
        if self.how == "zero":
            return torch.zeros_like(tokens)
        generator = torch.Generator().manual_seed(self.seed + layer)
        if self.how == "shuffle":
            if len(tokens) < 2:
                raise UnsupportedInput("how='shuffle' swaps tokens between images; use a batch of two images or more")
            order = torch.randperm(len(tokens), generator=generator)
            return tokens[order.roll(1)[order.argsort()]]  # one cycle through the batch: no image keeps its own
        mean, deviation = (moment.to(tokens) for moment in self.moments[layer])
        if self.how == "mean":
            return mean.expand_as(tokens)
        return mean + deviation * torch.randn(tokens.shape, generator=generator, dtype=torch.float64).to(tokens)


def _above(x: Tensor, special: int, threshold: float) -> Tensor:
    """Return which tokens (B, N) are patches with a norm above the threshold."""
    above = x.float().norm(dim=-1) > threshold
    above[:, :special] = False
    return above


def _moments(
    model: nn.Module, data: Any, which: tuple[int, ...] | float | None, layers: tuple[int, ...], batch_size: int | None
) -> dict[int, Moments]:
    """Compute the mean and standard deviation of channels after each block.

    ``which`` are positions, each with moments over images (Q, D); or the norm above which patches are outliers, with
    moments over all outliers (D,).
    """
    images = 0
    counts = dict.fromkeys(layers, 0)
    sums: dict[int, Moments] = {}
    for recording in stream(model, data, "tokens", layers, batch_size=batch_size):
        images += len(recording)
        for layer, tokens in recording.tokens.items():
            if isinstance(which, tuple):
                some = tokens[:, list(which)].double().cpu()
            else:
                assert which is not None
                some = tokens[_above(tokens, recording.layout.num_special, which)].double().cpu()
            counts[layer] += len(some)
            one, two = sums.get(layer, (torch.zeros(()), torch.zeros(())))
            sums[layer] = one + some.sum(0), two + some.square().sum(0)
    if not images:
        raise UnsupportedInput("data has no images to compute the mean from")
    if without := [layer for layer, count in counts.items() if not count]:
        raise UnsupportedInput(
            f"no patch has a norm above {which} after block {without[0]}; give the threshold of these layers, or others"
        )
    if not all(bool(two.isfinite().all()) for _, two in sums.values()):
        raise UnsupportedInput("some tokens are not finite on these images, so their mean is undefined")
    means = {layer: (one / counts[layer], two / counts[layer]) for layer, (one, two) in sums.items()}
    return {layer: (one, (two - one.square()).clamp_min(0).sqrt()) for layer, (one, two) in means.items()}
