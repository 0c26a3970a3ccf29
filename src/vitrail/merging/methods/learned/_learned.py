"""The base of methods with parameters that training must find."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from vitrail.errors import InvalidOption, UntrainedMethod
from vitrail.merging.method import Context, Method, ModelShape, Reduction
from vitrail.merging.trained import Trained

PREFIX = "vitrail_method."
"""What the keys of a method's weights begin with in the state_dict of a merged model."""

_BEGUN = "learned_begun"
"""Entry of the archive that marks a pass in which the method has reduced a block already."""


class LearnedMethod(Trained, Method):
    """A method whose decisions are learned.

    Subclasses implement :meth:`create`, :meth:`relax` for training mode and :meth:`select` for eval mode, and call
    :meth:`add_loss`. Parameters are created when the method is applied to a model in training mode, move with the
    model, and are saved in its state_dict. In eval mode a pass of a method that was never trained raises
    ``UntrainedMethod``. A trained method is applied again with its weights:

    >>> states = model.state_dict()                                                     # doctest: +SKIP
    >>> vitrail.merge(other, keep=0.5, method=DynamicViT.from_state(states))            # doctest: +SKIP

    Attributes:
        passes: number of passes in training mode so far whose gradients were computed, saved with the weights; 0 for
            a method never trained. Compiled models count when gradients are recorded.
        source: path from which the weights were loaded; None after more training.
        trained_on: name and shape of each parameter of the blocks of the model that it was trained with. Methods refuse
            other models; None disables the check, for a model whose blocks were changed since (adapters, quantization).
    """

    relaxes: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._terms: dict[int, Tensor] = {}
        self._states: dict[str, Tensor] = {}
        self.source: str | None = None
        self.trained_on: dict[str, tuple[int, ...]] | None = None

    @property
    def config(self) -> str | dict[str, Any] | Method:
        """The method as plain data: the path of its weights, where it has one, or else its name and options."""
        return super().config if self.source is None else self.source

    @classmethod
    def from_state(cls, states: Mapping[str, Tensor], **options: Any) -> Self:
        """Return a trained method from its weights: the state_dict of the method, or of a model that has it.

        Args:
            options: arguments of the constructor; weights do not contain them.
        """
        inside = {name.rpartition(PREFIX)[2]: value for name, value in states.items() if PREFIX in name}
        found = dict(inside or states)
        method = cls(**options)
        trained = found.pop("passes", None)
        if not found:
            raise InvalidOption(
                f"from_state takes the state_dict of a trained {method.label}, or of a model merged by it; got "
                f"{', '.join(list(states)[:3]) or 'no entries'}"
            )
        method.passes.fill_(1 if trained is None else int(trained))
        if not method.is_trained:
            raise UntrainedMethod(
                f"these weights of {method.label} were saved before it was trained; train it first, and save it then"
            )
        method._states = found
        return method

    def create(self, shape: ModelShape) -> Mapping[str, nn.Module]:
        """Return new modules with the method's parameters for a model, by name.

        Bare parameters come in an ``nn.ParameterList`` or ``nn.ParameterDict``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement create(shape)")

    def relax(self, context: Context, r: int | Tensor) -> Reduction | None:
        """Return the differentiable reduction of training mode; None leaves the tokens as they are."""
        raise NotImplementedError(f"{type(self).__name__} does not implement relax(context, r)")

    def select(self, context: Context, r: int | Tensor) -> Reduction | None:
        """Return the reduction of eval mode, as :meth:`Method.reduce` does."""
        raise NotImplementedError(f"{type(self).__name__} does not implement select(context, r)")

    def untrained(self) -> str:
        return (
            f"method {self.label} is learned, and these weights have not been trained; pass a trained one: "
            "method='PATH', the directory of a run of vitrail train or a file of merging.save_method. A name and "
            "options, such as those of merging.config, do not have the weights. In Python, call model.train() before "
            f"vitrail.merge to train it, and {type(self).__name__}.from_state(states) to take the weights of a trained "
            "model"
        )

    def check(self, shape: ModelShape) -> None:
        if not shape.training:
            self.check_trained()
        wanted = dict(shape.weights)
        if self.trained_on and wanted and self.trained_on != wanted:
            names = (*self.trained_on, *wanted)
            name = next(name for name in names if self.trained_on.get(name) != wanted.get(name))
            before, now = (found.get(name, "missing") for found in (self.trained_on, wanted))
            raise InvalidOption(
                f"this {self.label} was trained with another model: {name} of its blocks was {before}, and here it is "
                f"{now}; pass one that was trained with this model. If this is the same model, changed since, set "
                "method.trained_on = None after vitrail.load_method"
            )

    def check_ready(self) -> None:
        if not self.training:
            self.check_trained()

    def build(self, shape: ModelShape) -> None:
        """Create parameters on the first call; later keep them, or raise if the model has other sizes."""
        self._build(shape)
        if self.trained_on is None and shape.weights:
            self.trained_on = dict(shape.weights)

    def _build(self, shape: ModelShape) -> None:
        if not self._has_parameters():
            parts = self.create(shape)
            if self._states:
                self._check_fit({f"{name}.{key}": t for name, part in parts.items() for key, t in _own(part)})
            for name, part in parts.items():
                self.add_module(name, part)
            if self._states:
                states = {name: value.clone() for name, value in self._states.items()}
                self.load_state_dict({**states, "passes": self.passes}, assign=True)
                self._states = {}
            return
        with torch.device("meta"):
            parts = self.create(shape)
        wanted = {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in _own(part)}
        own = {key: tensor for key, tensor in self.state_dict().items() if key != "passes"}
        self._check_fit(wanted, own)

    def reduce(self, context: Context, r: int | Tensor) -> Reduction | None:
        if not self.training:
            return self.select(context, r)
        is_first = _BEGUN not in context.archive
        if is_first:
            self._terms = {}
        found = self.relax(context, r)
        if found is None:
            return None
        if is_first and torch.is_grad_enabled():
            self._count(found)
        return replace(found, archive={**found.archive, _BEGUN: context.x.new_ones(())})

    def _count(self, found: Reduction) -> None:
        """Count this pass when gradients go back through its first reduction."""
        if torch.compiler.is_compiling():  # which does not trace hooks
            self.count_pass()
            self.source = None
            return
        relaxed = (found.soft, found.weight, found.size)
        first = next((tensor for tensor in relaxed if tensor is not None and tensor.requires_grad), None)
        if first is not None:
            first.register_hook(partial(_trained, self))  # type: ignore[no-untyped-call]

    def add_loss(self, context: Context, term: Tensor) -> None:
        """Add the term of a block to the loss of this pass."""
        self._terms[context.layer] = term

    def loss(self) -> Tensor | None:
        return torch.stack(list(self._terms.values())).sum() if self._terms else None

    def _has_parameters(self) -> bool:
        return next(self.parameters(), None) is not None

    def _check_fit(self, wanted: Mapping[str, Tensor], own: Mapping[str, Tensor] | None = None) -> None:
        """Raise ``InvalidOption`` if weights, by default those of ``from_state``, differ from the wanted shapes."""
        own = self._states if own is None else own
        sizes, expected = ({name: tuple(t.shape) for name, t in found.items()} for found in (own, wanted))
        if sizes != expected:
            name = next(name for name in (*expected, *sizes) if sizes.get(name) != expected.get(name))
            raise InvalidOption(
                f"the weights of this {self.label} are those of another model: {name} is {sizes.get(name, 'missing')}, "
                f"and this model needs {expected.get(name, 'no such entry')}; pass a new method, or the weights of one "
                "trained with this model and these options"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles; the loss of the latest pass stays, as its graph cannot be copied."""
        return {**vars(self), "_terms": {}}


def _trained(method: LearnedMethod, _: Tensor) -> None:
    method.count_pass()
    method.source = None


def check_weight(name: str, value: object) -> float:
    """Return a valid weight of a loss; raise ``InvalidOption`` for others."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise InvalidOption(f"{name} is the weight of a loss, 0 or more; 0 disables it; got {value!r}")
    return float(value)


def _own(part: nn.Module) -> list[tuple[str, Tensor]]:
    return list(part.state_dict().items())
