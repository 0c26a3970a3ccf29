"""A teacher: any classifier, frozen, that says something about the pictures that its student sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters.registry import declared_spec
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption, UnsupportedModel
from vitrail.training.evaluation.outputs import answer, answer_with_map, width_of


class Taught(NamedTuple):
    """What a teacher says about a batch, in float32.

    Attributes:
        logits: (B, C).
        features: (B, D, h, w), where they were asked for.
    """

    logits: Tensor
    features: Tensor | None = None


class Teacher:
    """A frozen classifier in evaluation mode.

    It is no module, so that it never becomes a part of what is trained, wrapped or saved. It sees the very pictures
    that the student sees, augmented and mixed; where it was trained with another size, mean or spread of colours,
    they are brought to those.

    Args:
        model: any classifier (see ``training.evaluation.outputs``); it is frozen and moved in place.
        given: how the pictures are that it will be called with: the student's size, mean and std.
        expects: how it wants them; by default as its library tells, and as given where nobody does.
        features: whether to give features, too.
        outputs: which of its outputs are the student's classes, in their order, where it knows more of them.
        device, dtype: where and in which precision it runs; by default as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        given: InputSpec | None = None,
        expects: InputSpec | None = None,
        features: bool = False,
        outputs: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise InvalidOption(f"a teacher runs in a floating point dtype; got {dtype}")
        self.width = width_of(model) if features else None
        self.features = features
        self.model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        weight = next((value for value in model.parameters() if value.is_floating_point()), torch.zeros(()))
        self._dtype, self._device = weight.dtype, weight.device
        self._outputs = None if outputs is None else torch.tensor(list(outputs), device=weight.device)
        self._size: tuple[int, ...] | None = None
        self._scale: Tensor | None = None
        if given is not None:
            expects = expects or expected_by(model) or given
            self._size = expects.size if expects.size != given.size else None
            self._scale, self._shift = _renormalise(given, expects, weight.device)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Taught:
        """Say something about the pictures (B, 3, H, W) that the student is given."""
        self.model.eval()  # cheap, and nobody can have forgotten it
        x = images.to(self._device)
        if self._scale is not None:
            x = x * self._scale + self._shift
        if self._size is not None:
            x = F.interpolate(x, self._size, mode="bilinear", antialias=True)
        x = x.to(self._dtype)
        if self.features:
            output, features = answer_with_map(self.model, x)
        else:
            output, features = answer(self.model, x), None
        if output.logits is None:
            raise UnsupportedModel("a teacher of task tokens alone has no answer to the student's question")
        logits = output.logits if self._outputs is None else output.logits[:, self._outputs]
        return Taught(logits.float(), None if features is None else features.float())


def expected_by(model: nn.Module) -> InputSpec | None:
    """Return a model's preprocessing as its library declares it; None if unknown."""
    return declared_spec(model)


def _renormalise(given: InputSpec, expects: InputSpec, device: torch.device) -> tuple[Tensor | None, Tensor]:
    """Give the scale and shift (3, 1, 1) from one normalisation to another; no scale where they are the same."""
    (mean, std), (wanted_mean, wanted_std) = (
        (torch.tensor(one.mean, device=device), torch.tensor(one.std, device=device)) for one in (given, expects)
    )
    shift = ((mean - wanted_mean) / wanted_std).view(3, 1, 1)
    if (given.mean, given.std) == (expects.mean, expects.std):
        return None, shift
    return (std / wanted_std).view(3, 1, 1), shift
