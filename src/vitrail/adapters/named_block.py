"""Blocks described by a table of names: one class implements every method over it.

Most libraries' blocks differ in names alone. `BlockNames` holds dotted paths from a block to its parts and a few
choices; `NamedBlock` attends, feeds, finds the dense form and lists the modules that costs are computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, BlockCall, DenseBlock, DenseMlp, active_drops, is_plain
from vitrail.adapters.position import rotate


@dataclass(frozen=True)
class MlpNames:
    """Paths inside an MLP of two linear layers with a GELU between them, for the fused (dense) path.

    Attributes:
        classes: names of the MLP classes that compute exactly this, in the library's own modules.
        fc1, fc2: the linear layers, paths from the block like all that follow.
        act: activation module; None where the MLP calls the exact GELU as a function.
        norm: norm between the two layers, which must be the identity.
        drops: dropouts after the activation, and after the second layer.
    """

    classes: tuple[str, ...]
    fc1: str = "mlp.fc1"
    fc2: str = "mlp.fc2"
    act: str | None = None
    norm: str | None = None
    drops: tuple[str | None, str | None] = (None, None)


@dataclass(frozen=True)
class BlockNames:
    """Where the parts of a block are: dotted paths from the block, and a few choices.

    A part that is None in a block, such as a gate that is switched off, is skipped. A path that ends in ``?`` names a
    part that not every version of the library has; it counts as None where it is missing.

    Attributes:
        norm1, norm2: norms of the attention half and of the MLP half.
        qkv: one packed projection, or those of queries, keys and values. A parameter called ``…_weight`` is applied
            as a linear layer, with the matching ``…_bias`` (``nn.MultiheadAttention``).
        proj: output projection of attention.
        mlp: the MLP: one module, or several in order.
        heads, head_dim: number of heads and channels of one; None for the projection's inputs divided by the heads.
        attention: attention module, whose mode decides about dropout; None where its parts belong to the block itself.
        q_norm, k_norm: norms of the queries and keys of each head.
        inner_norm: norm of the concatenated heads, before the projection.
        gate: linear layer whose sigmoid scales the concatenated heads.
        proj_drop: dropout after the projection.
        after_attend, after_feed: modules applied, or parameters multiplied, in order, before the output of attention
            or MLP is added: layer scale, dropout, drop path.
        post_norm: whether the norms act on the output of each half instead of its input.
        scale: factor of the attention scores; None for 1/√d.
        attention_dropout: dropout of the attention weights, a module or a rate.
        rotate_half: whether rotary pairs are half a head apart (else neighbors): a choice, or where the block keeps it.
        prefix: where the block counts the tokens before the patches, if it treats them differently.
        tokens: name of the block's first argument.
        arguments: names of its other arguments in order, each with its meaning: mask, causal, rope, cos_sin for a
            rotation table in two tensors, or grid.
        among_special: whether masks hide special tokens alone and treat all patches alike.
        dense: the MLP in detail, for the fused path; None where it is never two linear layers with a GELU between.
    """

    norm1: str
    qkv: str | tuple[str, str, str]
    proj: str
    norm2: str
    mlp: str | tuple[str, ...]
    heads: str
    head_dim: str | None = None
    attention: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    inner_norm: str | None = None
    gate: str | None = None
    proj_drop: str | None = None
    after_attend: tuple[str, ...] = ()
    after_feed: tuple[str, ...] = ()
    post_norm: bool = False
    scale: str | None = None
    attention_dropout: str | None = None
    rotate_half: str | bool = True
    prefix: str | None = None
    tokens: str = "x"
    arguments: tuple[tuple[str, str], ...] = ()
    among_special: bool = False
    dense: MlpNames | None = None

    @property
    def qkv_paths(self) -> tuple[str, ...]:
        """Paths of the projections to queries, keys and values: one, or three."""
        return (self.qkv,) if isinstance(self.qkv, str) else self.qkv


TIMM_NAMES = BlockNames(
    norm1="norm1",
    qkv="attn.qkv",
    proj="attn.proj",
    norm2="norm2",
    mlp="mlp",
    heads="attn.num_heads",
    attention="attn",
    q_norm="attn.q_norm",
    k_norm="attn.k_norm",
    proj_drop="attn.proj_drop",
    after_attend=("ls1", "drop_path1"),
    after_feed=("ls2", "drop_path2"),
    attention_dropout="attn.attn_drop",
    dense=MlpNames(("Mlp",), drops=("mlp.drop1", "mlp.drop2")),
)
"""timm's names of the parts of a block, which Vitrail's own models share."""


class NamedBlock(BlockAdapter):
    """A block described by its `BlockNames`."""

    def __init__(self, names: BlockNames) -> None:
        self.names = names
        self.input_name = names.tokens

    def read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        given = {**dict(zip((name for name, _ in self.names.arguments), args, strict=False)), **kwargs}
        found = {meaning: given[name] for name, meaning in self.names.arguments if name in given}
        causal = bool(found.get("causal", False))
        rope, pair = found.get("rope"), found.get("cos_sin")
        if pair is not None:
            rope = torch.cat([pair[1], pair[0]], -1)
        return BlockCall(found.get("mask"), causal, rope, self.names.among_special, found.get("grid"))

    def attend_norm(self, block: nn.Module, x: Tensor) -> Tensor:
        return x if self.names.post_norm else find_part(block, self.names.norm1)(x)

    def qkv(self, block: nn.Module, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        names, (batch, length, _), (_, width) = self.names, h.shape, self.head_shape(block)
        projected = self.project(block, h)
        if isinstance(projected, Tensor):
            heads = projected.shape[2] // (3 * width)
            q, k, v = projected.reshape(batch, length, 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (part.reshape(batch, length, part.shape[2] // width, width).transpose(1, 2) for part in projected)
        return _apply(block, names.q_norm, q), _apply(block, names.k_norm, k), v

    def project(self, block: nn.Module, h: Tensor) -> Tensor | Sequence[Tensor]:
        """Project tokens (B, N, D) to queries, keys and values: packed (B, N, 3·H·d), or three of (B, N, H·d)."""
        projected = [linear_at(block, path)(h) for path in self.names.qkv_paths]
        return projected[0] if len(projected) == 1 else projected

    def rotate(self, block: nn.Module, x: Tensor, table: Tensor) -> Tensor:
        half = self.names.rotate_half
        return rotate(x, table, interleaved=not (find_part(block, half) if isinstance(half, str) else half))

    def attention_scale(self, block: nn.Module) -> float | None:
        return None if self.names.scale is None else find_part(block, self.names.scale)

    def attention_dropout(self, block: nn.Module) -> float:
        if self.names.attention_dropout is None or not self._attention(block).training:
            return 0.0
        dropout = find_part(block, self.names.attention_dropout)
        rate: float = getattr(dropout, "p", dropout)
        return rate

    def attend_output(self, block: nn.Module, attended: Tensor, h: Tensor) -> Tensor:
        names = self.names
        y = _apply(block, names.inner_norm, attended)
        gate = None if names.gate is None else find_part(block, names.gate)
        if gate is not None:
            y = y * gate(h).sigmoid()
        return _apply(block, names.proj_drop, find_part(block, names.proj)(y))

    def attend_branch(self, block: nn.Module, y: Tensor) -> Tensor:
        return self._branch(block, self.names.norm1, self.names.after_attend, y)

    def feed_norm(self, block: nn.Module, x: Tensor) -> Tensor:
        return x if self.names.post_norm else find_part(block, self.names.norm2)(x)

    def feed(self, block: nn.Module, h: Tensor) -> Tensor:
        for part in self.feed_parts(block):
            h = part(h)
        return h

    def feed_branch(self, block: nn.Module, y: Tensor) -> Tensor:
        return self._branch(block, self.names.norm2, self.names.after_feed, y)

    def attend_parts(self, block: nn.Module) -> Sequence[nn.Module]:
        names = self.names
        if names.attention is not None:
            return (find_part(block, names.attention),)
        paths = (*names.qkv_paths, names.gate, names.proj)
        found = (find_part(block, path) for path in paths if path is not None)
        return [part for part in found if part is not None]

    def attend_last(self, block: nn.Module) -> Sequence[nn.Module]:
        paths = (self.names.proj, self.names.attention)
        found = [find_part(block, path) for path in paths if path is not None]
        return [part for part in found if part is not None] or super().attend_last(block)

    def feed_parts(self, block: nn.Module) -> Sequence[nn.Module]:
        paths = (self.names.mlp,) if isinstance(self.names.mlp, str) else self.names.mlp
        return [find_part(block, path) for path in paths]

    def head_shape(self, block: nn.Module) -> tuple[int, int]:
        heads = find_part(block, self.names.heads)
        if self.names.head_dim is not None:
            return heads, find_part(block, self.names.head_dim)
        return heads, find_part(block, self.names.proj).in_features // heads

    def shift_prefix(self, block: nn.Module, by: int) -> None:
        if self.names.prefix is not None:
            owner, _, name = self.names.prefix.rpartition(".")
            part = find_part(block, owner) if owner else block
            setattr(part, name, getattr(part, name) + by)

    def dense(self, block: nn.Module) -> DenseBlock | None:
        names, find = self.names, partial(find_part, block)
        norm1, norm2 = find(names.norm1), find(names.norm2)
        plain = all(isinstance(norm, nn.LayerNorm) and _is_plain_norm(block, norm) for norm in (norm1, norm2))
        gammas = _gamma(block, names.after_attend), _gamma(block, names.after_feed)
        if names.post_norm or not self.fused or not plain or any(gamma is _UNKNOWN for gamma in gammas):
            return None
        if self.attention_dropout(block) or any(self._changes(half) for half in _HALVES):
            return None
        projects = not self._changes("project") and not self._changes("qkv") and self._lacks(block, "q_norm", "k_norm")
        ends = not self._changes("attend_output") and self._lacks(block, "inner_norm", "gate")
        return DenseBlock(
            heads=self.head_shape(block)[0],
            norm1=norm1,
            norm2=norm2,
            gammas=gammas,
            scale=self.attention_scale(block),
            drops=(
                _drops(block, *((names.proj_drop,) if ends else ()), *names.after_attend),
                _drops(block, *names.after_feed),
            ),
            qkv=tuple(linear_at(block, path) for path in names.qkv_paths) if projects else None,
            proj=find(names.proj) if ends else None,
            mlp=None if self._changes("feed") else self._dense_mlp(block),
        )

    def _dense_mlp(self, block: nn.Module) -> DenseMlp | None:
        """Return an MLP that is nothing but its matrices and a GELU, with no hook on any of its parts."""
        mlp, find = self.names.dense, partial(find_part, block)
        if mlp is None or not isinstance(self.names.mlp, str):
            return None
        feed = find(self.names.mlp)
        if type(feed).__name__ not in mlp.classes or not _is_own(block, feed):
            return None
        form = "none" if mlp.act is None else _gelu_form(find(mlp.act))
        linears = find(mlp.fc1), find(mlp.fc2)
        dense = all(is_plain(linear, *_LINEAR) and linear.bias is not None for linear in linears)
        norm = None if mlp.norm is None else find(mlp.norm)
        if not dense or form is None or not is_plain(feed, type(feed)) or not (norm is None or _is_idle(norm)):
            return None
        return DenseMlp(*linears, form, (_drops(block, mlp.drops[0]), _drops(block, mlp.drops[1])))

    def _changes(self, method: str) -> bool:
        """Return whether a subclass has a method of its own."""
        return getattr(type(self), method) is not getattr(NamedBlock, method)

    def _lacks(self, block: nn.Module, *names: str) -> bool:
        """Return whether a block has none of these parts."""
        paths = [getattr(self.names, name) for name in names]
        parts = [find_part(block, path) for path in paths if path is not None]
        return all(part is None or _is_idle(part) for part in parts)

    def _attention(self, block: nn.Module) -> nn.Module:
        return block if self.names.attention is None else find_part(block, self.names.attention)

    def _branch(self, block: nn.Module, norm: str, paths: tuple[str, ...], y: Tensor) -> Tensor:
        if self.names.post_norm:
            y = find_part(block, norm)(y)
        for path in paths:
            y = _apply(block, path, y)
        return y


def find_part(block: nn.Module, path: str) -> Any:
    """Return the object at a dotted path, resolved at each call: LoRA or quantization may replace a part."""
    if not path.endswith("?"):
        return attrgetter(path)(block)
    owner, _, name = path.removesuffix("?").rpartition(".")
    return getattr(attrgetter(owner)(block) if owner else block, name, None)


def linear_at(block: nn.Module, path: str) -> Callable[[Tensor], Tensor]:
    """Return the projection at a path: a module, or a function that applies a parameter called ``…_weight``."""
    if not path.endswith("_weight"):
        projection: nn.Module = find_part(block, path)
        return projection
    owner, _, name = path.rpartition(".")
    holder, bias = find_part(block, owner) if owner else block, name.removesuffix("weight") + "bias"
    return lambda h: F.linear(h, getattr(holder, name), getattr(holder, bias))


def _apply(block: nn.Module, path: str | None, y: Tensor) -> Tensor:
    """Apply the module at a path, or multiply by the parameter there; do nothing where there is none."""
    part = None if path is None else find_part(block, path)
    if part is None:
        return y
    return part(y) if callable(part) else part * y


_HALVES = ("attend_norm", "attend_branch", "feed_norm", "feed_branch")
"""Methods that a dense block replaces by kernels."""


def _is_plain_norm(block: nn.Module, norm: nn.LayerNorm) -> bool:
    return is_plain(norm, type(norm)) and _is_own(block, norm) and norm.bias is not None


def _is_idle(part: nn.Module) -> bool:
    return is_plain(part, nn.Identity)


_LINEAR = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
_UNKNOWN = nn.Identity()
"""Stands for a layer scale that is not a plain factor per channel."""


def _gelu_form(activation: nn.Module) -> str | None:
    """Return which form of GELU a module computes, as in ``torch.nn.functional.gelu``; None for anything else."""
    if is_plain(activation, nn.GELU):
        return str(activation.approximate)
    return _GELU_FORMS.get(type(activation).__name__)


_GELU_FORMS = {"GELUActivation": "none", "GELUTanh": "tanh", "PytorchGELUTanh": "tanh"}
"""Forms of GELU by the names of transformers' classes."""


def _gamma(block: nn.Module, paths: tuple[str, ...]) -> Any:
    """Return the layer scale among the parts of a branch: None where there is none."""
    found: list[Any] = []
    for path in paths:
        part = find_part(block, path)
        if isinstance(part, Tensor):
            found.append(part)
        elif part is not None and any(True for _ in part.parameters()):
            scales = list(part.parameters())
            own = len(scales) == 1 and _is_own(block, part) and is_plain(part, type(part))
            found.append(scales[0] if own else _UNKNOWN)
    return None if not found else found[0] if len(found) == 1 else _UNKNOWN


def _drops(block: nn.Module, *paths: str | None) -> tuple[nn.Module, ...]:
    """Return the active parts without parameters among those at these paths."""
    found = [find_part(block, path) for path in paths if path is not None]
    return active_drops(
        *(part for part in found if isinstance(part, nn.Module) and not any(True for _ in part.parameters()))
    )


def _is_own(block: nn.Module, part: nn.Module) -> bool:
    """Return whether a part's class is one of torch's, or of the library that the block comes from."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(block).__mro__}
    return type(part).__module__.partition(".")[0] in {"torch", *libraries}
