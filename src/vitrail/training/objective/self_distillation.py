"""Learning without labels by self-distillation (DINO, Caron et al. 2021), for sets of some thousands of pictures.

A student sees small and large views of a picture, and says what its teacher says about other, large views of it. The
teacher is the student's own average over time. The loss is about the class token alone: what patch tokens hold is
theirs to decide, as it is in supervised training, so that artifact tokens *can* appear and registers have something to
cure. Two options hide patches from the student. With ``patches`` it says what the teacher, who sees all, says about
them, after iBOT (Zhou et al. 2021) and DINOv2, in whose large models artifacts were found. It is simpler than theirs:
patches are hidden one by one and not in blocks, in every large view, in the mean colour. With ``reconstruct`` it gives
their pixels (masked autoencoding), which binds every patch token to its place: the control.
"""

from __future__ import annotations

from copy import deepcopy
from math import cos, pi
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.augment.views import GLOBAL, split_views
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.heads.pooling import linear
from vitrail.models import ViT
from vitrail.tokens import Role
from vitrail.training.evaluation.metrics import reduce
from vitrail.training.objective.losses import masked_answers, patches_of, reconstruction
from vitrail.training.objective.objective import Terms

STUDENT_TEMPERATURE = 0.1
MAX_WEIGHT = 1e4
"""Of a loss beside that on views, whose weight is one."""
ROUNDS = 3
"""Of balancing; as in SwAV and DINOv2."""


@torch.no_grad()
def balanced(logits: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Make logits (B, K) probabilities that use all K classes alike over the batch (Sinkhorn and Knopp).

    Rows and columns are scaled in turn until columns have the same sum; rows, scaled last, sum to one. The batch is
    that of all processes together.
    """
    largest = reduce(logits.max(), most=True)
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    q = (logits - largest).to(wide).exp().clamp(min=torch.finfo(wide).tiny)
    for _ in range(rounds):
        q = q / reduce(q.sum(0, keepdim=True))
        q = q / q.sum(1, keepdim=True)
    return q.to(logits.dtype)


class Projection(nn.Module):
    """Features (…, D) to cosines with prototypes (…, K): an MLP, a bottleneck of length one, unit prototypes."""

    def __init__(self, width: int, prototypes: int, hidden: int = 512, bottleneck: int = 128) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            linear(width, hidden), nn.GELU(), linear(hidden, hidden), nn.GELU(), linear(hidden, bottleneck)
        )
        self.prototypes = nn.Parameter(torch.randn(prototypes, bottleneck))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.mlp(x).float(), dim=-1) @ F.normalize(self.prototypes.float(), dim=-1).T


class SelfLearner(nn.Module):
    """A model that teaches itself; the loop trains it as any learner, with :class:`~vitrail.data.augment.views.Views`.

    - The teacher never gets gradients: after each step it moves a little towards the student. Its answers are
      balanced over the batch (:func:`balanced`), so that not all pictures can get the same one. DINO's centring, a
      running mean that is taken away, collapsed within twenty steps when it was tried on 32 pictures.
    - ``parts`` of the loss are ``dino``; ``entropy``, of the teacher's answers in nats: near log(prototypes) they say
      nothing; and, where they are asked for, ``patches`` with ``patch_entropy``, and ``reconstruction``.
    - Parts of an accumulated batch are balanced each by itself.
    - Evaluation is by nearest neighbours, for there is no head: the model has ``num_classes=0``.

    Args:
        model: a ViT of ours without heads, with any tokens. Class tokens are compared (their mean), and patches, by
            their mean, where there are none.
        prototypes: outputs that answers are spread over.
        momentum: how much of the teacher stays in a step at first; it rises to 1.
        temperature: of the teacher's answers; the lower, the sharper.
        patches: weight of a loss of what the teacher says about patches that are hidden from the student, in the
            words that it has for whole views: the same projection.
        reconstruct: weight of a loss of the pixels of hidden patches.
        hidden: share of the patches of large views that is hidden where one of these weights is more than 0.
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
            raise UnsupportedModel(f"learning without labels is for models of ours; got {type(model).__name__}")
        if any(isinstance(part, nn.Linear) for part in model.heads.children()):
            raise InvalidOption("a model that learns without labels has no heads; build it with num_classes=0")
        if not isinstance(prototypes, int) or isinstance(prototypes, bool) or prototypes < 2:
            raise InvalidOption(f"prototypes={prototypes!r}; expected a whole number, 2 or more")
        hides = patches != 0 or reconstruct != 0
        for name, value, low, high in (
            ("momentum", momentum, 0.0, 1.0),
            ("temperature", temperature, 1e-4, STUDENT_TEMPERATURE),
            ("patches", patches, 0.0, MAX_WEIGHT),
            ("reconstruct", reconstruct, 0.0, MAX_WEIGHT),
            ("hidden", hidden, 0.01 if hides else 0.0, 0.95),
        ):
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise InvalidOption(f"{name}={value!r}; expected a number from {low:g} to {high:g}")
        self.momentum, self.temperature = momentum, temperature
        self.patches, self.reconstruct, self.hidden = patches, reconstruct, hidden
        self.model = model
        self._classes = [where for span, where in model.layout().spans() if span.role is Role.CLASS]
        self.projection = Projection(model.config.width, prototypes)
        pixels = model.config.in_chans * model.config.patch[0] * model.config.patch[1]
        self.decoder = linear(model.config.width, pixels) if reconstruct else None
        self.teacher = nn.ModuleList(deepcopy([self.model, self.projection])).requires_grad_(False).eval()

    def forward(self, images: Tensor, labels: Tensor | None = None, mixed: Any = None, taught: Any = None) -> Terms:
        """Give the loss of a batch of views (B, views, C, size, size); labels and all else are not looked at."""
        if images.ndim != 5 or images.shape[1] < GLOBAL:
            raise UnsupportedInput(f"expected views (pictures, views, colours, y, x); got {tuple(images.shape)}")
        batch = len(images)
        large, small = split_views(images)
        targets, about_patches = self._targets(large)
        targets = targets.unflatten(0, (GLOBAL, batch))
        seen, mask = self._hide(large)
        features = self.model.forward_features(seen)
        said = [self.projection(self._pooled(features))]
        if len(small):
            said.append(self.projection(self._pooled(self.model.forward_features(small))))
        log_q = (torch.cat(said) / STUDENT_TEMPERATURE).log_softmax(-1).unflatten(0, (-1, batch))
        each = -torch.einsum("vbk,wbk->vw", targets, log_q) / batch
        pairs = each.numel() - GLOBAL  # a view is not compared with itself
        dino = (each.sum() - each.diagonal().sum()) / pairs
        parts = {"dino": dino, "entropy": torch.special.entr(targets).sum(-1).mean()}
        total = dino
        if mask is not None and about_patches is not None:
            parts["patches"] = masked_answers(
                self.projection(self._patches(features)) / STUDENT_TEMPERATURE, about_patches, mask
            )
            parts["patch_entropy"] = torch.special.entr(about_patches).sum(-1).mean()
            total = total + self.patches * parts["patches"]
        if mask is not None and self.decoder is not None:
            height, width = self.model.config.patch
            truth = patches_of(large, (height, width))
            parts["reconstruction"] = reconstruction(self.decoder(self._patches(features)), truth, mask)
            total = total + self.reconstruct * parts["reconstruction"]
        return Terms(total, {name: part.detach() for name, part in parts.items()})

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        """Move the teacher towards the student."""
        keep = 1 - (1 - self.momentum) * (1 + cos(pi * progress)) / 2
        student: list[Tensor] = [*self.model.parameters(), *self.projection.parameters()]
        torch._foreach_lerp_(list[Tensor](self.teacher.parameters()), student, 1 - keep)

    def no_weight_decay(self) -> set[str]:
        """Name the parameters that weight decay should leave alone, beside norms and biases."""
        return {f"model.{name}" for name in self.model.no_weight_decay()} | {"projection.prototypes"}

    def train(self, mode: bool = True) -> SelfLearner:
        """Change the mode of the student; the teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    @torch.no_grad()
    def _targets(self, large: Tensor) -> tuple[Tensor, Tensor | None]:
        """Give what the teacher says about large views (2·B, K) and, if asked for, their patches (2·B, P, K)."""
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

    def _hide(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Paint patches over in the mean colour, which is zero; give the pictures and which patches (B, P)."""
        if not (self.patches or self.reconstruct):
            return images, None
        height, width = self.model.config.patch[-2:]
        rows, columns = images.shape[2] // height, images.shape[3] // width
        mask = torch.rand(len(images), rows * columns, device=images.device) < self.hidden
        blocks = mask.view(-1, 1, rows, columns).repeat_interleave(height, 2).repeat_interleave(width, 3)
        return images.masked_fill(blocks, 0.0), mask
