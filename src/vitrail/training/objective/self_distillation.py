"""Self-supervised learning by self-distillation (DINO, Caron et al. 2021), for datasets of thousands of images.

A student sees global and local views of an image and predicts the teacher's output for other global views. The teacher
is the EMA of the student. The loss uses only the class token, so that artifact tokens *can* appear in patches, as in
supervised training, and registers have something to cure. Two options mask patches for the student. With ``patches``
it predicts the teacher's output for masked patches, after iBOT (Zhou et al. 2021) and DINOv2, but simpler: patches are
masked independently instead of in blocks, in every global view, with the mean color. With ``reconstruct`` it predicts
their pixels (MAE), which ties every patch token to its position: the control.
"""

from __future__ import annotations

from copy import deepcopy
from math import cos, pi
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail._checks import is_int, is_number
from vitrail.data.augment.views import GLOBAL, split_views
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.heads.pooling import linear
from vitrail.models import ViT
from vitrail.tokens import Role
from vitrail.training.evaluation.tallies import all_reduce
from vitrail.training.objective.losses import masked_cross_entropy, reconstruction
from vitrail.training.objective.objective import Terms

STUDENT_TEMPERATURE = 0.1
MAX_WEIGHT = 1e4
"""Largest weight of a loss on masked patches; the loss on views has weight one."""
ROUNDS = 3
"""Sinkhorn-Knopp iterations, as in SwAV and DINOv2."""


@torch.no_grad()
def balanced(logits: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Return probabilities of logits (B, K) that use all K classes equally over the batch (Sinkhorn-Knopp).

    Columns and rows are normalized alternately, rows last, over the global batch.
    """
    largest = all_reduce(logits.max(), maximum=True)
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    q = (logits - largest).to(wide).exp().clamp(min=torch.finfo(wide).tiny)
    for _ in range(rounds):
        q = q / all_reduce(q.sum(0, keepdim=True))
        q = q / q.sum(1, keepdim=True)
    return q.to(logits.dtype)


class Projection(nn.Module):
    """DINO head: MLP, normalized bottleneck, and cosine similarity with prototypes; (…, D) to (…, K)."""

    def __init__(self, width: int, prototypes: int, hidden: int = 512, bottleneck: int = 128) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            linear(width, hidden), nn.GELU(), linear(hidden, hidden), nn.GELU(), linear(hidden, bottleneck)
        )
        self.prototypes = nn.Parameter(torch.randn(prototypes, bottleneck))

    def no_weight_decay(self) -> set[str]:
        return {"prototypes"}

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.mlp(x).float(), dim=-1) @ F.normalize(self.prototypes.float(), dim=-1).T


class SelfLearner(nn.Module):
    """A student and its EMA teacher; trained by the same loop as `Learner`, on `vitrail.data.augment.views.Views`.

    - The teacher gets no gradients; it moves towards the student after each step. Its outputs are balanced over the
      batch (`balanced`), so that they cannot all be the same. DINO's centering collapsed within twenty steps on 32
      images.
    - ``parts`` of the loss are ``dino``; ``entropy`` of the teacher's outputs in nats, uninformative near
      log(prototypes); and, if enabled, ``patches`` with ``patch_entropy``, and ``reconstruction``.
    - With gradient accumulation, each part of a batch is balanced separately.
    - Evaluation is by k-NN, because there is no head: the model has ``num_classes=0``.

    Args:
        model: a Vitrail ViT without heads, with any tokens. The loss uses the mean of class tokens, or of patches if
            there are none.
        prototypes: number of outputs.
        momentum: initial momentum of the teacher; it rises to 1.
        temperature: of the teacher's outputs; lower is sharper.
        patches: weight of the loss on the teacher's outputs for masked patches, which share the projection.
        reconstruct: weight of the loss on pixels of masked patches.
        hidden: fraction of patches of global views to mask, if one of these weights is above 0.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        prototypes: int = 1024,
        momentum: float = 0.99,
        temperature: float = 0.04,
        patches: float = 0.0,
        reconstruct: float = 0.0,
        hidden: float = 0.5,
    ) -> None:
        super().__init__()
        if not isinstance(model, ViT):
            raise UnsupportedModel(f"recipe='dino' needs a Vitrail model; got {type(model).__name__}")
        if not is_int(prototypes, 2):
            raise InvalidOption(f"prototypes={prototypes!r}: expected an integer of at least 2")
        hides = patches != 0 or reconstruct != 0
        for name, value, low, high in (
            ("momentum", momentum, 0.0, 1.0),
            ("temperature", temperature, 1e-4, STUDENT_TEMPERATURE),
            ("patches", patches, 0.0, MAX_WEIGHT),
            ("reconstruct", reconstruct, 0.0, MAX_WEIGHT),
            ("hidden", hidden, 0.01 if hides else 0.0, 0.95),
        ):
            if not is_number(value) or not low <= value <= high:
                raise InvalidOption(f"{name}={value!r}: expected a number from {low:g} to {high:g}")
        self.momentum, self.temperature = momentum, temperature
        self.patches, self.reconstruct, self.hidden = patches, reconstruct, hidden
        self.model = model
        self._classes = [where for span, where in model.layout().spans() if span.role is Role.CLASS]
        self.projection = Projection(model.config.width, prototypes)
        pixels = model.config.in_chans * model.config.patch[0] * model.config.patch[1]
        self.decoder = linear(model.config.width, pixels) if reconstruct else None
        self.teacher = nn.ModuleList(deepcopy([self.model, self.projection])).requires_grad_(False).eval()

    def forward(self, images: Tensor, labels: Tensor | None = None, mixed: Any = None, taught: Any = None) -> Terms:
        """Return the loss of a batch of views (B, views, C, size, size); the other arguments are ignored."""
        if images.ndim != 5 or images.shape[1] < GLOBAL:
            raise UnsupportedInput(
                f"expected views (images, views, channels, height, width); got {tuple(images.shape)}"
            )
        batch = len(images)
        large, small = split_views(images)
        targets, patch_targets = self._targets(large)
        targets = targets.unflatten(0, (GLOBAL, batch))
        seen, mask = self._mask(large)
        features = self.model.forward_features(seen)
        every = [features, self.model.forward_features(small)] if len(small) else [features]
        projected = [self.projection(self._pooled(each)) for each in every]
        log_q = (torch.cat(projected) / STUDENT_TEMPERATURE).log_softmax(-1).unflatten(0, (-1, batch))
        each = -torch.einsum("vbk,wbk->vw", targets, log_q) / batch
        pairs = each.numel() - GLOBAL  # a view is not compared with itself
        dino = (each.sum() - each.diagonal().sum()) / pairs
        parts = {"dino": dino, "entropy": torch.special.entr(targets).sum(-1).mean()}
        total = dino
        if mask is not None and patch_targets is not None:
            parts["patches"] = masked_cross_entropy(
                self.projection(self._patches(features)) / STUDENT_TEMPERATURE, patch_targets, mask
            )
            parts["patch_entropy"] = torch.special.entr(patch_targets).sum(-1).mean()
            total = total + self.patches * parts["patches"]
        if mask is not None and self.decoder is not None:
            size = self.model.config.patch
            truth = F.unfold(large, size, stride=size).mT
            parts["reconstruction"] = reconstruction(self.decoder(self._patches(features)), truth, mask)
            total = total + self.reconstruct * parts["reconstruction"]
        return Terms(total, {name: part.detach() for name, part in parts.items()})

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        """Move the teacher towards the student."""
        keep = 1 - (1 - self.momentum) * (1 + cos(pi * progress)) / 2
        student: list[Tensor] = [*self.model.parameters(), *self.projection.parameters()]
        torch._foreach_lerp_(list[Tensor](self.teacher.parameters()), student, 1 - keep)

    def train(self, mode: bool = True) -> SelfLearner:
        """Set the mode of the student; the teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    @torch.no_grad()
    def _targets(self, large: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the teacher's outputs for global views (2·B, K) and, if enabled, for their patches (2·B, P, K)."""
        model, projection = self.teacher
        assert isinstance(model, ViT)
        features = model.forward_features(large)
        views = balanced(projection(self._pooled(features)) / self.temperature)
        if not self.patches:
            return views, None
        each = projection(self._patches(features)) / self.temperature
        return views, balanced(each.flatten(0, 1)).unflatten(0, each.shape[:2])

    def _pooled(self, features: Tensor) -> Tensor:
        own = [features[:, where.start : where.stop] for where in self._classes]
        return (torch.cat(own, 1) if own else self._patches(features)).mean(1)

    def _patches(self, features: Tensor) -> Tensor:
        return features[:, self.model.num_prefix_tokens :]

    def _mask(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mask random patches with the mean color, which is zero; return the images and the mask (B, P)."""
        if not (self.patches or self.reconstruct):
            return images, None
        height, width = self.model.config.patch[-2:]
        rows, columns = images.shape[2] // height, images.shape[3] // width
        mask = torch.rand(len(images), rows * columns, device=images.device) < self.hidden
        blocks = mask.view(-1, 1, rows, columns).repeat_interleave(height, 2).repeat_interleave(width, 3)
        return images.masked_fill(blocks, 0.0), mask
