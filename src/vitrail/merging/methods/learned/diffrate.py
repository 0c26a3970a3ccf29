"""DiffRate: how many tokens merge in each block is learned (Chen et al., ICCV 2023)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import InvalidOption
from vitrail.merging.bipartite import mask_edges, rank
from vitrail.merging.features import mean_over_heads
from vitrail.merging.method import Context, Method, ModelShape, Reduction, register_method
from vitrail.merging.methods.learned._learned import check_weight
from vitrail.merging.methods.learned._matching import LearnedMatching


@register_method("diffrate")
class DiffRate(LearnedMatching):
    """ToMe whose numbers of merges per block are learned, against a budget of FLOPs.

    Each block has logits over numbers of merges, 0, ``step``, 2·``step`` and so on. In training mode as many of the
    most similar pairs merge as the expectation says, rounded down, and the gradient of each pair's merge is that of the
    probability that so many merge (straight-through). :meth:`loss` is ``weight · (FLOPs / FLOPs without merging −
    target)²``. The numbers are for the model's own input size and need no ``r``, ``keep`` or ``gflops``. In eval mode
    this is ToMe with these numbers: ``merging.config`` has them as ``r``, and applies again without the method.

    The published method also prunes, with numbers of its own, and has the loss 5·(GFLOPs − target)², which for DeiT-S
    is that of the default weight. Only the logits train, with the model frozen: AdamW from 0.01 to 0.001, 3 epochs.

    Args:
        target: budget, as a share of the FLOPs without merging.
        step: difference of the numbers to choose from.
        weight: weight of the loss.
        reconstruction: weight of the reconstruction loss; see `LearnedMatching`.
    """

    decides = True

    def __init__(self, target: float = 0.6, step: int = 4, weight: float = 100.0, reconstruction: float = 0.0) -> None:
        super().__init__(reconstruction)
        if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target <= 1:
            raise InvalidOption(f"target is the share of FLOPs to keep, above 0 and at most 1; got {target!r}")
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise InvalidOption(f"step is a number of tokens, 1 or more; got {step!r}")
        self.target, self.step, self.weight = float(target), step, check_weight("weight", weight)
        self._cost: Callable[[Sequence[Any]], Any] | None = None
        self._special = self._tokens = 0
        self._counts: tuple[int, ...] | None = None

    @property
    def options(self) -> dict[str, Any]:
        given = {"target": (self.target, 0.6), "step": (self.step, 4), "weight": (self.weight, 100.0)}
        return {**{name: own for name, (own, default) in given.items() if own != default}, **super().options}

    @property
    def config(self) -> str | dict[str, Any] | Method:
        """ToMe, which merges the same tokens where ``r`` has the learned numbers."""
        return "tome"

    @property
    def twin(self) -> str | None:
        return None if self.training else "tome"

    def build(self, shape: ModelShape) -> None:
        super().build(shape)
        self._cost, self._special = shape.flops, shape.special
        self._tokens = shape.special + prod(shape.grid)

    def create(self, shape: ModelShape) -> Mapping[str, nn.Module]:
        patches = prod(shape.grid)
        values = torch.arange(0, max(1, patches // 2) + 1, self.step)
        start = -values * 2 * shape.depth / patches  # half of the patches are left in the end
        return {"rates": nn.ParameterList([start.float().clone() for _ in range(shape.depth)])}

    def probabilities(self) -> Tensor:
        """Return the probability of each number of merges (depth, K), in float64."""
        logits = torch.stack(list(self.get_submodule("rates").parameters()))
        return logits.double().softmax(1)

    def expected(self) -> Tensor:
        """Return the expected number of merges in each block (depth,)."""
        found = self.probabilities()
        return found @ (torch.arange(found.shape[1], device=found.device, dtype=found.dtype) * self.step)

    def counts(self) -> tuple[int, ...]:
        """Return the number of merges in each block."""
        if self._counts is None or self.training:
            with torch.no_grad():
                self._counts = tuple(int(r) for r in self._rounded().tolist())
        return self._counts

    def _rounded(self) -> Tensor:
        return (self.expected() + 1e-6).floor()

    def train(self, mode: bool = True) -> DiffRate:
        super().train(mode)
        self._counts = None
        if not mode and self._has_parameters():
            self.counts()  # once, so that no pass waits for the device
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._counts = None
        super()._load_from_state_dict(*args, **kwargs)

    def features(self, context: Context) -> Tensor:
        return mean_over_heads(context.k).detach()

    def matched(self, context: Context) -> Tensor:
        return context.k

    def share(self, context: Context, scores: Tensor, blocked: Tensor, r: int) -> tuple[Tensor, int | Tensor]:
        layer = context.layer
        count = torch.minimum(self._rounded()[layer].detach(), mask_edges(blocked).amin()).long()
        probability = self.probabilities()[layer]
        pairs = torch.arange(scores.shape[1], device=scores.device)
        numbers = torch.arange(len(probability), device=scores.device) * self.step
        likely = ((numbers > pairs.unsqueeze(1)) * probability).sum(1).to(scores.dtype)  # that pair j merges
        likely = (pairs < count) + (likely - likely.detach())
        best, odd = scores.max(2)
        merges = likely[rank(best.detach())] * best.isfinite()
        return F.one_hot(odd, scores.shape[2]) * merges.unsqueeze(2), count

    @torch.no_grad()
    def select(self, context: Context, r: int | Tensor) -> Reduction:
        return Reduction(context.match(self.features(context), r))

    def budget_share(self) -> Tensor | None:
        """Return the cost as a share of that without merging, with straight-through gradients."""
        if self._cost is None:
            return None
        expected = self.expected()
        counts = self._rounded().detach() + (expected - expected.detach())
        left, merges = expected.new_tensor(float(self._tokens)), []
        for r in counts:
            r = torch.minimum(r, (left - self._special).div(2).floor())
            merges.append(r)
            left = left - r
        share: Tensor = self._cost(merges) / self._cost([0] * len(counts))
        return share

    def loss(self) -> Tensor | None:
        share, own = self.budget_share(), super().loss()
        if share is None:
            return own
        term = self.weight * (share - self.target).square()
        return term.float() if own is None else term.to(own.dtype) + own

    def flops(self, tokens: Any, head_width: int) -> Any:
        if isinstance(tokens, int):
            return ((tokens + 1) // 2) * (tokens // 2) * head_width
        return tokens * tokens / 4 * head_width
