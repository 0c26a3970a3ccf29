"""Redundancy and specialization of special tokens: class, distillation, register and task tokens.

Tokens may become copies of each other. Four measures show it: cosines of their parameters, cosines of the tokens in
each layer, disagreement of their heads, and overlap of their attention. Pairs that are nearly equal have collapsed.
See ``docs/tokens.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail._arguments import checked, fitting
from vitrail.adapters import find
from vitrail.analysis._inputs import check_finite, check_shape
from vitrail.analysis.attention import Overlap, Spread, overlap, spread, token_maps
from vitrail.analysis.result import Result
from vitrail.analysis.roles.recording import record_roles
from vitrail.errors import UnsupportedInput
from vitrail.runtime.layout import token_values
from vitrail.tokens import TokenLayout, TokenSpan, token_names


class Thresholds(Result):
    """Limits for collapsed pairs. Two class tokens trained with one loss reached a cosine of 0.999 (DeiT).

    Attributes:
        tokens: least cosine of tokens in the last layer; 0.93 is normal there (DeiT's class and distillation).
        even: maps that cover more than this share of the patches are ignored, since all uniform maps are alike.
    """

    parameters: float = 0.99  # least cosine of token parameters
    tokens: float = 0.99
    attention: float = 0.99  # least cosine of attention maps
    even: float = 0.9
    divergence: float = 0.001  # largest Jensen–Shannon divergence of heads in bits, together with
    disagreement: float = 0.01  # largest share of images with different predictions


DEFAULT_THRESHOLDS = Thresholds()


class Cosines(Result, eq=False):
    """Cosines between tokens in each layer.

    Attributes:
        centred: (L, S, S) the same after subtracting each token's mean over the images: whether two tokens hold the
            same *about images*, even if their constant parts differ. None for a single image.
    """

    tokens: tuple[str, ...]  # names of the rows and columns: ``class``, ``register 1``, ``color``
    layers: tuple[int, ...]  # indices of the L layers
    matrix: Tensor  # (L, S, S) mean over images of the cosine between two tokens
    centred: Tensor | None
    within: dict[str, Tensor]  # by role, (L,) mean over all pairs of its tokens; roles with two or more tokens
    between: dict[str, Tensor]  # by pair of roles, (L,) mean over all pairs with one token of each


class ParameterCosines(Result, eq=False):
    """Cosines between learned tokens, without position: (S, S). Directions of tokens near zero mean nothing."""

    tokens: tuple[str, ...]
    matrix: Tensor


class Disagreement(Result, eq=False):
    """Disagreement of heads: (H, H) each.

    Attributes:
        divergence: mean over images of the Jensen–Shannon divergence of their softmax, in bits: 0 for equal, at most 1.
    """

    heads: tuple[str, ...]  # names of the rows and columns
    argmax: Tensor  # share of images for which two heads predict different classes
    divergence: Tensor


class TokenAttention(Result):
    """Attention of tokens to patches in one layer: overlap between tokens, and spread of each."""

    tokens: tuple[str, ...]
    overlap: Overlap
    spread: Spread


class Collapse(Result):
    """A pair of tokens that are nearly equal: in which measure, how similar, and the threshold."""

    where: str
    first: str
    second: str
    value: float
    threshold: float


class Roles(Result):
    """All measures of one model on some images; None or empty for what it does not have, explained by ``notes``."""

    images: int
    cosines: Cosines
    parameters: ParameterCosines | None
    heads: Disagreement | None
    attention: dict[int, TokenAttention]
    thresholds: Thresholds
    collapsed: tuple[Collapse, ...]
    notes: tuple[str, ...] = ()


@fitting
@torch.no_grad()
def cosine_matrix(x: Tensor) -> Tensor:
    """Return the cosines (..., S, S) between S vectors (..., S, D); 1 for two vectors of zeros."""
    unit = F.normalize(x.detach().double(), dim=-1)
    zero = (unit == 0).all(-1)
    cosine = (unit @ unit.transpose(-1, -2)).clamp(-1, 1)
    return torch.where(zero.unsqueeze(-1) & zero.unsqueeze(-2), 1.0, cosine)


@fitting
@torch.no_grad()
def token_cosines(tokens: Tensor, layout: TokenLayout, layers: Sequence[int] | None = None) -> Cosines:
    """Return the cosines between special tokens (L, B, S, D), in the order of the layout, in each layer."""
    check_shape(tokens, "special tokens", f"L B {layout.num_special} D", f", for {layout.special}")
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


@fitting
@torch.no_grad()
def disagreement(logits: Mapping[str, Tensor]) -> Disagreement:
    """Compare heads by their logits (or log-probabilities) (B, C) for the same images and classes."""
    shapes = {name: tuple(value.shape) for name, value in logits.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 2 or 0 in shape for shape in shapes.values()):
        raise UnsupportedInput(f"heads are compared by logits (images, classes) of one shape; got {shapes or 'none'}")
    x = torch.stack([value.detach().double() for value in logits.values()])
    check_finite(x.transpose(0, 1), "logits")
    log_p = x.log_softmax(-1)
    predicted = x.argmax(-1)
    differs = (predicted.unsqueeze(0) != predicted.unsqueeze(1)).double().mean(-1)
    bits = torch.zeros_like(differs)
    for one, other in combinations(range(len(x)), 2):
        middle = torch.logaddexp(log_p[one], log_p[other]) - math.log(2)
        parts = [(log_p[head].exp() * (log_p[head] - middle)).sum(-1) for head in (one, other)]
        bits[one, other] = bits[other, one] = ((parts[0] + parts[1]) / 2).mean() / math.log(2)
    return Disagreement(tuple(logits), differs.cpu(), bits.clamp(0, 1).cpu())


@fitting
@torch.no_grad()
def token_attention(
    attention: Tensor, layout: TokenLayout, tokens: Iterable[TokenSpan] | None = None
) -> TokenAttention:
    """Compare the attention rows (B, H, Q, N) of tokens in one layer; by default of all special tokens."""
    maps = token_maps(attention, layout)
    return TokenAttention(token_names(layout.special if tokens is None else tokens), overlap(maps), spread(maps))


@fitting
def token_parameters(model: nn.Module, layout: TokenLayout) -> dict[str, Tensor]:
    """Return the learned vectors (D,) of a model's special tokens by name, on the CPU, as far as they are found."""
    values = token_values(find(model))
    found: dict[str, Tensor] = {}
    names = token_names(layout.special)
    for span, where in layout.spans():
        value = values.get((span.role, span.name))
        if value is not None and value.numel() == span.count * value.shape[-1]:
            own = names[where.start : where.stop]
            found.update(zip(own, value.detach().cpu().reshape(span.count, -1), strict=True))
    return found


@fitting
def find_collapsed(
    cosines: Cosines,
    parameters: ParameterCosines | None = None,
    heads: Disagreement | None = None,
    attention: Mapping[int, TokenAttention] | None = None,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
) -> tuple[Collapse, ...]:
    """Return the pairs that are nearly equal; tokens and attention are compared in their last layer."""
    cosine = cosines.matrix[-1]
    found = _pairs("tokens", cosines.tokens, cosine, cosine >= thresholds.tokens, thresholds.tokens)
    if parameters is not None:
        cosine, limit = parameters.matrix, thresholds.parameters
        found += _pairs("parameters", parameters.tokens, cosine, cosine >= limit, limit)
    if heads is not None:
        same = (heads.divergence <= thresholds.divergence) & (heads.argmax <= thresholds.disagreement)
        found += _pairs("heads", heads.heads, heads.divergence, same, thresholds.divergence)
    if attention:
        last = attention[max(attention)]
        narrow = last.spread.effective <= thresholds.even * last.spread.patches
        same = (last.overlap.cosine >= thresholds.attention) & narrow & narrow[:, None]
        found += _pairs("attention", last.tokens, last.overlap.cosine, same, thresholds.attention)
    return tuple(found)


@checked
def measure_roles(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    attention_layers: Sequence[int] = (-1,),
    batch_size: int | None = None,
    call: Mapping[str, Any] | None = None,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
) -> Roles:
    """Run any supported model on images and measure how far its special tokens differ.

    Heads are compared if several predict the same classes (see :func:`vitrail.adapters.head_outputs`), including those
    of added tokens. Tokens are compared in the layers that have all of them; layers of a class-attention stage are
    numbered after the blocks.

    Args:
        model: the model; it may be merged or have added tokens, and is not changed.
        images: preprocessed images (B, C, H, W), videos (B, C, T, H, W), or batches of them, all of one size.
        attention_layers: layers whose attention is compared, negative numbers counted from the end; () for none.
            Attention of talking heads may be negative and is not compared; see ``notes``.
        batch_size, call: as for :func:`vitrail.record`.
        thresholds: limits for collapsed pairs.
    """
    seen = record_roles(model, images, attention_layers, batch_size, call)
    cosines = token_cosines(torch.stack([*seen.tokens.values()]), seen.layout, tuple(seen.tokens))
    vectors = token_parameters(model, seen.layout)
    parameters = ParameterCosines(tuple(vectors), cosine_matrix(torch.stack([*vectors.values()]))) if vectors else None
    heads = disagreement(seen.logits) if len(seen.logits) > 1 else None
    attention = {layer: token_attention(*found) for layer, found in seen.attention.items()}
    pairs = find_collapsed(cosines, parameters, heads, attention, thresholds)
    count = len(next(iter(seen.tokens.values())))
    return Roles(count, cosines, parameters, heads, attention, thresholds, pairs, seen.notes)


def _pairs(where: str, names: Sequence[str], values: Tensor, chosen: Tensor, limit: float) -> list[Collapse]:
    return [
        Collapse(where, names[one], names[other], values[one, other].item(), limit)
        for one, other in combinations(range(len(names)), 2)
        if chosen[one, other]
    ]
