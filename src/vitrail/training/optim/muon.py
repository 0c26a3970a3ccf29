"""Muon: AdamW, in which the weights of hidden layers move by orthogonal matrices instead.

Adam scales each number of a gradient by itself. A weight matrix is more than its numbers: what it does is said by its
singular values, and in gradients a few of them drown the rest. Muon moves along the gradient's momentum with all
singular values made about equal, so that rare directions are learned as fast as common ones. Jordan et al. (2024,
kellerjordan.github.io/posts/muon) found it; the scale of the moves, which lets AdamW's learning rate and weight decay
serve both, is that of Liu et al. (2025, arXiv:2502.16982).
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
"""Of the polynomial a·x + b·x³ + c·x⁵; applied over and over it takes all of (0, 1] to about 1, small ones first."""
TIMES = 5
RMS = 0.2
"""Root mean square of a move for each unit of the learning rate: about what AdamW's moves have."""

ANSWERING = ("head", "heads", "head_dist", "fc", "classifier")
"""What models call the layers that give answers. These, and the layer that reads pictures, are better left to Adam."""


def hidden_weights(model: nn.Module) -> set[str]:
    """Name the weights that Muon moves: those of linear layers and convolutions that decay, between first and last."""
    layers = [
        (name, f"{name}.weight" if name else "weight")
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    between = {weight for name, weight in layers[1:] if not set(name.split(".")) & set(ANSWERING)}
    return (between & trained) - undecayed(model)


class Muon(torch.optim.AdamW):
    """AdamW for all groups but those with ``"orthogonal": True``, whose parameters have two dimensions or more.

    The filters of a convolution are the rows of a matrix. Matrices of the same shape are computed together.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move matrices and take their gradients away, then let AdamW move whatever still has one."""
        if closure is not None:
            raise NotImplementedError("this optimiser takes gradients that are there already, and no closure")
        for group in self.param_groups:
            if group.get("orthogonal"):
                self._move(group)
        return super().step()

    def _move(self, group: dict[str, Any]) -> None:
        alike: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                alike[parameter.flatten(1).shape].append((parameter, parameter.grad))
        lr, decay = group["lr"], group["weight_decay"]
        for (rows, columns), both in alike.items():
            parameters, gradients = (list(ones) for ones in zip(*both, strict=True))
            momenta = [self.state[parameter]["momentum"] for parameter in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)
            moves = orthogonal(torch.stack([one.flatten(1) for one in ahead])) * (lr * RMS * sqrt(max(rows, columns)))
            torch._foreach_mul_(parameters, 1 - lr * decay)
            torch._foreach_sub_(parameters, [move.view_as(own) for move, own in zip(moves, parameters, strict=True)])
            for parameter in parameters:
                parameter.grad = None


def orthogonal(matrices_BMN: Tensor) -> Tensor:
    """Bring all singular values of matrices near 1, between about 0.7 and 1.2, and leave their directions alone.

    By Newton and Schulz' iteration in bfloat16: products of matrices alone, and no decomposition.
    """
    a, b, c = COEFFICIENTS
    x = matrices_BMN.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(TIMES):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices_BMN.dtype)
