"""torchvision as a library: models by name, built, loaded and trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from vitrail.adapters.base import Library, ModelRequest, TrunkAdapter
from vitrail.adapters.torchvision import swin, vit
from vitrail.adapters.torchvision.swin import TorchvisionSwin
from vitrail.adapters.torchvision.vit import TorchvisionTrunk
from vitrail.errors import ModelLoadError


class Torchvision(Library):
    """Models of torchvision, by the names that ``torchvision.models.get_model`` takes."""

    prefix = package = "torchvision"
    heads = {"head": "class"}  # noqa: RUF012

    def trunks(self) -> Mapping[str, TrunkAdapter]:
        return {
            f"{vit.MODULE}.VisionTransformer": TorchvisionTrunk(),
            f"{swin.MODULE}.SwinTransformer": TorchvisionSwin(),
        }

    def load(self, name: str, pretrained: bool = True, **options: Any) -> nn.Module:
        """Load a model with its default weights, or with random ones."""
        models = self.imported(name, "torchvision.models")
        if name not in models.list_models():
            expected = ", ".join(models.list_models(include=["vit*", "swin*"]))
            raise ModelLoadError(f"torchvision has no model named {name!r}; expected {expected}")
        try:
            return models.get_model(name, weights="DEFAULT" if pretrained else None, **options).eval()
        except Exception as error:
            hint = "Check the network, or use random weights (pretrained=False)." if pretrained else ""
            raise self.failed(name, error, hint) from error

    def build(self, name: str, request: ModelRequest) -> tuple[nn.Module, dict[str, Any]]:
        options = dict(request.options)
        if request.image_size is not None:
            options["image_size"] = request.image_size
        model: Any = self.load(name, bool(request.pretrained), **options)
        head = model.heads.head
        model.heads.head = nn.Linear(head.in_features, len(request.outputs))
        model.num_classes = len(request.outputs)
        return model, {"architecture": f"torchvision:{name}", "options": {**options, "num_classes": model.num_classes}}

    def reset_heads(self, model: Any) -> None:
        model.heads.head.reset_parameters()

    def looks_like(self, name: str) -> bool:
        return name.startswith(("vit_", "swin_"))

    def size_options(self, size: tuple[int, ...]) -> dict[str, Any]:
        return {"image_size": size[0]}


LIBRARY = Torchvision()
