"""DynamicViT: learned predictors decide which tokens stay (Rao et al., NeurIPS 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import InvalidOption
from vitrail.merging.assignment import Assignment
from vitrail.merging.method import Context, ModelShape, Reduction, register_method
from vitrail.merging.methods._groups import most_similar, rank_among, sizes_of, unit_features, work_dtype
from vitrail.merging.methods.learned._learned import LearnedMethod
from vitrail.merging.methods.pruning._keep import keep_only
from vitrail.merging.methods.pruning._stages import check_rate, stage_blocks, stage_shares

RATIO_WEIGHT = 2.0


@register_method("dynamicvit")
class DynamicViT(LearnedMethod):
    """Keep the tokens with the highest scores of learned predictors before the fourth, seventh and tenth of 12 blocks.

    In training mode all tokens stay: Gumbel-softmax draws which ones the others attend to, with straight-through
    gradients, and :meth:`loss` pulls the share of tokens kept to the planned one. In eval mode the planned number of
    tokens is dropped; their positions are restored from the most similar token that stays.

    As published except for one detail: a token dropped in training does not attend to itself, since sizes weigh keys
    for all queries alike. It only affects gradients: no kept token ever sees a dropped one.

    The published loss also has two terms that compare with a teacher, the unmerged model, and so belong to the training
    loop: 0.5 × KL divergence of the outputs, 0.5 × mean squared error of the last layer's kept tokens.

    Args:
        rate: share of tokens that each stage keeps in the default schedule; ``keep=rate**3`` is the published setting.
    """

    place = "before"

    def __init__(self, rate: float = 0.7) -> None:
        super().__init__()
        self.rate = check_rate(rate)

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.rate == 0.7 else {"rate": self.rate}

    def layers(self, depth: int) -> Sequence[float]:
        return stage_shares(depth, self.rate)

    def create(self, shape: ModelShape) -> Mapping[str, nn.Module]:
        predictors = {str(block): Predictor(shape.width) for block in stage_blocks(shape.depth)}
        return {"predictors": nn.ModuleDict(predictors)}

    @property
    def stages(self) -> nn.ModuleDict:
        """The predictors, by the index of the block that they precede."""
        found = self.get_submodule("predictors")
        assert isinstance(found, nn.ModuleDict)
        return found

    def scores(self, context: Context, kept: Tensor) -> Tensor:
        """Return the log-probabilities (B, N, 2) to keep and to drop each token, given those kept so far (B, N)."""
        predictors = self.stages
        if str(context.layer) not in predictors:
            raise InvalidOption(
                f"dynamicvit has predictors before blocks {', '.join(predictors)} (counted from 0) and cannot prune in "
                f"block {context.layer}; leave out schedule=, or give r as a list with 0 for all other blocks"
            )
        logits: Tensor = predictors[str(context.layer)](context.x, kept)
        return logits.to(work_dtype(logits)).log_softmax(-1)

    def relax(self, context: Context, r: int | Tensor) -> Reduction:
        size = sizes_of(context)
        free = context.mergeable.expand(size.shape)
        scores = self.scores(context, size * free)
        drawn = F.gumbel_softmax(scores, hard=True)[..., 0]
        size = torch.where(free, size * drawn, size)

        removed = context.archive.get("removed", size.new_zeros(())) + r
        count = free.sum(1)
        share = (size * free).sum(1) / count
        error = share - (1 - removed / count)
        self.add_loss(context, RATIO_WEIGHT * error.square().mean() / len(self.stages))
        step = Assignment.identity(size.shape[0], size.shape[1], size.device)
        return Reduction(step, weight=torch.ones_like(size).detach(), size=size, archive={"removed": removed})

    @torch.no_grad()
    def select(self, context: Context, r: int | Tensor) -> Reduction:
        assert isinstance(r, int)
        free = context.mergeable.expand(context.x.shape[:2])
        scores = self.scores(context, sizes_of(context) * free)[..., 0]
        kept = free & (rank_among(scores, free) < free.sum(1, keepdim=True) - r)
        return keep_only(context, kept, most_similar(unit_features(context, "tokens"), kept), r)

    def flops(self, tokens: int, head_width: int) -> int:
        if not self._has_parameters():
            return 0
        predictor = next(part for part in self.modules() if isinstance(part, Predictor))
        weights = sum(weight.numel() for weight in predictor.parameters() if weight.dim() > 1)
        return tokens * (weights + tokens * predictor.width)


class Predictor(nn.Module):
    """Scores of tokens from what each one has (local) and what the kept ones have in the mean (global)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half, quarter = max(1, width // 2), max(1, width // 4)
        self.width = width
        self.embed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.decide = nn.Sequential(
            nn.Linear(width, half), nn.GELU(), nn.Linear(half, quarter), nn.GELU(), nn.Linear(quarter, 2)
        )

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        """Return two logits for each token of (B, N, D): to keep it and to drop it.

        Args:
            kept: weight of each token (B, N) in the mean.
        """
        local, shared = self.embed(x).tensor_split([(self.width + 1) // 2], dim=-1)
        weight = kept / kept.sum(1, keepdim=True).clamp(min=1)
        mean = (shared * weight.unsqueeze(-1)).sum(1, keepdim=True).to(local.dtype)
        logits: Tensor = self.decide(torch.cat([local, mean.expand(-1, x.shape[1], -1)], -1))
        return logits
