"""Heads by role: every token is read by its own head, and those that answer the same question are fused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.heads.fusion import FUSE, Fuse, mean, mean_of_softmaxes
from vitrail.heads.pooling import AttentionPool, check_size, linear
from vitrail.tokens import Role, TokenLayout, TokenSpec, check_specs

Pool = Literal["token", "mean", "attention"]

PATCH = Role.PATCH.value
"""Name of the head that reads the pooled patches."""


class Output(NamedTuple):
    """What a model says about pictures.

    Attributes:
        logits: the fused answer (B, classes); the pooled features (B, D) where ``num_classes`` is 0; None where a
            model has task tokens alone.
        by_role: the answer of each head, by the name of its tokens; ``patch`` for pooled patches.
        features: all tokens (B, N, D) after the last norm.
    """

    logits: Tensor | None
    by_role: dict[str, Tensor]
    features: Tensor


class Heads(nn.Module):
    """One linear head for each kind of token that has one, and one answer from those for the model's own classes.

    - Several tokens of one spec share its head; its answer is the mean of their logits. The head is linear, so that
      is also its answer for the mean token.
    - The model's own question is answered by the class tokens (``pool="token"``), or by the patches, pooled by their
      mean or by attention. Class tokens beside pooled patches then have a head only where their spec says
      ``classes``, and it is not fused. The distillation token, where there is one, answers the same question.
    - ``fuse`` makes one answer of the two: ``logits`` is the mean of the logits, ``softmax`` the mean of the
      softmaxes, returned as **log-probabilities** (so that argmax and cross-entropy are right as they are), ``class``
      or ``distillation`` is one of them alone. Class tokens of several specs count as one answer, their mean.
    - Task tokens have a head each and are never fused. Regression heads give plain values, and have no softmax.

    The parameters of a head are named ``NAME.weight`` and ``NAME.bias``.

    Args:
        specs: the model's special tokens.
        width: channels of a token.
        num_classes: outputs of the heads whose spec does not say; 0 for none, so that ``logits`` are features.
        pool: what answers the model's own question.
        fuse: how class (or pooled patches) and distillation become one answer.
        attention: the module that pools, for ``pool="attention"``; by default ``AttentionPool(width)``.
        norm_eps: epsilon of a LayerNorm for the pooled patches; None for no such norm.
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
        self._specs = check_specs(specs)
        self._width, self._pool, self._fuse = width, pool, fuse
        _check_options(pool, fuse, attention, norm_eps)
        sizes = self._sizes(num_classes)
        self.num_classes, self._names = num_classes, tuple(sizes)
        self.attn_pool = (attention or AttentionPool(width)) if pool == "attention" else None
        self.fc_norm = nn.LayerNorm(width, eps=norm_eps) if norm_eps is not None else None
        taken = [spec.name for spec in self._specs if hasattr(self, spec.name)]
        if taken:
            raise InvalidOption(f"{taken[0]!r} cannot name a token: heads use it themselves; choose another name")
        for name, outputs in sizes.items():
            self.add_module(name, linear(width, outputs))

    def forward(self, features: Tensor, layout: TokenLayout) -> Output:
        """Read the tokens (B, N, D), not merged, that a layout describes."""
        self._check(features, layout)
        by_role = {name: self._answers(name, features, layout).mean(1) for name in self._names}
        main, distilled = self._asked()
        if not main and distilled is None:
            return Output(None, by_role, features)
        if (main[0] if main else distilled) not in by_role:
            return Output(self.pooled(features, layout), by_role, features)
        join = mean_of_softmaxes if self._fuse == "softmax" else mean
        parts = [join([by_role[name] for name in main])] if main else []
        if distilled is not None:
            parts.append(by_role[distilled])
        return Output(join(parts), by_role, features)

    def pooled(self, features: Tensor, layout: TokenLayout) -> Tensor:
        """Give what the fused heads read, as one vector a picture (B, D): the mean, where they are several."""
        self._check(features, layout)
        main, distilled = self._asked()
        if not main and distilled is None:
            raise UnsupportedInput("a model of task tokens alone has no pooled features; read the tokens by name")
        parts = [mean([self._read(name, features, layout).mean(1) for name in main])] if main else []
        if distilled is not None:
            parts.append(self._read(distilled, features, layout).mean(1))
        return mean(parts)

    def answers(self, features: Tensor, layout: TokenLayout) -> dict[str, Tensor]:
        """Give what each single token says to the model's own question, one by one: logits (B, classes) by name.

        Tokens that share a head are told apart as ``name[0]``, ``name[1]``, ...; how far they agree says how
        redundant they are. Heads of tasks and heads that regress are left out.
        """
        self._check(features, layout)
        kinds = {spec.name: spec.kind for spec in self._specs if spec.role in (Role.CLASS, Role.DISTILLATION)}
        kinds[PATCH] = "classification"
        found: dict[str, Tensor] = {}
        for name in self._names:
            if kinds.get(name) == "classification":
                each = self._answers(name, features, layout).unbind(1)
                found.update({f"{name}[{i}]" if len(each) > 1 else name: one for i, one in enumerate(each)})
        return found

    def reset(self, num_classes: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        """Start anew with another number of classes; heads whose spec says ``classes`` stay as they are.

        New heads are where the others are and in their dtype, unless it is said. An error changes nothing.
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
        """Give the outputs of every head there is, after checking that those to be fused fit together."""
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 0:
            raise InvalidOption(f"num_classes is a whole number, 0 for no head; got {num_classes!r}")
        sizes = {spec.name: spec.outputs(num_classes) for spec in self._specs}
        if self._pool != "token":
            for spec in self._specs:
                if spec.role is Role.CLASS and spec.classes is None:
                    sizes[spec.name] = 0
            sizes = {PATCH: num_classes, **sizes}
        main, distilled = self._asked()
        _check_fusion(main, distilled, num_classes, self._pool, self._fuse, self._specs)
        together = {name: sizes[name] for name in (*main, *([distilled] if distilled else []))}
        if len(set(together.values())) > 1:
            said = ", ".join(f"{name} {size}" for name, size in together.items())
            raise InvalidOption(
                f"heads that are fused have the same number of outputs; got {said}. Leave classes unset in the specs "
                "of class and distillation tokens, or make the other one a task token"
            )
        return {name: size for name, size in sizes.items() if size}

    def _asked(self) -> tuple[list[str], str | None]:
        """Name the heads that are fused: those of class tokens or patches, and that of the distillation token."""
        classes = [spec.name for spec in self._specs if spec.role is Role.CLASS]
        main = classes if self._pool == "token" else [PATCH]
        distilled = next((spec.name for spec in self._specs if spec.role is Role.DISTILLATION), None)
        if self._fuse == "class":
            return main, None
        return ([] if self._fuse == "distillation" else main), distilled

    def _answers(self, name: str, features: Tensor, layout: TokenLayout) -> Tensor:
        """Give the logits (B, count, classes) of each token that a head reads."""
        logits: Tensor = getattr(self, name)(self._read(name, features, layout))
        return logits

    def _read(self, name: str, features: Tensor, layout: TokenLayout) -> Tensor:
        """Give what a head reads: its tokens, or the pooled patches as one token (B, 1, D)."""
        if name == PATCH:
            patches = features[:, layout.patches]
            x = patches.mean(1) if self.attn_pool is None else self.attn_pool(patches)
            return (x if self.fc_norm is None else self.fc_norm(x)).unsqueeze(1)
        start = 0
        for span in layout.special:
            if span.name == name:
                return features[:, start : start + span.count]
            start += span.count
        raise UnsupportedInput(f"the layout has no tokens named {name!r}: {layout.special}")

    def _check(self, features: Tensor, layout: TokenLayout) -> None:
        if features.ndim != 3 or features.shape[1] != layout.num_tokens or features.shape[2] != self._width:
            raise UnsupportedInput(
                f"heads read (pictures, {layout.num_tokens} tokens, {self._width} channels) for {layout}; "
                f"got {tuple(features.shape)}; unmerge merged tokens first"
            )
        given = [(span.name, span.role, span.count) for span in layout.special]
        for spec in self._specs:
            if (spec.name, spec.role, spec.count) not in given:
                raise UnsupportedInput(
                    f"these heads are for {spec.count} {spec.role} tokens named {spec.name!r}; the layout has "
                    f"{', '.join(f'{count} {role} {name!r}' for name, role, count in given) or 'no special token'}"
                )


def _check_options(pool: str, fuse: str, attention: AttentionPool | None, norm_eps: float | None) -> None:
    if pool not in get_args(Pool):
        raise InvalidOption(f"pool is one of {', '.join(get_args(Pool))}; got {pool!r}")
    if fuse not in FUSE:
        raise InvalidOption(f"fuse is one of {', '.join(FUSE)}; got {fuse!r}")
    if attention is not None and pool != "attention":
        raise InvalidOption(f"a module for attention pooling needs pool='attention'; got pool={pool!r}")
    if norm_eps is not None and pool == "token":
        raise InvalidOption("norm_eps is for pooled patches (pool='mean' or 'attention'); tokens have the model's norm")


def _check_fusion(
    main: Sequence[str],
    distilled: str | None,
    num_classes: int,
    pool: Pool,
    fuse: Fuse,
    specs: Sequence[TokenSpec],
) -> None:
    """Refuse what cannot be fused."""
    if fuse == "distillation" and distilled is None:
        raise InvalidOption(
            "fuse='distillation' answers with the head of the distillation token, and there is none; add "
            "TokenSpec(..., role='distillation') or choose another fuse"
        )
    tasks_alone = distilled is None and num_classes == 0 and any(spec.role is Role.TASK for spec in specs)
    if fuse != "distillation" and not main and not tasks_alone:
        raise InvalidOption(
            f"pool={pool!r} answers with class tokens, and there is none among "
            f"{', '.join(f'{spec.name} ({spec.role})' for spec in specs) or 'no special tokens'}; add one, pool the "
            "patches with pool='mean' or 'attention', or set num_classes=0 for a model of task tokens alone"
        )
    kinds = {spec.kind for spec in specs if spec.name in (*main, distilled)}
    if len(kinds) > 1:
        raise InvalidOption("a head that classifies and one that regresses cannot be fused; use fuse='class'")
    if fuse == "softmax" and "regression" in kinds:
        raise InvalidOption("fuse='softmax' is for classes; a head that regresses has none, so use fuse='logits'")
