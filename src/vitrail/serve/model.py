"""The model of a server: one pass over a batch gives the class scores and the embedding of each image.

Both are those of ``vitrail predict`` and ``vitrail embed`` for the same image, preprocessed alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.adapters.registry import sized
from vitrail.adapters.saved import class_names
from vitrail.data.decode import MAX_PIXELS, decode_image
from vitrail.data.sample import Sample
from vitrail.embedding.embedder import Features, cast_model, parse_tokens
from vitrail.embedding.predictor import find_targets
from vitrail.embedding.reading import Fit, Preparation
from vitrail.errors import NotApplied, UnsupportedInput
from vitrail.surgery import Merging
from vitrail.training.evaluation.outputs import forward_output
from vitrail.training.objective.targets import Target


class Answer(NamedTuple):
    """What a model says of one image.

    Attributes:
        scores: probabilities of the classes (C,), by label column; empty for a model without classes.
        embedding: its class token, or the mean of its patches (D,), in float32.
    """

    scores: Mapping[str, Tensor]
    embedding: Tensor


class ServedModel:
    """A model in eval mode on its device, merged or not, with its preprocessing and the names of its classes.

    Args:
        model: a supported model that takes images.
        name: what answers and metrics call it.
        size: input size in pixels, height and width; by default the model's own.
        precision: ``float32``, ``float16`` or ``bfloat16``; None leaves it as it is.
        fit: ``crop`` the center of images, or ``stretch`` whole images.

    Attributes:
        classes: names of the classes by label column, numbers where there are none; empty without classes.
        width: length of an embedding.
        merging: the options of the model's merging; None if it is not merged.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        *,
        size: tuple[int, ...] | None = None,
        precision: str | None = None,
        fit: Fit = "crop",
    ) -> None:
        found = find(model)
        self.spec, self.layout = sized(found, size, name)
        if self.spec.modality != "image":
            raise UnsupportedInput(f"{name} takes {self.spec.modality} inputs; a server takes images")
        self.name, self.model = name, cast_model(model, precision)
        try:
            self.merging: dict[str, Any] | None = Merging.of(model).config
        except NotApplied:
            self.merging = None
        self._preparation = Preparation(self.spec, fit)
        (wanted,) = parse_tokens(found, ())
        self._features, self._column = Features(model, found, [wanted]), wanted.name
        is_classifier = bool(class_names(model)) or found.adapter.num_classes(model, found.trunk) > 0
        self._call: Callable[[Tensor], Any] = partial(forward_output, model) if is_classifier else found.trunk
        example, output = self._run([torch.zeros((3, *self.spec.size), dtype=torch.uint8)])
        outputs = getattr(output, "logits", None)
        targets: tuple[Target, ...] = ()
        if is_classifier:
            targets = find_targets(model, None if outputs is None else outputs.shape[1], None)
        self._targets = tuple(one for one in targets if one.kind in ("classification", "multilabel"))
        self.classes = {target.name: target.classes for target in self._targets}
        self.width = example.shape[1]

    def prepare(self, data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> Tensor:
        """Decode an image, and return it as the model's input in bytes (3, H, W)."""
        return self._preparation(lambda: Sample(decode_image(data, name, max_pixels), name))

    def __call__(self, images: Sequence[Tensor]) -> list[Answer]:
        """Return an answer for each prepared image, in their order."""
        embeddings, output = self._run(images)
        columns: dict[str, Tensor] = {}
        for target in self._targets:
            scores = target.prediction(output).float()
            columns[target.name] = (scores.sigmoid() if target.kind == "multilabel" else scores.softmax(1)).cpu()
        rows = embeddings.float().cpu()
        return [Answer({name: scores[i] for name, scores in columns.items()}, rows[i]) for i in range(len(images))]

    @torch.inference_mode()
    def _run(self, images: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """Return embeddings (B, D), and the output of the model or its trunk."""
        weight = next(value for value in self.model.parameters() if value.is_floating_point())
        batch = torch.stack(list(images)).to(weight.device, non_blocking=True)
        found, output = self._features.run(self._call, self.spec.normalize(batch).to(weight.dtype))
        return found[self._column], output
