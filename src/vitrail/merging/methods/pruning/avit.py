"""A-ViT: every token decides when it halts (Yin et al., CVPR 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import InvalidOption
from vitrail.merging.assignment import Assignment
from vitrail.merging.bipartite import protected_mask
from vitrail.merging.method import Context, ModelShape, Reduction, register_method
from vitrail.merging.methods._groups import most_similar, rank_among, sizes_of, unit_features, work_dtype
from vitrail.merging.methods.learned._learned import LearnedMethod
from vitrail.merging.methods.pruning._keep import keep_only

DEFAULTS = {"epsilon": 0.01, "ponder": 5e-4, "scale": 5.0, "shift": 10.0}


@register_method("avit")
class AViT(LearnedMethod):
    """Let tokens halt: the first channel of a token gives h = σ(γ·x₀ − β) after each block, and a token whose h sum to
    more than 1 − ε is dropped. Images keep different numbers of tokens.

    In training mode all tokens stay, and a halted one gets no attention. :meth:`loss` is the ponder loss, the mean over
    patches of the number of blocks that a token runs through and of what is left to 1 when it halts. Halting has a
    straight-through gradient, that of 1 − Σh, so that the model's own loss keeps tokens that it needs; the published
    model instead weights the outputs of all blocks by h, which needs a head of its own.

    ``r``, ``keep`` and ``gflops`` limit how many tokens halt in a block. The positions of halted tokens are restored
    from the most similar token that stays.

    Args:
        epsilon: ε.
        ponder: weight of the ponder loss.
        scale: initial value of γ, which is learned.
        shift: initial value of β, which is learned.
    """

    static = False
    place = "before"

    def __init__(self, epsilon: float = 0.01, ponder: float = 5e-4, scale: float = 5.0, shift: float = 10.0) -> None:
        super().__init__()
        given = {"epsilon": epsilon, "ponder": ponder, "scale": scale, "shift": shift}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, Real):
                raise InvalidOption(f"{name} is a number, by default {DEFAULTS[name]}; got {value!r}")
        if not 0 < epsilon < 1 or ponder < 0:
            raise InvalidOption(f"epsilon is between 0 and 1, ponder 0 or more; got {epsilon!r} and {ponder!r}")
        self.epsilon, self.ponder, self.scale, self.shift = map(float, given.values())

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name, value in DEFAULTS.items() if getattr(self, name) != value}

    def layers(self, depth: int) -> Sequence[float]:
        return [float(layer > 0 or depth == 1) for layer in range(depth)]

    def create(self, shape: ModelShape) -> Mapping[str, nn.Module]:
        start = {"scale": torch.tensor(self.scale), "shift": torch.tensor(self.shift)}
        return {"halting": nn.ParameterDict(start)}

    def relax(self, context: Context, r: int | Tensor) -> Reduction | None:
        if context.layer == 0:
            return None
        size, active, before = sizes_of(context), context.mergeable, self._before(context)
        total = before + self.halting_score(context.x) * active
        halts = self.halts(total, active, r)
        runs = active & ~halts
        left = (1 - total).clamp(0, 1)
        size = torch.where(active, runs + (left - left.detach()), size.detach())

        ponder = runs + halts * (1 - before)
        if "halting" not in context.memory:  # the blocks before ran for all tokens
            ponder = ponder + context.layer
        if context.layer == context.depth - 1:
            ponder = ponder + runs * left
        free = ~protected_mask(context.protected, size.shape[1], size.device).expand(size.shape)
        mean = (ponder * free).sum(1) / free.sum(1).clamp(min=1)
        self.add_loss(context, self.ponder * mean.mean())
        step = Assignment.identity(size.shape[0], size.shape[1], size.device)
        return Reduction(step, weight=torch.ones_like(size).detach(), size=size, memory={"halting": total})

    @torch.no_grad()
    def select(self, context: Context, r: int | Tensor) -> Reduction | None:
        if context.layer == 0:
            return None
        active = context.mergeable.expand(context.x.shape[:2])
        total = self._before(context) + self.halting_score(context.x) * active
        kept = active & ~self.halts(total, active, r)
        found = keep_only(context, kept, most_similar(unit_features(context, "tokens"), kept), None)
        return Reduction(found.assignment, found.weight, memory={"halting": total})

    def halting_score(self, x: Tensor) -> Tensor:
        """Return h = σ(γ·x₀ − β) of every token (B, N), in float32 or better."""
        work = work_dtype(x)
        scale, shift = self.get_parameter("halting.scale"), self.get_parameter("halting.shift")
        return (scale.to(work) * x[..., 0].to(work) - shift.to(work)).sigmoid().nan_to_num(0.0)

    def halts(self, total: Tensor, active: Tensor, r: int | Tensor) -> Tensor:
        """Return which active tokens (B, N) halt: those above 1 − ε, at most ``r`` and all but one, highest first."""
        most = active.sum(1, keepdim=True) - 1
        most = most.clamp(max=r) if isinstance(r, int) else torch.minimum(most, r.unsqueeze(1))
        return active & (total > 1 - self.epsilon) & (rank_among(total, active.expand(total.shape)) < most)

    def _before(self, context: Context) -> Tensor:
        """Return the sum of h of every token before this block (B, N)."""
        return context.memory.get("halting", torch.zeros_like(sizes_of(context)))
