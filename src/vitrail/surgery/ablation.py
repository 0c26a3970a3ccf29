"""``vitrail.ablate``: what a model does without what its registers hold, by four ways of taking it away.

Zeros are far from anything that a model has seen and overstate how much it depends on a token. The mean over pictures,
noise of the same spread, or another picture's token take away what the token says of this picture and leave what it is
like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitrail.adapters import Found, find
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.runtime.checks import refuse_extended, refuse_merged
from vitrail.runtime.layout import layout_of
from vitrail.surgery.recording import Pictures, stream
from vitrail.surgery.selection import check_layers, describe, find_queries, is_whole
from vitrail.tokens import Role

How = Literal["zero", "mean", "noise", "shuffle"]


class Ablation:
    """Tokens that are replaced after some blocks; :meth:`remove` ends it, and the model is what it was."""

    def __init__(
        self, found: Found, how: How, places: tuple[int, ...], moments: dict[int, tuple[Tensor, Tensor]], seed: int
    ) -> None:
        self.found = found
        self.how = how
        self.places = list(places)
        self.moments = moments
        self.seed = seed
        self.handles: list[RemovableHandle] = [
            found.blocks[layer].register_forward_hook(self._replacer(layer)) for layer in moments
        ]

    def remove(self) -> None:
        """Let the tokens be what they are again."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def __enter__(self) -> Ablation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _replacer(self, layer: int) -> Any:
        def replace(_: nn.Module, __: Any, output: Any) -> Any:
            x = (output[0] if isinstance(output, tuple) else output).clone()
            x[:, self.places] = self._instead(layer, x[:, self.places])
            return (x, *output[1:]) if isinstance(output, tuple) else x

        return replace

    def _instead(self, layer: int, tokens: Tensor) -> Tensor:
        """Give what stands in for tokens (B, Q, D)."""
        mean, deviation = (moment.to(tokens) for moment in self.moments[layer])
        if self.how == "zero":
            return torch.zeros_like(tokens)
        if self.how == "mean":
            return mean.expand_as(tokens)
        source = torch.Generator().manual_seed(self.seed + layer)
        if self.how == "noise":
            noise = torch.randn(tokens.shape, generator=source, dtype=torch.float64).to(tokens)
            return mean + deviation * noise
        if len(tokens) < 2:
            raise UnsupportedInput(
                "shuffling gives a picture the tokens of another one; run two pictures or more at once"
            )
        order = torch.randperm(len(tokens), generator=source)
        return tokens[order.roll(1)[order.argsort()]]  # along one cycle through all pictures: nobody keeps its own


def ablate(
    model: nn.Module,
    how: How,
    data: Pictures = None,
    *,
    tokens: Any = "register",
    layers: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Ablation:
    """Replace tokens after some of a model's blocks, in place; the handle that is returned ends it.

    Args:
        model: any supported model, not merged.
        how: ``zero``; ``mean`` over the pictures of ``data``; ``noise`` with their mean and spread in each channel;
            ``shuffle``, the tokens of another picture of the batch.
        data: pictures for ``mean`` and ``noise``, as files or prepared (see ``vitrail.record``);
            walked over once, one batch in memory at a time.
        tokens: roles or positions of the tokens; registers by default.
        layers: blocks after which tokens are replaced; all by default.
        batch_size: pictures at once, where they do not come in batches.
        seed: of noise and shuffling.
    """
    found = find(model)
    refuse_merged(model)
    refuse_extended(model)
    if how not in get_args(How):
        raise InvalidOption(f"tokens are replaced by {', '.join(get_args(How))}; got {how!r}")
    if not is_whole(seed):
        raise InvalidOption(f"the seed is a whole number; got {seed!r}")
    chosen = check_layers(layers, len(found.blocks))
    layout = layout_of(found)
    places = find_queries(tokens, layout) if tokens is not None else ()
    if not places or any(layout.role_of(place) is Role.PATCH for place in places):
        raise InvalidOption(f"tokens to replace are special ones; this model has {describe(layout)}, got {tokens!r}")
    if how in ("mean", "noise"):
        if data is None:
            raise InvalidOption(f"how={how!r} needs pictures to take the mean of; pass data")
        moments = _moments(model, data, places, chosen, batch_size)
    else:
        nothing = torch.zeros(())
        moments = dict.fromkeys(chosen, (nothing, nothing))
    return Ablation(found, how, places, moments, seed)


def _moments(
    model: nn.Module, data: Any, places: tuple[int, ...], layers: tuple[int, ...], batch_size: int | None
) -> dict[int, tuple[Tensor, Tensor]]:
    """Give the mean and the standard deviation over pictures of each token and channel, (Q, D), after each block."""
    count = 0
    sums: dict[int, tuple[Tensor, Tensor]] = {}
    for recording in stream(model, data, "tokens", layers, batch_size=batch_size):
        count += len(recording)
        for layer, tokens in recording.tokens.items():
            some = tokens[:, list(places)].double().cpu()
            one, two = sums.get(layer, (torch.zeros(()), torch.zeros(())))
            sums[layer] = one + some.sum(0), two + some.square().sum(0)
    if not count:
        raise UnsupportedInput("there were no pictures to take the mean of")
    if not all(bool(two.isfinite().all()) for _, two in sums.values()):
        raise UnsupportedInput("some of the tokens are not finite on these pictures, so they have no mean")
    return {
        layer: (one / count, (two / count - (one / count).square()).clamp_min(0).sqrt())
        for layer, (one, two) in sums.items()
    }
