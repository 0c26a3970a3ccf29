"""Do the special tokens of a model differ? Redundancy and specialisation of class, distillation, register, task tokens.

Tokens may become copies of each other. Four places show it: their parameters, the tokens in each layer, what heads make
of them, and the patches they look at. Pairs that are as good as equal have collapsed. See ``docs/tokens.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.analysis.attention import Overlap, Spread, overlap, spread, token_maps
from vitrail.analysis.probes.inputs import check_finite
from vitrail.analysis.result import Result
from vitrail.analysis.role_inputs import role_inputs
from vitrail.errors import UnsupportedInput
from vitrail.runtime.layout import token_values
from vitrail.tokens import TokenLayout, TokenSpan, token_names


@dataclass(frozen=True)
class Thresholds(Result):
    """From where on two tokens count as one: two class tokens trained with one loss reached a cosine of 0.999 (DeiT).

    Attributes:
        parameters: cosine of token parameters, at least.
        tokens: cosine of tokens in the last layer, at least; 0.93 is normal there (DeiT's class and distillation).
        attention: cosine of attention maps, at least.
        even: share of the patches from which on a map does not count, since all even maps are alike.
        divergence: Jensen–Shannon divergence of heads in bits, at most; and then also
        disagreement: share of pictures with another answer, at most.
    """

    parameters: float = 0.99
    tokens: float = 0.99
    attention: float = 0.99
    even: float = 0.9
    divergence: float = 0.001
    disagreement: float = 0.01


STATED = Thresholds()


@dataclass(frozen=True, eq=False)
class Cosines(Result):
    """How alike tokens are in each layer.

    Attributes:
        tokens: what the rows and columns are: ``class``, ``register 1``, ``colour``.
        matrix: (L, S, S) mean over pictures of the cosine between two tokens.
        centred: (L, S, S) the same after each token's mean over the pictures is taken away: whether two tokens say the
            same *about pictures*, however their constant parts differ. None for a single picture.
        within: by role, (L,) the mean over all pairs of its tokens; roles with two tokens or more.
        between: by two roles, (L,) the mean over all pairs of a token of the one and a token of the other.
    """

    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    matrix: Tensor
    centred: Tensor | None
    within: dict[str, Tensor]
    between: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class ParameterCosines(Result):
    """How alike the learned tokens are, without position: (S, S). Directions of tokens near zero mean nothing."""

    tokens: tuple[str, ...]
    matrix: Tensor


@dataclass(frozen=True, eq=False)
class Disagreement(Result):
    """How often ``heads``, which are the rows and columns, disagree: (H, H) each.

    Attributes:
        argmax: share of pictures for which two heads name different classes.
        divergence: Jensen–Shannon of their softmaxes, in bits, as mean over pictures: 0 for the same, 1 at most.
    """

    heads: tuple[str, ...]
    argmax: Tensor
    divergence: Tensor


@dataclass(frozen=True)
class Looks(Result):
    """Where tokens look in one layer: how alike their maps are, and how wide each is."""

    tokens: tuple[str, ...]
    overlap: Overlap
    spread: Spread


@dataclass(frozen=True)
class Collapse(Result):
    """Two tokens that are as good as one: in what, which, how alike, and from where on that counts."""

    where: str
    first: str
    second: str
    value: float
    threshold: float


@dataclass(frozen=True)
class Roles(Result):
    """All measures of one model on some pictures; what it does not have is None or empty, and ``notes`` may say why."""

    pictures: int
    cosines: Cosines
    parameters: ParameterCosines | None
    heads: Disagreement | None
    attention: dict[int, Looks]
    thresholds: Thresholds
    collapsed: tuple[Collapse, ...]
    notes: tuple[str, ...] = ()


@torch.no_grad()
def cosine_matrix(x: Tensor) -> Tensor:
    """Give the cosines (..., S, S) between S vectors (..., S, D). Two vectors of zeros are the same: 1."""
    unit = F.normalize(x.detach().double(), dim=-1)
    zero = (unit == 0).all(-1)
    cosine = (unit @ unit.transpose(-1, -2)).clamp(-1, 1)
    return torch.where(zero.unsqueeze(-1) & zero.unsqueeze(-2), 1.0, cosine)


@torch.no_grad()
def token_cosines(tokens: Tensor, layout: TokenLayout, layers: Sequence[int] | None = None) -> Cosines:
    """Compare special tokens (L, B, S, D), in the order of the layout, with each other in each layer."""
    if tokens.ndim != 4 or tokens.shape[2] != layout.num_special or 0 in tokens.shape:
        raise UnsupportedInput(
            f"special tokens are (layers, pictures, {layout.num_special} tokens, channels) for {layout.special}; "
            f"got {tuple(tokens.shape)}"
        )
    check_finite(tokens.transpose(0, 1), "special tokens")
    matrix = torch.stack([cosine_matrix(x).mean(0) for x in tokens]).cpu()
    varying = (x.double() - x.double().mean(0) for x in tokens)
    centred = torch.stack([cosine_matrix(x).mean(0) for x in varying]).cpu() if tokens.shape[1] > 1 else None
    roles = [span.role.value for span in layout.special for _ in range(span.count)]
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for one, other in combinations(range(len(roles)), 2):
        pair = tuple(sorted((roles[one], roles[other]), key=roles.index))
        groups.setdefault(pair, []).append(matrix[:, one, other])
    means = {pair: torch.stack(found).mean(0) for pair, found in groups.items()}
    within = {first: mean for (first, second), mean in means.items() if first == second}
    between = {f"{first}, {second}": mean for (first, second), mean in means.items() if first != second}
    numbers = tuple(range(len(tokens)) if layers is None else layers)
    return Cosines(token_names(layout.special), numbers, matrix, centred, within, between)


@torch.no_grad()
def disagreement(logits: Mapping[str, Tensor]) -> Disagreement:
    """Compare heads by their logits (or log-probabilities) (B, C) for the same pictures and the same classes."""
    shapes = {name: tuple(value.shape) for name, value in logits.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 2 or 0 in shape for shape in shapes.values()):
        raise UnsupportedInput(
            f"heads are compared by logits (pictures, classes) of the same pictures and classes; got {shapes or 'none'}"
        )
    x = torch.stack([value.detach().double() for value in logits.values()])
    check_finite(x.transpose(0, 1), "logits")
    log_p = x.log_softmax(-1)
    answer = x.argmax(-1)
    differs = (answer.unsqueeze(0) != answer.unsqueeze(1)).double().mean(-1)
    bits = torch.zeros_like(differs)
    for one, other in combinations(range(len(x)), 2):
        middle = torch.logaddexp(log_p[one], log_p[other]) - torch.log(x.new_tensor(2.0))
        parts = [(log_p[head].exp() * (log_p[head] - middle)).sum(-1) for head in (one, other)]
        bits[one, other] = bits[other, one] = ((parts[0] + parts[1]) / 2).mean() / torch.log(x.new_tensor(2.0))
    return Disagreement(tuple(logits), differs.cpu(), bits.clamp(0, 1).cpu())


@torch.no_grad()
def looks(attention: Tensor, layout: TokenLayout, tokens: Iterable[TokenSpan] | None = None) -> Looks:
    """Compare where tokens look, by their attention rows (B, H, Q, N) in one layer; by default all special ones."""
    maps = token_maps(attention, layout)
    return Looks(token_names(layout.special if tokens is None else tokens), overlap(maps), spread(maps))


def token_parameters(model: nn.Module, layout: TokenLayout) -> dict[str, Tensor]:
    """Find the learned vectors (D,) of a model's special tokens by name, on the CPU; those not found are left out."""
    values = token_values(find(model))
    found: dict[str, Tensor] = {}
    names = token_names(layout.special)
    for span, where in layout.spans():
        value = values.get((span.role, span.name))
        if value is not None and value.numel() == span.count * value.shape[-1]:
            own = names[where.start : where.stop]
            found.update(zip(own, value.detach().cpu().reshape(span.count, -1), strict=True))
    return found


def collapsed(
    cosines: Cosines,
    parameters: ParameterCosines | None = None,
    heads: Disagreement | None = None,
    attention: Mapping[int, Looks] | None = None,
    thresholds: Thresholds = STATED,
) -> tuple[Collapse, ...]:
    """Name the pairs that are as good as one: of tokens and attention, in the last layer that was looked into."""
    alike = cosines.matrix[-1]
    found = _pairs("tokens", cosines.tokens, alike, alike >= thresholds.tokens, thresholds.tokens)
    if parameters is not None:
        alike = parameters.matrix
        found += _pairs("parameters", parameters.tokens, alike, alike >= thresholds.parameters, thresholds.parameters)
    if heads is not None:
        same = (heads.divergence <= thresholds.divergence) & (heads.argmax <= thresholds.disagreement)
        found += _pairs("heads", heads.heads, heads.divergence, same, thresholds.divergence)
    if attention:
        last = attention[max(attention)]
        chosen = last.spread.effective <= thresholds.even * last.spread.patches
        same = (last.overlap.cosine >= thresholds.attention) & chosen & chosen[:, None]
        found += _pairs("attention", last.tokens, last.overlap.cosine, same, thresholds.attention)
    return tuple(found)


def measure_roles(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    attention_layers: Sequence[int] = (-1,),
    batch_size: int | None = None,
    call: Mapping[str, Any] | None = None,
    thresholds: Thresholds = STATED,
) -> Roles:
    """Run any supported model on pictures and measure how far its special tokens differ.

    Heads are compared where several answer for the same classes (see :func:`vitrail.adapters.head_outputs`), those of
    tokens that were added among them. Tokens are compared in the layers that have all of them; layers of a
    class-attention stage count on from the blocks.

    Args:
        model: the model; it may be merged, or have tokens added to it, and is not changed.
        images: prepared pictures (B, C, H, W), videos (B, C, T, H, W), or batches of them, all of one size.
        attention_layers: layers whose attention is compared, negative numbers counted from the end; () for none.
            Where weights may be negative, as heads that talk have them, none is compared, and ``notes`` says so.
        batch_size, call: as for :func:`vitrail.record`.
        thresholds: what counts as collapsed.
    """
    seen = role_inputs(model, images, attention_layers, batch_size, call)
    cosines = token_cosines(torch.stack([*seen.tokens.values()]), seen.layout, tuple(seen.tokens))
    vectors = token_parameters(model, seen.layout)
    parameters = ParameterCosines(tuple(vectors), cosine_matrix(torch.stack([*vectors.values()]))) if vectors else None
    heads = disagreement(seen.answers) if len(seen.answers) > 1 else None
    attention = {layer: looks(*found) for layer, found in seen.attention.items()}
    pairs = collapsed(cosines, parameters, heads, attention, thresholds)
    pictures = len(next(iter(seen.tokens.values())))
    return Roles(pictures, cosines, parameters, heads, attention, thresholds, pairs, seen.notes)


def _pairs(where: str, names: Sequence[str], values: Tensor, chosen: Tensor, limit: float) -> list[Collapse]:
    return [
        Collapse(where, names[one], names[other], values[one, other].item(), limit)
        for one, other in combinations(range(len(names)), 2)
        if chosen[one, other]
    ]
