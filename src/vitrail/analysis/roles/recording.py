"""Recording of special tokens, their attention and the logits of their heads, for :mod:`vitrail.analysis.roles`.

Layers of a class-attention stage are numbered after the blocks. Only the tokens that enter there change in them; all
others stay as the last block left them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._checks import as_tuple
from vitrail.adapters import Found, find, head_outputs
from vitrail.errors import UnsupportedInput
from vitrail.runtime.checks import extended_trunk
from vitrail.runtime.layout import all_entered, layout_of
from vitrail.runtime.side_tokens import receiving
from vitrail.surgery.added_tokens import AddedModule, AddedTokens
from vitrail.surgery.hooks import check_layers
from vitrail.surgery.recording import stream
from vitrail.tokens import Role, TokenLayout, TokenSpan


@dataclass(frozen=True)
class RoleRecording:
    """Special tokens of a model on some images, on the CPU.

    Attributes:
        attention: by layer, rows (B, H, Q, N), the layout of their keys, and the spans of their queries.
    """

    layout: TokenLayout  # all special tokens, including those that enter after the blocks, and the patches
    tokens: dict[int, Tensor]  # (B, S, D) by layer, for the layers that have all of them
    attention: dict[int, tuple[Tensor, TokenLayout, tuple[TokenSpan, ...]]]
    logits: dict[str, Tensor]  # (B, C) by head, for heads with the same classes
    notes: tuple[str, ...]  # what could not be measured, and why


class _ClassAttentionStage:
    """Hooks on the class-attention stage of a model, if it has one."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.blocks = dict(enumerate(found.adapter.stage(found.trunk), len(found.blocks)))
        self.outputs: dict[int, Tensor] = {}
        self.rows: dict[int, Tensor] = {}

    def special(self, layer: int) -> tuple[TokenSpan, ...]:
        """Return the model's own special tokens in a layer; −1 is the last block."""
        return self.found.adapter.layout_in(self.found.trunk, layer).special

    def queries(self, layer: int) -> tuple[TokenSpan, ...]:
        """Return the special tokens that change in a layer of the stage."""
        return tuple(span for span in self.special(layer) if span not in self.special(-1))

    def full_layout(self, layout: TokenLayout) -> TokenLayout:
        """Return the layout of a recording with the tokens that enter in the stage."""
        if not self.blocks:
            return layout
        added = layout.special[len(self.special(-1)) :]
        return TokenLayout((*self.special(max(self.blocks)), *added), layout.grid)

    def first_complete(self) -> int:
        """Return the first layer that has all tokens."""
        whole = self.special(max(self.blocks, default=-1))
        return next((layer for layer in self.blocks if self.special(layer) == whole), all_entered(self.found))

    def interleave(self, layer: int, special: Tensor, layout: TokenLayout) -> Tensor:
        """Return all special tokens (B, S, D) after a layer of the stage; ``special`` are those after the blocks."""
        changing = self.queries(layer)
        queries = iter(self.outputs[layer].cpu().split([span.count for span in changing], 1))
        others = iter(special.split([span.count for span in layout.special], 1))
        spans = self.full_layout(layout).special
        return torch.cat([next(queries if span in changing else others) for span in spans], 1)

    @contextmanager
    def hooked(self, attention: Sequence[int]) -> Iterator[None]:
        """Record the outputs of all layers of the stage, and the attention of some."""
        adapter = self.found.adapter

        def keep_output(layer: int) -> Callable[..., None]:
            return lambda _, __, output: self.outputs.update({layer: output})

        def keep_attention(layer: int) -> Callable[..., None]:
            return lambda block, args, kwargs: self.rows.update({layer: adapter.stage_attention(block, args, kwargs)})

        with ExitStack() as stack:
            for layer, block in self.blocks.items():
                stack.callback(block.register_forward_hook(keep_output(layer)).remove)
                if layer in attention:
                    hook = block.register_forward_pre_hook(keep_attention(layer), with_kwargs=True)
                    stack.callback(hook.remove)
            yield


def record_roles(
    model: nn.Module,
    images: Any,
    attention_layers: int | Sequence[int] | None,
    batch_size: int | None,
    call: Mapping[str, Any] | None,
) -> RoleRecording:
    """Run a model on images, and record its special tokens, their attention and their logits."""
    found = find(model)
    stage = _ClassAttentionStage(found)
    chosen = check_layers(attention_layers, len(found.blocks) + len(stage.blocks)) if as_tuple(attention_layers) else ()
    if not stage.full_layout(layout_of(found)).num_special:
        raise UnsupportedInput(
            f"this {type(found.trunk).__name__} has no special tokens; there are no roles to compare"
        )
    notes = {layer: note for layer in chosen if (note := _why_no_attention(found, layer))}
    wanted = [layer for layer in chosen if layer not in notes]
    what = ("tokens", "attention") if any(layer < len(found.blocks) for layer in wanted) else ("tokens",)
    tokens: dict[int, list[Tensor]] = {}
    rows: dict[int, list[Tensor]] = {layer: [] for layer in wanted}
    layouts: list[TokenLayout] = []
    with head_outputs(model) as heard, receiving() as beside, stage.hooked(wanted):
        for seen in stream(model, images, what, batch_size=batch_size, call=call):
            layouts.append(seen.layout)
            special = {layer: x[:, : seen.layout.num_special].cpu() for layer, x in seen.tokens.items()}
            last = special[len(found.blocks) - 1]
            special |= {layer: stage.interleave(layer, last, seen.layout) for layer in stage.blocks}
            for layer in range(stage.first_complete(), len(special)):
                tokens.setdefault(layer, []).append(special[layer])
            for layer in wanted:
                rows[layer].append((stage.rows if layer in stage.blocks else seen.attention)[layer].cpu())
    if len(set(layouts)) != 1:
        raise UnsupportedInput(f"expected one or more images, all of one size; got {len(set(layouts))} grids")
    layout = layouts[0]
    attention = {}
    for layer, parts in rows.items():
        keys, queries = layout, layout.special
        if layer in stage.blocks:  # a layer of the stage reads its queries, the other special tokens, and the patches
            queries = stage.queries(layer)
            keys = TokenLayout((*queries, *stage.special(-1)), layout.grid)
        if parts[0].shape[-1] == keys.num_tokens:
            attention[layer] = torch.cat(parts), keys, queries
        else:
            notes[layer] = "patches are merged and have no places"
    logits = {name: torch.cat(parts) for name, parts in heard.items()}
    if beside and extended_trunk(model) is not None:
        logits |= _added_logits(AddedTokens.of(model).tokens, torch.cat(beside))
    groups: dict[int, dict[str, Tensor]] = {}
    for name, value in logits.items():
        groups.setdefault(value.shape[-1], {})[name] = value
    return RoleRecording(
        stage.full_layout(layout),
        {layer: torch.cat(parts) for layer, parts in tokens.items()},
        attention,
        max(groups.values(), key=len, default={}),
        tuple(f"no attention of layer {layer}: {note}" for layer, note in notes.items()),
    )


def _why_no_attention(found: Found, layer: int) -> str:
    """Return why a layer's attention cannot be compared; empty if it can."""
    if layer >= len(found.blocks):
        return ""
    if not found.block_adapters[layer].fused:
        return "its heads mix their weights after the softmax, so weights may be negative"
    return "" if layout_of(found).num_special else "all special tokens enter after the blocks"


@torch.no_grad()
def _added_logits(added: AddedModule, beside: Tensor) -> dict[str, Tensor]:
    """Return the logits of added tokens (B, E, D) that predict the model's own classes, one by one, on the CPU."""
    features, _ = added.answer(beside)
    found: dict[str, Tensor] = {}
    for spec, part in zip(added.specs, features.split([spec.count for spec in added.specs], 1), strict=True):
        classifies = spec.role in (Role.CLASS, Role.DISTILLATION) and spec.kind == "classification"
        if classifies and spec.name in added.heads:
            each = added.heads[spec.name](part).cpu().unbind(1)
            found.update({f"{spec.name}[{i}]" if len(each) > 1 else spec.name: one for i, one in enumerate(each)})
    return found
