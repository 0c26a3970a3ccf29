"""Heads by role: each kind of token has its own linear head; heads for the same classes are fused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import log
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from vitrail._checks import is_int
from vitrail._deprecation import renamed_property
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.heads.pooling import AttentionPool, check_size, linear
from vitrail.tokens import Role, TokenLayout, TokenSpec, check_specs

Pool = Literal["token", "mean", "attention"]
Fuse = Literal["logits", "softmax", "class", "distillation"]

PATCH = Role.PATCH.value
"""Name of the head that reads the pooled patches."""


class Output(NamedTuple):
    """The output of a model with heads by role.

    Attributes:
        logits: fused logits (B, classes); pooled features (B, D) if ``num_classes`` is 0; None with task tokens only.
        by_role: logits of each head, by the name of its tokens; ``patch`` for pooled patches.
        features: all tokens (B, N, D) after the final norm.
        dense: logits (B, classes, H, W) of a dense head; None without one.
    """

    logits: Tensor | None
    by_role: dict[str, Tensor]
    features: Tensor
    dense: Tensor | None = None


class Heads(nn.Module):
    """One linear head for each kind of token, and fused logits for the model's own classes.

    - Tokens of one spec share a head; their logits are averaged.
    - The model's own classes are predicted from the class tokens (``pool="token"``) or from the patches, pooled by
      their mean or by attention. With pooled patches, class tokens have a head only if their spec sets ``classes``,
      and it is not fused. The distillation token, if any, predicts the same classes.
    - ``fuse`` combines the two: ``logits`` is the mean of the logits, ``softmax`` the mean of the softmaxes, returned
      as **log-probabilities** (so that argmax and cross-entropy need no change), ``class`` or ``distillation`` is one
      of them alone. Class tokens of several specs are averaged first.
    - Each task token has its own head and is never fused.

    The parameters of a head are named ``NAME.weight`` and ``NAME.bias``.

    Args:
        specs: the model's special tokens.
        width: channels of a token.
        num_classes: outputs of heads whose spec does not set ``classes``; 0 for none, so that ``logits`` are features.
        pool: where the prediction for the model's own classes comes from.
        fuse: how class (or pooled patches) and distillation logits are combined.
        attention: the pooling module for ``pool="attention"``; by default ``AttentionPool(width)``.
        norm_eps: epsilon of a LayerNorm on the pooled patches; None for no norm.
    """

    def __init__(
        self,
        specs: Iterable[TokenSpec],
        width: int,
        num_classes: int,
        *,
        pool: Pool = "token",
        fuse: Fuse = "logits",
        attention: AttentionPool | None = None,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        check_size("width", width)
        for name, value, choices in (("pool", pool, get_args(Pool)), ("fuse", fuse, get_args(Fuse))):
            if value not in choices:
                raise InvalidOption(f"{name} is one of {', '.join(choices)}; got {value!r}")
        if attention is not None and pool != "attention":
            raise InvalidOption(f"an attention pooling module needs pool='attention'; got pool={pool!r}")
        if norm_eps is not None and pool == "token":
            raise InvalidOption("norm_eps applies to pooled patches only; use pool='mean' or 'attention'")
        self._specs = check_specs(specs)
        self._width, self._pool, self._fuse = width, pool, fuse
        # the fused heads: those of class tokens or patches, and that of the distillation token
        classes = [spec.name for spec in self._specs if spec.role is Role.CLASS] if pool == "token" else [PATCH]
        self._main = [] if fuse == "distillation" else classes
        self._distilled = [spec.name for spec in self._specs if spec.role is Role.DISTILLATION and fuse != "class"]
        sizes = self._sizes(num_classes)
        self.num_classes, self._names = num_classes, tuple(sizes)
        self.attn_pool = (attention or AttentionPool(width)) if pool == "attention" else None
        self.fc_norm = nn.LayerNorm(width, eps=norm_eps) if norm_eps is not None else None
        taken = [spec.name for spec in self._specs if hasattr(self, spec.name)]
        if taken:
            raise InvalidOption(f"{taken[0]!r} cannot name a token: Heads uses it; choose another name")
        for name, outputs in sizes.items():
            self.add_module(name, linear(width, outputs))

    def forward(self, features: Tensor, layout: TokenLayout) -> Output:
        """Compute the output from all tokens (B, N, D), unmerged, in the order of ``layout``."""
        self._check(features, layout)
        by_role = {name: self._logits(name, features, layout).mean(1) for name in self._names}
        fused = [*self._main, *self._distilled]
        if not fused:
            return Output(None, by_role, features)
        if fused[0] not in by_role:
            return Output(self.pooled(features, layout), by_role, features)
        fuse = mean_of_softmaxes if self._fuse == "softmax" else mean
        return Output(self._combine(by_role, fuse), by_role, features)

    def pooled(self, features: Tensor, layout: TokenLayout) -> Tensor:
        """Return the input of the fused heads as one vector per sample (B, D), averaged over the heads."""
        self._check(features, layout)
        fused = [*self._main, *self._distilled]
        if not fused:
            raise UnsupportedInput("a model with task tokens alone has no pooled features; read the tokens by name")
        return self._combine({name: self._read(name, features, layout).mean(1) for name in fused}, mean)

    def _combine(self, values: Mapping[str, Tensor], fuse: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Return the fused values of class heads and distillation head; class heads are fused first."""
        main = [fuse([values[name] for name in self._main])] if self._main else []
        return fuse([*main, *(values[name] for name in self._distilled)])

    def token_logits(self, features: Tensor, layout: TokenLayout) -> dict[str, Tensor]:
        """Return the logits (B, classes) of each single token for the model's own classes, by name.

        Tokens that share a head are named ``name[0]``, ``name[1]``, ...; comparing them shows how redundant they are.
        Task and regression heads are left out.
        """
        self._check(features, layout)
        kinds = {spec.name: spec.kind for spec in self._specs if spec.role in (Role.CLASS, Role.DISTILLATION)}
        kinds[PATCH] = "classification"
        found: dict[str, Tensor] = {}
        for name in self._names:
            if kinds.get(name) == "classification":
                each = self._logits(name, features, layout).unbind(1)
                found.update({f"{name}[{i}]" if len(each) > 1 else name: one for i, one in enumerate(each)})
        return found

    answers = renamed_property("answers", "token_logits")

    def reset(self, num_classes: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        """Replace the heads by new ones with ``num_classes``; heads whose spec sets ``classes`` are kept.

        Device and dtype are those of the present parameters by default. If this raises, nothing has changed.
        """
        sizes = self._sizes(num_classes)
        like = next(self.parameters(), None)
        if like is not None:
            device, dtype = device or like.device, dtype or like.dtype
        kept = {spec.name for spec in self._specs if spec.classes is not None}
        for name in self._names:
            if name not in kept:
                delattr(self, name)
        self.num_classes, self._names = num_classes, tuple(sizes)
        for name, outputs in sizes.items():
            if name not in kept:
                self.add_module(name, linear(self._width, outputs, device, dtype).train(self.training))

    def extra_repr(self) -> str:
        return f"pool={self._pool!r}, fuse={self._fuse!r}, num_classes={self.num_classes}"

    def _sizes(self, num_classes: int) -> dict[str, int]:
        """Return the number of outputs of each head, after checking that the heads can be fused."""
        if not is_int(num_classes, 0):
            raise InvalidOption(f"num_classes must be an integer, 0 for no head; got {num_classes!r}")
        sizes = {spec.name: spec.outputs(num_classes) for spec in self._specs}
        if self._pool != "token":
            unused = [spec.name for spec in self._specs if spec.role is Role.CLASS and spec.classes is None]
            sizes = {PATCH: num_classes, **sizes, **dict.fromkeys(unused, 0)}
        if self._fuse == "distillation" and not self._distilled:
            raise InvalidOption(
                "fuse='distillation' needs a distillation token, and there is none; add "
                "TokenSpec(..., role='distillation') or choose another fuse"
            )
        tasks_alone = not self._distilled and num_classes == 0 and any(one.role is Role.TASK for one in self._specs)
        if self._fuse != "distillation" and not self._main and not tasks_alone:
            raise InvalidOption(
                f"pool={self._pool!r} needs a class token, and there is none among "
                f"{', '.join(f'{spec.name} ({spec.role})' for spec in self._specs) or 'no special tokens'}; add one, "
                "pool the patches with pool='mean' or 'attention', or set num_classes=0 for a model with task tokens "
                "alone"
            )
        fused = {name: sizes[name] for name in (*self._main, *self._distilled)}
        kinds = {spec.kind for spec in self._specs if spec.name in fused}
        if len(kinds) > 1:
            raise InvalidOption("a classification head and a regression head cannot be fused; use fuse='class'")
        if self._fuse == "softmax" and "regression" in kinds:
            raise InvalidOption("fuse='softmax' needs classification heads; use fuse='logits' for regression")
        if len(set(fused.values())) > 1:
            given = ", ".join(f"{name} {size}" for name, size in fused.items())
            raise InvalidOption(
                f"fused heads must have the same number of outputs; got {given}. Leave classes unset in the specs of "
                "class and distillation tokens, or use a task token"
            )
        return {name: size for name, size in sizes.items() if size}

    def _logits(self, name: str, features: Tensor, layout: TokenLayout) -> Tensor:
        """Return the logits (B, count, classes) of each token of a head."""
        logits: Tensor = getattr(self, name)(self._read(name, features, layout))
        return logits

    def _read(self, name: str, features: Tensor, layout: TokenLayout) -> Tensor:
        """Return the input of a head: its tokens (B, count, D), or the pooled patches (B, 1, D)."""
        if name == PATCH:
            patches = features[:, layout.patches]
            x = patches.mean(1) if self.attn_pool is None else self.attn_pool(patches)
            return (x if self.fc_norm is None else self.fc_norm(x)).unsqueeze(1)
        where = next(where for span, where in layout.spans() if span.name == name)
        return features[:, where.start : where.stop]

    def _check(self, features: Tensor, layout: TokenLayout) -> None:
        if features.ndim != 3 or features.shape[1] != layout.num_tokens or features.shape[2] != self._width:
            raise UnsupportedInput(
                f"expected features of shape (batch, {layout.num_tokens} tokens, {self._width} channels) for {layout}; "
                f"got {tuple(features.shape)}; unmerge merged tokens first"
            )
        given = [(span.name, span.role, span.count) for span in layout.special]
        for spec in self._specs:
            if (spec.name, spec.role, spec.count) not in given:
                raise UnsupportedInput(
                    f"these heads need {spec.count} {spec.role} tokens named {spec.name!r}; the layout has "
                    f"{', '.join(f'{count} {role} {name!r}' for name, role, count in given) or 'no special token'}"
                )


def mean(parts: Sequence[Tensor]) -> Tensor:
    """Return the mean of tensors of the same shape; a single tensor is returned unchanged."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).mean(0)


def mean_of_softmaxes(logits: Sequence[Tensor]) -> Tensor:
    """Return the mean of the softmaxes of logits (B, C) as log-probabilities (B, C).

    >>> one, other = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0986123]])
    >>> mean_of_softmaxes([one, other]).exp()
    tensor([[0.3750, 0.6250]])
    """
    logs = torch.stack([part.log_softmax(-1) for part in logits])
    return logs[0] if len(logits) == 1 else torch.logsumexp(logs, 0) - log(len(logits))
