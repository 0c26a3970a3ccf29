"""``vitrail.add_tokens``: add class, distillation, register and task tokens to an existing model.

At first the new tokens attend to the model's tokens but not vice versa, so that the model's output does not change.
:meth:`AddedTokens.open` lets the model's tokens attend to them, through a learned gate in each block.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from vitrail._atomic_files import write_bytes
from vitrail._checks import is_int, is_number, shown
from vitrail.adapters import Found, find
from vitrail.errors import InvalidOption, ModelLoadError, UnsupportedInput, UnsupportedModel
from vitrail.heads.pooling import linear
from vitrail.models.saving import check_fit
from vitrail.models.vit import undecayed
from vitrail.runtime.checks import check_changeable, extended_trunk, refuse_extended, refuse_packed, refuse_windowed
from vitrail.runtime.cost import CostModel
from vitrail.runtime.install import TOKENS, install, uninstall
from vitrail.runtime.layout import added_to, layout_of
from vitrail.runtime.plan import Plan
from vitrail.runtime.side_tokens import SideTokens, receiving
from vitrail.surgery._handle import Handle, check_module
from vitrail.surgery._pretrained import attach, detach
from vitrail.tokens import Role, TokenLayout, TokenSpec, check_specs

INITIAL_GATE = -10.0
"""Initial bias of the gates: an added token then has e⁻¹⁰, 1/22,000, of the weight of another."""

LARGEST_GATE = 20
"""Largest bias that :meth:`AddedTokens.open` takes."""


def add_tokens(
    model: nn.Module,
    *,
    registers: int = 0,
    tasks: Mapping[str, int] | None = None,
    classes: int = 0,
    distillation: bool = False,
    num_classes: int | None = None,
    tokens: Iterable[TokenSpec | Mapping[str, Any]] = (),
) -> AddedTokens:
    """Add tokens to a model, in place; the model's own output stays the same until they are opened.

    >>> added = vitrail.add_tokens(model, registers=4, tasks={"breed": 37})      # doctest: +SKIP
    >>> added(images).by_role["breed"]                                           # doctest: +SKIP

    Args:
        model: a supported model, or a module that contains exactly one. It can be merged before or after.
        registers: number of register tokens, named ``registers``.
        tasks: number of outputs of each task, by its name.
        classes: number of further class tokens, named ``classes``; they share a head.
        distillation: whether to add a distillation token, named ``distillation``.
        num_classes: outputs of the heads of class and distillation tokens; by default the model's.
        tokens: specs of further tokens, as objects or dicts. They have no position, and gates replace ``visible``.
    """
    found = _find_trunk(model)
    specs = _specs(registers, tasks, classes, distillation, tokens)
    return _apply(model, found, specs, _head_sizes(model, found, specs, num_classes))


class AddedOutput(NamedTuple):
    """The output of a model with added tokens.

    Attributes:
        logits: the model's own logits (B, classes); None if it returns none.
        by_role: logits of each added head, by the name of its tokens.
        features: the added tokens (B, E, D) after their norm, in the order of their specs.
        own: the model's own output.
    """

    logits: Tensor | None
    by_role: dict[str, Tensor]
    features: Tensor
    own: Any


class AddedModule(SideTokens):
    """The added tokens and gates, with a norm, and a linear head for each name that has one."""

    def __init__(self, specs: tuple[TokenSpec, ...], outputs: Mapping[str, int], width: int, depth: int) -> None:
        super().__init__(specs, width, depth)
        nn.init.constant_(self.gates, INITIAL_GATE)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.heads = nn.ModuleDict({name: linear(width, count) for name, count in outputs.items()})

    def answer(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the normalized tokens (B, E, D), and the logits of each head, averaged over tokens that share it."""
        features = self.norm(tokens)
        parts = features.split([spec.count for spec in self.specs], 1)
        by_name = {spec.name: part for spec, part in zip(self.specs, parts, strict=True)}
        return features, {name: head(by_name[name]).mean(1) for name, head in self.heads.items()}

    def groups(self) -> list[dict[str, Any]]:
        """Return named parameter groups for an optimizer; gates only if open, as they have no gradient otherwise."""
        decayed = [self.values[spec.name] for spec in self.specs if spec.decay]
        tokens = [self.values[spec.name] for spec in self.specs if not spec.decay]
        heads = [head.weight for head in self.heads.values()]
        flat = [*self.norm.parameters(), *(head.bias for head in self.heads.values())]
        return [
            {"name": "tokens", "params": tokens, "weight_decay": 0.0},
            {"name": "tokens, decay", "params": decayed},
            {"name": "gates", "params": [self.gates] if self.is_open else [], "weight_decay": 0.0},
            {"name": "heads", "params": heads},
            {"name": "heads, no decay", "params": flat if self.heads else [], "weight_decay": 0.0},
        ]


@dataclass(eq=False, repr=False)
class AddedTokens(Handle):
    """The handle of added tokens; call it with images to get an :class:`AddedOutput`.

    Attributes:
        tokens: the module ``vitrail_tokens`` of the trunk, which holds the added parameters; so they are part of the
            model's ``state_dict`` and move with the model.
    """

    _function = "vitrail.add_tokens"

    tokens: AddedModule

    @classmethod
    def _find(cls, model: nn.Module) -> Self | None:
        trunk = extended_trunk(model)
        return None if trunk is None else cls(model, find(trunk), _module_of(trunk))

    @classmethod
    def load(cls, model: nn.Module, path: str | Path) -> AddedTokens:
        """Add tokens saved by :meth:`save` to a model of the same width and depth."""
        found = _find_trunk(model)
        specs, outputs, states = _read(Path(path), _width(found), len(found.blocks))
        added = _apply(model, found, specs, outputs)
        added.tokens.load_state_dict(states)
        return added

    def save(self, path: str | Path) -> None:
        """Write the added tokens, without the model: to a file that ends in ``.safetensors``, for :meth:`load`.

        Any other path is a directory, which gets all changes of the model as :meth:`Handle.save` writes them.
        """
        if not Path(path).suffix:
            super().save(path)
            return
        from safetensors.torch import save

        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in self.tokens.state_dict().items()}
        metadata = {"specs": [spec.to_dict() for spec in self.specs]}
        try:
            write_bytes(Path(path), save(tensors, metadata={"format": "pt", "vitrail": json.dumps(metadata)}))
        except OSError as error:
            raise ModelLoadError(f"could not write {path} ({error.strerror or error})") from error

    def __call__(self, *images: Any, **call: Any) -> AddedOutput:
        self._check_active()
        with receiving() as found:
            own = self.model(*images, **call)
        if len(found) != 1:
            raise UnsupportedInput(f"expected one pass through the blocks for this input; the model made {len(found)}")
        features, by_role = self.tokens.answer(found[0])
        return AddedOutput(_logits(own), by_role, features, own)

    def __repr__(self) -> str:
        names = ", ".join(f"{spec.count} {spec.role} {spec.name!r}" for spec in self.specs)
        state = ("open" if self.is_open else "closed") if self.is_active else "removed"
        return f"AddedTokens({type(self.model).__name__}, {names}, {state})"

    @property
    def specs(self) -> tuple[TokenSpec, ...]:
        """Specs of the added tokens, in order."""
        return self.tokens.specs

    @property
    def layout(self) -> TokenLayout:
        """Layout of recordings of the model: its own special tokens, the added ones, the patches."""
        return layout_of(self.found)

    @property
    def is_active(self) -> bool:
        return added_to(self.found) is self.tokens

    @property
    def is_open(self) -> bool:
        """Whether the model's own tokens attend to the added ones."""
        return self.tokens.is_open

    @property
    def config(self) -> dict[str, Any]:
        """The options as plain data: ``vitrail.add_tokens(model, **config)`` adds such tokens with new values."""
        config: dict[str, Any] = {"tokens": [spec.to_dict() for spec in self.specs]}
        own = [self.tokens.heads[spec.name] for spec in self.specs if spec.outputs(0) != spec.outputs(1)]
        return {**config, "num_classes": own[0].out_features} if own else config

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"tokens": [spec.to_dict() for spec in self.specs]}, self.tokens.state_dict()

    @classmethod
    def from_saved(cls, model: nn.Module, options: dict[str, Any], tensors: dict[str, Tensor]) -> AddedTokens:
        found = _find_trunk(model)
        specs = check_specs(options["tokens"])
        outputs = _head_outputs(specs, tensors, _width(found), len(found.blocks))
        added = _apply(model, found, specs, outputs)
        added.tokens.load_state_dict(tensors)
        return added

    @torch.no_grad()
    def open(self, gate: float | None = None) -> None:
        """Let the model's tokens attend to the added ones, each with exp(gate) of the weight of another token.

        The gates are learned, one per block.

        Args:
            gate: value to set in every block; by default the gates keep their values, −10 at first, so that the
                model's output hardly changes.
        """
        self._check_active()
        if gate is not None:
            if not is_number(gate) or gate > LARGEST_GATE:
                raise InvalidOption(
                    f"gate is a number, at most {LARGEST_GATE}: {INITIAL_GATE:g} for almost closed, 0 for the weight "
                    f"of other tokens; got {gate!r}"
                )
            self.tokens.gates.fill_(gate)
        self._set_open(True)

    def close(self) -> None:
        """Stop the model's tokens from attending to the added ones; the gates keep their values."""
        self._check_active()
        self._set_open(False)

    def trainable(self, model: bool = False, *, gate_lr: float | None = None) -> list[dict[str, Any]]:
        """Return named parameter groups for an optimizer.

        Weight decay applies to head weights and to tokens whose spec sets ``decay``. All added parameters are set to
        require gradients; of the model's own, only those that do are included.

        Args:
            model: whether to include the model's own parameters.
            gate_lr: learning rate of the gates, which start far from 0, at −10.
        """
        self._check_active()
        groups = self.tokens.groups()
        for group in groups:
            for weight in group["params"]:
                weight.requires_grad_(True)
            if group["name"] == "gates" and gate_lr is not None:
                group["lr"] = gate_lr
        if model:
            added = {id(weight) for weight in self.tokens.parameters()}
            spared = undecayed(self.model)
            own = {n: w for n, w in self.model.named_parameters() if id(w) not in added and w.requires_grad}
            flat = [weight for name, weight in own.items() if name in spared]
            groups.append({"name": "model", "params": [w for name, w in own.items() if name not in spared]})
            groups.append({"name": "model, no decay", "params": flat, "weight_decay": 0.0})
        return [group for group in groups if group["params"]]

    def remove(self) -> None:
        """Remove the added tokens; a merging stays."""
        self._check_active()
        plan: Any = self.found.trunk._vitrail_plan
        if plan.merges:
            plan.added = None
            plan.solved.clear()
        else:
            uninstall(self.found)
        delattr(self.found.trunk, TOKENS)
        detach(self.model)

    def _set_open(self, is_open: bool) -> None:
        self.tokens.turn(is_open)
        self.found.trunk._vitrail_plan.solved.clear()  # type: ignore[union-attr, operator]


def added_module(model: nn.Module) -> AddedModule | None:
    """Return the module of a model's added tokens; None without any."""
    trunk = extended_trunk(model)
    return None if trunk is None else _module_of(trunk)


def split_states(states: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of a model and those of its added tokens, from the state_dict of the model with them."""
    inside = f"{TOKENS}."
    own = {name: value for name, value in states.items() if inside not in name}
    return own, {name.partition(inside)[2]: value for name, value in states.items() if inside in name}


def _module_of(trunk: nn.Module) -> AddedModule:
    module = trunk.get_submodule(TOKENS)
    assert isinstance(module, AddedModule)
    return module


def _find_trunk(model: nn.Module) -> Found:
    check_module(model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UnsupportedModel(
            "the model is wrapped in DDP, which would not synchronize parameters added now; add tokens first, then "
            "wrap the model, and use `AddedTokens.of(wrapped)`"
        )
    refuse_extended(model)
    return find(model)


def _apply(model: nn.Module, found: Found, specs: tuple[TokenSpec, ...], outputs: Mapping[str, int]) -> AddedTokens:
    """Check that the tokens fit the model, and add them."""
    check_changeable(model, found)
    refuse_packed(found, "adding tokens")
    refuse_windowed(found, "adding tokens")
    _check_fits(found, specs)
    weight = next(value for value in found.trunk.parameters() if value.is_floating_point())
    added = AddedModule(specs, outputs, _width(found), len(found.blocks))
    added.to(weight.device, weight.dtype).train(found.trunk.training)
    plan = getattr(found.trunk, "_vitrail_plan", None)
    cost = CostModel.of(model, found)
    found.trunk.add_module(TOKENS, added)
    if plan is None:
        install(found, Plan.bare(found, cost, added))
    else:
        plan.added = added
        plan.solved.clear()
    attach(model, found)
    return AddedTokens(model, found, added)


def _specs(
    registers: int,
    tasks: Mapping[str, int] | None,
    classes: int,
    distillation: bool,
    tokens: Iterable[TokenSpec | Mapping[str, Any]],
) -> tuple[TokenSpec, ...]:
    """Return the options of `add_tokens` as specs."""
    for name, value in (("registers", registers), ("classes", classes)):
        if not is_int(value, 0):
            raise InvalidOption(f"{name} is the number of tokens to add, 0 or more; got {shown(value)}")
    if not isinstance(distillation, bool):
        raise InvalidOption(
            f"distillation is True or False: a model has at most one such token; got {shown(distillation)}"
        )
    if tasks is not None and not isinstance(tasks, Mapping):
        raise InvalidOption(f"tasks are names with numbers of outputs, such as {{'breed': 37}}; got {shown(tasks)}")
    specs = [TokenSpec("classes", Role.CLASS, classes)] if classes else []
    specs += [TokenSpec("distillation", Role.DISTILLATION)] if distillation else []
    specs += [TokenSpec("registers", Role.REGISTER, registers)] if registers else []
    specs += [TokenSpec(name, Role.TASK, classes=outputs) for name, outputs in (tasks or {}).items()]
    if isinstance(tokens, TokenSpec | Mapping):
        raise InvalidOption(f"tokens is a list of TokenSpec objects; got {shown(tokens)}")
    checked = check_specs([*specs, *check_specs(tokens)])
    if not checked:
        raise InvalidOption("no tokens to add; set registers=, tasks=, classes=, distillation= or tokens=")
    return checked


def _head_sizes(
    model: nn.Module, found: Found, specs: tuple[TokenSpec, ...], num_classes: int | None
) -> dict[str, int]:
    """Return the number of outputs of each head by name."""
    if num_classes is not None and not is_int(num_classes, 1):
        raise InvalidOption(f"num_classes is 1 or more; got {num_classes!r}")
    own = num_classes or found.adapter.num_classes(model, found.trunk)
    unset = [spec.name for spec in specs if spec.role in (Role.CLASS, Role.DISTILLATION) and spec.classes is None]
    if unset and not own:
        raise InvalidOption(f"{type(model).__name__} has no classes for the head of {unset[0]!r}; set num_classes=")
    return {spec.name: spec.outputs(own) for spec in specs if spec.outputs(own)}


def _check_fits(found: Found, specs: tuple[TokenSpec, ...]) -> None:
    """Raise if the model cannot have such tokens in addition to its own."""
    own = layout_of(found)
    if own.indices(Role.DISTILLATION) and any(spec.role is Role.DISTILLATION for spec in specs):
        raise InvalidOption(
            "this model already has a distillation token, and at most one is allowed; use a task token for a further "
            "teacher"
        )
    taken = {span.name for span in own.special if span.name}
    for spec in specs:
        if spec.name in taken:
            raise InvalidOption(f"this model already has tokens named {spec.name!r}; choose another name")
        spec.expect("visible", spec.visible, "True: added tokens are hidden until opened")
        spec.expect("position", not spec.position, "False: added tokens have no position")
        last = len(found.blocks) - 1
        spec.expect("enters", 0 <= spec.enters <= last, f"a block, 0 to {last}")


def _read(path: Path, width: int, depth: int) -> tuple[tuple[TokenSpec, ...], dict[str, int], dict[str, Tensor]]:
    """Read specs, head sizes and parameters; raise if they are not for a model of this width and depth."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("vitrail", "null"))
            states = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        specs = check_specs(metadata["specs"])
    except (OSError, ValueError, TypeError, KeyError, SafetensorError, InvalidOption) as error:
        raise ModelLoadError(f"{path} has no added tokens ({error}); expected a file of AddedTokens.save") from error
    return specs, _head_outputs(specs, states, width, depth), states


def _head_outputs(specs: tuple[TokenSpec, ...], states: Mapping[str, Tensor], width: int, depth: int) -> dict[str, int]:
    """Return the number of outputs of each head; raise if weights are not those of such tokens in such a model."""
    outputs = {spec.name: len(states.get(f"heads.{spec.name}.bias", ())) for spec in specs}
    outputs = {name: count for name, count in outputs.items() if count}
    with torch.device("meta"):
        expected = AddedModule(specs, outputs, width, depth).state_dict()
    check_fit(f"model of {depth} blocks and {width} channels", expected, states)
    return outputs


def _width(found: Found) -> int:
    return int(found.block_adapters[0].feed_last(found.blocks[0]).out_features)  # type: ignore[arg-type]


def _logits(own: Any) -> Tensor | None:
    """Return the logits in the output of a model of any library."""
    if isinstance(own, Tensor):
        return own
    found = getattr(own, "logits", None)
    if found is None and isinstance(own, tuple) and own and isinstance(own[0], Tensor) and not hasattr(own, "_fields"):
        return own[0]
    return found if isinstance(found, Tensor) else None
