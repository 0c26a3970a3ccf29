"""Cards of handles and recordings in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail._wording import counted
from vitrail.drawing.notebook import bars, card, draw_map, picture
from vitrail.errors import VitrailError

if TYPE_CHECKING:
    from vitrail.surgery.hooks import Recording
    from vitrail.surgery.merging.merging import Merging

SHOWN = 4
"""Images whose norms are drawn."""


def merging_card(merging: Merging) -> str:
    """Return the card of a merging: tokens by block, FLOPs, and its settings."""
    name, config = type(merging.model).__name__, merging.config
    hidden = ("method", "unmerge", "protect")
    settings = ", ".join(f"{key}={value}" for key, value in config.items() if key not in hidden)
    figures = {"method": merging.method.label, "settings": settings}
    if not merging.is_active:
        return card(f"{name}, no longer merged", figures, note="This merging was removed from the model.")
    pictures = []
    try:
        tokens, start = merging.tokens_per_layer(), merging.layout.num_tokens
        before, after = merging.flops(merged=False), merging.flops()
        pictures.append(bars(tokens, start, "tokens that leave each block (gray: unmerged)", start))
        figures = {
            "tokens at the end": f"{tokens[-1]} of {start}",
            "GFLOPs of an input": f"{after / 1e9:.3g} of {before / 1e9:.3g} ({100 * (after / before - 1):+.0f} %)",
            **figures,
        }
    except VitrailError:  # packed models have no size of their own
        pass
    note = "" if merging.method.static else "Images decide how much merges: see merging.track() for each of them."
    return card(f"{name}, merged", figures, pictures, note)


def recording_card(recording: Recording) -> str:
    """Return the card of a recording: what it holds, and where the norms of the last block are high."""
    figures = {}
    if recording.embedding is not None:
        figures["embedding"] = " × ".join(map(str, recording.embedding.shape))
    held = 0 if recording.embedding is None else recording.embedding.nbytes
    for name, layers in recording.by_layer.items():
        if layers:
            example = next(iter(layers.values()))
            shape = " × ".join(map(str, example.shape))
            dtype = str(example.dtype).removeprefix("torch.")
            figures[name] = f"{shape}, {dtype}, of {counted(len(layers), 'layer')}"
            held += sum(layer.nbytes for layer in layers.values())
    figures["memory"] = f"{held / 1e6:.3g} MB"
    pictures = _norm_maps(recording)
    note = "Maps: norms of the patches in the last recorded layer." if pictures else ""
    return card(f"Recording of {counted(len(recording), 'image')}", figures, pictures, note)


def _norm_maps(recording: Recording) -> list[str]:
    layers = recording.norms or {layer: tokens.float().norm(dim=-1) for layer, tokens in recording.tokens.items()}
    if not layers:
        return []
    last = max(layers)
    norms = layers[last][:SHOWN, recording.layout.patches].float().cpu()
    maps = norms.reshape(-1, *recording.layout.grid)[:, 0].numpy()
    return [
        picture(draw_map(one), f"image {index}: {one.min():.3g} to {one.max():.3g}") for index, one in enumerate(maps)
    ]
