"""What roles are measured by: special tokens, their attention and their heads' answers, of blocks and of what follows.

Layers of a class-attention stage count on from the blocks. Only the tokens that enter there change in them; all others
are what the last block made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._checks import as_tuple
from vitrail.adapters import Found, find
from vitrail.errors import UnsupportedInput
from vitrail.heads import listen
from vitrail.runtime.checks import extended_trunk
from vitrail.runtime.layout import all_entered, layout_of
from vitrail.runtime.side_tokens import receiving
from vitrail.surgery.added_tokens import AddedModule, AddedTokens
from vitrail.surgery.hooks import check_layers
from vitrail.surgery.recording import stream
from vitrail.tokens import Role, TokenLayout, TokenSpan

Rows = dict[int, list[Tensor]]


@dataclass(frozen=True)
class RoleInputs:
    """What a model showed of its special tokens, on the CPU.

    Attributes:
        layout: all special tokens, those that only enter after the blocks among them, and the patches.
        tokens: (B, S, D) by layer, of the layers that have all of them.
        attention: by layer, rows (B, H, Q, N), the layout of their keys, and the spans that the rows belong to.
        answers: logits (B, C) for the same classes, by head.
        notes: what could not be measured, and why.
    """

    layout: TokenLayout
    tokens: dict[int, Tensor]
    attention: dict[int, tuple[Tensor, TokenLayout, tuple[TokenSpan, ...]]]
    answers: dict[str, Tensor]
    notes: tuple[str, ...]


class Stage:
    """The class-attention stage of a model, where it has one: which tokens gather in which layer, and what they do."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.blocks = dict(enumerate(found.adapter.stage(found.trunk), len(found.blocks)))
        self.outputs: dict[int, Tensor] = {}
        self.rows: dict[int, Tensor] = {}

    def special(self, layer: int) -> tuple[TokenSpan, ...]:
        """Give the model's own special tokens that a layer has; −1 is the last block."""
        return self.found.adapter.layout_in(self.found.trunk, layer).special

    def gathering(self, layer: int) -> tuple[TokenSpan, ...]:
        """Give the special tokens that change in a layer of the stage."""
        return tuple(span for span in self.special(layer) if span not in self.special(-1))

    def full(self, layout: TokenLayout) -> TokenLayout:
        """Give the layout of a recording with the tokens that enter in the stage."""
        if not self.blocks:
            return layout
        added = layout.special[len(self.special(-1)) :]
        return TokenLayout((*self.special(max(self.blocks)), *added), layout.grid)

    def keys(self, layer: int, layout: TokenLayout) -> TokenLayout:
        """Give the layout in which a layer of the stage attends: its queries, the others, the patches."""
        return TokenLayout((*self.gathering(layer), *self.special(-1)), layout.grid)

    def entered(self) -> int:
        """Give the first layer that has all tokens."""
        last = max(self.blocks, default=-1)
        return next(
            (layer for layer in self.blocks if self.special(layer) == self.special(last)), all_entered(self.found)
        )

    def woven(self, layer: int, special: Tensor, layout: TokenLayout) -> Tensor:
        """Give all special tokens (B, S, D) after a layer of the stage; ``special`` are those that left the blocks."""
        gathering = self.gathering(layer)
        queries = iter(self.outputs[layer].cpu().split([span.count for span in gathering], 1))
        others = iter(special.split([span.count for span in layout.special], 1))
        spans = self.full(layout).special
        return torch.cat([next(queries if span in gathering else others) for span in spans], 1)

    @contextmanager
    def hooked(self, attention: Sequence[int]) -> Iterator[None]:
        """Take down what each layer of the stage gives, and of some layers who attends to whom."""
        handles = []
        for layer, block in self.blocks.items():
            handles.append(block.register_forward_hook(self._output(layer)))
            if layer in attention:
                handles.append(block.register_forward_pre_hook(self._attention(layer), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _output(self, layer: int) -> Callable[..., None]:
        return lambda _, __, output: self.outputs.update({layer: output})

    def _attention(self, layer: int) -> Callable[..., None]:
        adapter = self.found.adapter
        return lambda block, args, kwargs: self.rows.update({layer: adapter.stage_attention(block, args, kwargs)})


def role_inputs(
    model: nn.Module,
    images: Any,
    attention_layers: int | Sequence[int] | None,
    batch_size: int | None,
    call: Mapping[str, Any] | None,
) -> RoleInputs:
    """Run a model on pictures, and keep what its roles are measured by."""
    found = find(model)
    stage = Stage(found)
    asked = check_layers(attention_layers, len(found.blocks) + len(stage.blocks)) if as_tuple(attention_layers) else ()
    if not stage.full(layout_of(found)).num_special:
        raise UnsupportedInput(f"this {type(found.trunk).__name__} has patches alone; there are no roles to compare")
    notes = {layer: note for layer in asked if (note := _unseen(found, layer))}
    wanted = [layer for layer in asked if layer not in notes]
    what = ("tokens", "attention") if any(layer < len(found.blocks) for layer in wanted) else ("tokens",)
    tokens: Rows = {}
    rows: Rows = {layer: [] for layer in wanted}
    layouts: list[TokenLayout] = []
    with listen(model) as answers, receiving() as beside, stage.hooked(wanted):
        for seen in stream(model, images, what, batch_size=batch_size, call=call):
            layouts.append(seen.layout)
            special = {layer: x[:, : seen.layout.num_special].cpu() for layer, x in seen.tokens.items()}
            last = special[len(found.blocks) - 1]
            special |= {layer: stage.woven(layer, last, seen.layout) for layer in stage.blocks}
            for layer in range(stage.entered(), len(special)):
                tokens.setdefault(layer, []).append(special[layer])
            for layer in wanted:
                rows[layer].append((stage.rows if layer in stage.blocks else seen.attention)[layer].cpu())
    if len(set(layouts)) != 1:
        raise UnsupportedInput(f"pictures must be of one size, one or more of them; got {len(set(layouts))} grids")
    layout = layouts[0]
    attention = {}
    for layer, parts in rows.items():
        staged = layer in stage.blocks
        keys = stage.keys(layer, layout) if staged else layout
        if parts[0].shape[-1] != keys.num_tokens:
            notes[layer] = "the patches have merged, and have no places any more"
            continue
        attention[layer] = torch.cat(parts), keys, stage.gathering(layer) if staged else layout.special
    said = {name: torch.cat(parts) for name, parts in answers.items()}
    if beside and extended_trunk(model) is not None:
        said |= added_answers(AddedTokens.of(model).tokens, torch.cat(beside))
    return RoleInputs(
        stage.full(layout),
        {layer: torch.cat(parts) for layer, parts in tokens.items()},
        attention,
        same_classes(said),
        tuple(f"no attention of layer {layer}: {note}" for layer, note in notes.items()),
    )


def _unseen(found: Found, layer: int) -> str:
    """Say why a layer's attention cannot be compared, if that is so."""
    if layer >= len(found.blocks):
        return ""
    if not found.block_adapters[layer].fused:
        return "its heads mix their weights after the softmax, so that some may be negative"
    return "" if layout_of(found).num_special else "all special tokens enter after the blocks"


@torch.no_grad()
def added_answers(added: AddedModule, beside: Tensor) -> dict[str, Tensor]:
    """Give what each added token (B, E, D) says that answers the model's own question, one by one, on the CPU."""
    features, _ = added.answer(beside)
    found: dict[str, Tensor] = {}
    for spec, part in zip(added.specs, features.split([spec.count for spec in added.specs], 1), strict=True):
        asked = spec.role in (Role.CLASS, Role.DISTILLATION) and spec.kind == "classification"
        if asked and spec.name in added.heads:
            each = added.heads[spec.name](part).cpu().unbind(1)
            found.update({f"{spec.name}[{i}]" if len(each) > 1 else spec.name: one for i, one in enumerate(each)})
    return found


def same_classes(answers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out heads that answer for another number of classes than most do."""
    groups: dict[int, dict[str, Tensor]] = {}
    for name, value in answers.items():
        groups.setdefault(value.shape[-1], {})[name] = value
    return max(groups.values(), key=len, default={})
