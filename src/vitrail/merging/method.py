"""The interface of merging methods: its inputs, its result, and its registration.

A method decides, for one block, which tokens become one. Everything else (proportional attention, sizes, unmerging,
tracking, costs, schedules) is written once for all methods. A complete method:

>>> @register_method("halve")
... class Halve(Method):
...     '''Merge neighbors in pairs.'''
...
...     def reduce(self, context, r):
...         pairs = torch.arange(context.x.shape[1]) // 2
...         return Reduction(Assignment(pairs.expand(context.x.shape[:2]), int(pairs.max()) + 1))

Shapes: B batch, N tokens, M tokens after the reduction, H heads, d channels of a head, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vitrail._checks import shown
from vitrail.errors import InvalidOption
from vitrail.merging.assignment import Assignment
from vitrail.merging.bipartite import REFERENCE, Matcher, Protected, protected_mask

Projections = tuple[Tensor, Tensor, Tensor]


@dataclass(eq=False)
class Context:
    """The inputs of a method in one block.

    Attributes:
        layer: index of the block.
        depth: number of blocks.
        grid: patch grid (t, h, w) of the input before any merge.
        x: tokens to reduce (B, N, D): the block's input, or what attention returned (``Method.place``).
        size: number of members of each token (B, N); None while all are 1. Size 0 marks padding.
        protected: tokens that must not merge: a number in front, or a mask (1 or B, N).
        memory: the method's own tensors (B, N, …), merged along with the tokens.
        archive: the method's own tensors, carried unchanged through the pass.
        guide: maps from outside (B, N, …), such as a saliency map; 0 for special tokens, merged along with the tokens.
        padded: whether images of the batch may keep different numbers of tokens.
        planned: number of tokens planned to merge in this block; None where no number was requested.
        class_token: position of the first class token; None for models without one.
        norm: computes the tokens as the block's attention receives them; called on first use.
        project: computes queries, keys and values; called on first use.
        rotate: computes queries and keys with rotary position from these.
        attend: computes attention weights; see :meth:`attention`.
        kernels: the steps of a matching as kernels, where these run.
    """

    layer: int
    grid: tuple[int, int, int]
    x: Tensor
    size: Tensor | None = None
    protected: Protected = 0
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    archive: Mapping[str, Tensor] = field(default_factory=dict)
    guide: Mapping[str, Tensor] = field(default_factory=dict)
    padded: bool = False
    planned: int | None = None
    class_token: int | None = None
    depth: int = 1
    norm: Callable[[], Tensor] | None = None
    project: Callable[[], Projections] | None = None
    rotate: Callable[[Projections], tuple[Tensor, Tensor]] | None = None
    attend: Callable[[Sequence[int] | None], Tensor] | None = None
    kernels: Matcher | None = None
    _normed: Tensor | None = None
    _projected: Projections | None = None
    _rotated: tuple[Tensor, Tensor] | None = None
    _mergeable: Tensor | None = None

    @property
    def normed(self) -> Tensor:
        """The input of the block's attention (B, N, D), after its first norm."""
        if self._normed is None:
            if self.norm is None:
                raise ValueError("this context has no normed tokens")
            self._normed = self.norm()
        return self._normed

    @property
    def q(self) -> Tensor:
        """Queries (B, H, N, d), after their norm and before rotary position."""
        return self._qkv()[0]

    @property
    def k(self) -> Tensor:
        """Keys (B, H, N, d), after their norm and before rotary position; with grouped queries H is smaller."""
        return self._qkv()[1]

    @property
    def v(self) -> Tensor:
        """Values (B, H, N, d)."""
        return self._qkv()[2]

    @property
    def rotated_q(self) -> Tensor:
        """Queries with rotary position; ``q`` for models without."""
        return self._qk_rotated()[0]

    @property
    def rotated_k(self) -> Tensor:
        """Keys with rotary position; ``k`` for models without."""
        return self._qk_rotated()[1]

    def attention(self, queries: Sequence[int] | None = None) -> Tensor:
        """Compute attention weights on demand; the block itself keeps its fused kernel.

        Returns the rows of these queries (B, H, len(queries), N), or, without queries, the mean attention that each
        token receives from all tokens present (B, H, N).
        """
        if self.attend is None:
            raise ValueError("this context has no attention")
        return self.attend(queries)

    @property
    def matcher(self) -> Matcher:
        """The steps of a matching: the reference functions, or kernels that do the same."""
        return REFERENCE if self.kernels is None else self.kernels

    def match(self, metric: Tensor, r: int | Tensor) -> Assignment:
        """Merge the ``r`` most similar pairs of an even and an odd token by features (B, N, D)."""
        return self.matcher.match(metric, r, self.protected, self.present)

    def match_scores(self, scores: Tensor, r: int | Tensor) -> Assignment:
        """Merge the ``r`` best pairs by scores (B, A, C) of even and odd tokens; −inf where either cannot merge."""
        return self.matcher.match_scores(scores, r, self.protected, self.present)

    @property
    def present(self) -> Tensor | None:
        """False for padding (B, N); None where there is none."""
        return self.size > 0 if self.padded and self.size is not None else None

    @property
    def mergeable(self) -> Tensor:
        """True for tokens (B or 1, N) that are neither protected nor padding."""
        if self._mergeable is None:
            free = ~protected_mask(self.protected, self.x.shape[1], self.x.device)
            present = self.present
            self._mergeable = free if present is None else free & present
        return self._mergeable

    def _qkv(self) -> Projections:
        if self._projected is None:
            if self.project is None:
                raise ValueError("this context has no queries, keys and values")
            self._projected = self.project()
        return self._projected

    def _qk_rotated(self) -> tuple[Tensor, Tensor]:
        if self._rotated is None:
            projected = self._qkv()
            self._rotated = projected[:2] if self.rotate is None else self.rotate(projected)
        return self._rotated


@dataclass(frozen=True)
class Reduction:
    """The result of a method: how the tokens of a block are reduced.

    Attributes:
        assignment: index map of the tokens. Images may fill different numbers of groups: the others are padding.
        weight: share of each token in its group's mean (B, N); None: its size. 0 leaves a token out (pruning).
        size: what each token adds to its group's size (B, N); None: the weight.
        soft: relaxation of the index map for training (B, N, M); it replaces the map for tokens, sizes and memory.
        memory: new or changed entries of the memory (B, N, …), merged along with the tokens.
        archive: new entries of the archive, carried unchanged.
    """

    assignment: Assignment
    weight: Tensor | None = None
    size: Tensor | None = None
    soft: Tensor | None = None
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    archive: Mapping[str, Tensor] = field(default_factory=dict)


class ModelShape(NamedTuple):
    """Facts about a model for methods that have parameters, or that not every model can serve.

    Attributes:
        special: number of special tokens in front.
        class_token: position of the first class token; None for models without one.
        grid: patch grid (t, h, w) at the model's own input size.
        training: whether the model is in training mode.
        flops: computes the multiply-adds for one input of the model's own size, from the number of merges per layer.
        weights: name and shape of each parameter of the blocks.
    """

    depth: int
    width: int
    heads: int
    head_width: int
    special: int = 0
    class_token: int | None = None
    grid: tuple[int, int, int] = (1, 1, 1)
    training: bool = False
    flops: Callable[[Sequence[Any]], Any] | None = None
    weights: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Method(nn.Module):
    """A way to reduce the tokens of a block. Subclasses implement :meth:`reduce`; everything else has a default.

    Class attributes:
        static: lengths follow from shapes alone, the same for every image. Static methods compile, export, and have
            FLOPs before they run; others return different numbers of tokens per image.
        decides: the method alone decides how many tokens merge in each layer: :meth:`counts`.
        takes_padding: `reduce` leaves out padding (`Context.present`), takes one number per image, and reads no grid:
            it serves images of different grids in one batch.
        relaxes: in training mode the method keeps all tokens, or mixes them softly, instead of removing the planned
            number.
        place: reduce tokens ``"before"`` attention, or ``"between"`` attention and MLP.
        scope: tokens stay reduced for the rest of the ``"pass"``, or are restored after each ``"block"``.
        places_groups: the index map places groups itself, protected tokens in front in their order. Otherwise groups
            are sorted by their first member.
        keeps_grid: the patches that stay form a grid in row-major order, also with ``order="original"``.
        twin: name of a fused kernel that does the same; see ``vitrail.kernels``.
        bucket: lengths of methods that are not static are padded to a multiple of this, so that shapes repeat and
            memory is reused; None: 16 on CUDA devices, 1 elsewhere.
    """

    static: ClassVar[bool] = True
    place: ClassVar[Literal["before", "between"]] = "between"
    scope: ClassVar[Literal["pass", "block"]] = "pass"
    places_groups: ClassVar[bool] = False
    keeps_grid: ClassVar[bool] = False
    takes_padding: ClassVar[bool] = False
    relaxes: ClassVar[bool] = False
    bucket: int | None = None
    decides: ClassVar[bool] = False

    name: ClassVar[str] = ""
    """Name under which the method is registered."""

    @property
    def twin(self) -> str | None:
        """Name of a fused kernel that does the same with these options; None for none.

        ``"tome"``: ToMe's matching by keys; ``"features"``: by :meth:`matched`.
        """
        return None

    def matched(self, context: Context) -> Tensor:
        """Return features (B, H, N, d) whose mean over H the fused matching compares; H may be 1."""
        return context.k

    @property
    def budgeted(self) -> bool:
        """Whether the method needs planned numbers, so that ``r``, ``keep`` or ``gflops`` is required."""
        return self.static

    @property
    def options(self) -> dict[str, Any]:
        """Constructor arguments that differ from their defaults, as plain data for JSON."""
        return {}

    @property
    def config(self) -> str | dict[str, Any] | Method:
        """The method as plain data: its name, or a dict with name and options; itself where it is not registered."""
        if METHODS.get(self.name) is not type(self):
            return self
        return {"name": self.name, **self.options} if self.options else self.name

    @property
    def label(self) -> str:
        """Name for messages: the registered name, or that of the class."""
        return self.name if METHODS.get(self.name) is type(self) else type(self).__name__

    def check(self, shape: ModelShape) -> None:
        """Raise ``UnsupportedModel`` if this model cannot serve the method; called before the model is changed."""

    def build(self, shape: ModelShape) -> None:
        """Create parameters for a model; called before the model is changed, each time the method is applied."""

    def check_ready(self) -> None:
        """Raise where the method cannot run in its present state; called at the beginning of each pass that merges."""

    def layers(self, depth: int) -> Sequence[float] | None:
        """Return the share of the merges in each layer where the caller requests no schedule; None for equal shares."""
        return None

    def counts(self) -> Sequence[int]:
        """Return the merges in each layer, for methods that decide them.

        In training mode, methods that relax reduce every layer.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement counts()")

    def maps(self, inputs: Tensor, grid: tuple[int, int, int]) -> Mapping[str, Tensor]:
        """Compute maps over the patches (B, P, …) from the model's input, at the beginning of each pass.

        They join ``context.guide``: 0 for special tokens, merged along with the tokens.
        """
        return {}

    def feasible(self, r: int, tokens: int, special: int, grid: tuple[int, int, int]) -> int:
        """Return the largest number of tokens, at most ``r``, that one step can remove from this many.

        For methods that remove whole rows, or the same number in every window. ``grid`` is that of the input.
        """
        return r

    def capacity(self, tokens: int, protected: Protected) -> int:
        """Return how many of this many tokens one reduction can remove at most; for a mask, in every image."""
        count = protected if isinstance(protected, int) else int(protected.sum(1).max())
        return max(0, tokens - count - 1)

    def amount(self, context: Context, planned: int) -> int | Tensor:
        """Return how many tokens to remove in this block: the planned number, or one per image (B,)."""
        return planned

    def reduce(self, context: Context, r: int | Tensor) -> Reduction | None:
        """Return which tokens become one.

        A static method removes exactly ``r`` tokens from every image. Others may return None, to leave the tokens of
        this block as they are.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement reduce(context, r)")

    def pool(self, x: Tensor, assignment: Assignment, weight: Tensor | None) -> Tensor:
        """Combine the tokens (B, N, D) of each group into one; by default their weighted mean."""
        return assignment.merge(x, weight)

    def restore(
        self, x: Tensor, assignment: Assignment, memory: Mapping[str, Tensor], archive: Mapping[str, Tensor]
    ) -> Tensor:
        """Return a token for every original position (B, N, D); by default a copy of its group's token."""
        return assignment.unmerge(x)

    def flops(self, tokens: int, head_width: int) -> int:
        """Return the multiply-adds of one reduction of this many tokens."""
        return 0

    def loss(self) -> Tensor | None:
        """Return the method's own loss for the latest pass, to be added to the model's; None where there is none."""
        return None

    @property
    def any_count(self) -> bool:
        """Whether one step can remove any number of tokens up to the capacity, and not only :meth:`feasible` ones."""
        return type(self).feasible is Method.feasible

    @property
    def averages(self) -> bool:
        """Whether groups become the weighted mean of their members, so that a fused kernel can compute it."""
        return type(self).pool is Method.pool


METHODS: dict[str, type[Method]] = {}
"""Registered methods by name."""


def list_methods() -> list[str]:
    """Return the names of the registered methods, for ``vitrail.merge(model, method=...)``."""
    return sorted(METHODS)


AnyMethod = TypeVar("AnyMethod", bound=type[Method])


def register_method(name: str) -> Callable[[AnyMethod], AnyMethod]:
    """Register a method under a name, so that ``vitrail.merge(model, method=name)`` and the commands find it."""

    if not isinstance(name, str) or not name:
        raise InvalidOption(f'register_method takes a name: @register_method("kmeans"); got {name!r}')

    def register(method: AnyMethod) -> AnyMethod:
        if not isinstance(method, type) or not issubclass(method, Method):
            raise InvalidOption(f"register_method registers subclasses of vitrail.Method; got {method!r}")
        known = METHODS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (method.__module__, method.__qualname__):
            raise InvalidOption(
                f"a method named {name!r} is registered already ({known.__name__}); choose another name"
            )
        method.name = name
        METHODS[name] = method
        return method

    return register


def as_method(method: str | Mapping[str, Any] | Method) -> Method:
    """Return a method by name, by name and options (``Method.config``), or unchanged."""
    if isinstance(method, Method):
        if method.place not in ("before", "between") or method.scope not in ("pass", "block"):
            raise InvalidOption(
                f"{method.label}: place is 'before' or 'between' and scope 'pass' or 'block'; got {method.place!r} and "
                f"{method.scope!r}"
            )
        return _check_reduces(method)
    if isinstance(method, type) and issubclass(method, Method):
        raise InvalidOption(f"method takes an instance, not a class: method={method.__name__}()")
    options = dict(method) if isinstance(method, Mapping) else {"name": method}
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in METHODS:
        raise InvalidOption(
            f"method is one of {', '.join(sorted(METHODS))}, a dict with a name and options, or an instance of "
            f"vitrail.Method; got {shown(method)}"
        )
    try:
        return _check_reduces(METHODS[name](**options))
    except TypeError as error:
        raise InvalidOption(f"method {name!r} does not take these options: {error}") from error


def _check_reduces(method: Method) -> Method:
    """Return a method; raise ``InvalidOption`` if it does not implement :meth:`Method.reduce`."""
    if getattr(method.reduce, "__func__", None) is Method.reduce:
        raise InvalidOption(
            f"{method.label} does not implement reduce(context, r), which returns the tokens that become one; see "
            "vitrail.Method"
        )
    return method


def check_amount(method: Method, r: object, context: Context) -> None:
    """Raise ``InvalidOption`` if a method's amount is neither a number nor one per image."""
    x = context.x
    if isinstance(r, Tensor):
        valid = r.shape == x.shape[:1] and not r.is_floating_point()
    else:
        valid = isinstance(r, int) and not isinstance(r, bool) and r >= 0 and (not method.static or r < x.shape[1])
    if not valid:
        given = f"a {r.dtype} tensor of shape {tuple(r.shape)}" if isinstance(r, Tensor) else repr(r)
        raise InvalidOption(
            f"{method.label}.amount returns a number of tokens, or an integer tensor with one per image "
            f"({x.shape[0]},); got {given}"
        )


def check_reduction(method: Method, reduction: object, context: Context) -> None:
    """Raise ``InvalidOption`` if what a method returned does not fit the tokens."""
    shape, name = tuple(context.x.shape[:2]), method.label
    if reduction is None and not method.static:
        return
    if not isinstance(reduction, Reduction) or not isinstance(reduction.assignment, Assignment):
        raise InvalidOption(
            f"{name}.reduce returns a Reduction(Assignment(target, length)){'' if method.static else ' or None'}; got "
            f"{type(reduction).__name__}"
        )
    target, length = reduction.assignment.target, reduction.assignment.length
    if tuple(target.shape) != shape or target.dtype != torch.int64 or length < 1:
        raise InvalidOption(
            f"{name}: the target of an Assignment is int64 of shape {shape}, its length 1 or more; got {target.dtype} "
            f"of shape {tuple(target.shape)} and length {length}"
        )
    for entry, value in (("weight", reduction.weight), ("size", reduction.size), *reduction.memory.items()):
        if value is not None and tuple(value.shape[:2]) != shape:
            raise InvalidOption(
                f"{name}: {entry} of a Reduction has shape {shape} or more axes; got {tuple(value.shape)}"
            )
    if reduction.soft is not None and tuple(reduction.soft.shape) != (*shape, length):
        raise InvalidOption(
            f"{name}: soft of a Reduction has shape {(*shape, length)}; got {tuple(reduction.soft.shape)}"
        )
    removed = shape[1] - length
    relaxed = reduction.soft is not None or (method.relaxes and method.training)
    # `in` would compare wrongly while torch 2.10 traces
    if method.static and not relaxed and context.planned is not None and context.planned != removed:
        raise InvalidOption(
            f"{name} removed {removed} of {shape[1]} tokens, where {context.planned} were planned; a method whose "
            "numbers vary declares `static = False`"
        )
    if not method.places_groups and not target.is_cuda and not torch.compiler.is_compiling():
        _check_values(name, reduction.assignment, context)


def _check_values(name: str, assignment: Assignment, context: Context) -> None:
    """Raise if an index is out of range or a protected token is not alone; not on a GPU, where it would synchronize."""
    target = assignment.target
    if int(target.min()) < 0 or int(target.max()) >= assignment.length:
        raise InvalidOption(
            f"{name}: targets are indices below {assignment.length}; got {int(target.min())} to {int(target.max())}"
        )
    members = assignment.merge_sizes(torch.ones_like(target)).gather(1, target)
    protected = protected_mask(context.protected, target.shape[1], target.device)
    if bool(((members > 1) & protected).any()):
        raise InvalidOption(f"{name} merged a protected token; choose among the tokens where context.mergeable is True")
