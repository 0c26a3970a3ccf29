"""What an adapter says about a library's models: where the parts are, and nothing of what is done with them.

To support another library, write one file with a :class:`BlockAdapter` per kind of block and a
:class:`TrunkAdapter` per kind of model, and add one entry to ``ADAPTERS``; see ``docs/adapters.md``.

Shapes: B batch, H heads, N tokens, D channels, d channels of a head, L layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.data.spec import InputSpec
from vitrail.errors import UnsupportedModel
from vitrail.tokens import Role, TokenLayout


def forward_class(module: nn.Module) -> type:
    """Give the class whose ``forward`` a module runs.

    Modules are recognised by it: wrappers such as FSDP put a class in front that leaves ``forward`` alone, while
    one that changes it is another kind of module. Mixins of our own do not count.
    """
    kinds = type(module).__mro__
    ours = {vars(kind)["_vitrail_swap"][0] for kind in kinds if "_vitrail_swap" in vars(kind)}
    return next(kind for kind in kinds if "forward" in vars(kind) and kind not in ours)


class BlockCall(NamedTuple):
    """What a block was called with beside its tokens.

    Attributes:
        mask: who reads whom.
        causal: whether each token reads only those before it.
        rope: table of the rotary position.
        among_special: whether the mask, (N, N), hides special tokens alone and treats all patches alike, so that its
            corner is the mask of fewer patches.
    """

    mask: Tensor | None = None
    causal: bool = False
    rope: Tensor | None = None
    among_special: bool = False


@dataclass(frozen=True)
class Rotary:
    """Rotary position of a model as ``angle = coordinates · frequencies``.

    Linear in the coordinates, so that a token between two patches has an angle, and a token at zero (any that
    is not a patch) is not rotated.

    Attributes:
        positions: coordinates of the patches (P, axes); None where only the model's own table knows them
            (augmented coordinates, dropped patches) and they are read back from it.
        frequencies: (L or 1, H or 1, axes, d / 2); one entry serves all layers, or all heads.
        interleaved: whether the two channels of a pair are neighbours, or half a head apart.
    """

    positions: Tensor | None
    frequencies: Tensor
    interleaved: bool

    def table(self, layer: int, positions: Tensor) -> Tensor:
        """Sines and cosines at any coordinates (B, N, axes), as one table (B, H or 1, N, 2·d)."""
        frequencies = self.frequencies[min(layer, self.frequencies.shape[0] - 1)]
        angle = positions.unsqueeze(1) @ frequencies.to(positions.dtype)
        angle = angle.repeat_interleave(2, -1) if self.interleaved else torch.cat([angle, angle], -1)
        return torch.cat([angle.sin(), angle.cos()], -1)

    def read(self, table: Tensor) -> Tensor:
        """Coordinates (P, axes) or (B, P, axes) from a table of (…, P, 2·d) whose axes have channels of their own.

        The slowest channel of an axis never turns far enough to be ambiguous, so its angle is the coordinate.
        """
        frequencies = self.frequencies[0, 0]
        work = torch.promote_types(table.dtype, torch.float32)
        sine, cosine = table.to(work).chunk(2, -1)
        pair = 2 if self.interleaved else 1
        angle = torch.atan2(sine, cosine)
        slowest = torch.where(frequencies == 0, torch.inf, frequencies.abs()).argmin(-1)
        axes = [angle[..., pair * channel] / frequencies[axis, channel] for axis, channel in enumerate(slowest)]
        positions = torch.stack(axes, -1)
        return positions.squeeze(1) if positions.dim() == 4 else positions


@dataclass(frozen=True)
class DenseBlock:
    """A block that is nothing but its matrices: LayerNorm, attention, LayerNorm, linear, GELU, linear.

    Attributes:
        qkv: one linear layer for queries, keys and values together, or three.
        gammas: layer scale of attention and MLP, or None for either.
        scale: factor of the attention scores; None for 1/√d.
        gelu: ``"none"`` or ``"tanh"``, as in ``torch.nn.functional.gelu``.
        drops: dropouts and the like that are at work: after attention, between the two linear layers, after both.
    """

    heads: int
    norm1: nn.LayerNorm
    qkv: tuple[nn.Linear, ...]
    proj: nn.Linear
    norm2: nn.LayerNorm
    fc1: nn.Linear
    fc2: nn.Linear
    gammas: tuple[Tensor | None, Tensor | None]
    scale: float | None
    gelu: str
    drops: tuple[tuple[nn.Module, ...], tuple[nn.Module, ...], tuple[nn.Module, ...]] = ((), (), ())


def at_work(*modules: nn.Module) -> tuple[nn.Module, ...]:
    """Give those dropouts and the like that do something now, or that somebody hooked into."""
    return tuple(part for part in modules if not _is_idle(part))


def _is_idle(part: nn.Module) -> bool:
    if not is_plain(part, type(part)):
        return False
    return not part.training or type(part) is nn.Identity or getattr(part, "p", getattr(part, "drop_prob", 1)) == 0


def is_plain(module: nn.Module, *kinds: type) -> bool:
    """Whether a module is just one of these classes, with ordinary weights and nobody hooked into it."""
    ordinary = all(type(value) in (nn.Parameter, Tensor) for value in module._parameters.values() if value is not None)
    return type(module) in kinds and ordinary and not module._forward_hooks and not module._forward_pre_hooks


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Give keys and values (B, heads, N, d) as many heads as queries have."""
    if k.shape[1] == q.shape[1]:
        return k, v
    repeats = q.shape[1] // k.shape[1]
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


class BlockAdapter(ABC):
    """The parts of one kind of block that attends, then feeds.

    Adapters hold no state: each method takes the block and finds the part when it is called, so that a part
    replaced later (LoRA, quantisation) is seen.
    """

    input_name = "x"
    """What the block calls its tokens, where they are passed by name."""

    fused = True
    """Whether attention is a softmax of the scores and nothing more, so that fused kernels serve."""

    @abstractmethod
    def read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """Read what the block was called with beside its tokens."""

    @abstractmethod
    def attend_norm(self, block: nn.Module, x: Tensor) -> Tensor:
        """Prepare tokens (B, N, D) for attention; the identity in post-norm blocks."""

    @abstractmethod
    def qkv(self, block: nn.Module, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries, keys and values (B, H, N, d), with their norms and before any rotation.

        Keys and values may have fewer heads (grouped queries).
        """

    def rotate(self, block: nn.Module, x: Tensor, table: Tensor) -> Tensor:
        """Rotate queries or keys (B, H, N, d) by a table for the last tokens of the sequence."""
        raise NotImplementedError

    def attention_scale(self, block: nn.Module) -> float | None:
        """Factor of the attention scores; None where the library leaves it to the attention function, 1/√d."""
        return None

    def weigh(self, block: nn.Module, scores: Tensor, bias: Tensor | None = None) -> Tensor:
        """Turn scores (B, H, Q, N), scaled, into weights; a key with bias b counts as exp b keys, with −inf as none."""
        return (scores if bias is None else scores + bias).softmax(-1)

    @abstractmethod
    def attention_dropout(self, block: nn.Module) -> float:
        """Dropout of the attention weights in the block's present mode."""

    @abstractmethod
    def attend_output(self, block: nn.Module, attended: Tensor, h: Tensor) -> Tensor:
        """Project the attended values (B, N, H·d); ``h`` is what attention was given."""

    @abstractmethod
    def attend_branch(self, block: nn.Module, y: Tensor) -> Tensor:
        """Whatever happens to attention's output before it is added: layer scale, dropout, drop path, post-norm."""

    @abstractmethod
    def feed_norm(self, block: nn.Module, x: Tensor) -> Tensor:
        """Prepare tokens (B, N, D) for the MLP; the identity in post-norm blocks."""

    @abstractmethod
    def feed(self, block: nn.Module, h: Tensor) -> Tensor:
        """Run the MLP."""

    @abstractmethod
    def feed_branch(self, block: nn.Module, y: Tensor) -> Tensor:
        """Whatever happens to the MLP's output before it is added."""

    def dense(self, block: nn.Module) -> DenseBlock | None:
        """Give the block as its matrices; None where it is anything more, or somebody looks inside."""
        return None

    @abstractmethod
    def attend_parts(self, block: nn.Module) -> Sequence[nn.Module]:
        """Give the modules whose weights multiply every token while attending."""

    @abstractmethod
    def feed_parts(self, block: nn.Module) -> Sequence[nn.Module]:
        """Give the modules whose weights multiply every token while feeding."""

    def shift_prefix(self, block: nn.Module, by: int) -> None:  # noqa: B027  (most blocks do not care)
        """Tell a block that so many more, or fewer, tokens stand before the patches, where it treats those apart."""

    def feed_last(self, block: nn.Module) -> nn.Module:
        """Give the MLP's last linear layer: what it is given are the MLP's neurons."""
        found: list[tuple[str, nn.Module]] = []
        for index, whole in enumerate(self.feed_parts(block)):
            for name, part in whole.named_modules(prefix=str(index)):
                inside = any(name.startswith(f"{outer}.") for outer, _ in found)  # a wrapper's own layers
                if hasattr(part, "in_features") and not inside:
                    found.append((name, part))
        if not found:
            raise UnsupportedModel(f"the MLP of this {type(block).__name__} has no linear layer to be found")
        return found[-1][1]

    def pair_weights(self, block: nn.Module) -> int:
        """Count the weights that meet every pair of tokens while attending, beside queries and keys."""
        return 0

    @abstractmethod
    def head_shape(self, block: nn.Module) -> tuple[int, int]:
        """Give the number of heads, and the channels of one."""


class TrunkAdapter(ABC):
    """One kind of model: its blocks in order, its tokens, and how a pass through it begins."""

    @abstractmethod
    def blocks(self, trunk: nn.Module) -> Sequence[nn.Module]:
        """Give the blocks in the order in which they run."""

    @abstractmethod
    def block_adapter(self, block: nn.Module) -> BlockAdapter:
        """Give the adapter of a block; raises ``UnsupportedModel`` for one that is not known."""

    @abstractmethod
    def layout(self, trunk: nn.Module, size: tuple[int, ...] | None = None) -> TokenLayout:
        """Give the token layout before the first block, for inputs of a size in pixels or of the model's own."""

    def layout_in(self, trunk: nn.Module, layer: int, size: tuple[int, ...] | None = None) -> TokenLayout:
        """Give the token layout as a block sees it, where tokens enter between blocks; −1 is the last block.

        Layers of a class-attention stage count on from the blocks.
        """
        return self.layout(trunk, size)

    def stage(self, trunk: nn.Module) -> Sequence[nn.Module]:
        """Give the blocks of a class-attention stage after the others; each gives the tokens that gather (B, Q, D)."""
        return ()

    def stage_attention(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Give the attention (B, H, Q, N) of the tokens that gather, over them, other special ones, and patches."""
        raise NotImplementedError

    @abstractmethod
    def resizes(self, trunk: nn.Module) -> bool:
        """Whether the model takes inputs of other sizes than its own."""

    @abstractmethod
    def preprocessing(self, trunk: nn.Module) -> InputSpec:
        """What the model expects of a picture."""

    @abstractmethod
    def entry_points(self) -> type:
        """Give the mixin whose methods wrap the model's own ways in, each opening a pass (``passes.py``).

        While a trunk has the mixin, its attribute ``_vitrail_adapter`` is this adapter.
        """

    @abstractmethod
    def patch_parts(self, trunk: nn.Module) -> Sequence[nn.Module]:
        """Give the modules outside the blocks whose weights multiply every patch (embedding, attention pooling)."""

    def patch_embedding(self, trunk: nn.Module) -> nn.Module:
        """Give the module that turns pictures (B, C, H, W) into patch tokens, before any position is added."""
        return self.patch_parts(trunk)[0]

    def check(self, trunk: nn.Module) -> None:  # noqa: B027  (most trunks have nothing more to check)
        """Raise ``UnsupportedModel`` where something beside the blocks cannot be handled."""

    def rotary(self, trunk: nn.Module, grid: tuple[int, int, int]) -> Rotary | None:
        """Give the model's rotary position for a patch grid, where it has one."""
        return None

    def token_parameters(self, trunk: nn.Module) -> dict[tuple[Role, str], Tensor]:
        """Give the learned values (1, count, D) of special tokens, by role and name as the layout has them."""
        return {}

    def num_classes(self, model: nn.Module, trunk: nn.Module) -> int:
        """Say how many classes a model around this trunk, or the trunk itself, tells apart; 0 where it does not."""
        return 0
