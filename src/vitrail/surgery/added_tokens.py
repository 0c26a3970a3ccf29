"""``vitrail.add_tokens``: more class, distillation, register and task tokens for a model that exists.

At first they only read, so that the model answers exactly as before. :meth:`AddedTokens.open` lets its tokens read
them, through a gate that each block learns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.adapters import Found, find
from vitrail.errors import InvalidOption, NotMerged, UnsupportedInput, UnsupportedModel
from vitrail.models.weight_decay import undecayed
from vitrail.runtime.checks import extended_trunk, refuse_extended, refuse_meta, refuse_patched, refuse_registers
from vitrail.runtime.cost import CostModel
from vitrail.runtime.install import install, uninstall
from vitrail.runtime.layout import added_to, layout_of
from vitrail.runtime.plan import Plan
from vitrail.runtime.side_tokens import receiving
from vitrail.surgery.added_token_checks import check_mix, outputs_of, specs_of
from vitrail.surgery.added_token_module import START, AddedModule, read_added, write_added
from vitrail.tokens import TokenLayout, TokenSpec

WIDEST = 20
"""Widest that gates may be opened by hand: a token then counts as e²⁰, half a billion, of another."""

PLACE = "vitrail_tokens"
"""Name of the module in the trunk that holds everything that was added."""


def add_tokens(
    model: nn.Module,
    *,
    registers: int = 0,
    tasks: Mapping[str, int] | None = None,
    classes: int = 0,
    distillation: bool = False,
    num_classes: int | None = None,
    tokens: Iterable[TokenSpec] = (),
) -> AddedTokens:
    """Add tokens to a model, in place; the model's own output stays what it is until they are opened.

    >>> added = vitrail.add_tokens(model, registers=4, tasks={"breed": 37})      # doctest: +SKIP
    >>> added(images).by_role["breed"]                                           # doctest: +SKIP

    Args:
        model: a supported model, or a module that has exactly one inside. It may be merged, before or after.
        registers: how many register tokens, named ``registers``.
        tasks: outputs of each task's head, by the name of the task.
        classes: how many more class tokens, named ``classes``; they share one head.
        distillation: whether to add a distillation token, named ``distillation``.
        num_classes: outputs of the heads of class and distillation tokens; by default the model's own.
        tokens: specs of further tokens, for all that the other options do not say. They have no position, and
            whether they are visible is what the gates are for.
    """
    found = _find(model)
    specs = specs_of(registers, tasks, classes, distillation, tokens)
    return _apply(model, found, specs, outputs_of(model, found, specs, num_classes))


class AddedOutput(NamedTuple):
    """What a model with added tokens says.

    Attributes:
        logits: the model's own answer (B, classes); None where it gives none.
        by_role: what each added head says, by the name of its tokens.
        features: the added tokens (B, E, D) after their norm, in the order of their specs.
        own: what the model itself returned.
    """

    logits: Tensor | None
    by_role: dict[str, Tensor]
    features: Tensor
    own: Any


class AddedTokens:
    """The handle of tokens that were added to a model; called with pictures, it gives the whole answer.

    Attributes:
        model: the model as it was given.
        found: the trunk in it, its blocks and their adapters.
        tokens: the module that holds what was added, ``vitrail_tokens`` in the trunk; so ``state_dict`` has it, too,
            and it moves and converts with the model.
    """

    def __init__(self, model: nn.Module, found: Found, tokens: AddedModule) -> None:
        self.model = model
        self.found = found
        self.tokens = tokens

    @classmethod
    def of(cls, model: nn.Module) -> AddedTokens:
        """Find what was added to a model again, also to a copied or unpickled one."""
        trunk = extended_trunk(model) if isinstance(model, nn.Module) else None
        if trunk is None:
            raise NotMerged(f"nothing was added to this {type(model).__name__}; vitrail.add_tokens(model, ...) does it")
        return cls(model, find(trunk), trunk._vitrail_plan.added)  # type: ignore[union-attr, arg-type]

    @classmethod
    def load(cls, model: nn.Module, path: str | Path) -> AddedTokens:
        """Add tokens to a model that :meth:`save` wrote for one of its width and depth."""
        found = _find(model)
        specs, outputs, states = read_added(Path(path), _width(found), len(found.blocks))
        added = _apply(model, found, specs, outputs)
        added.tokens.load_state_dict(states)
        return added

    def save(self, path: str | Path) -> None:
        """Write what was added, and nothing of the model, as a safetensors file."""
        write_added(Path(path), self.tokens)

    def __call__(self, *images: Any, **call: Any) -> AddedOutput:
        self._check_applied()
        with receiving() as found:
            own = self.model(*images, **call)
        if len(found) != 1:
            raise UnsupportedInput(
                f"the model ran its blocks {len(found)} times for these pictures; expected once, with tokens added"
            )
        features, by_role = self.tokens.answer(found[0])
        return AddedOutput(_logits(own), by_role, features, own)

    def __enter__(self) -> AddedTokens:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.is_applied:
            self.remove()

    def __repr__(self) -> str:
        names = ", ".join(f"{spec.count} {spec.role} {spec.name!r}" for spec in self.specs)
        state = ("open" if self.is_open else "closed") if self.is_applied else "removed"
        return f"AddedTokens({type(self.model).__name__}, {names}, {state})"

    @property
    def specs(self) -> tuple[TokenSpec, ...]:
        """The tokens that were added, in their order."""
        return self.tokens.specs

    @property
    def layout(self) -> TokenLayout:
        """Which index is which token where a model is recorded: the model's own, those added, the patches."""
        return layout_of(self.found)

    @property
    def is_applied(self) -> bool:
        """Whether the model still has them."""
        return added_to(self.found) is self.tokens

    @property
    def is_open(self) -> bool:
        """Whether the model's own tokens read them."""
        return self.tokens.is_open

    @torch.no_grad()
    def open(self, gate: float | None = None) -> None:
        """Let the model's tokens read them, each counting as exp(gate) of another; gates learn.

        Args:
            gate: bias to begin with in every block; by default what the gates are, −10 at first, so that the model's
                output hardly changes.
        """
        self._check_applied()
        if gate is not None:
            number = isinstance(gate, int | float) and not isinstance(gate, bool) and isfinite(gate)
            if not number or gate > WIDEST:
                raise InvalidOption(
                    f"gate is a number, {START:g} for hardly open, 0 for read as all others, at most {WIDEST}; got "
                    f"{gate!r}"
                )
            self.tokens.gates.fill_(gate)
        self._turn(True)

    def close(self) -> None:
        """Let nobody read them again: the model's output is its own; gates stay what they have become."""
        self._check_applied()
        self._turn(False)

    def trainable(self, model: bool = False, *, gate_lr: float | None = None) -> list[dict[str, Any]]:
        """Give the parameters that should learn, in groups for an optimiser, each named.

        Tokens, gates (once they are open), norm and biases are spared weight decay; tokens whose spec says ``decay``
        and the heads' matrices are not. What was added is made to require gradients, should somebody have frozen it;
        the model's own parameters are left as they are, and none of them is listed that is frozen.

        Args:
            model: whether the model's own parameters should learn, too; else only what was added.
            gate_lr: learning rate of the gates; from −10 they have far to go, at steps of the usual size.
        """
        self._check_applied()
        groups = self.tokens.groups()
        for group in groups:
            for weight in group["params"]:
                weight.requires_grad_(True)
            if group["name"] == "gates" and gate_lr is not None:
                group["lr"] = gate_lr
        if model:
            mine = {id(weight) for weight in self.tokens.parameters()}
            spared = undecayed(self.model)
            own = {n: w for n, w in self.model.named_parameters() if id(w) not in mine and w.requires_grad}
            flat = [weight for name, weight in own.items() if name in spared]
            groups.append({"name": "model", "params": [w for name, w in own.items() if name not in spared]})
            groups.append({"name": "model, no decay", "params": flat, "weight_decay": 0.0})
        return [group for group in groups if group["params"]]

    def remove(self) -> None:
        """Give the model back exactly as it was, but for its merging."""
        self._check_applied()
        plan = self.found.trunk._vitrail_plan
        if plan.merges:  # type: ignore[union-attr]
            plan.added = None  # type: ignore[union-attr]
            plan.solved.clear()  # type: ignore[union-attr, operator]
        else:
            uninstall(self.found)
        delattr(self.found.trunk, PLACE)

    def _turn(self, is_open: bool) -> None:
        self.tokens.turn(is_open)
        self.found.trunk._vitrail_plan.solved.clear()  # type: ignore[union-attr, operator]

    def _check_applied(self) -> None:
        if not self.is_applied:
            raise NotMerged("these tokens were removed from their model; vitrail.add_tokens(model, ...) adds new ones")


def _find(model: nn.Module) -> Found:
    """Find the trunk of a model that tokens may be added to."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a torch.nn.Module; got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UnsupportedModel(
            "this model is wrapped already, and DDP would not share what is added now among processes; add tokens "
            "first, then wrap the model, and use `AddedTokens.of(wrapped)`"
        )
    refuse_extended(model)
    return find(model)


def _apply(model: nn.Module, found: Found, specs: tuple[TokenSpec, ...], outputs: Mapping[str, int]) -> AddedTokens:
    """Check that the tokens go with the model's own, and put them in."""
    refuse_patched(found)
    refuse_registers(found)
    refuse_meta(model)
    check_mix(found, specs)
    weight = next(value for value in found.trunk.parameters() if value.is_floating_point())
    added = AddedModule(specs, outputs, _width(found), len(found.blocks))
    added.to(weight.device, weight.dtype).train(found.trunk.training)
    plan = getattr(found.trunk, "_vitrail_plan", None)
    cost = CostModel.of(model, found)
    found.trunk.add_module(PLACE, added)
    if plan is None:
        install(found, Plan.bare(found, cost, added))
    else:
        plan.added = added
        plan.solved.clear()
    return AddedTokens(model, found, added)


def _width(found: Found) -> int:
    return int(found.block_adapters[0].feed_last(found.blocks[0]).out_features)  # type: ignore[arg-type]


def _logits(own: Any) -> Tensor | None:
    if isinstance(own, Tensor):
        return own
    found = getattr(own, "logits", None)
    if found is None and isinstance(own, tuple) and own and isinstance(own[0], Tensor) and not hasattr(own, "_fields"):
        return own[0]
    return found if isinstance(found, Tensor) else None
