"""The interface of restorers: what to keep at each reduction, and how to restore a token for every position.

Restorers are independent of methods: a method decides which tokens become one, a restorer what is kept of them. A
complete restorer, which restores each token as it was when it merged:

>>> @register_restorer("frozen")
... class Frozen(Restorer):
...     '''Add the difference to its group's token that a token had when it merged.'''
...
...     def keep(self, x, merged, step, before, after):
...         lost = before.to_original(x - step.unmerge(merged))
...         return {"lost": lost + before.kept["lost"] if before.kept else lost}
...
...     def restore(self, x, state):
...         return super().restore(x, state) + state.kept["lost"]

Shapes: B batch, N original positions, n tokens before a reduction, m after it, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn

from vitrail.errors import InvalidOption
from vitrail.merging.assignment import Assignment, insert
from vitrail.merging.method import ModelShape

if TYPE_CHECKING:
    from vitrail.merging.state import MergeState


@dataclass(frozen=True)
class Exit:
    """The tokens of a batch as they leave one block, merged and unmerged; restorers are fitted to these.

    Attributes:
        layer: index of the block.
        tokens: tokens of the merged model (B, m, D).
        state: its state; ``state.kept`` has the entries of :class:`WholeResiduals`.
        target: tokens of the model without merging (B, N, D).
    """

    layer: int
    tokens: Tensor
    state: MergeState
    target: Tensor

    @property
    def missing(self) -> Tensor:
        """What copies of the groups' tokens lack (B, N, D)."""
        return self.target - self.state.unmerge(self.tokens)


class FitOptions(NamedTuple):
    """Options of :meth:`Restorer.fit`.

    Attributes:
        by_block: tokens are restored after each block, not after the last one.
        steps: steps of training, for restorers that are trained.
        learning_rate: highest learning rate of these.
        seed: seed of their random numbers.
        progress: called with steps done, all steps, and the latest loss.
    """

    by_block: bool = False
    steps: int = 300
    learning_rate: float = 1e-3
    seed: int = 0
    progress: Callable[[int, int, float], None] | None = None


Observe = Callable[[], Iterable[Sequence[Exit]]]
"""Returns the exits of each batch of the calibration images; every call runs the model again."""


class Restorer(nn.Module):
    """A way to restore full length. Subclasses implement :meth:`keep` and :meth:`restore`."""

    name: ClassVar[str] = ""
    """Name under which the restorer is registered."""

    @property
    def options(self) -> dict[str, Any]:
        """Constructor arguments that differ from their defaults, as plain data for JSON."""
        return {}

    @property
    def config(self) -> str | dict[str, Any] | Restorer:
        """The restorer as plain data: its name, or a dict with name and options; itself if it is not registered."""
        if RESTORERS.get(self.name) is not type(self):
            return self
        return {"name": self.name, **self.options} if self.options else self.name

    @property
    def label(self) -> str:
        """Name for messages: the registered name, or that of the class."""
        return self.name if RESTORERS.get(self.name) is type(self) else type(self).__name__

    def check(self, shape: ModelShape) -> None:
        """Raise ``UnsupportedModel`` or ``InvalidOption`` if this model cannot be served; called before any change."""

    def build(self, shape: ModelShape) -> None:
        """Create parameters for a model; called before the model is changed."""

    def check_ready(self) -> None:
        """Raise where this cannot run in its present state; called at the beginning of each pass that merges."""

    def keep(
        self, x: Tensor, merged: Tensor, step: Assignment, before: MergeState, after: MergeState
    ) -> Mapping[str, Tensor]:
        """Return what to keep of one reduction: new or changed entries of ``state.kept``, each (B, N, …).

        Args:
            x: the tokens (B, n, D).
            merged: their groups' tokens (B, m, D).
            step: index map of this reduction.
            before: state before the reduction; ``before.layer`` is the block, ``before.kept`` what was kept so far.
            after: state after it.
        """
        return {}

    def insert(self, kept: Mapping[str, Tensor], places: Sequence[int]) -> dict[str, Tensor]:
        """Return what was kept after special tokens entered at these places; by default zeros for them."""
        return {name: insert(values, places, [0.0] * len(places)) for name, values in kept.items()}

    def restore(self, x: Tensor, state: MergeState) -> Tensor:
        """Return a token for every original position (B, N, D) from the groups' tokens (B, m, D).

        ``state.layer − 1`` is the block that the tokens leave; ``state.assignment`` is not None.
        """
        return state.unmerge(x)

    def fit(self, observe: Observe, options: FitOptions) -> None:
        """Fit parameters to images, by :attr:`Exit.target`; by default there are none."""


RESTORERS: dict[str, type[Restorer]] = {}
"""Registered restorers by name."""

AnyRestorer = TypeVar("AnyRestorer", bound=type[Restorer])


def register_restorer(name: str) -> Callable[[AnyRestorer], AnyRestorer]:
    """Register a restorer under a name, for ``vitrail.merge(model, restore=name)``."""
    if not isinstance(name, str) or not name:
        raise InvalidOption(f'register_restorer takes a name: @register_restorer("frozen"); got {name!r}')

    def register(restorer: AnyRestorer) -> AnyRestorer:
        if not isinstance(restorer, type) or not issubclass(restorer, Restorer):
            raise InvalidOption(f"register_restorer registers subclasses of Restorer; got {restorer!r}")
        known = RESTORERS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (restorer.__module__, restorer.__qualname__):
            raise InvalidOption(f"a restorer named {name!r} is registered already ({known.__name__}); choose another")
        restorer.name = name
        RESTORERS[name] = restorer
        return restorer

    return register


def as_restorer(restore: str | Mapping[str, Any] | Restorer | None) -> Restorer | None:
    """Return a restorer by name, by name and options (``Restorer.config``), or unchanged; None for None."""
    if restore is None or isinstance(restore, Restorer):
        return restore
    options = dict(restore) if isinstance(restore, Mapping) else {"name": restore}
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in RESTORERS:
        raise InvalidOption(
            f"restore is one of {', '.join(sorted(RESTORERS))}, a dict with a name and options, or an instance of "
            f"vitrail.merging.Restorer; got {restore!r}"
        )
    try:
        return RESTORERS[name](**options)
    except TypeError as error:
        raise InvalidOption(f"restorer {name!r} does not take these options: {error}") from error


@register_restorer("copy")
class Copy(Restorer):
    """Copy each group's token to its members; nothing is kept."""


class WholeResiduals(Restorer):
    """Keep ``x_i − x_group`` of every reduction, at full width, to fit other restorers; restores copies."""

    def keep(
        self, x: Tensor, merged: Tensor, step: Assignment, before: MergeState, after: MergeState
    ) -> Mapping[str, Tensor]:
        return {residual_entry(before.layer): before.to_original(x - step.unmerge(merged))}


def residual_entry(layer: int) -> str:
    """Return the name of the entry that has the residuals of a layer."""
    return f"residual.{layer}"
