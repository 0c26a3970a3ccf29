"""``Predictor``: a batch of images in, the most likely classes out, with names and probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail._checks import check_int
from vitrail.adapters import find, image_model
from vitrail.adapters.registry import declared_spec, named_classes
from vitrail.adapters.saved import class_names, target_specs
from vitrail.data.sources.base import LABEL
from vitrail.data.spec import InputSpec
from vitrail.embedding.embedder import Column, Core, cast_model, precision_of
from vitrail.errors import InvalidOption, UnsupportedModel
from vitrail.surgery.recording import taking
from vitrail.training.evaluation.outputs import forward_output
from vitrail.training.objective.targets import Target, assign_targets


class Predictor(Core):
    """The most likely classes of images: columns ``class_1``, ``probability_1``, ``class_2``, …

    Of a model with several label columns the names have the column in front: ``breed.class_1``. The value of a
    regression is a column ``value``, in the units of its labels; where several classes may apply at once, each has a
    probability of its own. Masks are left out.

    Args:
        model: a classifier, merged or not; it is set to eval mode.
        top: number of classes to name; of fewer classes all.
        classes: names of the classes; by default those that the model was trained or published with, else numbers.
        precision, spec: as for `Embedder`.
    """

    kind = "predict"

    def __init__(
        self,
        model: nn.Module,
        top: int = 5,
        *,
        classes: Sequence[str] | None = None,
        precision: str | None = None,
        spec: InputSpec | None = None,
    ) -> None:
        check_int("top", top)
        model = image_model(model)
        self.model, self._found = cast_model(model, precision), find(model)
        known = declared_spec(model) if spec is None else spec
        assert known is not None
        self.spec = known
        if not class_names(model) and not self._found.adapter.num_classes(model, self._found.trunk):
            raise UnsupportedModel(
                f"{type(model).__name__} has no classes to predict: it returns features. Use vitrail embed, or a model "
                "with a classification head"
            )
        weight = next(model.parameters())
        with torch.inference_mode(), taking(self._found, torch.empty(1, *self.spec.shape)):
            outputs = forward_output(model, torch.zeros(1, *self.spec.shape).to(weight))
        found = find_targets(model, None if outputs.logits is None else outputs.logits.shape[1], classes)
        self.targets = tuple(target for target in found if not target.spec.pixel_bytes)
        if not self.targets:
            raise UnsupportedModel(
                f"{type(model).__name__} predicts masks alone, which are no rows of a table. Call the model and "
                "read .dense of its output"
            )
        self.top = {target.name: min(top, len(target.classes)) for target in self.targets}
        self.columns = tuple(
            Column(f"{self._prefix(target)}{name}", (), dtype)
            for target in self.targets
            for name, dtype in self._names(target)
        )

    @property
    def settings(self) -> dict[str, Any]:
        return {"classes": {one.name: list(one.classes) for one in self.targets}, "precision": precision_of(self.model)}

    def run(self, images: Tensor) -> dict[str, Tensor]:
        """Compute probabilities and class numbers (B, top) of each label column."""
        made = {}
        with torch.inference_mode(), taking(self._found, images):
            output = forward_output(self.model, images)
            for target in self.targets:
                scores = target.prediction(output).float()
                if target.kind == "regression":
                    made[f"{target.name}.value"] = target.values(scores)[:, 0]
                    continue
                shares = scores.sigmoid() if target.kind == "multilabel" else scores.softmax(1)
                likely, places = shares.topk(self.top[target.name], 1)
                made[f"{target.name}.probability"], made[f"{target.name}.class"] = likely, places
        return made

    def finish(self, found: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        values = super().finish(found)
        made: dict[str, np.ndarray] = {}
        for target in self.targets:
            names, prefix = np.array(target.classes, dtype=object), self._prefix(target)
            if target.kind == "regression":
                made[f"{prefix}value"] = values[f"{target.name}.value"]
                continue
            for place in range(self.top[target.name]):
                made[f"{prefix}class_{place + 1}"] = names[values[f"{target.name}.class"][:, place]]
                made[f"{prefix}probability_{place + 1}"] = values[f"{target.name}.probability"][:, place]
        return made

    def _names(self, target: Target) -> list[tuple[str, str]]:
        """Return names and dtypes of a target's columns."""
        if target.kind == "regression":
            return [("value", "float32")]
        kinds = (("class", "string"), ("probability", "float32"))
        places = range(1, self.top[target.name] + 1)
        return [(f"{name}_{place}", dtype) for place in places for name, dtype in kinds]

    def _prefix(self, target: Target) -> str:
        return f"{target.name}." if len(self.targets) > 1 else ""


def find_targets(model: nn.Module, outputs: int | None, classes: Sequence[str] | None) -> tuple[Target, ...]:
    """Return what a classifier predicts; raise for a model without classes."""
    trained = class_names(model)
    if trained and classes is None:
        return assign_targets(model, trained, target_specs(model))
    assert outputs is not None
    names = tuple(classes or named_classes(model, outputs) or map(str, range(outputs)))
    if len(names) != outputs:
        raise InvalidOption(f"{len(names)} class names were given, and the model has {outputs} outputs")
    return (Target(LABEL, slice(0, 1), names, ("class",)),)
