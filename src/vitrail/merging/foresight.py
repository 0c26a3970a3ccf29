"""Foresight: a small network that predicts a later layer's attention from early tokens, inside the same pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail._checks import is_int
from vitrail.errors import InvalidOption
from vitrail.merging.method import ModelShape
from vitrail.merging.state import MergeState
from vitrail.merging.trained import Trained


class Foresight(Trained):
    """Predict how a later layer distributes its attention over the patches, from the tokens that enter a block.

    The prediction is a guide: methods read it as ``context.guide[name]`` from that block on; it merges along with the
    tokens. Trained by ``Merging.train_foresight``; no gradients flow through it.

    Args:
        layer: block whose input is read.
        hidden: hidden units of the network; 0 for a linear one.
        name: name of the guide.
    """

    network: nn.Sequential

    def __init__(self, layer: int = 0, *, hidden: int = 64, name: str = "ahead") -> None:
        super().__init__()
        if not is_int(layer, 0) or not is_int(hidden, 0):
            raise InvalidOption(f"layer and hidden are 0 or more; got layer={layer!r} and hidden={hidden!r}")
        if not isinstance(name, str) or not name:
            raise InvalidOption(f"name is that of a guide; got {name!r}")
        self.layer, self.hidden, self.guide = layer, hidden, name

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"layer": self.layer, "hidden": self.hidden, "name": self.guide}

    def build(self, shape: ModelShape) -> None:
        """Create the parameters for a model, unless they fit it already; raise if the model has no such layer."""
        if self.layer >= shape.depth:
            raise InvalidOption(f"foresight reads layer {self.layer}, and this model has {shape.depth}")
        inputs = 2 * shape.width
        if "network" in self._modules and next(self.network.parameters()).shape[1] == inputs:
            return
        last = nn.Linear(self.hidden or inputs, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        layers = [nn.Linear(inputs, self.hidden), nn.GELU(), last] if self.hidden else [last]
        self.network = nn.Sequential(*layers).requires_grad_(False)
        self.forget_training()

    def untrained(self) -> str:
        return (
            "foresight has not been trained; call merging.train_foresight(images), or load trained weights: "
            "merging.foresight.load_state_dict(states), with the state_dict() of a trained one. merging.config does "
            "not have them"
        )

    def check_ready(self) -> None:
        """Raise ``UntrainedMethod`` if the network was never trained; called at the beginning of each pass."""
        self.check_trained()

    def forward(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """Return scores of patches (B, P) from their tokens (B, P, D)."""
        normed = F.layer_norm(x.to(next(self.network.parameters()).dtype), x.shape[-1:])
        if present is None:
            mean = normed.mean(1, keepdim=True)
        else:
            share = present / present.sum(1, keepdim=True)
            mean = (normed * share.unsqueeze(2)).sum(1, keepdim=True).to(normed.dtype)
        scores: Tensor = self.network(torch.cat([normed, mean.expand_as(normed)], 2))
        return scores.squeeze(2)

    @torch.no_grad()
    def look(self, x: Tensor, state: MergeState) -> MergeState:
        """Return the state with the guide, where the tokens (B, N, D) enter the block that is read."""
        if state.layer != self.layer or not any(state.per_layer):
            return state
        front, presence = state.special, state.presence
        present = None if presence is None else presence[:, front:]
        scores = self(x[:, front:], present).float()
        if present is not None:
            scores = scores.masked_fill(present == 0, -torch.inf)
        share = scores.softmax(1)
        guide = torch.cat([share.new_zeros(len(share), front), share], 1)
        return replace(state, guide={**state.guide, self.guide: guide})


def as_foresight(foresight: Mapping[str, Any] | Foresight | None) -> Foresight | None:
    """Return a predictor from its options (``Foresight.config``), or unchanged; None for None."""
    if foresight is None or isinstance(foresight, Foresight):
        return foresight
    if not isinstance(foresight, Mapping):
        raise InvalidOption(
            f"foresight is a dict of options such as {{'layer': 0}}, or a vitrail.merging.foresight.Foresight; got "
            f"{foresight!r}"
        )
    try:
        return Foresight(**foresight)
    except TypeError as error:
        raise InvalidOption(f"foresight does not take these options: {error}") from error
