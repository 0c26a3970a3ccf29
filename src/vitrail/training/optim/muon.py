"""Muon: AdamW that updates the weights of hidden layers by orthogonalized momentum.

Adam scales each entry of a gradient separately. In a gradient matrix a few singular values dominate; Muon makes all
singular values of the update about equal, so that rare directions are learned as fast as common ones (Jordan et al.
2024, kellerjordan.github.io/posts/muon). Updates are scaled so that AdamW's learning rate and weight decay serve both
(Liu et al. 2025, arXiv:2502.16982). ``torch.optim.Muon`` computes the same, but only for 2-D weights, one at a
time, and CUDA graphs cannot capture it.
"""

from __future__ import annotations

from collections import defaultdict
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.models.vit import undecayed

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Newton-Schulz polynomial a·x + b·x³ + c·x⁵: iterated, it maps (0, 1] to about 1."""
STEPS = 5
RMS = 0.2
"""Root mean square of an update per unit of the learning rate: about that of AdamW."""

OUTPUT_LAYERS = ("head", "heads", "head_dist", "fc", "classifier")
"""Names of output layers. These and the first layer are left to AdamW."""


def hidden_weights(model: nn.Module) -> set[str]:
    """Return the names of weights that Muon updates: of hidden linear and convolution layers."""
    layers = [
        (name, f"{name}.weight" if name else "weight")
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    between = {weight for name, weight in layers[1:] if not set(name.split(".")) & set(OUTPUT_LAYERS)}
    return (between & trained) - undecayed(model)


class Muon(torch.optim.AdamW):
    """AdamW, except for groups with ``"orthogonal": True``, whose parameters have at least two dimensions.

    The filters of a convolution are the rows of a matrix. Matrices of the same shape are updated in one batch.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the matrices and clear their gradients, then let AdamW update the rest."""
        if closure is not None:
            raise NotImplementedError("Muon does not support closures")
        for group in self.param_groups:
            if group.get("orthogonal"):
                self._update_matrices(group)
        return super().step()

    def _update_matrices(self, group: dict[str, Any]) -> None:
        alike: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                alike[parameter.flatten(1).shape].append((parameter, parameter.grad))
        lr, decay = group["lr"], group["weight_decay"]
        for (rows, columns), both in alike.items():
            parameters, gradients = (list(ones) for ones in zip(*both, strict=True))
            momenta = [self._momentum(parameter) for parameter in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)
            updates = orthogonal(torch.stack([one.flatten(1) for one in ahead])) * (lr * RMS * sqrt(max(rows, columns)))
            torch._foreach_mul_(parameters, 1 - lr * decay)
            torch._foreach_sub_(
                parameters, [update.view_as(own) for update, own in zip(updates, parameters, strict=True)]
            )
            for parameter in parameters:
                parameter.grad = None

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        state: dict[str, Tensor] = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state["momentum"]


def orthogonal(matrices_BMN: Tensor) -> Tensor:
    """Return matrices with the same singular vectors and singular values between about 0.7 and 1.2.

    Uses the Newton-Schulz iteration in bfloat16: matrix products, no decomposition.
    """
    a, b, c = COEFFICIENTS
    x = matrices_BMN.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices_BMN.dtype)
