"""Teachers: frozen classifiers whose outputs a student learns from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters.registry import declared_spec
from vitrail.data.spec import InputSpec
from vitrail.errors import UnsupportedModel
from vitrail.training.evaluation.outputs import feature_width, forward_output, forward_output_and_map


class TeacherOutput(NamedTuple):
    """Output of a teacher in float32: logits (B, C), and features (B, D, h, w) if requested."""

    logits: Tensor
    features: Tensor | None = None


class Teacher:
    """A frozen classifier in evaluation mode.

    It is not a module, so that it is never trained, wrapped or saved. It sees the student's images, augmented and
    mixed, resized and normalized for the teacher where needed.

    Args:
        model: any classifier; frozen, and moved to ``device`` and ``dtype`` in place.
        given, expects: the student's preprocessing and its own; by default its library's, or else the student's.
        features: whether to return features.
        outputs: indices of the student's classes among its outputs.
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
        self.width = feature_width(model) if features else None
        self.features = features
        self.model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        weight = next((value for value in model.parameters() if value.is_floating_point()), torch.zeros(()))
        self._dtype, self._device = weight.dtype, weight.device
        self._outputs = None if outputs is None else torch.tensor(list(outputs), device=weight.device)
        self._size: tuple[int, ...] | None = None
        self._scale: Tensor | None = None
        if given is not None:
            expects = expects or declared_spec(model) or given
            self._size = expects.size if expects.size != given.size else None
            if (given.mean, given.std) != (expects.mean, expects.std):
                values = (given.mean, given.std, expects.mean, expects.std)
                mean, std, own_mean, own_std = (torch.tensor(one, device=weight.device).view(3, 1, 1) for one in values)
                self._scale, self._shift = std / own_std, (mean - own_mean) / own_std

    @torch.no_grad()
    def __call__(self, images: Tensor) -> TeacherOutput:
        self.model.eval()
        x = images.to(self._device)
        if self._scale is not None:
            x = x * self._scale + self._shift
        if self._size is not None:
            x = F.interpolate(x, self._size, mode="bilinear", antialias=True)
        x, both = x.to(self._dtype), self.features
        output, features = forward_output_and_map(self.model, x) if both else (forward_output(self.model, x), None)
        if output.logits is None:
            raise UnsupportedModel("a teacher with only task tokens has no prediction for the student's classes")
        logits = output.logits if self._outputs is None else output.logits[:, self._outputs]
        return TeacherOutput(logits.float(), None if features is None else features.float())
