"""ToMe: Token Merging (Bolya et al., ICLR 2023)."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from vitrail.errors import InvalidOption
from vitrail.merging.bipartite import Protected, front_edges, mask_edges
from vitrail.merging.features import Features, check_features, compute_features
from vitrail.merging.method import Context, Method, Reduction, register_method


@register_method("tome")
class ToMe(Method):
    """Merge the r most similar pairs of a bipartite matching, by the mean key over heads.

    Args:
        features: features to compare, one name of ``vitrail.merging.FEATURES`` or several with weights.
        place: reduce tokens ``"between"`` attention and MLP as in the paper, or ``"before"`` attention, which then
            runs on merged tokens, too. With keys, these are computed twice; with ``features="tokens"`` they are not.
    """

    places_groups = True
    takes_padding = True

    def __init__(self, features: Features = "keys", place: Literal["before", "between"] = "between") -> None:
        super().__init__()
        self.features = check_features(features)
        if place not in ("before", "between"):
            raise InvalidOption(f"place is 'before' or 'between' (attention and MLP); got {place!r}")
        self.place = place  # type: ignore[misc]

    @property
    def twin(self) -> str | None:
        if self.place == "before":
            return None
        return {"keys": "tome", "queries": "features", "values": "features"}.get(str(self.features))

    @property
    def options(self) -> dict[str, Any]:
        given = {"features": self.features, "place": self.place}
        return {name: value for name, value in given.items() if value not in ("keys", "between")}

    def capacity(self, tokens: int, protected: Protected) -> int:
        return front_edges(tokens, protected) if isinstance(protected, int) else int(mask_edges(protected).min())

    def matched(self, context: Context) -> Tensor:
        return {"queries": context.q, "values": context.v}.get(str(self.features), context.k)

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        features = compute_features(context, self.features).detach()
        return Reduction(context.match(features, r))

    def flops(self, tokens: int, head_width: int) -> int:
        return ((tokens + 1) // 2) * (tokens // 2) * head_width
