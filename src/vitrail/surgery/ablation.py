"""``vitrail.ablate``: replace special tokens by zeros, means, noise, or those of another image.

Zeros are out of distribution and overstate how much a model depends on a token. The mean over images, noise with the
same statistics, or another image's token remove the information about this image only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail._checks import is_int
from vitrail.adapters import find
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.runtime.checks import refuse_extended, refuse_merged, refuse_packed, refuse_windowed
from vitrail.runtime.layout import layout_of
from vitrail.surgery._handle import HookHandle
from vitrail.surgery.hooks import check_layers
from vitrail.surgery.recording import Images, stream
from vitrail.tokens import Role

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
        tokens: roles or positions of special tokens; by default registers.
        layers: blocks after which to replace tokens; by default all.
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
    places = layout.find(tokens) if tokens is not None else ()
    if not places or any(layout.role_of(place) is Role.PATCH for place in places):
        raise InvalidOption(f"only special tokens can be replaced; the model has {layout.describe()}, got {tokens!r}")
    moments: dict[int, Moments] = {}
    if how in ("mean", "noise"):
        if data is None:
            raise InvalidOption(f"how={how!r} needs images to compute the mean from; pass data")
        moments = _moments(model, data, places, chosen, batch_size)
    return Ablation(model, found, how, list(places), chosen, moments, seed)


@dataclass(eq=False, repr=False)
class Ablation(HookHandle):
    """The handle of replaced tokens.

    Attributes:
        how, places, layers, seed: see :func:`ablate`; ``places`` are positions.
        moments: mean and standard deviation (Q, D) over images after each block, for ``mean`` and ``noise``.
    """

    _function = "vitrail.ablate"
    _mark, _name = "_vitrail_ablation", "an ablation"

    how: How
    places: list[int]
    layers: tuple[int, ...]
    moments: dict[int, Moments]
    seed: int

    def __post_init__(self) -> None:
        blocks = self.found.blocks
        self._attach([blocks[layer].register_forward_hook(partial(self._replace, layer)) for layer in self.layers])

    @property
    def config(self) -> dict[str, Any]:
        """The options as plain data; ``mean`` and ``noise`` need ``data`` in addition."""
        return {"how": self.how, "tokens": list(self.places), "layers": list(self.layers), "seed": self.seed}

    def _replace(self, layer: int, _: nn.Module, __: Any, output: Any) -> Any:
        x = (output[0] if isinstance(output, tuple) else output).clone()
        x[:, self.places] = self._replacement(layer, x[:, self.places])
        return (x, *output[1:]) if isinstance(output, tuple) else x

    def _replacement(self, layer: int, tokens: Tensor) -> Tensor:
        """Return the replacement of tokens (B, Q, D)."""
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


def _moments(
    model: nn.Module, data: Any, places: tuple[int, ...], layers: tuple[int, ...], batch_size: int | None
) -> dict[int, Moments]:
    """Compute the mean and standard deviation over images of each token and channel after each block."""
    count = 0
    sums: dict[int, Moments] = {}
    for recording in stream(model, data, "tokens", layers, batch_size=batch_size):
        count += len(recording)
        for layer, tokens in recording.tokens.items():
            some = tokens[:, list(places)].double().cpu()
            one, two = sums.get(layer, (torch.zeros(()), torch.zeros(())))
            sums[layer] = one + some.sum(0), two + some.square().sum(0)
    if not count:
        raise UnsupportedInput("data has no images to compute the mean from")
    if not all(bool(two.isfinite().all()) for _, two in sums.values()):
        raise UnsupportedInput("some tokens are not finite on these images, so their mean is undefined")
    return {
        layer: (one / count, (two / count - (one / count).square()).clamp_min(0).sqrt())
        for layer, (one, two) in sums.items()
    }
