"""The model of a server: one pass over a batch gives the class scores and the embedding of each image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.adapters.outputs import output_tensor, pooled_features
from vitrail.adapters.registry import sized
from vitrail.adapters.saved import class_names
from vitrail.data.spec import to_tensor
from vitrail.errors import NotApplied, UnsupportedInput
from vitrail.surgery import Merging
from vitrail.training.evaluation.outputs import forward_output
from vitrail.training.objective.targets import assign_targets


class Answer(NamedTuple):
    """What a model says of one image.

    Attributes:
        scores: probabilities of the classes (C,), by label column; empty for a model without classes.
        embedding: what its classification head reads, or its pooled output (D,), in float32.
    """

    scores: Mapping[str, Tensor]
    embedding: Tensor


class ServedModel:
    """A model in eval mode on its device, merged or not, with its preprocessing and the names of its classes.

    Args:
        model: a supported model that takes images.
        name: what answers and metrics call it.
        size: input size in pixels, height and width; by default the model's own.
        dtype: dtype to run in; by default the model's own.
    """

    def __init__(
        self, model: nn.Module, name: str, *, size: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        found = find(model)
        self.spec, self.layout = sized(found, size, name)
        if self.spec.modality != "image":
            raise UnsupportedInput(f"{name} takes {self.spec.modality} inputs; a server takes images")
        self.name = name
        self.model = model.eval() if dtype is None else model.eval().to(dtype)
        self.classes = class_names(model)
        self._targets = assign_targets(model, self.classes) if self.classes else ()
        self._count = found.adapter.num_classes(model, found.trunk)
        try:
            self.merging: dict[str, Any] | None = Merging.of(model).config
        except NotApplied:
            self.merging = None
        (answer,) = self([torch.zeros(self.spec.shape)])
        self.width = len(answer.embedding)

    @property
    def is_classifier(self) -> bool:
        """Whether the model scores classes."""
        return self._count > 0 or bool(self.classes)

    def prepare(self, image: Image.Image) -> Tensor:
        """Return an image as the model takes it (3, H, W)."""
        return to_tensor([image], self.spec)[0]

    @torch.inference_mode()
    def __call__(self, images: Sequence[Tensor]) -> list[Answer]:
        """Return an answer for each prepared image, in their order."""
        weight = next(value for value in self.model.parameters() if value.is_floating_point())
        batch = torch.stack(list(images)).to(weight.device, weight.dtype, non_blocking=True)
        with pooled_features(self.model) as take:
            output: Any = forward_output(self.model, batch) if self.is_classifier else self.model(batch)
            pooled = take()
        embeddings = self._pool(output) if pooled is None else pooled
        columns = {name: scores.float().softmax(1).cpu() for name, scores in self._scores(output).items()}
        rows = embeddings.float().cpu()
        return [Answer({name: scores[i] for name, scores in columns.items()}, rows[i]) for i in range(len(images))]

    def _scores(self, output: Any) -> dict[str, Tensor]:
        if self._targets:
            return {one.name: one.read(output.logits if one.own else output.by_role[one.name]) for one in self._targets}
        return {"label": output.logits} if self.is_classifier else {}

    def _pool(self, output: Any) -> Tensor:
        """Return the output of a model without a head as one vector per image: of all tokens, the first special one."""
        values = output_tensor(output)
        if values.dim() == 2:
            return values
        if values.dim() == 3 and self.layout.num_special:
            return values[:, 0]
        return values.flatten(1, -2).mean(1)
