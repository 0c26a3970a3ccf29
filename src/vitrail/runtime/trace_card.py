"""The card of a trace in a notebook: the groups of the first images, and how many tokens were left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.drawing.notebook import bars, card, draw_groups, picture

if TYPE_CHECKING:
    from vitrail.runtime.trace import Trace

SHOWN = 4
"""Images whose groups are drawn."""


def trace_card(trace: Trace) -> str:
    """Return the card of a trace, also of one that recorded nothing yet."""
    if not trace.passes:
        return card("Trace", {}, note="Nothing was tracked yet: call the model inside the with block.")
    layout, tokens = trace.layout, trace.tokens_per_layer.float().mean(0).tolist()
    groups = trace.groups[:SHOWN].reshape(-1, *layout.grid)[:, 0].cpu().numpy()
    left = [len(set(one.flatten().tolist())) for one in groups]
    pictures = [
        picture(draw_groups(one), f"image {index}: {count} groups")
        for index, (one, count) in enumerate(zip(groups, left, strict=True))
    ]
    pictures.append(bars(tokens, layout.num_tokens, "tokens that leave each block (gray: unmerged)", layout.num_tokens))
    figures = {
        "images": f"{trace.latest.batch}",
        "passes": f"{len(trace.passes)}",
        "tokens at the end": f"{tokens[-1]:.4g} of {layout.num_tokens}, mean over images",
        "largest group": f"{int(trace.sizes.max())} tokens",
        "GFLOPs of an image": f"{trace.flops.float().mean().item() / 1e9:.3g}",
    }
    return card("Trace of the latest pass", figures, pictures)
